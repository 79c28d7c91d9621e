// What it is, findings, and everything behind the site.

const linkTo = (site, step, kind = null) => "#" + Object.entries({ site, kind, step }).filter(([, value]) => value !== null).map((pair) => pair.join("=")).join("&");

function fill(id, ...children) {
  byId(id + "-body").replaceChildren(...children);
}

function table(heads, rows, { shownAtFirst = 12, numeric = 1 } = {}) {
  const body = node("tbody"), lines = (from, to) => rows.slice(from, to).map((cells) =>
    node("tr", {}, ...cells.map((cell, i) => node(i ? "td" : "th", i ? { class: i >= numeric ? "number" : null } : { scope: "row" }, cell))));
  body.append(...lines(0, shownAtFirst));
  const box = node("div", { class: "scroll", tabindex: "0" }, node("table", {},
    node("thead", {}, node("tr", {}, ...heads.map((head, i) => node("th", { scope: "col", class: i >= numeric ? "number" : null }, head)))), body));
  if (rows.length <= shownAtFirst) return [box];
  const more = node("button", { type: "button", class: "more", onclick: () => { body.append(...lines(shownAtFirst)); more.remove(); } }, `Show all ${count(rows.length)}`);
  return [box, more];
}

function siteLink(site, step = null) {
  const [name] = record.sites[site];
  return node("a", { href: linkTo(site, step), title: name.length <= 2000 ? plain(name) : null }, node("bdi", {}, shortened(name)));
}

const at = (seconds) => new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
function lasted(seconds) {
  if (seconds < 120) return `${say(seconds, 2)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${say(seconds / 3600, 2)} h`;
}

function showHead() {
  const called = [record.name, ...(record.other ? [record.other.name] : [])];
  document.title = `${called.map((name) => shortened(name, 40)).join(" and ")} · hookstats`;
  byId("name").replaceChildren(...called.flatMap((name, i) => [i ? node("span", { class: "muted" }, " and ") : "", node("bdi", {}, shortened(name, 80))]));
  const [first, last, steps] = own(), { settings } = record;
  const heads = record.other ? [record, record.other].map(({ name, head }) => node("p", {}, node("bdi", { class: "strong" }, shortened(name, 40)), ": ", shortened(head.join(" "), 1400)))
    : record.head.map((sentence) => node("p", {}, shortened(sentence, 700)));
  byId("summary").replaceChildren(...heads, ...partingLine());
  const facts = [];
  if (settings.model) facts.push(["Model", shortened(typeof settings.model === "string" ? settings.model : String(settings.model.class ?? settings.model.name ?? ""), 60)]);
  if (facts.length && settings.parameters > 0) facts[0].push(`${said(settings.parameters)} parameters`);
  facts.push(["Steps", first === last ? count(first) : `${count(first)} to ${count(last)}`, `${count(steps)} measured`]);
  facts.push(["Sites", count(SITES - (record.other?.alone[1].length ?? 0)), `${many(names.size, "module or parameter", "modules and parameters")}`]);
  if (record.times) facts.push(["Recorded", at(record.times[0]), record.times[1] > record.times[0] ? `for ${lasted(record.times[1] - record.times[0])}` : ""]);
  const [, died] = /^died: (.*)/.exec(settings.ended ?? "") ?? [];
  if (died && record.version === undefined) facts.push(["Ended", "died", shortened(died, 120)]); // a served page has it above
  if (record.values) facts.push(["Measured", said(record.values) + " values", `${count(record.readings)} readings`]);
  if (settings.state_bytes > 0) facts.push(["Cost", `${say(settings.state_bytes / 2 ** 20, 2)} MB of state`, settings.dropped > 0 ? `${many(settings.dropped, "step")} dropped` : "no step dropped"]);
  if (settings.rows > 1) facts.push(["Read", `one of ${count(settings.rows)} rows`, "of activations and their gradients; extremes are of the rows read"]);
  const took = settings.overhead, share = took && 100 * took.measured_host / took.measured_step;
  if (settings.budget && took?.every) facts.push(["Budget", `${say(100 * settings.budget, 2)} %`, `every=${took.every}, rows=${took.rows}`]);
  // Above 100 it says no more than that the machine was busier in the few steps that were timed.
  if (share >= 0 && share <= 100) facts.push(["Time added", `${say(share, 2)} % of a measured step`, `on the host${took.skipped_step > 0 ? `, ${say(100 * took.skipped_host / took.skipped_step, 2)} % of any other` : ""}`]);
  if (record.other) facts.push(["Compared with", shortened(record.other.name, 40), `${many(record.other.steps, "step")} in common`]);
  byId("facts").replaceChildren(...facts.map(([name, value, more]) => node("div", {}, node("dt", {}, name), node("dd", {}, value), more ? node("dd", { class: "muted" }, more) : null)));
}

// Where two runs part, as a sentence with a link.
function partingLine() {
  if (!record.other) return [];
  const { name, steps } = record.other, { parting, is_equal: isEqual } = record, common = `In the ${many(steps, "step")} that both have`;
  if (isEqual === undefined) return []; // not known yet
  if (!parting) return [node("p", {}, isEqual ? `${common}, all sizes of ${shortened(record.name, 40)} and ${shortened(name, 40)} are the same.`
    : `${common}, ${shortened(record.name, 40)} and ${shortened(name, 40)} differ by no more than rounding, as far as was looked.`)];
  const [site, tensor] = record.sites[parting.site];
  return [node("p", { id: "parting" }, `a, ${shortened(record.name, 40)}, and b, ${shortened(name, 40)}, part at `,
    node("a", { href: linkTo(parting.site, parting.step) }, `step ${count(parting.step)}, `, node("bdi", {}, shortened(site, 44)), ` ${wordsOf(tensor)}`), `: ${shortened(parting.sentence, 500)}.`)];
}

// A sentence of a rule begins small, because elsewhere it follows its step; a name stays as it is.
const begun = (sentence) => /^[a-z]+ /.test(sentence) && !names.has(sentence.split(" ", 1)[0]) ? sentence[0].toUpperCase() + sentence.slice(1) : sentence;

function findingLine(finding, ...below) {
  const place = finding.site === null ? null : record.sites[finding.site];
  const link = (step) => linkTo(finding.site, step, finding.kind);
  const where = node("a", { href: link(finding.step) },
    `step ${count(finding.step)}`, finding.kind ? `, ${titleOf(finding.kind).toLowerCase()}` : "", ...(place ? [", ", node("bdi", {}, shortened(place[0], 44)), ` ${wordsOf(place[1])}`] : []));
  const more = [shortened(finding.rule, 60), ...several.map((of) => `${of} ${count(finding[of])}`)];
  const since = finding.since === finding.step ? [] : [", ", node("a", { href: link(finding.since) }, `since step ${count(finding.since)}`)];
  return node("li", { class: finding.severity }, node("span", { class: "severity" }, finding.severity),
    node("div", {}, node("p", {}, shortened(begun(finding.sentence), 700)),
      node("p", { class: "small" }, where, ...since, node("span", { class: "muted" }, ` · ${more.join(" · ")}`)), ...sitesOf(finding), ...below));
}

function sitesOf({ sites, site_count, step }) {
  if (site_count < 2) return [];
  const left = site_count - sites.length, isMixed = new Set(sites.map((site) => record.sites[site][1])).size > 1;
  return [node("details", { class: "fold" }, node("summary", {}, `At ${count(site_count)} sites`),
    node("ul", { class: "sites" }, ...sites.map((site) => node("li", {}, siteLink(site, step), isMixed ? ` ${wordsOf(record.sites[site][1])}` : "")),
      left ? node("li", { class: "muted" }, `and ${many(left, "other")}`) : null))];
}

function chapterLine({ finding, effects }) {
  if (!effects.length) return findingLine(finding);
  const grave = effects.filter((each) => each.severity === "critical").length;
  const list = node("ul", { class: "findings" });
  const fold = node("details", { class: "fold" },
    node("summary", {}, `and ${many(effects.length, "finding")} that ${effects.length === 1 ? "follows" : "follow"} from it` + (grave && finding.severity !== "critical" ? `, ${count(grave)} critical` : "")), list);
  list.append(...effects.map((each) => findingLine(each)));
  return findingLine(finding, fold);
}

function showFindings() {
  const list = byId("findings-list"), more = byId("findings-more"), { chapters } = record;
  const isNote = ({ finding, effects }) => [finding, ...effects].every((each) => each.severity === "note");
  const grave = chapters.filter((each) => !isNote(each)), notes = chapters.filter(isNote);
  const few = [grave.slice(0, 6), notes.slice(0, 3)];
  const show = ([most, others]) => {
    list.replaceChildren(...most.map(chapterLine));
    byId("notes-list").replaceChildren(...others.map(chapterLine));
  };
  show(few);
  list.hidden = !grave.length;
  byId("notes").hidden = !notes.length;
  byId("findings-none").hidden = chapters.length > 0;
  more.hidden = few[0].length + few[1].length === chapters.length;
  more.textContent = `Show all ${count(chapters.length)}` + (record.left_out ? `; ${many(record.left_out, "finding")} more in the record` : "");
  more.onclick = () => { show([grave, notes]); more.hidden = true; };
  const others = record.other?.chapters ?? [], box = byId("other-findings");
  box.hidden = !others.length;
  box.firstElementChild.replaceChildren("Findings of ", node("bdi", {}, shortened(record.other?.name ?? "", 60)));
  box.lastElementChild.replaceChildren(...others.slice(0, 6).map(chapterLine));
  // On paper nothing can be opened.
  window.onbeforeprint = () => {
    if (!more.hidden) more.click();
    for (const fold of document.querySelectorAll(".fold")) fold.open = true;
  };
}

function showPrecision() {
  const { precision } = record;
  if (!precision) { fill("precision", node("p", { class: "muted" }, "Nothing to show: no histogram by exponent was recorded (histogram=ExponentBins()).")); return; }
  const octave = (power) => ["2", node("sup", {}, String(power).replace("-", "−"))], { blocks } = precision;
  const blockNames = blocks ? Object.keys(blocks.formats) : [];
  const order = precision.rows.map((_, i) => i).sort((i, j) => {
    const a = precision.rows[i], b = precision.rows[j];
    return (b[3][4] - a[3][4]) || (b[3][0] + b[3][2] - a[3][0] - a[3][2]);
  });
  const lost = ([small, least, most]) => share(small + most, small + least);
  const rows = order.map((i) => {
    const row = precision.rows[i];
    return [node("span", {}, siteLink(row[0], precision.step), ` ${wordsOf(record.sites[row[0]][1])}`), node("span", {}, ...octave(row[1]), " to ", ...octave(row[2] + 1)),
      lost(row[3]), share(row[3][4]), node("span", {}, ...octave(row[3][3])), lost(row[4]), share(row[4][4]), lost(row[5]),
      ...blockNames.map((name) => { const of = blocks.formats[name][i]; return of ? share(of[1], of[0], of[2]) : node("span", { class: "muted" }, "–"); })];
  });
  const along = blocks && (blocks.dim === -1 ? "the last dimension" : "the other dimensions");
  const shown = [node("p", { class: "about" }, `Share of the values at step ${count(precision.step)} that a format cannot hold: too small, and become zero, or too large. “Scaled”: after multiplying by the power of two that brings the largest value just below the format's.`,
      blocks ? ` Of ${blockNames.join(", ")}: what becomes zero with a scale for each block of ${blocks.size} values along ${along}; after ±, the standard error where not all blocks were counted.` : "", " More than one per cent is set in bold."),
    ...table(["site", "values", "e4m3", "e4m3 scaled", "scale", "e5m2", "e5m2 scaled", "fp16", ...blockNames], rows)];
  if (precision.is_low || blocks) return fill("precision", ...shown);
  const open = byId("precision").querySelector("details")?.open ?? false; // of a page that grows
  fill("precision", node("details", { class: "fold", open }, node("summary", {}, "No values of bf16, fp16 or fewer bits are in use here; what fp16 and 8 bits could not hold"), ...shown));
}

// On a ground that tells its size, from a ten thousandth to all; where bounds are apart, both; with a standard error.
function share(most, least = most, error = 0) {
  const size = Math.min(Math.max(1 + Math.log10(most) / 4, 0), 1);
  const text = (least === most ? percent(most) : `${percent(least).replace(" %", "")} to ${percent(most)}`) + (error ? ` ± ${percent(error)}` : "");
  const made = node("span", { class: `share${most > 0.01 ? " strong" : most === 0 ? " muted" : ""}` }, text);
  if (size > 0) {
    made.style.background = `rgb(${diverging(size).map(Math.round).join(" ")})`;
    if (size > 0.6) made.style.color = ink("page");
  }
  return made;
}

let flowStep = null;
function showFlow() {
  const layers = rowsOfKind("grad_output");
  if (layers.length < 2) { fill("flow", node("p", { class: "muted" }, "Nothing to show: fewer than two gradients of outputs were recorded (tensors=(\"output\", \"grad_output\")).")); return; }
  const outputs = layers.map((site) => record.sites.findIndex(([name, tensor]) => name === record.sites[site][0] && tensor === record.sites[site][1].replace("grad_", "")));
  const begin = record.line_begin, host = node("div"), words = node("output", { for: "flow-step" });
  const slider = node("input", { type: "range", id: "flow-step", min: "0", max: String(ownLast()), oninput: () => draw() });
  slider.value = String(flowStep === null ? ownLast() : flowStep);
  let turn = 0;
  const draw = async () => {
    const mine = ++turn, column = Number(slider.value);
    flowStep = column;
    const all = await rmsOfAll(), rms = (site) => all[site * begin.length + column];
    if (mine !== turn) return;
    words.textContent = `step ${count(begin[column])}`;
    host.replaceChildren();
    const steps = layers.map((_, i) => i + 1);
    const named = (i) => record.sites[layers[i - 1]]?.[0] ?? "";
    const made = chart(host, {
      label: "rms over depth", steps, isLog: true, height: 240,
      series: [
        { label: "gradient", values: layers.map(rms), colour: ink("accent"), width: 1.6 },
        { label: "activation", values: outputs.map((site) => site < 0 ? null : rms(site)), colour: ink("second"), width: 1.2 },
      ],
      axis: { value: (i) => shortened(named(i), 40) },
      onstep: (i) => go(layers[i], begin[column]),
    });
    if (made) made.root.setAttribute("aria-label", `rms of gradients and activations over depth at step ${begin[column]}`);
  };
  fill("flow", node("p", { class: "about" }, "From the first layer that is executed to the last. A line that falls by orders of magnitude towards the first layers is a gradient that vanishes. A click opens the layer."),
    node("label", { class: "slider", for: "flow-step" }, "Step", slider, words), host);
  draw();
}

async function showParameters() {
  const kinds = ["param", "param_grad", "param_update"], of = Object.fromEntries(kinds.map((kind) => [kind, new Map()]));
  const sampled = { param: "param_sample", param_update: "update_sample" }; // where not all of their values were read
  for (const kind of kinds) for (const tensor of [sampled[kind], kind])
    for (const site of record.rows) if (record.sites[site][1] === tensor) of[kind].set(record.sites[site][0], site);
  const names = [...new Set(kinds.flatMap((kind) => [...of[kind].keys()]))];
  if (!names.length) { fill("parameters", node("p", { class: "muted" }, "Nothing to show: parameters were not recorded (tensors=(..., \"param_sample\", \"param_grad\", \"update_sample\")).")); return; }
  const rms = await rmsOfAll(), columns = record.line_begin.length, column = ownLast();
  const lines = names.map((name) => {
    const at = (kind) => of[kind].has(name) ? rms[of[kind].get(name) * columns + column] : null;
    const size = at("param"), update = at("param_update");
    return { name, site: kinds.map((kind) => of[kind].get(name)).find((site) => site !== undefined), size, gradient: at("param_grad"), update, ratio: size > 0 && update !== null ? update / size : null };
  });
  lines.sort((a, b) => (b.ratio ?? -1) - (a.ratio ?? -1));
  const spark = (each) => {
    const site = of.param_update.get(each.name) ?? of.param_grad.get(each.name) ?? each.site;
    return sparkline(rms.slice(site * columns, (site + 1) * columns));
  };
  const rows = lines.map((each) => [siteLink(each.site), say(each.size), say(each.gradient), say(each.update),
    node("span", { class: each.ratio > 0.01 ? "strong" : null }, say(each.ratio, 2)), spark(each)]);
  fill("parameters", node("p", { class: "about" }, `rms of each parameter, its gradient and its update at step ${count(record.line_begin[column])}. An update of about a thousandth of the weight is usual; more than a hundredth is set in bold. The line: updates over time, else gradients, on a logarithmic scale.`),
    ...table(["parameter", "weight", "gradient", "update", "update / weight", "over time"], rows));
}

function sparkline(values) {
  const wide = 120, tall = 22, svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path"), logs = values.map((x) => x > 0 ? Math.log(x) : null);
  const known = logs.filter((x) => x !== null), low = Math.min(...known), high = Math.max(...known);
  let text = "", isDown = false;
  logs.forEach((x, i) => {
    if (x === null) { isDown = false; return; }
    text += `${isDown ? "L" : "M"}${(i / Math.max(logs.length - 1, 1) * wide).toFixed(1)} ${(tall - 2 - (x - low) / (high - low || 1) * (tall - 4)).toFixed(1)}`;
    isDown = true;
  });
  path.setAttribute("d", text);
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${wide} ${tall}`, width: wide, height: tall, class: "spark", "aria-hidden": "true" })) svg.setAttribute(name, value);
  svg.append(path);
  return svg;
}

function showLeftOut() {
  const alone = new Set(record.other?.alone[1]), [, , steps] = own(); // those that only the other run has
  const silent = record.rows.filter((site) => !record.fired[site] && !alone.has(site));
  const seldom = record.rows.filter((site) => record.fired[site] && record.fired[site] < 0.9 * steps);
  const list = (title, sites, words) => sites.length ? [node("h3", {}, title), ...table(["site", "tensor", "measured steps"], sites.map((site) => [siteLink(site), wordsOf(record.sites[site][1]), words(site)]), { numeric: 2 })] : [];
  const parts = [
    ...list("Silent in every measured step", silent, () => "0"),
    ...list("Silent in more than a tenth of the steps", seldom, (site) => `${count(record.fired[site])} of ${count(steps)}`),
  ];
  if (record.skipped.length) parts.push(node("h3", {}, "Skipped"), ...table(["site", "tensor", "reason", "tensors", "since step"],
    record.skipped.map(([name, tensor, reason, times, since]) => [node("bdi", {}, shortened(name)), wordsOf(tensor), shortened(reason, 200), times === null ? "given up" : count(times), count(since)]), { numeric: 3 }));
  fill("left-out", ...(parts.length ? parts : [node("p", { class: "muted" }, "Nothing: every site fired in nearly every measured step, and no tensor was skipped.")]));
}

function showSettings() {
  const entries = Object.entries(record.settings).filter(([, value]) => value !== null && value !== "");
  const told = (value, name) => name === "time" && value > 0 ? node("span", {}, at(value)) : typeof value === "object" ? node("pre", {}, plainLines(JSON.stringify(value, null, 1))) : node("span", {}, shortened(String(value), 300));
  const plainLines = (text) => text.split("\n").map((each) => plain(each)).join("\n");
  fill("settings", entries.length ? node("dl", { class: "settings" }, ...entries.map(([name, value]) => node("div", {}, node("dt", {}, shortened(name.replaceAll("_", " "), 60)), node("dd", {}, told(value, name))))) : node("p", { class: "muted" }, "None were recorded."),
    node("p", { class: "small muted" }, `${record.version ? "Read" : "Written"} ${at(record.written)}. ${record.version ? "This page is served by hookstats serve, and asks nothing of any other machine." : "This page is one file: it opens without a network and asks nothing of any other machine."} Single steps are kept for lines of up to ${many(record.line_begin.length, "column")} and for ${many(COLUMNS, "column")} of the heatmap; beyond that a column of the heatmap tells the farthest, a line the average, its band the smallest and largest.`));
}
