"""Tests of a notebook's view of a Snapshot, of a Run, and of plots."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from tests.report.browser import Browser


class Page:
    """Tags, the text of cells, row by row, and all of the text."""

    def __init__(self, html: str) -> None:
        self.tags = set(re.findall(r"</?(\w+)", html))
        rows = re.split(r"<tr[ >]", html)[1:]
        self.rows = [[text_of(cell) for cell in re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row, re.DOTALL)] for row in rows]
        self.text = text_of(html)


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html))


def measured(model: nn.Module, sinks: tuple[object, ...] = ()) -> Snapshot:
    with hookstats.attach(model, every=1, tensors="output", sinks=sinks) as monitor:
        model(torch.ones(3, 4))
        monitor.step(loss=0.25)
        return monitor.snapshot()


def test_a_snapshot_shows_its_table() -> None:
    snapshot = measured(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    page = Page(snapshot._repr_html_())
    words = [line.split() for line in snapshot.table().splitlines()]
    assert [[cell for text in row for cell in text.split()] for row in page.rows] == [words[0], *words[2:]]
    assert page.text.startswith("Step 0, loss 0.25")


def test_names_are_text_and_rows_are_bounded() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(80)))
    model.add_module("<script>alert(1)</script>\u202e&" + "x" * 5000, nn.Linear(4, 4))
    model.add_module("last", nn.Linear(4, 4))
    html = measured(model)._repr_html_()
    page = Page(html)
    assert page.tags <= {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}
    name = page.rows[1][0]
    assert name.startswith("<script>alert(1)</script>\\u202e&xxx")
    assert len(html) < 4000
    many = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
    page = Page(measured(many)._repr_html_())
    assert len(page.rows) == 61
    assert "40 more rows" in page.text


def test_what_did_not_fire_is_said() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.used(x)
            return y

    assert "did not fire: unused output" in Page(measured(Half())._repr_html_()).text


def test_a_run_shows_its_attempts_and_findings(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    measured(model, (hookstats.record(tmp_path / "<run>"),))
    run = hookstats.load(tmp_path / "<run>")
    page = Page(run._repr_html_())
    assert page.tags <= {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert page.rows[1][:2] == ["1", "Sequential"]
    assert page.rows[1][3:] == ["closed", "1", "0"]
    assert run.findings
    assert run.findings[0].sentence[:100] in page.text  # of a long one, the beginning


PNG = b"\x89PNG\r\n\x1a\n"


def shown(cell: str, known: dict[str, object]) -> dict[str, object]:
    """Return a notebook's view of the last line of a cell, by kind, as a kernel's displayhook sends it."""
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell()
    shell.display_formatter.active_types = shell.display_formatter.format_types  # a terminal's is text alone
    shell.user_ns.update(known)
    done = shell.run_cell(cell)
    done.raise_error()
    data, _ = shell.display_formatter.format(done.result)
    return dict(data)


def a_run(folder: Path) -> Path:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with hookstats.attach(model, every=1, sinks=hookstats.record(folder)) as monitor:
        for _ in range(4):
            model(torch.ones(3, 4)).sum().backward()
            monitor.step()
    return folder


@pytest.mark.parametrize("pyplot", [False, True])
def test_plots_are_pictures_as_the_last_line_of_a_cell(tmp_path: Path, pyplot: bool) -> None:
    pytest.importorskip("matplotlib")
    path, model = a_run(tmp_path / "run"), nn.Sequential(nn.Conv2d(3, 4, 3))
    with hookstats.capture(model, "0") as captured:
        model(torch.randn(1, 3, 8, 8))
    before = "import matplotlib.pyplot\n" if pyplot else ""
    for cell in ("hookstats.report.plot(path)", "captured.plot('0')"):
        data = shown(before + cell, {"hookstats": hookstats, "path": path, "captured": captured})
        assert data["image/png"].startswith(PNG)  # type: ignore[attr-defined]
        assert len(data["image/png"]) > 5_000  # type: ignore[arg-type]


def test_plots_give_their_picture_to_whoever_shows_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = hookstats.report.plot(hookstats.load(a_run(tmp_path / "run")))
    assert figure._repr_png_().startswith(PNG)
    own = Figure().subplots()
    assert hookstats.report.plot(tmp_path / "run", axes=own) is own.figure


def test_tables_are_tables_as_the_last_line_of_a_cell(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    known = {"run": hookstats.load(a_run(tmp_path / "run")), "snapshot": measured(model), "model": model}
    for cell in ("run", "snapshot", "__import__('hookstats').explain(model)"):
        assert str(shown(cell, known)["text/html"]).startswith("<div><b>")


def test_a_notebook_shows_the_page_of_a_run_and_of_a_monitor_that_records(chromium: Browser, tmp_path: Path) -> None:
    """Executed as Jupyter does, and opened: the frame holds the page, and its script has drawn the heatmap."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    path, own = a_run(tmp_path / "'a' <run>"), tmp_path / "trained here"
    cells = [
        f"import hookstats\nhookstats.report.show({str(path)!r}, height=640)",
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())\n"
        f"monitor = hookstats.attach(model, every=1, sinks=hookstats.record({str(own)!r}))\n"
        "for _ in range(4):\n    model(torch.randn(3, 4)).sum().backward()\n    monitor.step()\n"
        "hookstats.report.show(monitor, height=640)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        startup_timeout=60,
        iopub_timeout=60,
        resources={"metadata": {"path": str(Path.cwd())}},
    ).execute()
    outputs = [cell.outputs[-1] for cell in notebook.cells]
    frames = [re.fullmatch(r"<iframe (.*)></iframe>", output["data"]["text/html"], re.DOTALL) for output in outputs]
    given = [dict(re.findall(r'(\w+)="([^"]*)"', frame[1])) for frame in frames if frame]
    assert all("notebooks show it" in output["data"]["text/plain"] for output in outputs)
    for frame, name in zip(given, ("'a' <run>", "trained here"), strict=True):
        assert set(frame) == {"title", "sandbox", "height", "style", "srcdoc"}
        assert frame["sandbox"] == "allow-scripts"  # not the notebook's origin
        assert unescape(frame["title"]) == f"hookstats report: {name}"
        assert unescape(frame["srcdoc"]).startswith("<!doctype html>")
    exported = tmp_path / "notebook.html"
    for output in outputs:
        exported.write_text(f"<!doctype html><html><body>{output['data']['text/html']}</body></html>")
        chromium.call("Page.navigate", url=exported.as_uri())
        chromium.wait("document.querySelector('iframe') !== null && document.readyState === 'complete'")
        inside = chromium.context
        assert chromium.run("location.href", inside) == "about:srcdoc"
        chromium.wait("document.documentElement.dataset.ready === 'true'", context=inside)
        assert chromium.run("document.querySelector('iframe').clientHeight") == 640
        colours = """(() => {
          const canvas = document.getElementById("heat-cells"), { width, height } = canvas;
          const { buffer } = canvas.getContext("2d").getImageData(0, 0, width, height).data;
          return new Set(new Uint32Array(buffer)).size;
        })()"""
        assert chromium.run(colours, inside) > 10
        assert "4 measured" in chromium.run("document.querySelector('#facts').innerText", inside)
        chromium.run("location.hash = '#site=1&step=2'", inside)
        chromium.wait("location.hash === '#site=1&step=2'", context=inside)
    assert all(url.startswith(("file:", "data:", "about:")) for url in chromium.requests)


def test_what_is_no_run_is_refused_in_words() -> None:
    with (
        hookstats.attach(nn.Linear(4, 4), every=1) as monitor,
        pytest.raises(ValueError, match=r"expected a monitor .* sinks=\[hookstats.record\('runs/a'\)\]"),
    ):
        hookstats.report.show(monitor)
    with pytest.raises(TypeError, match="expected a run, its directory, a monitor that records, or Snapshots; got 5"):
        hookstats.report.plot(5)  # type: ignore[arg-type]


def test_a_page_in_a_notebook_is_tall_enough() -> None:
    with pytest.raises(ValueError, match="at least 200 pixels, got 20"):
        hookstats.report.show([], height=20)
