// A page that is served while its run grows: bytes are asked for when they are drawn, and the page itself again and again.

const nodeOfState = node("p", { class: "small muted", id: "live", "aria-live": "polite" });
let trouble = 0, waiting = [];

// Bytes of this version of the page; where there is another one by now, null, when that is here.
async function fetched(name) {
  if (byId("blob-" + name)) return unpack(name);
  const answer = await fetch(`blob?name=${encodeURIComponent(name)}&version=${record.version}`).catch(() => null);
  if (answer?.ok) return new Uint8Array(await answer.arrayBuffer());
  if (answer?.status === 404) throw new Error(`${name}: there is none`);
  record.tag = ""; // all of the page is asked for
  await new Promise((resolve) => waiting.push(resolve));
  return null;
}

function showState([kind, sentence, changed]) {
  const words = `${shortened(sentence, 300)}.`.replace("..", ".");
  const when = changed ? ` Last change ${new Date(changed * 1000).toLocaleTimeString("en-GB")}.` : "";
  if (nodeOfState.textContent !== words + when) nodeOfState.textContent = words + when;
  nodeOfState.dataset.state = kind;
}

// What is seen stays what is seen, by its steps; whoever saw the last column sees the new ones.
async function grow(next) {
  const seen = state.seen, wasAll = seen.columns[0] === 0 && seen.columns[1] === COLUMNS, wasLast = seen.columns[1] === COLUMNS;
  const steps = [record.begin[seen.columns[0]], lastStepOf(seen.columns[1] - 1)], before = ownLast();
  const cursor = state.cursor && { site: state.rows[state.cursor.row], step: record.begin[state.cursor.column] };
  const kinds = present().length, scalars = Object.keys(record.scalars).length;
  const [told, coming] = [record, next].map(({ chapters }) => JSON.stringify(chapters, (key, value) => key === "cause" ? undefined : value));
  Object.assign(record, next);
  settle();
  unpacked.clear();
  waiting.splice(0).forEach((resolve) => resolve());
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
  if (told !== coming) showFindings();
  const view = state.view;
  seeView();
  if (view !== state.view || kinds !== present().length || scalars !== Object.keys(record.scalars).length) showTools();
  describe();
  await showPlane();
  await showSite(state.site, chosen().step);
  if (flowStep === before || flowStep > ownLast()) flowStep = null;
  await showRest();
}

async function look() {
  if (!document.hidden && !drag) try {
    const answer = await fetch(location.pathname, { headers: { "If-None-Match": `"${record.tag}"` } });
    if (answer.status !== 304) {
      const text = (await answer.text()).replace(/<style>[^]*?<\/style>/, ""); // which this page has, or must not have
      const page = new DOMParser().parseFromString(text, "text/html"), said = page.getElementById("record");
      const kind = page.querySelector("main")?.dataset.state;
      if (!said && !kind) throw new Error(String(answer.status));
      if (said) renew(JSON.parse(said.textContent), page);
      else showState([kind, page.querySelector(".lead").textContent, 0]);
    }
    trouble = 0;
  } catch {
    if (++trouble > 2) nodeOfState.textContent = "The server does not answer; it is asked again.";
  }
  setTimeout(look, 1000);
}

function renew(next, page) {
  const isSame = record.tag && next.version === record.version;
  record.tag = next.tag;
  showState(next.state);
  if (isSame) return;
  const begun = performance.now(), first = "blob-rms.relative";
  byId(first).textContent = page.getElementById(first).textContent;
  grow(next).then(() => performance.measure("update", { start: begun }), () => { record.tag = ""; });
}

function live() {
  source = fetched;
  document.querySelector(".mark").replaceChildren(node("a", { href: "/" }, "All runs"));
  document.querySelector(".mark").after(nodeOfState);
  showState(record.state);
}
