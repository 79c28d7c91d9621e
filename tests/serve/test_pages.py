"""The index and the pages of runs in headless Chromium, while runs grow, die, are resumed and deleted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookstats.numbers.fields import Site
from hookstats.rules import Finding
from tests.records.recorded import wait_for
from tests.report.browser import Browser
from tests.serve.served import Growing, Served, serving

HOSTILE = "<img src=x onerror=document.title='run'>"


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """No page asks another server."""
    yield chromium
    chromium.call("Page.navigate", url="about:blank")  # asks no more
    # A server ends before its page, or while it is asked; bytes of a page that was made anew twice are asked for again.
    expected = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE", "410 (Gone)")
    assert [error for error in chromium.errors if not any(each in error for each in expected)] == []
    assert all(url.startswith(("http://127.0.0.1:", "data:", "about:")) for url in chromium.requests), chromium.requests
    chromium.errors.clear()


def open_run(browser: Browser, served: Served, name: str) -> None:
    browser.open(served.address)
    browser.open(f"http://127.0.0.1:{served.port}{served.runs()[name]}")


def says(browser: Browser, selector: str, words: str) -> None:
    browser.wait(f"document.querySelector({selector!r})?.textContent.includes({words!r})")


def test_an_open_page_grows_with_its_run_and_keeps_what_is_chosen(browser: Browser, tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    run.add(range(40))
    with serving(tmp_path) as served:
        open_run(browser, served, "run")
        says(browser, "#live", "process")
        browser.run("location.hash = '#site=3&step=20'")
        name = run.sites[3].name
        says(browser, "#site-title", name)
        browser.run("document.querySelector('#settings').scrollIntoView()")
        at = browser.run("scrollY")
        before, url = browser.colours(), browser.run("location.origin + location.pathname")
        browser.requests.clear()
        run.add(range(40, 70))
        run.find(Finding("spike", 50, run.sites[3], 6.0, 3.0, "warning", "It rose by a lot."))
        says(browser, "#facts", "0 to 69")
        says(browser, "#findings-list", "It rose by a lot.")
        browser.wait(f"document.querySelector('#heat-cells').toDataURL() !== {before!r}")
        assert browser.text("#site-title") == name
        assert browser.run("location.hash") == "#site=3&step=20"
        assert abs(browser.run("scrollY") - at) < 200
        assert {url.partition("/blob?")[0].rstrip("/") for url in browser.requests} == {url.rstrip("/")}


def test_a_page_that_has_grown_shows_what_one_shows_that_is_opened_then(browser: Browser, tmp_path: Path) -> None:
    """Across the steps at which two columns become one, in every plane and every line."""
    numbers = """(async () => {
        const wait = () => new Promise((resolve) => setTimeout(resolve, 20));
        while (!document.querySelector("#site canvas") || !document.querySelector("#flow canvas")) await wait();
        const found = [], count = () => performance.getEntriesByName("switch").length;
        const statistics = ["rms", "abs_max", "peak", "centre", "zeros"], views = ["relative", "absolute"];
        for (const statistic of statistics) for (const view of views) {
            const select = document.querySelectorAll("#tools select")[1], before = count();
            select.value = statistic;
            select.dispatchEvent(new Event("change"));
            document.querySelector(`[data-value=${view}]`).click();
            while (count() === before) await wait();
            found.push(document.querySelector("#heat-cells").toDataURL());
        }
        const lines = [...document.querySelectorAll("#site canvas, #flow canvas")];
        return [...found, ...lines.map((each) => each.toDataURL())];
    })()"""
    run = Growing(
        tmp_path / "run",
        [Site(name, "output") for name in "abc"] + [Site("c", "grad_output"), Site("b", "grad_output")],
    )
    run.add(range(990))
    with serving(tmp_path) as served:
        open_run(browser, served, "run")
        for end, size in ((999, 30.0), (1010, 1e3), (1024, 1e5)):  # on other scales each time
            browser.run(numbers)  # all of it is asked for, so that differences are
            run.add(range(end - (9 if end == 999 else 11 if end == 1010 else 14), end), size)
            says(browser, "#facts", f"0 to {end - 1:,}".replace(",", "\u2009"))
            browser.wait("document.querySelector('#flow output').innerText.length > 0")
        with Browser() as other:
            open_run(other, served, "run")
            wait_for(lambda: browser.run(numbers) == other.run(numbers))  # until the last update is drawn in both
            assert other.errors == []


def test_a_run_that_dies_and_is_resumed_is_followed(browser: Browser, tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    run.add(range(30))
    with serving(tmp_path) as served:
        open_run(browser, served, "run")
        says(browser, "#live", "records it")
        run.die()
        says(browser, "#live", "died; what")
        run.recover()
        again = Growing(tmp_path / "run", run.sites, attempt=2)
        again.add(range(20, 25))
        says(browser, "#facts", "0 to 24")
        says(browser, "#live", "records it")
        again.end()
        says(browser, "#live", "the run has ended")


def test_a_page_waits_for_the_first_step(browser: Browser, tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    with serving(tmp_path) as served:
        browser.open(served.address)
        browser.call("Page.navigate", url=f"http://127.0.0.1:{served.port}{served.runs()['run']}")
        says(browser, "main", "Nothing is recorded yet.")
        run.add(range(3))
        browser.wait("document.documentElement?.dataset.ready === 'true' && !!document.querySelector('#facts')")
        says(browser, "#facts", "0 to 2")


def test_twenty_runs_are_an_index_that_is_sorted_filtered_and_grows(browser: Browser, tmp_path: Path) -> None:
    sites = [Site("a", "output")]
    runs = []
    for number in range(20):
        runs.append(Growing(tmp_path / f"group{number % 5}" / f"run{number:02d}", sites))
        runs[-1].add(range(number + 1))
    with serving(tmp_path) as served:
        browser.open(served.address)
        names = "[...document.querySelectorAll('#rows tr:not([hidden]) a')].map((each) => each.innerText)"
        assert len(browser.run(names)) == 20
        assert browser.run(names)[0] == "group4/run19"
        assert browser.text("#rows tr").split("\t")[:4] == ["group4/run19", "alive", "GPT", "step 19"]
        runs[7].add(range(8, 40))
        runs[7].find(Finding("nonfinite", 9, sites[0], 1.0, 0.0, "critical", "NaN."))
        browser.wait(f"{names}[0] === 'group2/run07'")
        says(browser, "#rows tr", "1 critical")
        runs[7].end()
        says(browser, "#rows tr", "closed")
        browser.key("Tab")
        assert browser.run("document.activeElement.id") == "filter"
        for letter in "up3 1":
            browser.key(letter)
        found = browser.run(names)
        assert {"group3/run13", "group3/run18"} <= set(found) < {f"group3/run{number:02d}" for number in range(20)}
        assert browser.text("#count").endswith(" of 20")
        browser.key("Tab")
        browser.key("Enter")
        browser.wait("location.pathname.startsWith('/run/') && document.documentElement?.dataset.ready === 'true'")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_of_the_index_is_cut_off_and_names_are_text(
    browser: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    for name in (HOSTILE, "x" * 200, "a/b/c"):
        run = Growing(tmp_path / name, [Site(HOSTILE, HOSTILE)])
        run.add(range(3))
        run.find(Finding("spike", 1, run.sites[0], 6.0, 3.0, "note", HOSTILE))
    with serving(tmp_path) as served:
        browser.look(width, dark=dark)
        browser.open(served.address)
        assert browser.run("document.documentElement.scrollWidth") == width
        wide = (
            "[...document.querySelectorAll('main *')].filter((each) => each.getBoundingClientRect().right > innerWidth)"
        )
        assert browser.run(f"{wide}.length") == 0
        assert HOSTILE in browser.text("#rows")
        assert browser.run("document.querySelectorAll('img').length") == 0
        browser.run("[...document.querySelectorAll('#rows a')].find((each) => each.innerText.startsWith('<')).click()")
        browser.wait("document.documentElement?.dataset.ready === 'true' && !!document.querySelector('#heat')")
        assert browser.run("document.documentElement.scrollWidth") == width
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.run("document.title") != "run"
        assert browser.text("h1") == HOSTILE


def test_a_server_that_ends_is_told_and_the_page_stays(browser: Browser, tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    run.add(range(30))
    with serving(tmp_path) as served:
        open_run(browser, served, "run")
        served.process.terminate()
        served.process.wait()
        says(browser, "#live", "The server does not answer")
        assert "0 to 29" in browser.text("#facts")
        served.process = type(served.process)(["sleep", "600"], stdout=-1, stderr=-1, text=True)


def test_two_runs_that_are_ticked_have_a_page_that_grows(browser: Browser, tmp_path: Path) -> None:
    """Each with a site of its own; by keyboard, while rows are made anew."""
    sites = [Site(name, "output") for name in "abcd"]
    first, second = Growing(tmp_path / "one", [*sites, Site("e", "output")]), Growing(tmp_path / "two", sites[1:])
    third = Growing(tmp_path / "three")
    for run in (first, second, third):
        run.add(range(40))
    with serving(tmp_path) as served:
        browser.open(served.address)
        boxes = "[...document.querySelectorAll('#rows input')]"
        assert browser.run("getComputedStyle(document.querySelector('#both')).display") == "none"
        for name in ("two", "one"):
            label = f"beside another run: {name}"
            browser.run(f"{boxes}.find((each) => each.ariaLabel === {label!r}).focus()")
            browser.key(" ")
        third.add(range(40, 50))
        says(browser, "#rows", "step 49")
        assert browser.run(f"{boxes}.filter((each) => each.checked).length") == 2
        browser.run("document.querySelector('#both').click()")
        browser.wait("document.documentElement?.dataset.ready === 'true' && !!document.querySelector('#heat')")
        assert browser.text("h1") == "two and one"
        assert "one" in browser.text("#facts")
        assert "40 steps in common" in browser.text("#facts")
        says(browser, "#live", "two: process")
        runs = browser.run("[...document.querySelectorAll('[data-value]')].map((each) => each.dataset.value)")
        assert runs[:3] == ["first", "second", "difference"]
        mine = browser.colours()
        for value in ("second", "difference"):
            browser.run(f"document.querySelector('[data-value={value}]').click()")
            browser.wait(f"document.querySelector('#heat-cells').toDataURL() !== {mine!r}")
            mine = browser.colours()
        second.add(range(40, 60))
        says(browser, "#facts", "0 to 59")
        browser.wait(f"document.querySelector('#heat-cells').toDataURL() !== {mine!r}")
        assert "40 steps in common" in browser.text("#facts")
        first.add(range(40, 60))
        says(browser, "#facts", "60 steps in common")
        shutil.rmtree(tmp_path / "one")
        says(browser, "#live", "This run was deleted.")


def test_runs_that_have_nothing_in_common_say_so(browser: Browser, tmp_path: Path) -> None:
    for name in "ab":
        Growing(tmp_path / name, [Site(f"only.{name}", "output")]).add(range(5))
    with serving(tmp_path) as served:
        ids = [address.split("/")[2] for _, address in sorted(served.runs().items())]
        words = "cannot be shown together: expected runs with sites and steps in common; a and b have none"
        assert words in served.ask(f"/run/{ids[0]}/{ids[1]}/").text
        for path in (f"{ids[0]}/{ids[0]}/", f"{ids[0]}/{'0' * 16}/", f"{'0' * 16}/{ids[0]}/", f"{ids[0]}/{ids[1]}"):
            assert served.ask(f"/run/{path}").status == 404


def test_a_run_of_one_step_shows_its_sizes_and_then_what_changes(browser: Browser, tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    run.add(range(1))
    with serving(tmp_path) as served:
        open_run(browser, served, "run")
        pressed = "document.querySelector('[data-value={}]').ariaPressed"
        assert browser.run(pressed.format("absolute")) == "true"
        run.add(range(1, 4))
        says(browser, "#facts", "0 to 3")
        browser.wait(pressed.format("relative") + " === 'true'")
        browser.run("document.querySelector('[data-value=absolute]').click()")
        run.add(range(4, 6))
        says(browser, "#facts", "0 to 5")
        assert browser.run(pressed.format("absolute")) == "true"  # who has chosen sees what he chose
