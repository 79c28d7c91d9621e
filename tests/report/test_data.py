"""From a picture to its data: the numbers of a cell, and Python that leads to them; and two runs on one page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hookstats
from hookstats.numbers.fields import Site
from hookstats.report import Recorded, write
from hookstats.rules import Finding
from tests.report.browser import Browser
from tests.report.runs import run, sites_of

NAMES = ["a\"b'c\\d", "ключ.😀", "\u202eturned\n", "\ud800lone"]
HEARD = (
    "Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (text) => { window.copied = text; } } })"
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = torch.nn.Sequential()
    model.add_module("first", torch.nn.Linear(4, 8))
    model.add_module("second", torch.nn.Linear(8, 3))
    path = tmp_path_factory.mktemp("kept") / "run"
    with hookstats.attach(model, every=3, sinks=[hookstats.record(path)]) as monitor:
        for _ in range(20):
            loss = model(torch.randn(16, 4)).square().mean()
            loss.backward()
            monitor.step(loss=loss)
    return path


def test_the_row_of_the_cell_at_the_mouse_is_told_in_numbers_and_c_copies_python_that_gives_them(
    chromium: Browser, recorded: Path, tmp_path: Path
) -> None:
    chromium.open(write(recorded, tmp_path / "page.html"))
    chromium.run(HEARD)
    loaded = hookstats.load(recorded)
    for row, column in ((1, 2), (0, 5)):
        chromium.mouse("Moved", *chromium.cell(row, column, 3, 7))
        chromium.wait("document.querySelector('#numbers').innerText.includes('copies it')")
        told = chromium.text("#numbers").replace("−", "-")
        chromium.run("window.copied = null")
        chromium.key("c")
        chromium.wait("window.copied !== null")
        assert " copied" in chromium.text("#numbers")
        copied = chromium.run("copied")
        assert copied in told
        stats = eval(copied, {"run": loaded})
        site = next(each for each in loaded.totals["name"].unique().to_pylist() if f'"{each}"' in copied)
        assert chromium.text("#readout").startswith(f"{site} output · step {3 * column} ·")
        for title, value in (
            ("rms", stats.total.rms),
            ("largest |x|", stats.total.abs_max),
            ("mean", stats.total.mean),
        ):
            shown = float(told.partition(f"{title} ")[2].split()[0].replace("e−", "e-"))
            assert shown == pytest.approx(value, rel=2e-3, abs=2e-3 * stats.total.rms)
    chromium.mouse("Moved", 5, 5)
    assert chromium.text("#numbers") == ""
    chromium.run("window.copied = null")
    chromium.key("c")
    assert chromium.run("copied") is None  # no cell is chosen


def test_a_click_copies_the_line_of_the_site_that_is_open(chromium: Browser, recorded: Path, tmp_path: Path) -> None:
    page = write(recorded, tmp_path / "page.html")
    site = Site("second", "output")
    place = hookstats.report.to_recorded(recorded).sites.index(site)
    chromium.open(f"{page.as_uri()}#site={place}&step=9")
    chromium.run(HEARD)
    assert chromium.text("#site button.code code") == 'run[9]["second", "output"]'
    chromium.run("document.querySelector('#site button.code').click()")
    chromium.wait("document.querySelector('#site button.code span').innerText === 'Copied'")
    assert eval(chromium.run("copied"), {"run": hookstats.load(recorded)}).calls == 1
    shown = float(chromium.text("#site .numbers-at").partition("rms ")[2].split()[0])
    assert shown == pytest.approx(hookstats.load(recorded)[9][site].total.rms, rel=2e-3)


def test_without_a_clipboard_it_is_copied_as_a_selection_is(chromium: Browser, recorded: Path, tmp_path: Path) -> None:
    chromium.open(write(recorded, tmp_path / "page.html"))
    chromium.run(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
        "document.execCommand = (name) => { window.copied = [name, document.activeElement.value]; }"
    )
    chromium.run("document.querySelector('#site button.code').click()")
    chromium.wait("!!window.copied")
    name, line = chromium.run("copied")
    assert name == "copy"
    assert line.startswith("run[18][")
    assert chromium.run("document.querySelectorAll('textarea').length") == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_in_the_line_as_python_has_it(chromium: Browser, tmp_path: Path, name: str) -> None:
    page = write(run([Site(name, "output.<i>")], 4), tmp_path / "page.html")
    chromium.open(page)
    chromium.run(HEARD)
    chromium.run("document.querySelector('#site button.code').click()")
    chromium.wait("!!window.copied")
    line = chromium.run("copied")
    assert line.isascii()
    assert eval(line, {"run": {3: {(name, "output.<i>"): "found"}}}) == "found"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second run has a site more, lacks another, and goes on for longer."""
    sites = sites_of(2)
    found = [Finding("spike", 30, sites[4], 6.0, 3.0, "warning", "It rose by a lot.")]
    first = Recorded.of(run(sites, 40), "baseline", found)
    others = [*sites[:4], Site("layers.0.gate", "output"), *sites[4:]]
    del others[9]
    found = [Finding("spike", 53, others[7], 6.0, 3.0, "critical", "It rose by more.")]
    second = Recorded.of(run(others, 60, seed=1), "with a gate", found)
    return write(replace(first, settings={"model": "GPT"}), tmp_path_factory.mktemp("both") / "both.html", second)


def switch(browser: Browser, value: str) -> None:
    before = browser.run("performance.getEntriesByName('switch').length")
    browser.run(f"document.querySelector('[data-value={value}]').click()")
    browser.wait(f"performance.getEntriesByName('switch').length > {before}")


def is_hatched(browser: Browser, row: int, column: int, columns: int = 60, rows: int = 17) -> bool:
    """Return whether nothing is drawn there: the hatch has two greys, and a cell one colour."""
    x, y = browser.cell(row, column, rows, columns)
    colours = browser.run(f"""(() => {{
        const canvas = document.querySelector("#heat-cells"), box = canvas.getBoundingClientRect();
        const small = document.createElement("canvas").getContext("2d", {{ willReadFrequently: true }});
        small.drawImage(canvas, 3 - {x} + box.left, 3 - {y} + box.top);
        const at = small.getImageData(0, 0, 7, 7).data;
        return [...new Set(new Uint32Array(at.buffer))].length;
    }})()""")
    return bool(colours > 1)


def test_two_runs_are_switched_and_what_only_one_has_is_hatched(chromium: Browser, both: Path) -> None:
    chromium.open(both)
    assert "24" not in chromium.text("#layers-about")
    assert chromium.text("#layers-about").startswith("17 rows")
    gate, missing = 4, 9  # rows
    assert [is_hatched(chromium, row, 5) for row in (gate, missing, 2)] == [True, False, False]
    assert is_hatched(chromium, 2, 50)
    switch(chromium, "second")
    assert [is_hatched(chromium, row, 5) for row in (gate, missing, 2)] == [False, True, False]
    assert not is_hatched(chromium, 2, 50)
    assert "Of with a gate." in chromium.text("#readout")
    switch(chromium, "difference")
    assert [is_hatched(chromium, row, 5) for row in (gate, missing, 2)] == [True, True, False]
    assert is_hatched(chromium, 2, 50)
    assert chromium.run("document.querySelector('[data-value=absolute]').closest('.choice').offsetParent") is None
    chromium.mouse("Moved", *chromium.cell(gate, 5, 17, 60))
    assert "only with a gate has it" in chromium.text("#readout")
    chromium.mouse("Moved", *chromium.cell(missing, 5, 17, 60))
    assert "only baseline has it" in chromium.text("#readout")
    chromium.mouse("Moved", *chromium.cell(2, 5, 17, 60))
    told = chromium.text("#readout")
    assert "loss of with a gate" in told
    assert re.search(r"rms (0\.\d+|1\.\d+) times the first run's|as in the first run", told)
    assert chromium.text("#site .key").endswith("largest |x| of with a gate")
    switch(chromium, "second")
    chromium.mouse("Moved", *chromium.cell(2, 50, 17, 60))
    chromium.wait("document.querySelector('#numbers').innerText.includes('other[50][')")


def test_the_first_parting_leads_to_its_cell_and_findings_of_both_are_told(chromium: Browser, both: Path) -> None:
    chromium.open(both)
    assert "baseline, and b, with a gate, part at step 0, embedding output" in chromium.text("#parting")
    chromium.run("document.querySelector('#parting a').click()")
    chromium.wait("document.querySelector('#site-title').innerText === 'embedding'")
    assert chromium.run("location.hash").endswith("step=0")
    assert chromium.text("#other-findings h3") == "Findings of with a gate"
    assert "It rose by more." in chromium.text("#other-findings")
    assert "It rose by more." not in chromium.text("#findings-list")
    assert [line for line in chromium.text("#summary").split("\n") if line][:2] == [
        "baseline: In step 30: It rose by a lot.",
        "with a gate: In step 53: It rose by more.",
    ]
    assert chromium.text("#flow output") == "step 39"  # the last of the first run
    assert "gate" not in chromium.text("#left-out")


def test_runs_that_are_the_same_are_said_to_be(chromium: Browser, tmp_path: Path) -> None:
    made = [Recorded.of(run(sites_of(1), 10), name) for name in ("one", "two")]
    chromium.open(write(made[0], tmp_path / "page.html", made[1]))
    assert "In the 10 steps that both have, all sizes of one and two are the same." in chromium.text("#summary")
