"""The page of a run in headless Chromium: what it shows, that it asks for nothing, that names are never HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hookstats
from hookstats.numbers.fields import Site, Skipped
from hookstats.numbers.snapshot import Snapshot
from hookstats.report import Recorded, write
from hookstats.rules import Finding
from tests.report.browser import Browser
from tests.report.runs import run, sites_of

STEPS = 60
SPIKE = 40
HOSTILE = [
    "</script><script>document.title = 'run'</script><img src=x onerror=document.title='run'>",
    "a \"quoted\" 'name' & <b>bold</b> `${document.title = 'run'}`",
    "long." + "x" * 9_995,
    "layers.0.\u202egnp.txe\u202c\u2066\u200b",
    "\x00\x1b[31m\ud800<!--",
]


def finding(step: int, site: Site | None, severity: str = "warning", sentence: str = "It rose.") -> Finding:
    return Finding("spike", step, site, 6.0, 3.0, severity, sentence)


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    sites = sites_of(3)
    found = [
        finding(SPIKE, Site("layers.0.norm1", "grad_output"), "critical", "5 values of layers.0.norm1 are NaN."),
        finding(30, Site("layers.1.mlp.down", "output")),
        finding(SPIKE, None, "note"),
    ]
    made = Recorded.of(run(sites, STEPS), "a run", found)
    skipped = [(Site("router", "output"), Skipped("a dtype that is not floating", 12), 0)]
    return replace(made, skipped=skipped, settings={"model": "GPT", "every": 1, "time": 1.6e9})


@pytest.fixture(scope="module")
def page(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(recorded, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def browser(chromium: Browser, page: Path) -> Iterator[Browser]:
    """The page, opened anew."""
    chromium.open(page)
    yield chromium
    assert all(url.startswith(("file:", "about:")) for url in chromium.requests), chromium.requests


def test_the_page_is_one_file_that_asks_for_nothing(browser: Browser, page: Path) -> None:
    assert [url for url in browser.requests if not url.startswith("about:")][-1] == page.as_uri()
    assert browser.run("performance.getEntriesByType('resource').length") == 0
    blocked = "fetch('https://example.org/').then(() => 'let through', () => 'blocked')"
    seen = len(browser.errors)
    assert browser.run(blocked) == "blocked"
    assert all("Content Security Policy" in error for error in browser.errors[seen:]), browser.errors
    del browser.errors[seen:]


def test_it_says_what_it_is_and_what_was_found(browser: Browser) -> None:
    assert browser.text("h1") == "a run"
    assert browser.text("#summary").split("\n")[0] == "In step 40: 5 values of layers.0.norm1 are NaN."
    assert "0 to 59" in browser.text("#facts")
    first = browser.text("#findings-list li")
    assert "5 values of layers.0.norm1 are NaN." in first
    assert "step 40, layers.0.norm1 gradient of the output" in first
    assert "a dtype that is not floating" in browser.text("#left-out")
    assert "GPT" in browser.text("#settings")
    assert re.search(r"time\s+1[234] Sept? 2020", browser.text("#settings"))  # a date


def test_the_sections_come_in_the_order_in_which_one_asks(browser: Browser) -> None:
    titles = browser.run("[...document.querySelectorAll('section')].map((section) => section.id)")
    assert titles == ["findings", "layers", "site", "precision", "flow", "parameters", "left-out", "settings"]


def test_what_follows_is_folded_beneath_its_cause_and_notes_stand_apart(
    chromium: Browser, recorded: Recorded, tmp_path: Path
) -> None:
    sites = tuple(recorded.sites[:3])
    cause = replace(finding(30, sites[0], "warning", "The batch is unlike the others."), since=20)
    cause = replace(cause, sites=sites, site_count=25)
    effect = replace(finding(31, sites[1], "critical", "It <b>rose</b>."), because=cause.as_cause)
    path = write(
        replace(recorded, findings=[cause, effect, finding(2, None, "note", "Good to know.")]), tmp_path / "page.html"
    )
    chromium.open(path)
    assert chromium.text("#summary").split("\n")[0].startswith("Since step 20: The batch is unlike the others; what")
    assert chromium.run("document.querySelectorAll('#findings-list > li').length") == 1
    folds = chromium.run("[...document.querySelectorAll('#findings-list summary')].map((each) => each.innerText)")
    assert folds == ["At 25 sites", "and 1 finding that follows from it"]  # the cause is as grave
    assert "since step 20" in chromium.text("#findings-list > li")
    assert "rose" not in chromium.text("#findings-list")
    assert chromium.run("document.querySelectorAll('#findings-list .sites a').length") == 3
    assert chromium.run("document.querySelector('#findings-list .sites').textContent").endswith("and 22 others")
    assert "Good to know." in chromium.text("#notes-list")
    chromium.run("window.dispatchEvent(new Event('beforeprint'))")
    assert "It <b>rose</b>." in chromium.text("#findings-list")
    told = path.read_text().partition("<noscript>")[2].partition("</noscript>")[0]
    assert "The batch is unlike the others." in told
    assert "It &lt;b&gt;rose&lt;/b&gt;." in told


def test_the_fit_into_few_bits_is_folded_where_nothing_has_few(
    chromium: Browser, browser: Browser, recorded: Recorded, tmp_path: Path
) -> None:
    assert "Share of the values" not in browser.text("#precision")
    browser.run("document.querySelector('#precision summary').click()")
    assert "Share of the values" in browser.text("#precision")
    browser.open(write(recorded, tmp_path / "again.html"))
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert "Share of the values" in browser.text("#precision")
    net = torch.nn.Linear(16, 16).to(torch.bfloat16)
    with hookstats.attach(net) as monitor:
        net(torch.randn(8, 16, dtype=torch.bfloat16)).square().mean().backward()
        snapshot = monitor.snapshot()
    browser.open(write([snapshot], tmp_path / "low.html"))
    assert "Share of the values" in browser.text("#precision")


def test_a_finding_leads_to_its_cell_and_its_site(browser: Browser) -> None:
    browser.run("document.querySelectorAll('#findings-list a')[1].click()")
    browser.wait("document.querySelector('#site-title').innerText === 'layers.1.mlp.down'")
    assert browser.run("location.hash").endswith("&step=30")
    assert browser.run("document.querySelector('#tools select').value") == "output"
    assert "layers.1.mlp.down output · step 30 ·" in browser.text("#readout")


def test_a_finding_without_a_site_leads_to_what_its_rule_is_about(
    chromium: Browser, recorded: Recorded, tmp_path: Path
) -> None:
    """Gradients, or the loss; one of another rule leads to its step."""
    found = [
        replace(finding(SPIKE, None, "critical"), rule="clipped-gradients"),
        replace(finding(30, None), rule="loss-spike"),
        replace(finding(20, None), rule="my own"),
    ]
    path = write(replace(recorded, findings=found), tmp_path / "page.html")
    chromium.open(path)
    links = "document.querySelectorAll('#findings-list a')"
    places = chromium.run(f"[...{links}].map((each) => each.innerText)")
    assert sorted(places) == ["step 20", "step 30, loss", "step 40, gradients of outputs"]
    assert chromium.run("document.querySelector('#tools select').value") == "grad_output"  # which the first is about
    chromium.run(
        "(() => { const select = [...document.querySelectorAll('#tools select')].at(-1); select.value = 'lr';"
        "select.dispatchEvent(new Event('change')) })()"
    )
    chromium.run(f"{links}[{places.index('step 30, loss')}].click()")
    chromium.wait("document.querySelector('#readout').innerText.includes('· step 30 · ')")
    assert "loss 2." in chromium.text("#readout")
    chromium.run("document.querySelector('#tools select').value = 'output'")
    chromium.run("document.querySelector('#tools select').dispatchEvent(new Event('change'))")
    chromium.run(f"{links}[{places.index('step 40, gradients of outputs')}].click()")
    chromium.wait("document.querySelector('#readout').innerText.includes('gradient of the output · step 40 · ')")


def test_a_value_that_is_not_finite_is_told_as_such(browser: Browser) -> None:
    browser.run("document.querySelector('#findings-list a').click()")
    browser.wait("document.querySelector('#readout').innerText.includes('holds NaN or infinity')")


def test_the_cell_under_the_mouse_is_told_and_a_click_opens_its_site(browser: Browser) -> None:
    x, y = browser.cell(8, SPIKE, 23, STEPS)  # "embedding", seven of each block, "head"
    browser.mouse("Moved", x, y)
    assert browser.text("#readout").startswith("layers.1.norm1 gradient of the output · step 40 · rms")
    assert re.search(r"rms (≥ )?\d\.?\d* times its past", browser.text("#readout"))
    browser.click(x, y)
    browser.wait("document.querySelector('#site-title').innerText === 'layers.1.norm1'")
    browser.wait("document.querySelectorAll('#site figcaption').length === 10")  # pictures are unpacked one by one
    heads = browser.run("[...document.querySelectorAll('#site h3')].map((head) => head.innerText)")
    assert heads == ["Output", "Gradient of the output"]
    assert browser.run("document.querySelectorAll('#site .uplot').length") == 4
    captions = " ".join(browser.run("[...document.querySelectorAll('#site figcaption')].map((each) => each.innerText)"))
    assert all(part in captions for part in ("Size", "Range", "Values over time", "Channels over time", "Top channels"))


def test_a_switch_draws_another_picture_and_says_its_numbers(browser: Browser) -> None:
    relative = browser.colours()
    x, y = browser.cell(8, 10, 23, STEPS)
    browser.run("document.querySelector('[data-value=absolute]').click()")
    browser.wait("performance.getEntriesByName('switch').length === 2")
    assert browser.colours() != relative
    browser.mouse("Moved", x, y)
    assert "rms ≈" in browser.text("#readout")
    log = browser.colours()
    browser.run("document.querySelector('[data-value=linear]').click()")
    assert browser.colours() != log
    browser.run(
        "(() => { const select = document.querySelectorAll('#tools select')[1]; select.value = 'zeros';"
        "select.dispatchEvent(new Event('change')) })()"
    )
    browser.wait("performance.getEntriesByName('switch').length === 3")
    browser.mouse("Moved", x + 1, y)
    assert "share of zeros ≈ 0.01 ·" in browser.text("#readout")


def test_a_drag_enlarges_and_a_double_click_shows_all(browser: Browser) -> None:
    whole = browser.colours()
    begin, end = browser.cell(4, 30, 23, STEPS), browser.cell(12, 45, 23, STEPS)
    browser.mouse("Moved", *begin)
    browser.mouse("Pressed", *begin, button="left", clickCount=1)
    browser.mouse("Moved", *end, button="left", buttons=1)
    browser.mouse("Released", *end, button="left", clickCount=1)
    assert browser.colours() != whole
    left, top = browser.cell(0, 0, 23, STEPS)
    browser.mouse("Moved", left - 2, top)
    assert re.search(r"· step 3[01] ·", browser.text("#readout"))
    for _ in range(20):  # the first click opens a site, and the page may still be moving when the second one comes
        left, top = browser.cell(0, 0, 23, STEPS)
        for count in (1, 2):
            for kind in ("Pressed", "Released"):
                browser.mouse(kind, left, top, button="left", clickCount=count)
        left, top = browser.cell(0, 0, 23, STEPS)
        browser.mouse("Moved", left - 2, top)
        if "· step 0 ·" in browser.text("#readout"):
            break
    assert "· step 0 ·" in browser.text("#readout")


def test_all_of_the_heatmap_can_be_reached_by_keyboard(browser: Browser) -> None:
    for _ in range(60):
        browser.key("Tab")
        if browser.run("document.activeElement.id") == "heat":
            break
    assert browser.run("document.activeElement.id") == "heat"
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        browser.key(key)
    assert browser.text("#readout").startswith("layers.0.norm1 gradient of the output · step 1 ·")
    whole = browser.colours()
    browser.key("+")
    enlarged = browser.colours()
    assert enlarged != whole
    browser.key("ArrowRight", shift=True)
    assert browser.colours() != enlarged
    browser.key("0")
    assert browser.colours() == whole
    browser.key("ArrowDown")
    browser.key("Enter")
    browser.wait("document.querySelector('#site-title').innerText === 'layers.0.attention.qkv'")


def test_the_flow_of_gradients_follows_the_step_that_is_chosen(browser: Browser) -> None:
    picture = "document.querySelector('#flow canvas').toDataURL()"
    browser.wait("document.querySelector('#flow canvas') !== null")
    last = browser.run(picture)
    browser.run(
        f"(() => {{ const slider = document.querySelector('#flow-step'); slider.value = '{SPIKE}';"
        "slider.dispatchEvent(new Event('input')) })()"
    )
    browser.wait("document.querySelector('#flow output').innerText === 'step 40'")
    browser.wait("document.querySelector('#flow canvas') !== null")
    assert browser.run(picture) != last


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off_at_the_side(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.look(width, dark=dark)
    browser.open(page)
    assert browser.run("document.documentElement.scrollWidth") == width
    inside = "[...document.querySelectorAll('main *')].filter((each) => !each.closest('.scroll'))"
    too_wide = f"{inside}.filter((each) => each.getBoundingClientRect().right > innerWidth).length"
    assert browser.run(too_wide) == 0
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 21, 23)" if dark else "rgb(252, 252, 251)")


def test_a_change_of_colours_is_followed_while_the_page_is_open(browser: Browser) -> None:
    light = browser.colours()
    browser.look(1280, dark=True)
    browser.wait(f"document.querySelector('#heat-cells').toDataURL() !== {light!r}")


def test_hostile_names_are_shown_as_text(chromium: Browser, tmp_path: Path) -> None:
    sites = [Site(name, tensor) for name in HOSTILE for tensor in ("output", "grad_output", "output.<i>")]
    found = [finding(5, site, sentence=f"It is {site.name}") for site in sites[::3]]
    made = Recorded.of(run(sites, 12), HOSTILE[0], found)
    hostile = replace(
        made, skipped=[(Site(HOSTILE[0], "output"), Skipped(HOSTILE[0], None), 0)], settings={HOSTILE[0]: [HOSTILE[1]]}
    )
    path = write(hostile, tmp_path / "hostile.html")
    for i, name in enumerate(HOSTILE):
        chromium.call("Page.navigate", url="about:blank")
        chromium.open(f"{path.as_uri()}#site={hostile.sites.index(Site(name, 'output'))}&step=3")
        shown = chromium.text("#site-title")
        assert shown.startswith(re.sub(r"[\x00-\x1f\u200b-\u202e\u2060-\u206f].*", "", name)[:20])
        assert not re.search(r"[\x00-\x1f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", shown)
        if i == 2:
            assert "x" * 9_000 in chromium.run("document.querySelector('#site .whole').textContent")
        if i == 3:
            assert "\\u202egnp.txe" in shown
    assert chromium.run("document.title") != "run"
    assert chromium.run("document.querySelectorAll('main b b, main img, main i i').length") == 0
    assert chromium.run("document.querySelectorAll('script').length") == path.read_text().count("<script")
    assert chromium.run("document.documentElement.scrollWidth") == 1280
    assert "<script>" in chromium.text("#left-out")


def test_a_run_of_one_step_and_one_site_has_a_page(chromium: Browser, tmp_path: Path) -> None:
    path = write(run([Site("", "output")], 1), tmp_path / "one.html")
    chromium.look(390)
    chromium.open(path)
    assert "(model)" in chromium.text("#site-title")
    assert "No rule found anything wrong" in chromium.text("#summary")
    assert "fewer than two gradients" in chromium.text("#flow")
    assert chromium.text("#findings").split("\n")[-1] == "None."  # and does not send one to settings it does not show


@pytest.mark.parametrize("ended", ["died: RuntimeError: of a test", "closed", None])
def test_a_page_says_above_that_training_died(
    ended: str | None, chromium: Browser, recorded: Recorded, tmp_path: Path
) -> None:
    chromium.open(write(replace(recorded, settings={"ended": ended}), tmp_path / "page.html"))
    assert ("died\nRuntimeError: of a test" in chromium.text("#facts")) == (ended is not None and "died" in ended)


@pytest.mark.parametrize(("host", "said"), [(5.0, "50 % of a measured step"), (16.0, None)])
def test_no_more_than_a_whole_step_is_said_to_be_taken(
    host: float, said: str | None, chromium: Browser, recorded: Recorded, tmp_path: Path
) -> None:
    overhead = {"measured_host": host, "measured_step": 10.0}
    chromium.open(write(replace(recorded, settings={"overhead": overhead}), tmp_path / "page.html"))
    facts = chromium.text("#facts")
    assert ("Time added" in facts) == (said is not None)
    assert (said or "") in facts


def blue(browser: Browser, selector: str) -> int:
    """Count the pixels of a canvas that are about as blue as the first line."""
    return int(
        browser.run(f"""(() => {{
            const canvas = document.querySelector({selector!r});
            const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let found = 0;
            for (let i = 0; i < data.length; i += 4) found += data[i + 2] > data[i] + 60 && data[i + 3] > 100;
            return found;
        }})()""")
    )


def test_a_value_with_none_beside_it_is_seen(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(write(run([Site("a", "output")], 1), tmp_path / "one.html"))
    assert blue(chromium, "#site .uplot canvas") >= 4
    assert blue(chromium, "#heat-cells") >= 4  # the loss above the cells


def test_a_site_that_fired_is_not_called_silent_where_it_has_nothing_to_draw(chromium: Browser, tmp_path: Path) -> None:
    layer = torch.nn.Identity()
    snapshots: list[Snapshot] = []
    with hookstats.attach(layer, modules="*", tensors="output", every=1, sinks=snapshots.append) as monitor:
        for _ in range(3):
            layer(torch.zeros(4, 2))
            monitor.step()
        for _ in range(3):
            layer(torch.full((4, 2), float("nan")))
            monitor.step()
    for few, word in ((snapshots[:3], "zero"), (snapshots[3:], "no finite value")):
        chromium.open(write(few, tmp_path / "page.html"))
        assert chromium.text("#site-body .chart").split("\n")[-1] == word


def test_a_few_steps_have_a_label_each(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(write(run(sites_of(1), 3), tmp_path / "three.html"))
    chromium.run(
        "window.said = []; window.fill = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {"
        " said.push([this.canvas.getAttribute('aria-label') ?? this.canvas.id, text]);"
        " fill.call(this, text, ...more); }"
    )
    chromium.look(1280, dark=True)  # draws all of it anew
    for drawn in ("Channels over time", "Values over time", "heat-cells"):
        chromium.wait(f"said.some(([of]) => of.startsWith({drawn!r}))")
    said = chromium.run("said.filter(([of]) => of === 'heat-cells').map(([, text]) => text)")
    assert [each for each in said if re.fullmatch(r"\d+", each)] == ["0", "1", "2"]
    of_values = chromium.run("said.filter(([of]) => of.startsWith('Values over time')).map(([, text]) => text)")
    assert of_values[-3:] == ["0", "1", "2"]


# What is written on canvases: text, its right end and its canvas's, in pixels of the page.
_WRITTEN = """
window.written = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, ...more) {
  const at = this.getTransform(), wide = this.measureText(text).width * at.a;
  const right = x * at.a + at.e + ({ center: wide / 2, right: 0, end: 0 }[this.textAlign] ?? wide);
  written.push([String(text), right - wide, right, this.canvas.width]);
  return write.call(this, text, x, ...more);
};
"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("factor", [10, 20_000])
def test_no_label_is_cut_at_the_edge_of_its_chart(chromium: Browser, tmp_path: Path, width: int, factor: int) -> None:
    snapshots = list(run(sites_of(3), 51))
    for snapshot in snapshots:
        snapshot.frame.step *= factor  # the last one has a label of its own
    chromium.look(width)
    script = chromium.call("Page.addScriptToEvaluateOnNewDocument", source=_WRITTEN)
    chromium.open(write(snapshots, tmp_path / "page.html"))
    chromium.call("Page.removeScriptToEvaluateOnNewDocument", **script)
    written = chromium.run("written")
    last = f"{50 * factor:,}".replace(",", "\u2009")
    assert last in {text for text, *_ in written}
    cut = [each for each in written if each[1] < -0.5 or each[2] > each[3] + 0.5]
    assert not cut
