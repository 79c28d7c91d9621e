// Lines over steps by uPlot, and small pictures: channels over steps, a histogram over steps.

function clear(colour, share) {
  const canvas = clear.canvas ??= document.createElement("canvas").getContext("2d");
  canvas.fillStyle = colour;
  const found = canvas.fillStyle;
  return found.startsWith("#") ? found + Math.round(255 * share).toString(16).padStart(2, "0") : found;
}

function swatch(colour) {
  const made = node("i");
  made.style.background = colour;
  return made;
}

// The places of values with none beside them, which no line leads to.
const alone = (values) => values.flatMap((x, i) => x === null || (values[i - 1] ?? values[i + 1] ?? null) !== null ? [] : [i]);

// series: { label, values, colour, width, between: [lowest, highest] }, without a label the edges of bands,
// hidden: told in the key, not drawn;
// bands: [upper, lower, colour, share] by place of series.
function chart(host, { label, steps, series, bands = [], isLog = false, height = 190, mark = null, axis = null, onstep = null }) {
  const figure = node("figure", { class: "chart" }, node("figcaption", {}, label));
  host.append(figure);
  const drawn = series.filter((each) => !each.hidden);
  const usable = drawn.map((each) => each.values.map((x) => x === null || (isLog && !(x > 0)) ? null : x));
  if (!usable.some((values) => values.some((x) => x !== null))) {
    const isZero = drawn.some((each) => each.values.some((x) => x === 0)); // a logarithm cannot draw it
    figure.append(node("p", { class: "muted" }, isZero ? "zero" : "no finite value"));
    return;
  }
  const key = node("p", { class: "key" }), told = (values, i) => i === null || i === undefined ? "" : ` ${say(values[i])}`;
  const spread = ({ between, hidden }, i) => i === null || i === undefined || !between || !(between[0][i] < between[1][i]) ? ""
    : hidden ? node("b", {}, ` ${say(between[0][i])} to ${say(between[1][i])}`) : ` (${say(between[0][i])} to ${say(between[1][i])})`;
  const tell = (i) => key.replaceChildren(
    i === null || i === undefined ? "" : node("span", {}, axis ? axis.value(steps[i]) : `step ${count(steps[i])}`),
    ...series.filter((each) => each.label).map((each) => node("span", {},
      swatch(each.colour), each.label, node("b", {}, each.hidden && each.between ? "" : told(each.values, i)), spread(each, i))));
  const pen = (clear.canvas ??= document.createElement("canvas").getContext("2d"));
  pen.font = `11px ${FONT}`;
  const widest = Math.max(...[steps[0], steps.at(-1)].map((x) => pen.measureText(count(x)).width));
  const grid = { stroke: ink("grid"), width: 1 }, noTicks = { show: false };
  const words = { font: `11px ${FONT}`, stroke: ink("muted"), ticks: noTicks };
  const options = {
    width: Math.max(figure.clientWidth, 200), height,
    padding: [6, Math.max(8, Math.ceil(widest / 2) + 1), 0, 0], // half of the last label stands beyond the last step
    legend: { show: false },
    cursor: { points: { size: 5 }, drag: { x: true, y: false }, sync: { key: "steps" } },
    scales: {
      x: { time: false, ...(steps.length === 1 ? { range: [steps[0] - 0.5, steps[0] + 0.5] } : {}) },
      y: isLog ? { distr: 3, range: (_, low, high) => low > 0 ? [low / 1.15, high * 1.15] : [0.1, 1] } : {},
    },
    axes: [
      { ...words, grid: { show: false }, size: 26, gap: 4, space: Math.max(50, widest + 16), values: (_, at) => at.map((x) => Number.isInteger(x) ? count(x) : "") },
      { ...words, grid, size: 54, gap: 6,
        splits: isLog ? (u) => logTicks(u.scales.y.min, u.scales.y.max, 5) : (u) => ticks(u.scales.y.min, u.scales.y.max, 4),
        filter: (_, at) => at, values: (_, at) => at.map((x) => x === null ? "" : say(x, 3)) },
    ],
    series: [
      {},
      ...drawn.map((each) => ({ stroke: each.colour ?? "transparent", width: each.width ?? 0, dash: each.dash, points: { show: false, size: 5, fill: each.colour, filter: (u, i) => each.colour ? alone(u.data[i]) : null } })),
    ],
    bands: bands.map(([upper, lower, colour, share]) => ({ series: [upper + 1, lower + 1], fill: clear(colour, share) })),
    hooks: { setCursor: [(u) => tell(u.cursor.idx)], draw: mark === null ? [] : [(u) => {
      const x = u.valToPos(mark, "x", true);
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
      u.ctx.save();
      u.ctx.fillStyle = ink("accent");
      u.ctx.globalAlpha = 0.7;
      u.ctx.fillRect(Math.round(x), u.bbox.top, Math.max(1, window.devicePixelRatio), u.bbox.height);
      u.ctx.restore();
    }] },
  };
  const made = new uPlot(options, [steps, ...usable], figure);
  figure.append(key);
  tell(null);
  made.root.setAttribute("role", "img");
  made.root.setAttribute("aria-label", label);
  if (onstep) made.over.addEventListener("click", () => { if (made.cursor.idx !== null) onstep(made.cursor.idx); });
  return made;
}

// A plane of one site: rows x steps, codes on a logarithmic scale; labels tell rows.
function picture(host, { label, of, isUpwards, rowLabels, sayRow, height = 180, note }) {
  const { rows, steps, low, step, bounds, codes } = of, columns = steps.length;
  const figure = node("figure", { class: "chart" }, node("figcaption", {}, label));
  const canvas = node("canvas", { role: "img", "aria-label": label }), words = node("p", { class: "small muted" }, note);
  figure.append(canvas, words);
  host.append(figure);
  const width = Math.max(figure.clientWidth, 200), left = 60, below = 22, tall = height - below - 4, wide = width - left - 8;
  const context = surface(canvas, width, height), colours = palette(false), pixels = new Uint8Array(rows * columns);
  const rank = new Uint8Array(256);
  for (let code = 1; code < 256; code++)
    rank[code] = code === ZERO ? 1 : 1 + Math.round(253 * Math.min(Math.max((low + (code - FIRST) * step - bounds[0]) / (bounds[1] - bounds[0] || 1), 0), 1));
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < columns; column++)
      pixels[(isUpwards ? rows - 1 - row : row) * columns + column] = rank[codes[row * columns + column]];
  context.fillStyle = ink("silent");
  context.fillRect(left, 4, wide, tall);
  context.imageSmoothingEnabled = rows > 2 * tall;
  context.drawImage(image(pixels, columns, rows, colours), left, 4, wide, tall);
  context.font = `11px ${FONT}`;
  context.fillStyle = ink("muted");
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const [row, text] of rowLabels) context.fillText(text, left - 6, Math.max(4 + (isUpwards ? 1 - row / rows : row / rows) * tall, 9));
  drawStepAxis(context, [steps[0], steps[columns - 1]], wide / 90, [left, left + wide], 4 + tall, (each) => left + (columnOf(each, steps) + 0.5) / columns * wide);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - left) / wide * columns);
    const line = Math.floor((event.clientY - box.top - 4) / tall * rows), row = isUpwards ? rows - 1 - line : line;
    if (column < 0 || column >= columns || row < 0 || row >= rows) return;
    const code = codes[row * columns + column];
    const value = code === SILENT ? "none" : code === ZERO ? "0" : say(2 ** (low + (code - FIRST) * step), 2);
    words.textContent = sayRow(row, value, steps[column]);
  });
  canvas.addEventListener("pointerleave", () => { words.textContent = note; });
}
