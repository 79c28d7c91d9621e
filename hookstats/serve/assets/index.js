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

let last = rows.innerHTML;
async function look() {
  let words = "";
  if (!document.hidden) try {
    const answer = await fetch("/rows");
    if (!answer.ok) throw new Error(await answer.text());
    const next = await answer.text();
    if (next !== last) {
      const at = document.activeElement?.closest("#rows a")?.getAttribute("href");
      rows.innerHTML = last = next;
      for (const link of rows.querySelectorAll("a")) if (link.getAttribute("href") === at) link.focus({ preventScroll: true });
      choose();
    }
  } catch (error) { words = "The server does not answer; it is asked again."; }
  byId("trouble").textContent = words;
  setTimeout(look, 2000);
}
setTimeout(look, 2000);
choose();
document.documentElement.dataset.ready = "true";
