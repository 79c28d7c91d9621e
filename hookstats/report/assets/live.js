// A page that is served while its run grows: bytes are asked for when they are drawn, and what is new each second.
// Of what changed, only the difference from what is here is sent.

const held = new Map(); // by name: the version of the bytes, and the bytes
const nodeOfState = node("p", { class: "small muted", id: "live", "aria-live": "polite" });
let trouble = 0;

async function fetched(name) {
  const { version } = record, sites = SITES, old = held.get(name), columns = (name.startsWith("line.") ? record.line_begin : record.begin).length;
  const answer = await fetch(`blob?name=${encodeURIComponent(name)}&version=${version}` + (old ? `&since=${old.version}` : ""));
  if (!answer.ok) { unpacked.delete(name); throw new Error(`${name}: ${answer.status}`); }
  const told = new Uint8Array(await answer.arrayBuffer()), bytes = told[0] ? together(name, old, told.slice(1), columns) : told.slice(1);
  held.set(name, { version, bytes, columns, sites });
  return bytes;
}

// Earlier bytes with what is new behind them, as changes.py has them: columns from one on; rows that are sent whole; the rest
// of those whose scale is another one follows from what they were.
function together(name, old, told, columns) {
  const { sites } = old, planes = name.startsWith("line.") ? 2 : 1, lines = planes * sites, cells = lines * columns;
  const [first, many, size] = new Uint32Array(told.buffer, 0, 3), rows = new Uint32Array(told.buffer, 12, many);
  let at = 12 + 4 * many;
  const next = (length) => told.subarray(at, at += length), wide = columns - first;
  const bytes = new Uint8Array(cells + old.bytes.length - lines * old.columns);
  for (let line = 0; line < lines; line++) {
    bytes.set(old.bytes.subarray(line * old.columns, line * old.columns + first), line * columns);
    bytes.set(next(wide), line * columns + first);
  }
  for (let line = 0; line < lines; line += sites) for (const row of rows) bytes.set(next(first), (line + row) * columns);
  const bits = next(size);
  bytes.set(next(bytes.length - cells), cells);
  const [before, now] = [old.bytes.slice(lines * old.columns), bytes.slice(cells)].map((each) => new Float64Array(each.buffer));
  if (now.length) rescale(bytes, planes, columns, first, new Set(rows), bits, before, now);
  return bytes;
}

// Codes on the new scale of their row. A new step is a power of two of old ones; a code in the middle between two has a bit.
function rescale(bytes, planes, columns, first, whole, bits, before, now) {
  const sites = now.length / 2, low = sites * columns, last = planes === 2 ? 4095 : LAST;
  let bit = 0;
  for (let row = 0; row < sites; row++) {
    const [step, wide] = [before[sites + row], now[sites + row]], from = before[row] / step, to = now[row] / wide;
    if (whole.has(row) || (before[row] === now[row] && step === wide)) continue;
    for (let at = row * columns; at < row * columns + first; at++) {
      const code = planes === 2 ? (bytes[at] << 8) | bytes[low + at] : bytes[at];
      if (code < FIRST || code > last) continue;
      const near = (from + code - FIRST) / (wide / step), below = Math.floor(near), half = near - below;
      const upper = half === 0.5 ? (bits[bit >> 3] >> (7 - (bit++ & 7))) & 1 : half > 0.5;
      const made = FIRST + below + Number(upper) - to;
      if (planes === 2) [bytes[at], bytes[low + at]] = [made >> 8, made & 255];
      else bytes[at] = made;
    }
  }
}

const WORDS = { recording: "Alive", ended: "Closed", died: "Died", deleted: "Deleted", waiting: "Waiting" };
function showState({ state: kind, sentence, changed }) {
  const words = `${WORDS[kind] ?? "Cannot be read"}: ${shortened(sentence, 300)}.`.replace("..", ".");
  const when = changed ? ` Last change ${new Date(changed * 1000).toLocaleTimeString("en-GB")}.` : "";
  if (nodeOfState.textContent !== words + when) nodeOfState.textContent = words + when;
  nodeOfState.dataset.state = kind;
}

// What is seen stays what is seen, by its steps; whoever saw the last column sees the new ones.
async function grow(changes) {
  const seen = state.seen, wasAll = seen.columns[0] === 0 && seen.columns[1] === COLUMNS, wasLast = seen.columns[1] === COLUMNS;
  const steps = [record.begin[seen.columns[0]], lastStepOf(seen.columns[1] - 1)], before = ownLast();
  const cursor = state.cursor && { site: state.rows[state.cursor.row], step: record.begin[state.cursor.column] };
  const [{ chapters }, kinds, scalars] = [record, present().length, Object.keys(record.scalars).length];
  Object.assign(record, changes);
  settle();
  tellApart();
  unpacked.clear();
  state.rows = rowsOfKind(state.kind);
  state.seen = { rows: seen.rows.map((row) => Math.min(row, state.rows.length)), columns: [columnOf(steps[0]), columnOf(steps[1]) + 1] };
  if (wasAll || seen.rows[1] === 0) state.seen = { rows: wasAll ? [0, state.rows.length] : state.seen.rows, columns: [0, COLUMNS] };
  else if (wasLast) {
    const wide = Math.min(seen.columns[1] - seen.columns[0], COLUMNS);
    state.seen.columns = [COLUMNS - wide, COLUMNS];
  }
  state.cursor = cursor && { row: state.rows.indexOf(cursor.site), column: columnOf(cursor.step) };
  if (state.cursor?.row < 0) state.cursor = null;
  showHead();
  if (record.chapters !== chapters) showFindings();
  const view = state.view;
  seeView();
  if (view !== state.view || kinds !== present().length || scalars !== Object.keys(record.scalars).length) showTools();
  describe();
  await showPlane();
  await showSite(state.site, chosen().step);
  showPrecision();
  if (flowStep === before || flowStep === null || flowStep > ownLast()) flowStep = null;
  showFlow();
  await showParameters();
  showLeftOut();
  showSettings();
}

async function look() {
  let wait = 1000;
  if (!document.hidden && !drag) try {
    const answer = await fetch(`update?version=${record.version}`);
    if (answer.status === 404 || answer.status === 403) throw new Error("gone");
    const told = await answer.json();
    trouble = 0;
    showState(told);
    if (told.record) {
      const begun = performance.now();
      try { await grow(told.record); } catch (error) { record.version = 0; throw error; } // all of it is asked for again
      performance.measure("update", { start: begun });
    }
    if (["ended", "deleted"].includes(told.state) && !told.record) wait = 5000; // it may be resumed
  } catch {
    if (++trouble > 2) nodeOfState.textContent = "The server does not answer; it is asked again.";
    wait = 3000;
  }
  setTimeout(look, wait);
}

function live() {
  source = fetched;
  document.querySelector(".mark").replaceChildren(node("a", { href: "/" }, "All runs"));
  document.querySelector(".mark").after(nodeOfState);
}
