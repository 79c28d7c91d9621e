// What a heatmap shows of a plane: codes to ranks of colour, rows and columns to pixels by the largest, or by the
// farthest from the middle.

// Of the absolute view, the range of colours: from the rows that are shown, without the least hundredth.
function rangeOf(shown, rows) {
  const known = [];
  const stride = Math.max(1, Math.floor(rows.length * COLUMNS / 50000));
  let at = 0;
  for (const row of rows)
    for (let column = at++ % stride; column < COLUMNS; column += stride) {
      const code = shown.codes[row * COLUMNS + column];
      if (code >= FIRST && code !== NONFINITE) known.push(shown.low[row] + (code - FIRST) * shown.step[row]);
    }
  known.sort((a, b) => a - b);
  return known.length ? [known[Math.floor(known.length / 100)], known[known.length - 1]] : [0, 1];
}

const unitOf = ({ statistic, view }) => record.statistics[statistic][view === "difference" ? "difference" : "unit"];

// Of each row 256 ranks. Relative: reach is how far the outermost colour is from the site's past.
function ranksOf(shown, rows, state) {
  const ranks = new Uint8Array(rows.length * 256);
  const { kind } = record.statistics[state.statistic], unit = unitOf(state);
  const isRelative = state.view !== "absolute";
  let [low, high] = state.range;
  const told = kind === "scale" && !state.log ? (x) => 2 ** x : (x) => x;
  if (kind === "scale" && !state.log) [low, high] = [0, 2 ** high];
  rows.forEach((row, i) => {
    for (let code = 1; code < NONFINITE; code++) {
      let x;
      if (isRelative) x = 0.5 + (code - NEUTRAL) / unit / state.reach / 2;
      else if (code === ZERO) x = kind === "signed" ? 0.5 : 0;
      else x = (told(shown.low[row] + (code - FIRST) * shown.step[row]) - low) / (high - low || 1);
      ranks[256 * i + code] = 1 + Math.round(253 * Math.min(Math.max(x, 0), 1));
    }
    ranks[256 * i + NONFINITE] = 255;
  });
  return ranks;
}

// The rank of each of height x width pixels; of several cells in one the largest, or the farthest from the middle.
function reduced(shown, rows, ranks, isSigned, [firstRow, endRow], [firstColumn, endColumn], height, width) {
  const found = new Uint8Array(height * width), highs = endRow - firstRow, wides = endColumn - firstColumn;
  const at = new Uint32Array(wides);
  for (let column = 0; column < wides; column++) at[column] = Math.floor(column * width / wides);
  for (let i = 0; i < highs; i++) {
    const begin = rows[firstRow + i] * COLUMNS + firstColumn, scale = 256 * (firstRow + i);
    const line = Math.floor(i * height / highs) * width;
    for (let column = 0; column < wides; column++) {
      const rank = ranks[scale + shown.codes[begin + column]], place = line + at[column], old = found[place];
      if (isSigned && rank !== 255 && old !== 255 && rank && old) {
        if (Math.abs(rank - 127.5) > Math.abs(old - 127.5)) found[place] = rank;
      } else if (rank > old) found[place] = rank;
    }
  }
  return found;
}

function image(ranks, width, height, colours) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d"), pixels = context.createImageData(width, height);
  const words = new Uint32Array(pixels.data.buffer);
  for (let i = 0; i < ranks.length; i++) words[i] = colours[ranks[i]];
  context.putImageData(pixels, 0, 0);
  return canvas;
}
