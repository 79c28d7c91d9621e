// The filter, and rows that are asked for again while the page is seen. The server has made text of every name.
const byId = (id) => document.getElementById(id);
const rows = byId("rows"), filter = byId("filter");

function choose() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows.children) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    shown += !row.hidden;
  }
  byId("count").textContent = words.length ? `${shown} of ${rows.children.length}` : "";
}
filter.addEventListener("input", choose);

// Two runs that are ticked have a page together; the one that was ticked first is the first.
let ticked = [];
function tick(event) {
  const { value, checked } = event.target;
  ticked = [...ticked.filter((id) => id !== value), ...(checked ? [value] : [])].slice(-2);
  showTicks();
}
function showTicks() {
  for (const box of rows.querySelectorAll("input")) box.checked = ticked.includes(box.value);
  const link = byId("both");
  link.hidden = ticked.length < 2;
  if (!link.hidden) link.href = `/run/${ticked.join("/")}/`;
}
rows.addEventListener("change", tick);

let tag = null;
async function look() {
  let words = "";
  if (!document.hidden) try {
    const answer = await fetch("/", { headers: tag ? { "If-None-Match": tag } : {} });
    if (!answer.ok && answer.status !== 304) throw new Error(await answer.text());
    if (answer.ok) {
      tag = answer.headers.get("ETag");
      const named = (element) => element?.getAttribute("href") ?? element?.value;
      const at = named(document.activeElement?.closest("#rows a, #rows input"));
      const next = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("rows");
      rows.replaceChildren(...next.children);
      for (const each of rows.querySelectorAll("a, input")) if (named(each) === at) each.focus({ preventScroll: true });
      showTicks();
      choose();
    }
  } catch (error) { words = "The server does not answer; it is asked again."; }
  byId("trouble").textContent = words;
  setTimeout(look, 2000);
}
setTimeout(look, 2000);
choose();
document.documentElement.dataset.ready = "true";
