// Layers x steps: a row a site, in order of execution, a column a step or several, a scalar above on the same axis.

const REACH = { scale: 3, share: 0.3, signed: 0.3 };
const state = {
  kind: "", statistic: "rms", view: "relative", of: "relative", log: true, scalar: "", rows: [], seen: null, cursor: null, site: 0,
  range: [0, 1], reach: 3, isChosen: false, // by whoever looks
  run: "first", // of two: "first", "second" or "difference"
};
let shown = null, ranks = null, colours = null, geometry = null;

const isSigned = () => state.view !== "absolute" || record.statistics[state.statistic].kind === "signed";
const rowsOfKind = (kind) => record.rows.filter((site) => kindOf(site) === kind);

// "layers.3" of "layers.3.mlp.down": the part of a name up to its last number, else its first word.
function groupOf(site) {
  if (site < 0) return null;
  const parts = record.sites[site][0].split("."), last = parts.findIndex((part) => /^\d+$/.test(part));
  return parts.slice(0, last < 0 ? 1 : last + 1).join(".");
}
const leafOf = (site) => {
  const [name, tensor] = record.sites[site], group = groupOf(site), inner = tensor.split(".").slice(1).join(".");
  return (name === group ? "" : name.slice(group.length + 1)) + (inner ? "." + inner : "");
};

async function showPlane() {
  const { statistic, view, run } = state, begun = performance.now();
  const next = await plane(statistic, view, run);
  if (statistic !== state.statistic || view !== state.view || run !== state.run) return; // something else was asked for meanwhile
  shown = next;
  recolour();
  drawHeat();
  performance.measure("switch", { start: begun });
}

function recolour() {
  const { kind: told } = record.statistics[state.statistic];
  state.reach = state.view === "difference" && told === "scale" ? 1 : REACH[told];
  if (state.view === "absolute") {
    const { kind } = record.statistics[state.statistic];
    state.range = kind === "signed" ? [-1, 1] : rangeOf(shown, state.rows);
    if (kind === "share") state.range[0] = 0;
  }
  colours = palette(isSigned());
  ranks = ranksOf(shown, state.rows, state);
  drawLegend();
}

function seeAll() {
  state.seen = { rows: [0, state.rows.length], columns: [0, COLUMNS] };
}

function layOut() {
  const width = byId("heat").clientWidth, narrow = width < 620;
  const left = narrow ? 74 : 216, above = state.scalar ? 64 : 0, below = 24, gap = state.scalar ? 14 : 8;
  const many = state.seen.rows[1] - state.seen.rows[0];
  const tall = Math.round(Math.min(narrow ? 440 : 620, Math.max(many * 17, 96)));
  const cells = { x: left, y: above + gap, width: width - left - 1, height: tall };
  return { width, narrow, left, above, height: cells.y + tall + below, cells };
}

const xOf = (column) => {
  const [first, end] = state.seen.columns, { cells } = geometry;
  return cells.x + (column - first) / (end - first) * cells.width;
};
const yOf = (row) => {
  const [first, end] = state.seen.rows, { cells } = geometry;
  return cells.y + (row - first) / (end - first) * cells.height;
};
function cellAt(x, y) {
  const { cells } = geometry, [firstRow, endRow] = state.seen.rows, [firstColumn, endColumn] = state.seen.columns;
  const across = (x - cells.x) / cells.width, down = (y - cells.y) / cells.height;
  if (across < 0 || across >= 1 || down < 0 || down >= 1) return null;
  return {
    row: firstRow + Math.floor(down * (endRow - firstRow)),
    column: firstColumn + Math.floor(across * (endColumn - firstColumn)),
  };
}

function drawHeat() {
  if (!shown || !state.rows.length) return;
  geometry = layOut();
  const { cells, width, height } = geometry;
  byId("heat").style.height = height + "px";
  const context = surface(byId("heat-cells"), width, height), ratio = window.devicePixelRatio || 1;
  const { rows, columns } = state.seen;
  const tall = Math.min(rows[1] - rows[0], Math.round(cells.height * ratio));
  const wide = Math.min(columns[1] - columns[0], Math.round(cells.width * ratio));
  context.fillStyle = hatch(context);
  context.fillRect(cells.x, cells.y, cells.width, cells.height);
  context.imageSmoothingEnabled = false;
  const pixels = reduced(shown, state.rows, ranks, isSigned(), rows, columns, tall, wide);
  context.drawImage(image(pixels, wide, tall, colours), cells.x, cells.y, cells.width, cells.height);
  drawNames(context);
  drawSteps(context);
  if (state.scalar) drawScalar(context);
  drawFindings(context);
  drawCursor();
}

function drawNames(context) {
  const { cells, left, narrow } = geometry, [first, end] = state.seen.rows, high = cells.height / (end - first);
  context.textBaseline = "middle";
  let begin = first, lastLabel = -Infinity;
  for (let row = first; row <= end; row++) {
    if (row < end && groupOf(state.rows[row]) === groupOf(state.rows[begin])) continue;
    const top = yOf(begin), middle = (top + yOf(row)) / 2;
    if (begin > first && high >= 3) {
      context.fillStyle = ink("page");
      context.fillRect(0, Math.round(top) - 0.5, cells.x + cells.width, 1);
    }
    if (middle - lastLabel >= 13) {
      context.font = `500 11px ${FONT}`;
      context.textAlign = "left";
      context.fillStyle = ink("text");
      context.fillText(fitted(context, shortened(groupOf(state.rows[begin]), 40), narrow ? left - 8 : left * 0.47), 0, middle);
      lastLabel = middle;
    }
    begin = row;
  }
  if (narrow || high < 9) return;
  context.font = `${Math.min(11, Math.max(9.5, high - 3))}px ${FONT}`;
  context.textAlign = "right";
  context.fillStyle = ink("muted");
  for (let row = first; row < end; row++) {
    const isAlone = [row - 1, row + 1].every((near) => groupOf(state.rows[near] ?? -1) !== groupOf(state.rows[row]));
    const leaf = leafOf(state.rows[row]) || (isAlone ? "" : "(whole)");
    if (!leaf) continue;
    context.fillText(fitted(context, shortened(leaf, 40), left * 0.5 - 8), left - 8, yOf(row + 0.5));
  }
}

function fitted(context, text, width) {
  while (text.length > 2 && context.measureText(text).width > width) text = text.slice(0, -2) + "…";
  return text;
}

function drawSteps(context) {
  const { cells } = geometry, [first, end] = state.seen.columns, y = cells.y + cells.height;
  drawStepAxis(context, [record.begin[first], lastStepOf(end - 1)], cells.width / 110, [cells.x, cells.x + cells.width], y, (step) => {
    const column = columnOf(step), begin = record.begin[column];
    return xOf(column + Math.min((step - begin) / Math.max(lastStepOf(column) + 1 - begin, 1), 1));
  });
  context.textAlign = "left";
  context.fillText("step", 0, y + 7);
}

// Of two runs those that are seen: that of the other one is dashed, in the other colour.
function drawScalar(context) {
  const { cells, above, left } = geometry, [first, end] = state.seen.columns;
  const shown = [[record.scalars, ink("accent"), []], [record.other?.scalars, ink("second"), [4, 3]]]
    .filter(([scalars]) => scalars?.[state.scalar]).map(([scalars, ...style]) => [scalars[state.scalar], ...style]);
  const inside = (numbers) => numbers.slice(first, end).filter((x) => x !== null);
  const least = Math.min(...shown.flatMap(([[low]]) => inside(low))), most = Math.max(...shown.flatMap(([[, , high]]) => inside(high)));
  if (!Number.isFinite(least)) return;
  const isLog = least > 0 && most / least > 30, told = isLog ? Math.log : (x) => x;
  const from = told(least), span = told(most) - from || 1;
  const yAt = (x) => above - 4 - (told(x) - from) / span * (above - 14);
  context.font = `11px ${FONT}`;
  context.textAlign = "right";
  context.fillStyle = ink("muted");
  context.textBaseline = "middle";
  context.fillText(say(most), left - 8, yAt(most));
  if (most > least) context.fillText(say(least), left - 8, yAt(least));
  context.textAlign = "left";
  context.font = `500 11px ${FONT}`;
  context.fillStyle = ink("text");
  context.fillText(fitted(context, shortened(state.scalar, 24), left * 0.47), 0, above / 2);
  for (const line of shown.reverse()) drawLine(context, line, yAt);
}

function drawLine(context, [[low, middle, high], colour, dash], yAt) {
  const { cells } = geometry, [first, end] = state.seen.columns;
  context.strokeStyle = context.fillStyle = colour;
  context.beginPath();
  for (let column = first; column < end; column++) if (low[column] !== null && high[column] > low[column]) {
    const x = xOf(column + 0.5);
    context.moveTo(x, yAt(low[column]));
    context.lineTo(x, yAt(high[column]));
  }
  context.globalAlpha = 0.35;
  context.lineWidth = Math.max(1, cells.width / (end - first));
  context.stroke();
  context.globalAlpha = 1;
  context.lineWidth = 1.4;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  let isDown = false;
  const ours = record.other ? middle.map((x, i) => x === null && middle[i - 1] !== null && middle[i + 1] !== null ? undefined : x) : middle;
  for (let column = first; column < end; column++) {
    if (ours[column] === undefined) continue; // a step that only the other run has
    if (middle[column] === null) { isDown = false; continue; }
    const x = xOf(column + 0.5), y = yAt(middle[column]), isAlone = !isDown && (middle[column + 1] ?? null) === null;
    if (isAlone) context.moveTo(x - 3, y); // a line of one point would not be seen
    context[isDown || isAlone ? "lineTo" : "moveTo"](isAlone ? x + 3 : x, y);
    isDown = true;
  }
  context.stroke();
  context.setLineDash([]);
}

const findingsOfRun = () => [...(state.run === "second" ? [] : record.findings), ...(state.run === "first" ? [] : record.other.findings)];

// A small mark above the cells at the step of each finding; the site's row has its own beside the cells.
function drawFindings(context) {
  const { cells } = geometry, [first, end] = state.seen.columns;
  const rank = ({ severity }) => ["note", "warning", "critical"].indexOf(severity);
  if (record.parting) drawParting(context, record.parting.step);
  for (const finding of findingsOfRun().sort((a, b) => rank(a) - rank(b))) {
    const column = columnOf(finding.step);
    if (column < first || column >= end) continue;
    const x = xOf(column + 0.5), y = cells.y - 2;
    context.fillStyle = ink(finding.severity);
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x - 4, y - 7);
    context.lineTo(x + 4, y - 7);
    context.fill();
  }
}

// Where two runs part: a line through all rows.
function drawParting(context, step) {
  const { cells, above } = geometry, column = columnOf(step), [first, end] = state.seen.columns;
  if (column < first || column >= end) return;
  const x = Math.round(xOf(column)), words = "they part";
  context.strokeStyle = context.fillStyle = ink("text");
  context.lineWidth = 1;
  context.setLineDash([2, 3]);
  context.beginPath();
  context.moveTo(x + 0.5, above ? 0 : cells.y);
  context.lineTo(x + 0.5, cells.y + cells.height);
  context.stroke();
  context.setLineDash([]);
  if (!above) return;
  context.font = `11px ${FONT}`;
  context.textBaseline = "top";
  const isRight = x + 8 + context.measureText(words).width > cells.x + cells.width;
  context.textAlign = isRight ? "right" : "left";
  context.fillText(words, isRight ? x - 4 : x + 5, 0);
}

function drawCursor() {
  const { width, height, cells } = geometry, context = surface(byId("heat-cursor"), width, height);
  const outline = (row, colour) => {
    const [first, end] = state.seen.rows;
    if (row < first || row >= end) return;
    context.fillStyle = colour;
    context.beginPath();
    context.moveTo(cells.x - 1, yOf(row + 0.5));
    context.lineTo(cells.x - 6, yOf(row + 0.5) - 4);
    context.lineTo(cells.x - 6, yOf(row + 0.5) + 4);
    context.fill();
  };
  outline(state.rows.indexOf(state.site), ink("accent"));
  if (drag?.box) {
    const { x, y, width: wide, height: tall } = drag.box;
    context.fillStyle = ink("veil");
    context.fillRect(x, y, wide, tall);
    context.strokeStyle = ink("text");
    context.strokeRect(x + 0.5, y + 0.5, wide, tall);
  } else if (state.cursor) {
    const { row, column } = state.cursor, x = xOf(column), y = yOf(row);
    const wide = Math.max(xOf(column + 1) - x, 1), tall = Math.max(yOf(row + 1) - y, 1);
    context.fillStyle = ink("cross");
    context.fillRect(x + wide / 2 - 0.5, 0, 1, cells.y + cells.height);
    context.fillRect(cells.x, y + tall / 2 - 0.5, cells.width, 1);
    context.lineWidth = 1.5;
    context.strokeStyle = ink("page");
    context.strokeRect(x - 2, y - 2, Math.max(wide, 3) + 4, Math.max(tall, 3) + 4);
    context.strokeStyle = ink("text");
    context.strokeRect(x - 0.5, y - 0.5, Math.max(wide, 3) + 1, Math.max(tall, 3) + 1);
  }
  showReadout();
}

function drawLegend() {
  const { kind, title } = record.statistics[state.statistic], canvas = node("canvas", { "aria-hidden": true });
  const wide = 180, context = surface(canvas, wide, 10), bytes = new Uint8Array(colours.buffer);
  for (let x = 0; x < wide; x++) {
    const rank = 1 + Math.round(253 * x / (wide - 1));
    context.fillStyle = `rgb(${bytes[4 * rank]} ${bytes[4 * rank + 1]} ${bytes[4 * rank + 2]})`;
    context.fillRect(x, 0, 1.5, 10);
  }
  let low, middle, high;
  if (state.view !== "absolute") {
    const middles = state.view === "difference" ? "equal" : "its past";
    [low, middle, high] = kind !== "scale" ? ["−0.3", middles, "+0.3"] : state.view === "difference" ? ["half", middles, "twice"] : ["⅛ of", middles, "8 times"];
  } else if (kind !== "scale") [low, middle, high] = [state.range[0], (state.range[0] + state.range[1]) / 2, state.range[1]].map((x) => say(x, 2));
  else {
    const [from, to] = state.range;
    [low, middle, high] = state.log ? [2 ** from, 2 ** ((from + to) / 2), 2 ** to].map((x) => say(x, 2)) : [0, 2 ** to / 2, 2 ** to].map((x) => say(x, 2));
  }
  const chip = (name, text) => node("span", { class: "chip" }, node("i", { class: name }), text);
  byId("legend").replaceChildren(
    node("div", { class: "ramp" }, canvas, node("div", { class: "numbers" }, node("span", {}, low), node("span", {}, middle), node("span", {}, high))),
    node("div", { class: "chips" }, chip("nan", "NaN or infinity"), chip("quiet", record.other ? "silent, or in one run only" : "silent"),
      ...(record.other && state.scalar ? [chip("one", shortened(record.name, 24)), chip("two", shortened(record.other.name, 24))] : [])));
  canvas.title = title;
}

// Windows on whole rows and columns.
function see(rows, columns) {
  const bounded = ([begin, end], all, least) => {
    const size = Math.min(Math.max(Math.round(end - begin), least), all);
    const from = Math.min(Math.max(Math.round(begin), 0), all - size);
    return [from, from + size];
  };
  state.seen = { rows: bounded(rows, state.rows.length, Math.min(3, state.rows.length)), columns: bounded(columns, COLUMNS, Math.min(10, COLUMNS)) };
  drawHeat();
}
function zoom(factor, centre = state.cursor) {
  const { rows, columns } = state.seen;
  const around = ([begin, end], at) => {
    const middle = at === undefined ? (begin + end) / 2 : Math.min(Math.max(at + 0.5, begin), end);
    return [middle - (middle - begin) * factor, middle + (end - middle) * factor];
  };
  see(around(rows, centre?.row), around(columns, centre?.column));
}
function pan(rows, columns) {
  const { seen } = state, high = seen.rows[1] - seen.rows[0], wide = seen.columns[1] - seen.columns[0];
  const down = Math.round(rows * high), across = Math.round(columns * wide);
  see(seen.rows.map((x) => x + down), seen.columns.map((x) => x + across));
}

let drag = null;
function listen(open) {
  const heat = byId("heat");
  const at = (event) => {
    const box = heat.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  heat.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { from: at(event), seen: state.seen, box: null, moves: event.shiftKey };
    if (event.pointerType !== "touch") heat.setPointerCapture(event.pointerId);
  });
  heat.addEventListener("pointermove", (event) => {
    if (!geometry) return;
    const here = at(event), { cells } = geometry;
    if (drag && event.pointerType !== "touch" && Math.hypot(here.x - drag.from.x, here.y - drag.from.y) > 5) {
      if (drag.moves) {
        const { rows, columns } = drag.seen;
        const across = (drag.from.x - here.x) / cells.width * (columns[1] - columns[0]);
        const down = (drag.from.y - here.y) / cells.height * (rows[1] - rows[0]);
        drag.box = null;
        drag.moved = true;
        see(rows.map((x) => x + down), columns.map((x) => x + across));
        return;
      }
      const left = Math.max(Math.min(here.x, drag.from.x), cells.x), top = Math.max(Math.min(here.y, drag.from.y), cells.y);
      const right = Math.min(Math.max(here.x, drag.from.x), cells.x + cells.width);
      const bottom = Math.min(Math.max(here.y, drag.from.y), cells.y + cells.height);
      drag.box = { x: left, y: top, width: right - left, height: bottom - top };
    }
    state.cursor = cellAt(here.x, here.y) ?? (drag ? state.cursor : null);
    drawCursor();
  });
  heat.addEventListener("pointerup", (event) => {
    const done = drag;
    drag = null;
    if (!done || !geometry) return;
    if (done.box && done.box.width > 4) {
      const { cells } = geometry, { x, y, width, height } = done.box, { rows, columns } = state.seen;
      const across = (x - cells.x) / cells.width, down = (y - cells.y) / cells.height;
      const wide = columns[1] - columns[0], high = rows[1] - rows[0];
      const from = [rows[0] + down * high, columns[0] + across * wide];
      const flat = height < 12; // along the steps alone
      see(flat ? rows : [Math.floor(from[0]), Math.ceil(from[0] + height / cells.height * high)], [from[1], from[1] + width / cells.width * wide]);
    } else if (!done.moved) {
      const here = at(event), cell = cellAt(here.x, here.y);
      if (cell) { state.cursor = cell; open(state.rows[cell.row], record.begin[cell.column]); }
    }
    drawCursor();
  });
  heat.addEventListener("pointercancel", () => { drag = null; });
  heat.addEventListener("pointerleave", () => { if (!drag && geometry && document.activeElement !== heat) { state.cursor = null; drawCursor(); } });
  heat.addEventListener("dblclick", () => { seeAll(); drawHeat(); });
  heat.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, cellAt(at(event).x, at(event).y));
  }, { passive: false });
  heat.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !geometry) return;
    const cursor = state.cursor ?? { row: state.seen.rows[0], column: state.seen.columns[0] };
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] }[event.key];
    if (move && event.shiftKey) pan(move[0] / 4, move[1] / 4);
    else if (move) {
      if (state.cursor) {
        cursor.row = Math.min(Math.max(cursor.row + move[0], 0), state.rows.length - 1);
        cursor.column = Math.min(Math.max(cursor.column + move[1], 0), COLUMNS - 1);
      }
      state.cursor = cursor;
      follow();
    } else if (event.key === "+" || event.key === "=") zoom(0.6);
    else if (event.key === "-") zoom(1 / 0.6);
    else if (event.key === "0" || event.key === "Escape") { seeAll(); drawHeat(); }
    else if (event.key === "Enter") open(state.rows[cursor.row], record.begin[cursor.column]);
    else return;
    event.preventDefault();
  });
}

// The cursor stays inside of what is seen.
function follow() {
  const inside = ([begin, end], at) => at < begin ? [at, at + end - begin] : at >= end ? [at + 1 - end + begin, at + 1] : [begin, end];
  const { rows, columns } = state.seen, next = { rows: inside(rows, state.cursor.row), columns: inside(columns, state.cursor.column) };
  if (next.rows[0] !== rows[0] || next.columns[0] !== columns[0]) { state.seen = next; drawHeat(); }
  else drawCursor();
}
