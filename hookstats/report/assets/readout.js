// What a cell is, in words, in numbers, and as a line of Python that leads to the data.

const NUMBERS = [["rms", "rms"], ["abs_max", "largest |x|"], ["mean", "mean"], ["std", "std"], ["min", "smallest"], ["max", "largest"]];

// Of a site at a step, or at the steps that share a column with it; null where it was silent.
async function numbersAt(site, step, run = "first") {
  const column = columnOf(step, record.line_begin), next = record.line_begin[column + 1] ?? record.steps[1] + 1;
  const wanted = run === "second" ? NUMBERS.slice(0, 2).map(([name, title]) => ["other_" + name, title]) : NUMBERS;
  const found = await lines(site), values = wanted.map(([name]) => found[name][column]);
  if (values[0] === null) return null;
  const several = record.steps[2] > record.line_begin.length && next - record.line_begin[column] > 1;
  const told = wanted.map(([, title], i) => [title, values[i]]).filter(([, value]) => value !== null);
  return { told, words: several ? `steps ${count(record.line_begin[column])} to ${count(next - 1)}, averages and ends` : "" };
}

// A line of Python for what load gives of the run: its site at a step.
function python(site, step, run = "first") {
  const literal = (text) => JSON.stringify(text).replace(/[\u007f-\uffff]/gu, (mark) => "\\u" + mark.charCodeAt(0).toString(16).padStart(4, "0"))
    .replace(/[\u{10000}-\u{10ffff}]/gu, (mark) => "\\U" + mark.codePointAt(0).toString(16).padStart(8, "0"));
  return `${run === "second" ? "other" : "run"}[${step}][${record.sites[site].map(literal).join(", ")}]`;
}

// Where no clipboard is offered (a frame of a notebook, an address that is not secure), as a selection is copied.
async function copy(text) {
  try { await navigator.clipboard.writeText(text); } catch {
    const area = node("textarea", { class: "unseen" }), before = document.activeElement;
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    before?.focus({ preventScroll: true });
  }
}

function copyButton(text) {
  const said = node("span", { class: "muted" }, "Copy");
  return node("button", { type: "button", class: "code", title: `Copy: ${plain(text.slice(0, 500))}`, onclick: async () => {
    await copy(text);
    said.textContent = "Copied";
    setTimeout(() => { said.textContent = "Copy"; }, 1500);
  } }, node("code", {}, shortened(text, 110)), said);
}

let told = 0;
function showReadout() {
  const words = byId("readout"), numbers = byId("numbers"), turn = ++told;
  if (!state.cursor || !shown) {
    words.replaceChildren(node("span", { class: "muted" }, hintOfView()));
    numbers.replaceChildren();
    return;
  }
  words.replaceChildren(...readout());
  const { row, column } = state.cursor, site = state.rows[row], step = record.begin[column];
  const run = state.run === "second" ? "second" : "first";
  numbersAt(site, step, run).then((found) => {
    if (turn !== told) return;
    numbers.replaceChildren(...(found ? [...numbersOf(found), node("span", {}, node("code", {}, shortened(python(site, step, run), 70)), " ", node("kbd", {}, "C"), node("span", {}, " copies it"))] : []));
  }, () => {});
}
const numbersOf = ({ told, words }) => [...told.map(([title, value]) => node("span", {}, `${title} `, node("b", {}, say(value, 4)))), words ? node("span", { class: "muted" }, `(${words})`) : ""];

// At the mouse, or where the keyboard is: the line of Python of that cell.
function copyCell() {
  const { row, column } = state.cursor, site = state.rows[row], code = shown.codes[site * COLUMNS + column];
  if (code === SILENT) return;
  copy(python(site, record.begin[column], state.run === "second" ? "second" : "first"));
  const last = byId("numbers").lastElementChild;
  if (last) last.lastElementChild.textContent = " copied";
}
document.addEventListener("keydown", (event) => {
  const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (event.key !== "c" || event.ctrlKey || event.metaKey || event.altKey || isTyping || !state.cursor || !shown) return;
  copyCell();
});

// What a cell is, in words.
function readout() {
  const { row, column } = state.cursor, site = state.rows[row], code = shown.codes[site * COLUMNS + column];
  const { kind, title } = record.statistics[state.statistic], unit = unitOf(state);
  const past = state.view === "difference" ? "the first run's" : "its past";
  const [name, tensor] = record.sites[site];
  let value;
  if (code === SILENT) value = missing(site, column);
  else if (code === NONFINITE) value = "holds NaN or infinity";
  else if (state.view !== "absolute") {
    const change = (code - NEUTRAL) / unit, outer = code === FIRST ? "≤ " : code >= LAST + 1 ? "≥ " : "";
    if (kind !== "scale") value = `${title} ${change > 0 ? "+" : "−"}${say(Math.abs(change), 2)} against ${past}`;
    else if (Math.abs(change) < (state.view === "difference" ? 0.5 / unit : 0.1)) value = `${title} as ${state.view === "difference" ? "in the first run" : "usual"}`;
    else value = `${title} ${outer}${say(2 ** change, state.view === "difference" ? 3 : 2)} times ${past}`;
  } else if (code === ZERO && kind !== "signed") value = `${title} 0`;
  else {
    const told = shown.low[site] + (code - FIRST) * shown.step[site];
    value = `${title} ≈ ${say(kind === "scale" ? 2 ** told : told, 2)}`;
  }
  const [scalar, second] = [record.scalars, record.other?.scalars].map((scalars) => scalars?.[state.scalar]?.[1][column] ?? null);
  const name2 = record.other && second !== null ? `${shortened(state.scalar, 20)} of ${shortened(record.other.name, 24)}` : "";
  return [
    node("b", {}, node("bdi", {}, shortened(name))), ` ${wordsOf(tensor)} · ${stepsOf(column)} · `, node("b", {}, value),
    scalar === null ? "" : ` · ${shortened(state.scalar, 20)} ${say(scalar, 4)}`, name2 ? ` · ${name2} ${say(second, 4)}` : "",
  ];
}

// Why a cell is empty. Of two runs one may have no such site.
function missing(site) {
  if (!record.other) return "silent";
  const names = [record.name, record.other.name].map((name) => shortened(name, 30));
  const owner = record.other.alone.findIndex((sites) => sites.includes(site));
  if (owner >= 0) return `only ${names[owner]} has it`;
  return state.run === "difference" ? "silent in one of them" : "silent, or not measured in this run";
}
const ofRun = () => record.other ? ` Of ${shortened(state.run === "second" ? record.other.name : record.name, 40)}.` : "";
const hintOfView = () => state.view === "relative" ? "Colour: how far a site is from the median of its own past." + ofRun()
  : state.view === "difference" ? `Colour: how far ${shortened(record.other.name, 40)} is from ${shortened(record.name, 40)}, in the ${count(record.other.steps)} steps that both have.`
  : "Colour: the value itself, on one scale for all rows." + ofRun();

