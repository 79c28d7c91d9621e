// Colours that are perceptually even: viridis for sizes; for signs two hues whose lightness is a straight line in OKLab.

const darkness = matchMedia("(prefers-color-scheme: dark)");
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

const ramp = (text) => text.split(" ").map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
const VIRIDIS = ramp("440154 482878 3e4989 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725");
const ON_LIGHT = ramp("055b99 2e74b2 518dc6 76a7d7 9ec1e3 c8daec f3f3f3 f4d2ca f0b2a3 e7927e d9745d c6583f af3f26");
const ON_DARK = ramp("7fc4ff 65a6e4 5088be 406c96 34516d 293744 1e1e1e 462e28 703f33 9a513f c2654f e97d64 ff997e");

function between(colours, x) {
  const at = Math.min(Math.max(x, 0), 1) * (colours.length - 1), i = Math.min(Math.floor(at), colours.length - 2);
  return colours[i].map((from, part) => from + (at - i) * (colours[i + 1][part] - from));
}

// x from -1, less than usual, to 1, more.
const diverging = (x) => between(darkness.matches ? ON_DARK : ON_LIGHT, (x + 1) / 2);
const sequential = (x) => between(VIRIDIS, x);
const NAN_COLOUR = [255, 0, 130];

// 256 ranks of a colour: 0 silent, 1 to 254 from one end to the other, 255 not finite.
function palette(isSigned) {
  const colours = new Uint32Array(256), bytes = new Uint8Array(colours.buffer);
  for (let rank = 1; rank < 255; rank++) {
    const x = (rank - 1) / 253;
    bytes.set([...(isSigned ? diverging(2 * x - 1) : sequential(x)), 255].map(Math.round), 4 * rank);
  }
  bytes.set([...NAN_COLOUR, 255], 4 * 255);
  return colours; // of silent cells nothing is drawn
}

// A canvas as sharp as the screen; what is drawn on it is told in CSS pixels.
function surface(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// What is silent is hatched, so that it is not taken for a value.
function hatch(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const strokes = tile.getContext("2d");
  strokes.fillStyle = ink("silent");
  strokes.fillRect(0, 0, 6, 6);
  strokes.strokeStyle = ink("hatch");
  strokes.beginPath();
  for (const x of [-3, 3, 9]) { strokes.moveTo(x - 3, 6); strokes.lineTo(x + 3, 0); }
  strokes.stroke();
  return context.createPattern(tile, "repeat");
}

const FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

// Round numbers from low to high, about so many of them.
function ticks(low, high, about) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(about, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high * (1 + 1e-12); x += step) found.push(Math.abs(x) < step / 1e6 ? 0 : x);
  return found;
}
// Of steps, which are whole: no closer than 1.
const stepTicks = (first, last, about) => ticks(first, last, Math.min(about, last - first));
// Under a picture from left to right, whose lower edge is y; xAt: of a step. No more than so many.
function drawStepAxis(context, [first, last], most, [left, right], y, xAt) {
  context.font = `11px ${FONT}`;
  context.textBaseline = "top";
  context.textAlign = "center";
  context.fillStyle = ink("muted");
  for (const step of stepTicks(first, last, Math.max(2, Math.floor(most)))) {
    const x = xAt(step), text = count(step), half = context.measureText(text).width / 2;
    if (x < left - 0.5 || x > right) continue;
    context.fillRect(x, y, 1, 4);
    context.fillText(text, Math.min(Math.max(x, left + half), right - half), y + 7);
  }
}
function logTicks(low, high, about) {
  if (!(low > 0) || !(high > low)) return [low];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const digit of [1, 2, 5]) found.push(Number(`${digit}e${power}`));
  const inside = found.filter((x) => x >= low && x <= high);
  if (inside.length < 2) return ticks(low, high, about);
  if (inside.length <= about) return inside;
  const tens = inside.filter((x) => String(x.toExponential())[0] === "1");
  if (tens.length < 2) return inside.filter((_, i) => i % Math.ceil(inside.length / about) === 0);
  const every = Math.ceil(tens.length / about);
  return tens.filter((x) => Math.round(Math.log10(x)) % every === 0);
}
