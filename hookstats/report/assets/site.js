// A site: its tensors side by side, each with its size, its range, its values and its channels over the steps.

const TOPS = { rms: "rms", abs_max: "largest |x|", mean: "mean", std: "standard deviation", zeros: "share of zeros" };
// What a channel of a tensor is.
const UNITS = [["attention.", "head"], ["router.", "expert"], ["", "channel"]];
const channelUnit = (tensor) => UNITS.find(([prefix]) => tensor.startsWith(prefix))[1];
const capital = (word) => word[0].toUpperCase() + word.slice(1);
let asked = 0;

async function showSite(site, step) {
  const turn = ++asked, [name, tensor] = record.sites[site];
  const kin = record.rows.filter((each) => record.sites[each][0] === name);
  const chosen = kin.indexOf(site);
  const first = kin.slice(chosen - chosen % 2, chosen - chosen % 2 + 2);
  const title = byId("site-title"), body = byId("site-body");
  const seen = kin.length > 4 ? first : kin, parts = await Promise.all(seen.map(lines)), pictures = seen.map(detailsOf);
  const marked = step ?? own()[1], found = await numbersAt(site, marked);
  if (title.dataset.site === `${name} ${tensor}`) await Promise.all(pictures); // it is drawn anew: nothing jumps
  if (turn !== asked) return;
  title.dataset.site = `${name} ${tensor}`;
  title.replaceChildren(node("bdi", { title: name.length <= 2000 ? plain(name) : null }, shortened(name, 90)));
  const about = node("p", { class: "about" }, `${state.rows.indexOf(site) >= 0 ? `Row ${state.rows.indexOf(site) + 1} of ${state.rows.length} in order of execution. ` : ""}`,
    step === null ? "" : `The line marks step ${count(step)}.`);
  const columns = node("div", { class: "columns" });
  const line = found ? [node("div", { class: "at-step" }, node("span", { class: "numbers-at" }, node("span", {}, `${capital(wordsOf(tensor))} at step ${count(marked)}:`), ...numbersOf(found)), copyButton(python(site, marked)))] : [];
  body.replaceChildren(about, ...line, ...findingsOf(kin), columns);
  if (name.length > 90) about.after(node("details", { class: "hint" }, node("summary", {}, `The whole name, ${count(name.length)} characters`), node("p", { class: "whole" }, node("bdi", {}, plain(name)))));
  if (kin.length > 4) columns.before(node("p", { class: "chips" }, ...kin.map((each) => node("a", { href: linkTo(each, step), "aria-current": each === site ? "true" : null }, wordsOf(record.sites[each][1])))));
  const hosts = seen.map((each) => node("div", { class: "tensor" }, node("h3", {}, wordsOf(record.sites[each][1]))));
  columns.append(...hosts); // all of them before any is drawn: they share the width
  seen.forEach((each, i) => drawLines(hosts[i], each, parts[i], step));
  seen.forEach((each, i) => pictures[i].then((found) => { if (turn === asked) drawPictures(hosts[i], each, found); }));
}

function findingsOf(kin) {
  const found = record.findings.filter((finding) => kin.includes(finding.site) || finding.sites.some((site) => kin.includes(site)));
  return found.length ? [node("ul", { class: "findings" }, ...found.slice(0, 6).map((finding) => findingLine(finding, ...followsFrom(finding))))] : [];
}

function followsFrom({ cause }) {
  return cause ? [node("p", { class: "small muted" }, "It follows from ", node("a", { href: linkTo(cause.site, cause.step, cause.kind) }, `${shortened(cause.rule, 60)} in step ${count(cause.step)}`), ".")] : [];
}

function drawLines(host, site, part, mark) {
  const steps = record.line_begin, accent = ink("accent"), second = ink("second"), isOfSecond = record.other?.fired[site] > 0;
  if (!record.fired[site]) {
    const name = isOfSecond ? shortened(record.other.name, 40) : "";
    host.append(node("p", { class: "muted" }, isOfSecond ? `Only ${name} has it, or it did not fire in the first run.` : "Silent: it did not fire in any measured step."));
    if (!isOfSecond) return;
  }
  const plus = (sign) => part.mean.map((mean, i) => mean === null || part.std[i] === null ? null : mean + sign * part.std[i]);
  const others = record.other ? [[part.other_rms, "rms", accent], [part.other_abs_max, "largest |x|", second]] : [];
  chart(host, {
    label: "Size", steps, isLog: true, mark,
    series: [
      { label: "rms", values: part.rms, colour: accent, width: 1.8, between: [part.rms_low, part.rms_high] }, { values: part.rms_low },
      { values: part.rms_high }, { label: "largest |x|", values: part.abs_max, colour: second, width: 1.2 },
      ...others.map(([values, of, colour]) => ({ label: `${of} of ${shortened(record.other.name, 24)}`, values, colour: clear(colour, 0.6), width: 1.4, dash: [5, 4] })),
    ],
    bands: [[2, 1, accent, 0.22]],
  });
  if (!record.fired[site]) return;
  chart(host, {
    label: "Range", steps, mark,
    series: [
      { label: "mean", values: part.mean, colour: accent, width: 1.6 }, { values: plus(-1) }, { values: plus(1) },
      { values: part.min, colour: clear(accent, 0.45), width: 0.8 }, { values: part.max, colour: clear(accent, 0.45), width: 0.8 },
      { label: "standard deviation", values: part.std, colour: clear(accent, 0.4), hidden: true },
      { label: "smallest to largest", values: part.max, colour: clear(accent, 0.18), between: [part.min, part.max], hidden: true },
    ],
    bands: [[4, 3, accent, 0.1], [2, 1, accent, 0.22]],
  });
  for (const window of record.windows.filter((each) => each.site === site && (mark === null || (each.steps[0] <= mark && mark <= each.steps.at(-1)))).slice(0, 2))
    chart(host, {
      label: "Single steps around the finding", steps: window.steps, isLog: true, mark,
      series: [{ label: "rms", values: window.rms, colour: accent, width: 1.8 }, { label: "largest |x|", values: window.abs_max, colour: second, width: 1.2 }],
    });
}

function drawPictures(host, site, { histogram: of, groups, channels }) {
  if (of) {
    const edge = (row) => of.edges[row], between = (row) => `${say(edge(row), 2)} to ${say(edge(row + 1), 2)}`;
    const every = Math.max(1, Math.round(of.rows / 6)), labels = [];
    for (let row = 0; row <= of.rows; row += every) labels.push([Math.min(row, of.rows - 0.01), say(edge(row), 1)]);
    picture(host, {
      label: of.magnitude ? "Values over time: the share in each octave of |x|" : "Values over time: the share in each bin", of, isUpwards: true, rowLabels: labels.slice(1),
      note: "Brighter: more of the values lie there, on a logarithmic scale.",
      sayRow: (row, value, step) => `step ${count(step)} · ${between(row)}: ${value === "none" ? "nothing" : percent(Number(value.replace("−", "-")))}`,
    });
  }
  if (groups) drawChannels(host, groups, "head", channels ? `of ${count(channels.channels / groups.channels)} channels` : "");
  if (channels) drawChannels(host, channels, channelUnit(record.sites[site][1]));
}

function drawChannels(host, of, unit, each = "") {
  const per = of.channels / of.rows, labels = [0, 0.25, 0.5, 0.75, 1].map((x) => [x * of.rows, count(Math.round(x * of.channels))]);
  picture(host, {
    label: `${capital(unit)}s over time: rms of each`, of, rowLabels: labels.slice(0, -1),
    note: per > 1 ? `Each row is the largest of ${say(per)} ${unit}s.` : `A row for each ${unit}${each && " " + each}.`,
    sayRow: (row, value, step) => `step ${count(step)} · ${unit} ${per > 1 ? "from " : ""}${Math.floor(row * per)}: rms ${value}`,
  });
  host.append(topTable(of.top, unit));
}

function topTable(top, unit) {
  const body = node("tbody"), select = node("select", { "aria-label": "Statistic", onchange: () => fill() },
    ...Object.entries(TOPS).map(([name, title]) => node("option", { value: name }, title)));
  const fill = () => {
    const rows = top[select.value].slice(0, -1), usual = Math.abs(top[select.value].at(-1)[1]);
    body.replaceChildren(...rows.map(([channel, value]) => node("tr", {},
      node("th", { scope: "row" }, String(channel)), node("td", {}, say(value)),
      node("td", { class: "muted" }, value !== null && usual > 0 ? `${say(Math.abs(value) / usual, 2)}×` : "–"))));
  };
  fill();
  return node("figure", { class: "chart top" },
    node("figcaption", {}, `Top ${unit}s at step ${count(top.step)} by `, select),
    node("table", {}, node("thead", {}, node("tr", {}, ...[unit, "value", "to the median"].map((text) => node("th", { scope: "col" }, text)))), body));
}
