"""Tests of a page's numbers, against the Snapshots that it was made from; of the plot; of a run from its directory."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import hookstats
from hookstats.numbers.fields import Site
from hookstats.numbers.kinds import KINDS, kind_of
from hookstats.numbers.site_stats import SiteStats
from hookstats.numbers.snapshot import Snapshot
from hookstats.report import Recorded, plot, write, writing
from hookstats.report.page import asset, page
from hookstats.report.reducing import FIRST, NEUTRAL, NONFINITE, PER_OCTAVE, SILENT, past
from hookstats.report.writing import order_sites
from hookstats.rules import Finding
from tests.conftest import ROOT
from tests.report.runs import contents, run, sites_of

SITES = sites_of(2)


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Recorded.of(run(SITES, 30, detail_every=3))


def decoded(blob: bytes, sites: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes = np.frombuffer(blob[: sites * columns], np.uint8).reshape(sites, columns)
    low, step = np.frombuffer(blob[sites * columns :], "<f8").reshape(2, sites)
    return codes, low, step


def test_an_absolute_plane_tells_each_value_within_three_per_cent(recorded: Recorded) -> None:
    _, blobs = contents(recorded)
    codes, low, step = decoded(blobs["rms.absolute"], len(SITES), 30)
    told = 2 ** (low[:, None] + (codes.astype(float) - FIRST) * step[:, None])
    known = codes != NONFINITE
    np.testing.assert_allclose(told[known], recorded.statistic("rms")[known], rtol=2 ** (1 / 24) - 1 + 1e-9)


def lines_of(blob: bytes) -> np.ndarray:
    """Return lines in the page's order: all first bytes stand before all second ones."""
    return np.frombuffer(np.frombuffer(blob, np.uint8).reshape(4, -1).T.tobytes(), "<f4")


def test_a_line_tells_each_value_within_a_thousandth(recorded: Recorded) -> None:
    record, blobs = contents(recorded)
    np.testing.assert_allclose(lines_of(blobs["line.rms"]).reshape(-1, 30), recorded.statistic("rms"), rtol=1e-3)
    for i in (0, 7):
        mine = dict(zip(record["lines"], lines_of(blobs[f"line.{i}"]).reshape(-1, 30), strict=True))
        for name in ("rms", "abs_max", "mean", "std", "min", "max"):
            np.testing.assert_allclose(mine[name], recorded.statistic(name)[i], rtol=1e-3)


@pytest.mark.parametrize("octaves", [3, -3])
def test_one_step_that_is_eight_times_the_past_or_an_eighth_is_seen_among_twenty(octaves: int) -> None:
    values = np.ones((1, 20_000))
    values[0, 12_345] = 2.0**octaves
    none = np.zeros_like(values)

    def planes(names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: (none if "nans" in name else values).copy() for name in names}

    detailed = np.empty(0, np.int64)
    made = Recorded("long", [Site("a", "output")], np.arange(20_000), planes, lambda *_: [], detailed)
    _, blobs = contents(made)
    codes = np.frombuffer(blobs["rms.relative"], np.uint8)
    assert len(codes) == 1000
    assert codes[617] == NEUTRAL + octaves * PER_OCTAVE
    assert (np.delete(codes, 617) == NEUTRAL).all()


def test_the_past_is_what_came_before_and_never_what_comes() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 400))
    before = past(values)
    values[:, 200:] += 100
    after = past(values)
    np.testing.assert_array_equal(before[:, :201], after[:, :201])
    assert (after[:, 300:] < 50).all()  # a level that stays is told until half of the run was like it


def test_a_level_that_stays_150_times_higher_is_told_to_the_end() -> None:
    values = np.full((1, 300), 1.0)
    values[:, 200:] = 150.0
    assert (past(values) == 1).all()
    values[:, 20:] = 150.0
    assert past(values)[0, 60] == 150


def test_the_past_of_a_site_that_was_silent_is_what_it_had_last() -> None:
    values = np.ones((2, 64))
    values[0, 20:40] = np.nan
    values[1] = np.nan
    told = past(values)
    assert (told[0] == 1).all()
    assert np.isnan(told[1]).all()
    values[1, 30:] = 7.0  # begins late: its past is its first value
    assert (past(values)[1, 30:] == 7).all()


def test_silence_and_what_is_not_finite_have_codes_of_their_own(recorded: Recorded) -> None:
    record, blobs = contents(recorded)
    codes, _, _ = decoded(blobs["zeros.absolute"], len(SITES), 30)
    bad = recorded.statistic("nans") > 0
    assert bad.any()
    np.testing.assert_array_equal(codes == NONFINITE, bad)
    one = run([Site("a", "output")], 10)
    two = run([Site("a", "output"), Site("b", "output")], 5)
    for i, snapshot in enumerate(two):
        snapshot.frame.step = 10 + i
    made = Recorded.of([*one, *two])
    _, blobs = contents(made)
    codes, _, _ = decoded(blobs["rms.absolute"], 2, 15)
    np.testing.assert_array_equal(codes == SILENT, [[False] * 15, [True] * 10 + [False] * 5])
    assert record["fired"] == [30] * len(SITES)


def test_values_that_are_not_finite_were_measured_as_well() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    layer = torch.nn.Identity()
    with hookstats.attach(layer, modules="*", tensors="output", every=1) as monitor:
        layer(x)
        record, _ = contents(Recorded.of([monitor.snapshot()]))
    assert record["values"] == 4


def test_a_gradient_stands_beside_its_activation_in_the_order_of_execution() -> None:
    rows = order_sites(SITES)
    assert [SITES[i] for i in rows[:4]] == [
        Site("embedding", "output"),
        Site("embedding", "grad_output"),
        Site("layers.0.norm1", "output"),
        Site("layers.0.norm1", "grad_output"),
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind_of(kind).of != "module"])
def test_whatever_is_measured_of_a_parameter_stands_where_its_module_does(kind: str) -> None:
    sites = [Site("0", "output"), Site("1", "output"), Site("0.weight", kind), Site("1.weight", kind)]
    assert [sites[i].name for i in order_sites(sites)] == ["0", "0.weight", "1", "1.weight"]


def test_the_top_channels_are_those_of_the_last_step_with_channels(recorded: Recorded) -> None:
    _, blobs = contents(recorded)
    site = Site("layers.1.mlp.up", "output")
    details = json.loads(blobs[f"details.{recorded.sites.index(site)}"])
    snapshot = next(iter(recorded.snapshots([27], [site])))
    assert details["channels"]["top"]["step"] == 27
    channels = snapshot[site].channels
    assert channels is not None
    expected = int(channels.abs_max.argmax())
    assert details["channels"]["top"]["abs_max"][0] == [expected, pytest.approx(channels.abs_max[expected], rel=1e-4)]
    assert details["channels"]["steps"] == list(range(0, 30, 3))


def test_pictures_are_made_without_the_channels_of_all_steps_at_once() -> None:
    whole, seen, held = Recorded.of(run(SITES[:1], 30)), list[weakref.ref[SiteStats]](), list[int]()

    def snapshots(steps: Sequence[int], sites: Sequence[Site]) -> Iterator[Snapshot]:
        for each in whole.snapshots(steps, sites):
            read = Snapshot(replace(each.frame))
            seen.append(weakref.ref(read[SITES[0]]))
            held.append(sum(stats() is not None for stats in seen))
            yield read

    contents(replace(whole, snapshots=snapshots))
    assert len(held) > 30
    assert max(held) < 4


def test_the_last_step_with_channels_is_among_those_of_a_picture_however_many_there_are() -> None:
    _, blobs = contents(Recorded.of(run(SITES[:1], 200)))
    channels = json.loads(blobs["details.0"])["channels"]
    assert (channels["steps"][0], channels["steps"][-1], len(channels["steps"])) == (0, 199, 128)
    assert channels["top"]["step"] == 199


def test_a_page_has_the_gravest_findings_as_far_as_there_is_room_and_counts_the_others(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_FINDINGS", 20)
    cause = Finding("spike", 5, recorded.sites[0], 6.0, 3.0, "critical", "It rose.")
    effects = [replace(cause, step=6 + i, severity="note", because=cause.as_cause) for i in range(15)]
    others = [Finding(f"other-{i}", 5, None, 1.0, 0.0, "warning", "So it is.") for i in range(10)]
    record, _ = contents(replace(recorded, findings=[*others, cause, *effects]))
    first, *rest = record["chapters"]
    assert (first["finding"]["rule"], len(first["effects"]), len(rest)) == ("spike", 9, 10)
    assert record["left_out"] == 6


def test_a_head_says_of_a_loss_that_came_back_that_it_did() -> None:
    diverged = Finding("loss-spike", 20, None, 9.0, 4.5, "critical", "the loss is 9: training diverges.", since=10)
    for last, is_back in ((2.0, True), (9.5, False), (6.0, False), (float("nan"), False)):
        snapshots = run(SITES[:1], 30)
        snapshots[-1].scalars["loss"] = last
        record, _ = contents(Recorded.of(snapshots, findings=[diverged]))
        [sentence] = record["head"]
        assert ("diverges" in sentence) != is_back
        assert (sentence == "Since step 10: the loss rose to 9 by step 20; it is 2 in step 29.") == is_back


def test_what_becomes_zero_in_few_bits_is_counted_by_the_exponents(recorded: Recorded) -> None:
    record, _ = contents(recorded)
    precision = record["precision"]
    assert precision["step"] == 27
    snapshot = next(iter(recorded.snapshots([27], recorded.sites)))
    for row in precision["rows"]:
        histogram = snapshot[recorded.sites[row[0]]].histogram
        assert histogram is not None
        inside = (histogram.edges[:-1] >= -(2.0**-10)) & (histogram.edges[1:] <= 2.0**-10)
        inside[254] = False
        expected = histogram.counts[inside].sum() / (histogram.counts.sum() - histogram.counts[254])
        assert row[3][0] == pytest.approx(expected, rel=1e-2, abs=1e-12), recorded.sites[row[0]]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_whether_values_of_low_precision_are_in_use_follows_from_the_values(dtype: torch.dtype | None) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
    )
    monitor = hookstats.attach(model, every=1)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    record, _ = contents(Recorded.of([monitor.snapshot()]))
    monitor.detach()
    assert record["precision"]["is_low"] == (dtype is not None)


def test_a_second_run_is_told_by_its_distance_where_both_have_been(recorded: Recorded) -> None:
    sites = [*SITES[1:], Site("new", "output")]
    second = Recorded.of(run(sites, 20, every=2, seed=1))
    record, blobs = contents(recorded, second)
    steps = [*range(30), *range(30, 40, 2)]
    assert record["begin"] == steps
    assert record["sites"] == [list(site) for site in [*SITES, Site("new", "output")]]
    assert record["other"]["steps"] == 15
    assert record["other"]["alone"] == [[0], [len(SITES)]]
    codes, mine, its = (
        np.frombuffer(blobs[name], np.uint8)[: 33 * 35].reshape(33, 35)
        for name in ("rms.difference", "rms.absolute", "rms.other_absolute")
    )
    assert (codes[[0, 32]] == SILENT).all()
    assert (codes[:, [1, 3, 30, 34]] == SILENT).all()
    assert (mine[32] == SILENT).all()
    assert (mine[:, 30:] == SILENT).all()
    assert (its[0] == SILENT).all()
    assert (its[1:, ::2][:, :15] != SILENT).all()
    assert (its[:, 1:30:2] == SILENT).all()
    for site in SITES[1:4]:
        here, there = recorded.sites.index(site), second.sites.index(site)
        apart = np.log2(second.statistic("rms")[there, :15] / recorded.statistic("rms")[here, ::2])
        told = (codes[here, :30:2].astype(float) - NEUTRAL) / 64
        known = (codes[here, :30:2] != NONFINITE) & (np.abs(apart) < 1.9)
        assert known.sum() > 5
        np.testing.assert_allclose(told[known], apart[known], atol=1 / 128 + 1e-9)
    assert record["parting"]["step"] == 0
    equal = np.frombuffer(contents(recorded, recorded)[1]["rms.difference"], np.uint8)
    assert set(np.unique(equal).tolist()) == {NEUTRAL, NONFINITE}
    assert contents(recorded, recorded)[0]["parting"] is None
    with pytest.raises(ValueError, match="sites and steps in common"):
        contents(recorded, Recorded.of(run([Site("else", "output")], 5)))


def test_the_first_parting_is_where_compare_finds_it_and_rounding_is_none(recorded: Recorded) -> None:
    """The second run is equal, but for one site from step 13 on, and for a rounding in step 9."""
    other = run(SITES, 30, detail_every=3)
    site = SITES[5]
    for snapshot in other[13:]:
        snapshot.frame.state(snapshot.frame.sites.place[site])[1] *= 1.5  # the mean
    other[9].frame.state(0)[2] *= 1 + 1e-12
    second = Recorded.of(other)
    parting = contents(recorded, second)[0]["parting"]
    expected = hookstats.compare(run(SITES, 30, detail_every=3), other).first
    assert expected is not None
    assert (parting["step"], parting["site"]) == (expected.step, recorded.sites.index(expected.site))
    assert str(expected) == f"step {expected.step}, {expected.site}: {parting['sentence']}"


def test_what_only_the_second_run_has_stands_behind_what_it_has_before_it(recorded: Recorded) -> None:
    sites = [*SITES]
    sites.insert(3, Site("layers.0.more", "output"))
    record, _ = contents(recorded, Recorded.of(run(sites, 30)))
    names = [record["sites"][row][0] for row in record["rows"] if record["sites"][row][1] == "output"]
    assert names == [site.name for site in sites if site.tensor == "output"]


def test_a_library_that_is_not_the_pinned_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(page.__globals__["_SHA256"], "uplot/uPlot.min.css", "0" * 64)
    with pytest.raises(ValueError, match=r"uPlot\.min\.css: expected the file with sha256 0000"):
        asset("uplot/uPlot.min.css")


def test_the_licence_of_what_is_inlined_is_in_the_page(recorded: Recorded, tmp_path: Path) -> None:
    text = write(recorded, tmp_path / "report.html").read_text()
    assert "Permission is hereby granted, free of charge" in text
    assert "Leon Sorokin" in text


def test_nothing_measured_has_no_page() -> None:
    with pytest.raises(ValueError, match="expected snapshots of ascending steps"):
        write([], "report.html")


def test_a_page_that_cannot_be_written_leaves_the_old_one(recorded: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    bad = Recorded("bad", [], recorded.steps, recorded.planes, recorded.snapshots, recorded.detailed)
    with pytest.raises(ValueError, match="something was measured"):
        write(bad, path)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_plot_has_a_row_a_site_and_says_what_it_shows(recorded: Recorded) -> None:
    pytest.importorskip("matplotlib")
    axes = plot(recorded, "rms", "grad_output").axes[0]
    cells, broken = (image.get_array() for image in axes.images)
    assert cells.shape == (16, 30)
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["embedding", "layers.0.norm1"]
    assert not broken.mask.all()
    absolute = plot(recorded, "rms", relative=False).axes[0].images[0].get_array()
    rows = [i for i in order_sites(SITES) if SITES[i].tensor == "output"]
    np.testing.assert_array_equal(absolute, recorded.statistic("rms")[rows])
    with pytest.raises(ValueError, match="expected a statistic of rms"):
        plot(recorded, "kurtosis")
    with pytest.raises(ValueError, match="expected a tensor of output, grad_output"):
        plot(recorded, tensor="param")


def test_a_run_from_its_directory_has_the_page_of_its_snapshots(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    kept: list[hookstats.Snapshot] = []
    sinks = [hookstats.record(tmp_path / "run"), kept.append]
    with hookstats.attach(model, every=1, sinks=sinks) as monitor:
        for step in range(12):
            loss = model(torch.randn(16, 4)).square().mean()
            loss.backward()
            monitor.step(loss=loss.detach(), late=torch.tensor(float(step)))
        monitor.snapshot()
    from hookstats.report.loading import load_recorded as loaded

    read, expected = loaded(tmp_path / "run"), Recorded.of(kept)
    assert read.sites == expected.sites
    assert read.steps.tolist() == expected.steps.tolist() == read.detailed.tolist() == list(range(12))
    for name in ("rms", "abs_max", "mean", "count", "nans"):
        np.testing.assert_array_equal(read.statistic(name), expected.statistic(name))
    assert read.scalars.keys() == expected.scalars.keys()
    for got, want in zip(read.scalars["loss"], expected.scalars["loss"], strict=True):
        np.testing.assert_array_equal(got, want)
    assert read.settings["model"] == "Sequential"
    (record, blobs), (_, others) = contents(read), contents(expected)
    assert blobs == others
    assert record["name"] == "run"
    some = loaded(hookstats.load(tmp_path / "run", sites=[("0", "output")], steps=slice(4, 8)))
    assert some.sites == [Site("0", "output")]
    assert some.steps.tolist() == [4, 5, 6, 7]
    code = f"import hookstats, sys; hookstats.report.write({str(tmp_path / 'run')!r}, {str(tmp_path / 'a.html')!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "False\n", done.stderr
