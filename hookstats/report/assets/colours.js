// Colours that are perceptually even: viridis for sizes; for signs two hues whose lightness is a straight line in OKLab.

const darkness = matchMedia("(prefers-color-scheme: dark)");
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

const VIRIDIS = ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"].map(
  (hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

function between(colours, x) {
  const at = Math.min(Math.max(x, 0), 1) * (colours.length - 1), i = Math.min(Math.floor(at), colours.length - 2);
  return colours[i].map((from, part) => from + (at - i) * (colours[i + 1][part] - from));
}

// OKLab to sRGB: B. Ottosson, "A perceptual color space for image processing", 2020.
function fromOklab([lightness, a, b]) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((x) => 255 * Math.min(Math.max(x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055, 0), 1));
}

// x from -1, less than usual, to 1, more.
function diverging(x) {
  const size = Math.min(Math.abs(x), 1), hue = x < 0 ? [-0.045, -0.115] : [0.125, 0.085];
  const [middle, end] = darkness.matches ? [0.235, 0.8] : [0.965, x < 0 ? 0.46 : 0.52];
  const strength = Math.sin(size * Math.PI / 2) * (darkness.matches ? 0.95 : 1);
  return fromOklab([middle + (end - middle) * size, hue[0] * strength, hue[1] * strength]);
}

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
