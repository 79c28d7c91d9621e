// What the page is made from, and words for it. Names come from somebody else's model: they become text nodes only.

const record = JSON.parse(document.getElementById("record").textContent);
let SITES, COLUMNS, names, several;
// What follows from the record, as it is now.
function settle() {
  for (const run of [record, record.other]) if (run) run.findings = run.chapters.flatMap(({ finding, effects }) => [finding, ...effects]);
  for (const { finding, effects } of record.chapters) for (const effect of effects) effect.cause = finding;
  record.windows ??= []; // this and others come later where the page is served
  SITES = record.sites.length;
  COLUMNS = record.begin.length;
  names = new Set(record.sites.map(([name]) => name));
  // A run's ranks and attempts are named where there are several.
  several = ["rank", "attempt"].filter((of) => new Set(record.findings.map((finding) => finding[of])).size > 1);
}
settle();
const byId = (id) => document.getElementById(id);
const SILENT = 0, ZERO = 1, FIRST = 2, LAST = 253, NEUTRAL = 128, NONFINITE = 255;

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// Controls and marks that turn text around or hide in it are shown as what they are.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
function plain(name) {
  return name.replace(UNSEEN, (mark) => "\\u" + mark.charCodeAt(0).toString(16).padStart(4, "0")) || "(model)";
}

function shortened(name, most = 56) {
  const text = plain(name.length > 400 ? name.slice(0, 200) + "…" + name.slice(-199) : name);
  if (text.length <= most) return text;
  const tail = Math.floor(most * 0.6);
  return text.slice(0, most - tail - 1) + "…" + text.slice(-tail);
}

// Of all tensors of a kind, and of one.
const KINDS = {
  output: ["Outputs", "output"], grad_output: ["Gradients of outputs", "gradient of the output"],
  input: ["Inputs", "input"], grad_input: ["Gradients of inputs", "gradient of the input"],
  param: ["Parameters", "parameter"], param_grad: ["Gradients of parameters", "gradient of the parameter"],
  param_update: ["Updates of parameters", "update of the parameter"], param_sample: ["Parameters, a sample", "sample of the parameter"],
  update_sample: ["Updates, a sample", "sample of the update"], buffer_sample: ["Buffers, a sample", "sample of the buffer"],
};
const titleOf = (kind) => KINDS[kind]?.[0] ?? shortened(kind);
const kindOf = (site) => record.sites[site][1].split(".")[0];
const wordsOf = (tensor) => {
  const [kind, ...rest] = tensor.split(".");
  return shortened(KINDS[kind] ? [KINDS[kind][1], ...rest].join(" ") : tensor);
};

function say(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const text = size >= 1e5 || size < 1e-3
    ? x.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e")
    : Number(x.toPrecision(digits)).toString();
  return text.replace("-", "−").replace("e-", "e−");
}
const count = (n) => Math.round(n).toLocaleString("en-US").replaceAll(",", "\u2009");
const many = (n, one, more = one + "s") => `${count(n)} ${n === 1 ? one : more}`;
const percent = (share) => share === 0 ? "0" : share < 1e-6 ? "< 0.0001 %" : say(100 * share, 2) + " %";

function said(bytes) {
  const units = ["", " thousand", " million", " billion", " trillion"];
  const power = Math.min(Math.floor(Math.log10(Math.max(bytes, 1)) / 3), 4);
  return say(bytes / 1000 ** power) + units[power];
}

// Bytes are unpacked when they are first asked for. Those behind the script may still be on their way.
const unpacked = new Map();
const arrived = document.readyState === "loading"
  ? new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve, { once: true }))
  : Promise.resolve();
let source = unpack;
// read: what is made of the bytes, once.
async function blob(name, read = (bytes) => bytes) {
  const { version } = record; // of a run that grows, see live.js
  if (!unpacked.has(name)) unpacked.set(name, source(name).then((bytes) => bytes && read(bytes)));
  const found = await unpacked.get(name);
  return found && record.version === version ? found : blob(name, read);
}
async function unpack(name) {
  if (!byId("blob-" + name)) await arrived;
  const text = byId("blob-" + name).textContent;
  const packed = Uint8Array.fromBase64
    ? Uint8Array.fromBase64(text)
    : Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
const json = (bytes) => JSON.parse(new TextDecoder().decode(bytes));

async function plane(statistic, view, run) {
  const bytes = await blob(`${statistic}.${run === "second" && view !== "difference" ? "other_" : ""}${view}`);
  const cells = SITES * COLUMNS;
  if (view !== "absolute") return { codes: bytes };
  const scales = new Float64Array(bytes.slice(cells).buffer);
  return { codes: bytes.subarray(0, cells), low: scales.subarray(0, SITES), step: scales.subarray(SITES) };
}

// Numbers of lines by their names, of one site: null where it was silent, or nothing is finite.
const lines = (site) => blob("line." + site, (bytes) => {
  const numbers = floats(bytes), columns = record.line_begin.length;
  return Object.fromEntries(record.lines.map((name, i) => [name, numbers.slice(i * columns, (i + 1) * columns)]));
});
// The rms of all sites, one after another.
const rmsOfAll = () => blob("line.rms", floats);
function floats(bytes) {
  const count = bytes.length / 4, mixed = new Uint8Array(bytes.length); // all first bytes stand before the second ones
  for (let byte = 0; byte < 4; byte++) for (let i = 0; i < count; i++) mixed[4 * i + byte] = bytes[byte * count + i];
  return Array.from(new Float32Array(mixed.buffer), (x) => Number.isFinite(x) ? x : null);
}

// Pictures of a site by their names, with what is said of each. A file has those of some sites.
async function detailsOf(site) {
  if (record.detailed && !record.detailed.includes(site)) return {};
  const found = await blob("details." + site, json);
  for (const [name, each] of Object.entries(found)) each.codes = await blob(`details.${site}.${name}`);
  return found;
}

// First and last step of the first run, and how many it has; its last column of lines.
const own = () => record.measured;
const ownLast = () => columnOf(own()[1], record.line_begin);
const lastStepOf = (column) => column + 1 < COLUMNS ? record.begin[column + 1] - 1 : record.steps[1];
function columnOf(step, begin = record.begin) {
  let low = 0, high = begin.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (begin[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}
const stepsOf = (column) => {
  const first = record.begin[column], next = column + 1 < COLUMNS ? record.begin[column + 1] : record.steps[1] + 1;
  const exact = record.steps[2] === COLUMNS;
  return exact || next - first <= 1 ? `step ${count(first)}` : `steps ${count(first)} to ${count(next - 1)}`;
};
