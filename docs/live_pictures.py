"""The pictures of docs/live.md: the example of the report, with its faults and without.

    python docs/live_pictures.py [--output build/live]

It needs Chromium and nbconvert, and takes a few minutes. Run it from the root of the checkout.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import report_example  # noqa: E402

from tests.report.browser import Browser  # noqa: E402
from tests.serve.served import serving  # noqa: E402


def train(run: Path, is_ill: bool, steps: int = 160) -> None:
    """The example with smaller batches."""
    report_example.STEPS, report_example.BATCH, report_example.LENGTH = steps, 4, 32
    report_example.SPIKE, report_example.OUTLIER_FROM, report_example.GROWTH = range(100, 103), 20, 1.05
    if not is_ill:
        report_example.SPIKE, report_example.GROWTH = range(0), 1.0
    report_example.train(run)


def section(browser: Browser, selector: str, path: Path, height: float | None = None) -> None:
    """A part of the page, with some room around it."""
    x, y, width, tall = browser.run(
        f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect();"
        "return [box.left, box.top + scrollY, box.width, box.height] })()"
    )
    clip = {"x": x - 24, "y": y - 20, "width": width + 48, "height": (height or tall) + 32}
    browser.picture(path, clip=clip)


def hover(browser: Browser, row: float, column: float) -> None:
    """row, column: as shares of the cells."""
    browser.run("document.querySelector('#heat').scrollIntoView({block: 'center'})")
    box = browser.run(
        "(() => { const box = document.querySelector('#heat').getBoundingClientRect();"
        "return [box.left, box.top, box.width, box.height] })()"
    )
    browser.mouse("Moved", box[0] + 216 + column * (box[2] - 217), box[1] + 78 + row * (box[3] - 102))
    browser.wait("document.querySelector('#numbers').innerText.includes('copies it')")


def notebook(browser: Browser, run: Path) -> None:
    """Executed, and as Jupyter exports it."""
    import nbclient
    import nbconvert
    import nbformat

    cell = f"import hookstats\n\nhookstats.report.show({str(run)!r}, height=620)"
    cells = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(cells, resources={"metadata": {"path": str(DOCS.parent)}}).execute()
    exported = run.parent / "notebook.html"
    exported.write_text(nbconvert.HTMLExporter().from_notebook_node(cells)[0])
    browser.call("Page.navigate", url=exported.absolute().as_uri())
    browser.wait("document.querySelector('iframe') !== null && document.readyState === 'complete'")
    browser.wait("document.documentElement.dataset.ready === 'true'", context=browser.context)
    browser.picture(DOCS / "live_notebook.png", clip={"x": 0, "y": 0, "width": 1280, "height": 740})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/live"))
    runs = parser.parse_args().output
    context = multiprocessing.get_context("spawn")
    for name, is_ill in (("healthy", False), ("ill", True)):
        if not (runs / name).exists():
            process = context.Process(target=train, args=(runs / name, is_ill))
            process.start()
            process.join()
    growing = context.Process(target=train, args=(runs / "sweep" / "grows", True, 100_000))
    growing.start()
    try:
        with serving(runs) as served, Browser(1280, 900) as browser:
            browser.open(served.address)
            browser.wait("document.querySelectorAll('#rows .recording').length === 1", 300)
            time.sleep(20)  # some steps, seen each two seconds
            address = f"http://127.0.0.1:{served.port}"
            found = served.runs()
            browser.open(address + found["sweep/grows"])
            browser.wait("document.querySelector('#facts').innerText.match(/0 to (\\d+)/)?.[1] > 110", 600)
            browser.wait("document.querySelector('#settings').innerText.includes('model')")
            section(browser, "#layers", DOCS / "live_run.png")
            browser.open(address + "/")
            for name in ("ill", "healthy"):
                row = f"[...document.querySelectorAll('#rows tr')].find((row) => row.innerText.startsWith('{name}'))"
                browser.run(f"{row}.querySelector('input').click()")
            browser.picture(DOCS / "live_index.png", clip={"x": 0, "y": 0, "width": 1280, "height": 400})
            growing.kill()
            ids = {name: path.split("/")[2] for name, path in found.items()}
            browser.open(f"{address}/run/{ids['healthy']}/{ids['ill']}/")
            browser.run("document.querySelector('[data-value=difference]').click()")
            browser.wait("performance.getEntriesByName('switch').length > 1")
            browser.wait("document.querySelector('#settings').innerText.includes('model')")
            section(browser, "#layers", DOCS / "live_two.png")
            browser.open(address + found["ill"])
            hover(browser, 0.62, 0.7)
            section(browser, "#layers", DOCS / "live_cell.png")
            browser.open(address + found["sweep/grows"])
            browser.wait("document.body.innerText.includes('died')")
            browser.picture(DOCS / "live_died.png", clip={"x": 0, "y": 0, "width": 1280, "height": 420})
            assert not browser.errors, browser.errors  # a notebook asks for scripts of the network besides
            notebook(browser, runs / "sweep" / "grows")
    finally:
        growing.terminate()
        growing.join()


if __name__ == "__main__":
    main()
