// Where everything begins, and what happens when something is chosen. Every choice of a site is a link.

function options(label, entries, value, choose) {
  const select = node("select", { onchange: () => choose(select.value) }, ...entries.map(([name, text]) => node("option", { value: name }, text)));
  select.value = value;
  return node("label", {}, node("span", {}, label), select);
}
function choice(label, entries, value, choose) {
  const group = node("div", { class: "choice", role: "group", "aria-label": label });
  group.append(...entries.map(([name, text]) => node("button", {
    type: "button", "data-value": name, "aria-pressed": String(name === value),
    onclick: (event) => {
      for (const button of group.children) button.setAttribute("aria-pressed", String(button === event.currentTarget));
      choose(name);
    },
  }, text)));
  return group;
}

const present = () => [...new Set(record.rows.map(kindOf))];
function showTools() {
  const there = present();
  const kinds = [...Object.keys(KINDS).filter((kind) => there.includes(kind)), ...there.filter((kind) => !(kind in KINDS))];
  const scalars = Object.keys(record.scalars);
  const scale = choice("Scale", [["log", "Log"], ["linear", "Linear"]], state.log ? "log" : "linear", (name) => { state.log = name === "log"; recolour(); drawHeat(); });
  const views = choice("View", [["relative", "Against its past"], ["absolute", "Absolute"]], state.of, (view) => { state.isChosen = true; state.of = state.view = view; update(); showPlane(); });
  const update = () => {
    views.hidden = state.view === "difference";
    scale.hidden = state.view !== "absolute" || record.statistics[state.statistic].kind !== "scale";
  };
  const runs = record.other ? [choice("Run", [["first", shortened(record.name, 18)], ["second", shortened(record.other.name, 18)], ["difference", "Distance"]], state.run, (run) => {
    state.run = run;
    state.view = run === "difference" ? run : state.of;
    update();
    showPlane();
  })] : [];
  byId("tools").replaceChildren(
    options("Tensor", kinds.map((kind) => [kind, titleOf(kind)]), state.kind, (kind) => { setKind(kind); recolour(); drawHeat(); describe(); }),
    options("Statistic", Object.entries(record.statistics).map(([name, { title }]) => [name, title]), state.statistic, (name) => { state.statistic = name; update(); showPlane(); }),
    ...runs,
    views,
    scale,
    ...(scalars.length > 1 ? [options("Above", scalars.map((name) => [name, shortened(name, 24)]), state.scalar, (name) => { state.scalar = name; drawHeat(); })] : []));
  update();
  const button = (text, label, act) => node("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  byId("zoom").replaceChildren(button("+", "Enlarge", () => zoom(0.6)), button("−", "Shrink", () => zoom(1 / 0.6)), button("All", "Show all", () => { seeAll(); drawHeat(); }));
}

// A single step has no past yet, and would be an empty picture.
function seeView() {
  if (!state.isChosen && state.run !== "difference") state.of = state.view = record.steps[2] > 1 ? "relative" : "absolute";
}

function setKind(kind) {
  state.kind = kind;
  state.rows = rowsOfKind(kind);
  state.cursor = null;
  seeAll();
  const select = byId("tools").querySelector("select");
  if (select) select.value = kind;
}

function describe() {
  const per = record.steps[2] / COLUMNS;
  byId("layers-about").textContent = `${many(state.rows.length, "row")} in order of execution, ${per > 1 ? `${count(COLUMNS)} columns of about ${say(per, 2)} measured steps; a cell shows the farthest of them` : "a column for each measured step"}.`;
  byId("heat").setAttribute("aria-label", `${titleOf(state.kind)}: ${record.statistics[state.statistic].title}, layers by steps. Arrow keys move from cell to cell.`);
}

function go(site, step) {
  const link = linkTo(site, step);
  if (location.hash === link) chooseFromLink();
  else location.hash = link;
}

// "#site=12&step=300", "#kind=param_grad&step=300", or a part of it
function chosen() {
  const given = new URLSearchParams(location.hash.slice(1)), kind = given.get("kind"), number = (name) => given.has(name) ? Number(given.get(name)) : NaN;
  const site = number("site"), step = number("step");
  return { site: record.sites[site] ? site : null, step: Number.isInteger(step) ? step : null, kind: present().includes(kind) ? kind : null, scalar: record.scalars[kind] ? kind : null };
}
async function chooseFromLink(isFirst = false) {
  const found = chosen(), { step } = found, site = found.site ?? (found.kind ? rowsOfKind(found.kind)[0] : isFirst ? worst() : state.site);
  if (found.scalar && found.scalar !== state.scalar) {
    state.scalar = found.scalar;
    showTools();
  }
  state.site = site;
  if (kindOf(site) !== state.kind) { setKind(kindOf(site)); recolour(); describe(); }
  if (found.site !== null || step !== null) {
    state.cursor = { row: state.rows.indexOf(site), column: step === null ? state.seen.columns[0] : columnOf(step) };
    follow();
  }
  drawHeat();
  await showSite(site, step);
  if (found.site !== null && !isFirst) byId("site").focus({ preventScroll: true });
}
function worst() {
  const finding = record.findings.find((each) => each.site !== null || present().includes(each.kind)), outputs = rowsOfKind("output");
  if (finding) return finding.site ?? rowsOfKind(finding.kind)[0];
  const rows = outputs.length ? outputs : rowsOfKind(kindOf(record.rows[0]));
  return rows.find((site) => record.detailed?.includes(site)) ?? rows[0];
}

function draw() {
  if (!shown) return;
  recolour();
  drawHeat();
  showSite(state.site, chosen().step);
  showFlow();
}

// What stands below the site, and what takes longer to tell where the page is served.
async function showRest() {
  if (record.version !== undefined) {
    Object.assign(record, await blob("more", json));
    showHead();
    drawHeat();
  }
  showPrecision();
  showFlow();
  await showParameters();
  showLeftOut();
  showSettings();
}

async function begin() {
  const isLive = record.version !== undefined;
  if (isLive) live();
  const scalars = Object.keys(record.scalars);
  seeView();
  state.scalar = scalars.includes("loss") ? "loss" : scalars[0] ?? "";
  setKind(kindOf(worst()));
  showHead();
  showFindings();
  showTools();
  describe();
  listen(go);
  await showPlane();
  performance.mark("first picture");
  await chooseFromLink(true);
  await showRest();
  window.addEventListener("hashchange", () => {
    chooseFromLink();
    const { top } = byId("layers").getBoundingClientRect();
    if (top > innerHeight * 0.6 || top < -innerHeight) byId("layers").scrollIntoView({ behavior: "smooth" });
  });
  darkness.addEventListener("change", () => { draw(); showPrecision(); });
  let width = innerWidth, waiting = 0;
  window.addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's bars come and go
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(draw, 120);
  });
  document.documentElement.dataset.ready = "true";
  if (isLive) look();
}
begin();
