"""Snapshot, SiteStats, Stats on the host."""

from __future__ import annotations

import builtins
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, LinearBins, Snapshot
from hookstats.numbers import fields
from tests import scaled


def snapshot() -> Snapshot:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    torch.manual_seed(0)
    with torch.no_grad():
        model[2].weight.mul_(1000)
        model[2].bias[0] = float("nan")
    mon = hookstats.attach(model, ["0", "1", "2", ""], every=1, tensors="output")
    model[0](torch.randn(8, 4))
    model[2](model[1](model[0](torch.randn(8, 4))))
    taken = mon.step()
    assert taken is not None
    return taken


def test_the_table_reads_in_order_of_execution_and_names_what_did_not_fire() -> None:
    lines = snapshot().table().splitlines()
    head = "site tensor calls channels dim mean std rms abs_max zeros% nan inf"
    assert lines[0].split() == head.split()
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "2"]
    assert lines[2].split()[1:4] == ["output", "2", "3"]
    assert lines[4].split()[-2:] == ["8", "0"]
    assert lines[5] == "did not fire: (model) output"
    assert len({len(line) for line in lines[:5]}) == 1  # columns stand under each other


def test_the_table_can_be_sorted_by_any_statistic() -> None:
    taken = snapshot()
    rows = taken.table(sort="rms").splitlines()[2:5]
    assert rows[0].startswith("2 ")
    rows = taken.table(sort="l1_norm").splitlines()
    assert "l1_norm" in rows[0]
    with pytest.raises(ValueError, match=r"expected one of count, mean.*got 'size'"):
        taken.table(sort="size")


def owner(array: Any) -> Any:
    """The array whose memory this one shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def memory_of(taken: Snapshot) -> dict[int, weakref.ref[Any]]:
    """Return the memory that the step's sites are read from."""
    blocks = [owner(taken.frame.state(i)) for i in range(len(taken))]
    return {id(block): weakref.ref(block) for block in blocks}


@pytest.mark.parametrize("histogram", [ExponentBins(), ExponentBins(per_channel=True), LinearBins(-1, 1, 4), None])
def test_a_site_that_is_kept_holds_its_own_numbers_alone(histogram: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 1000), nn.ReLU(), nn.Linear(1000, 3))
    with hookstats.attach(model, ["0", "2"], every=1, tensors="output", histogram=histogram) as mon:
        model(torch.randn(8, 4))
        taken = mon.step()
    del mon
    memory = memory_of(taken)
    place = taken.frame.sites.place[hookstats.Site("2", "output")]
    state, counts = taken.frame.state(place).copy(), taken.frame.histogram(place)
    counts = None if counts is None else counts.copy()
    kept = taken["2", "output"]
    assert kept is taken["2", "output"]  # found once
    del taken
    gc.collect()
    assert [each() for each in memory.values()] == [None] * len(memory)
    again = hookstats.results.SiteStats(state, 1, counts, True, histogram, channel_dim=kept.channel_dim)
    assert str(kept._to_dict()) == str(again._to_dict())
    for name in fields.STATISTICS:
        np.testing.assert_array_equal(getattr(kept.channels, name), getattr(again.channels, name))
    if histogram is not None:
        np.testing.assert_array_equal(kept.histogram.counts, again.histogram.counts)
        np.testing.assert_array_equal(kept.quantile(0.5), again.quantile(0.5))


@pytest.mark.parametrize("channels", [True, False])
def test_a_compact_snapshot_keeps_the_totals_and_nothing_of_the_steps_memory(channels: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 1000), nn.ReLU(), nn.Linear(1000, 3), nn.Tanh())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    mon = hookstats.attach(model, ["0", "2", "3", ""], tensors="output", channels=channels)
    model[2](model[0](torch.randn(8, 4)))
    scaled.show(scaler, model)
    mon.step(loss=3.0)
    taken = mon.snapshot()
    taken.frame.skipped = {hookstats.Site("x", "output"): "a reason"}
    del mon
    assert taken.overflowed is False
    memory = memory_of(taken)
    compact = taken.compact()
    assert isinstance(compact, Snapshot)
    for name in ("step", "order", "scalars", "skipped", "grad_scale", "overflowed"):
        assert getattr(compact, name) == getattr(taken, name)
    assert list(compact) == list(taken)
    for site, stats in taken.items():
        assert compact[site].calls == stats.calls
        for name in fields.STATISTICS:  # to the bit
            np.testing.assert_equal(getattr(compact[site].total, name), getattr(stats.total, name))
        assert compact[site].channels is compact[site].histogram is None
    kept, other = compact["2", "output"], compact["0", "output"]
    assert owner(kept._moments) is not owner(other._moments)
    assert owner(kept._moments).nbytes == 8 * len(fields.FIELDS)
    with pytest.raises(ValueError, match=r"or is of Snapshot\.compact"):
        kept.quantile(0.5)
    del taken, stats
    gc.collect()
    assert [each() for each in memory.values()] == [None] * len(memory)


@pytest.mark.parametrize("copied", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy])
def test_a_snapshot_can_be_pickled_and_copied(copied: Callable[[Snapshot], Snapshot]) -> None:
    taken = snapshot()
    taken.frame.skipped = {hookstats.Site("x", "output"): hookstats.results.Skipped("a reason", 2)}
    layer = nn.Linear(4, 3)
    with hookstats.attach(layer, "*", every=1, channels=hookstats.Channels(every=2)) as mon:
        for _ in range(2):
            layer(torch.randn(8, 4)).sum().backward()
            of_totals = mon.step(loss=1.5)
    assert of_totals["", "output"].channels is None
    for each in (taken, taken.compact(), taken.select("2"), Snapshot.from_dict(taken.to_dict()), of_totals):
        other = copied(each)
        assert other.equals(each)
        assert other.table() == each.table()
    np.testing.assert_array_equal(copied(taken)["2", "output"].channels.rms, taken["2", "output"].channels.rms)


def test_flat_gives_names_for_loggers() -> None:
    taken = snapshot()
    flat = taken.flat("rms", "nans")
    assert list(flat) == [f"output/{name}/{i}" for i in (0, 1, 2) for name in ("rms", "nans")]
    assert flat["output/nans/2"] == 8
    assert flat["output/rms/0"] == taken["0", "output"].total.rms
    assert len(taken.flat()) == 3 * len(fields.STATISTICS)
    with pytest.raises(ValueError, match="got 'size'"):
        taken.flat("rms", "size")


def test_to_pandas() -> None:
    pytest.importorskip("pandas")
    taken = snapshot()
    frame = taken.to_pandas()
    assert list(frame.index) == taken.order
    assert list(frame.columns) == ["calls", *fields.STATISTICS]
    assert frame.loc["0", "output"]["rms"] == taken["0", "output"].total.rms


def test_to_pandas_without_pandas_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pandas(name: str, *args: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args)

    taken = snapshot()
    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(ImportError, match=r"pip install 'hookstats\[pandas\]'"):
        taken.to_pandas()


def test_an_unknown_site_is_refused_with_an_example() -> None:
    with pytest.raises(KeyError, match=r"expected \(name, tensor\) of a watched site.*'0', 'output'.*got \('9', 'x'\)"):
        snapshot()["9", "x"]
    with pytest.raises(AttributeError, match=r"expected one of count.*got 'median'"):
        snapshot()["0", "output"].total.median  # noqa: B018


def test_a_watched_site_is_in_it_and_nothing_else_and_no_numbers_are_read_for_that() -> None:
    taken = snapshot()
    for site in (("0", "output"), ["0", "output"], hookstats.Site("", "output")):
        assert site in taken
    for stranger in (("0", "input"), ("0",), "0", 7, None, [[], []]):
        assert stranger not in taken
    assert not taken.frame._stats


def test_too_few_values_give_nan_not_an_error() -> None:
    nothing = hookstats.measure(torch.full((3, 2), float("nan")))
    for stats in (nothing.total, nothing.channels):
        assert stats is not None
        for name in ("mean", "var", "std", "rms", "abs_mean", "abs_max", "min", "max"):
            assert np.all(np.isnan(getattr(stats, name)))
        for name in ("count", "l1_norm", "l2_norm", "zeros", "posinfs", "neginfs"):
            assert np.all(getattr(stats, name) == 0)
    assert nothing.total.nans == 6
    one = hookstats.measure(torch.tensor([[3.0, -4.0]]))
    assert np.isnan(one.channels.std).all()
    assert one.channels.abs_max.tolist() == [3, 4]
    assert "3" in repr(one.total)


def test_quantiles_at_the_ends_are_the_extremes() -> None:
    x = torch.tensor([-3.0, -1.0, 2.0, 5.0])
    stats = hookstats.measure(x, channels=False)
    assert stats.quantile(1) == 5
    assert stats.quantile(0) == -3
    with pytest.raises(ValueError, match="expected 0 <= q <= 1, got 2"):
        stats.quantile(2)
    for question in ("quantile", "share_above", "share_below"):
        with pytest.raises(ValueError, match=f"{question}: expected a site with a histogram"):
            getattr(hookstats.measure(x, histogram=None), question)(0.5)
    assert np.isnan(hookstats.measure(torch.full((4,), float("nan"))).quantile(0.5))


def test_histogram_edges_ascend_and_hold_their_values() -> None:
    x = torch.tensor([-1.5, -0.3, 0.0, 1e-40, 0.3, 1.0, 1.5, 3e38])
    histogram = hookstats.measure(x, channels=False).histogram
    assert histogram.counts.shape == (509,)
    assert histogram.edges.shape == (510,)
    assert np.all(np.diff(histogram.edges) > 0)
    for value in x.tolist():
        bin_ = np.searchsorted(histogram.edges, value, side="right" if value >= 0 else "left") - 1
        assert histogram.counts[bin_] > 0
    octaves = hookstats.measure(x, histogram=ExponentBins(True), channels=False).histogram
    assert octaves.counts.shape == (1, 64)
    assert octaves.edges[[0, 1, -2, -1]].tolist() == [0, 2**-46, 2**16, np.inf]


def test_linear_bins_count_what_lies_outside() -> None:
    x = torch.tensor([-5.0, -1.0, -0.5, 0.0, 0.4, 1.0, 1.5, 7.0, float("nan"), float("inf")])
    stats = hookstats.measure(x, histogram=LinearBins(-1, 1, 4), channels=False)
    assert stats.histogram.counts.tolist() == [1, 1, 2, 1]
    assert (stats.histogram.underflow, stats.histogram.overflow) == (1, 2)
    assert stats.histogram.edges.tolist() == [-1, -0.5, 0, 0.5, 1]
    columns = hookstats.measure(torch.stack([x, 2 * x], 1), 1, LinearBins(-1, 1, 4, per_channel=True)).histogram
    assert columns.counts.tolist() == [[1, 1, 2, 1], [1, 0, 1, 1]]
    assert columns.underflow.tolist() == [1, 2]
    assert columns.overflow.tolist() == [2, 3]


def test_quantiles_of_linear_bins_lie_in_the_bin_of_the_exact_one() -> None:
    x = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    whole = hookstats.measure(x, histogram=LinearBins(-2, 2, 50), channels=False)
    rows = hookstats.measure(x, 0, LinearBins(-2, 2, 50, per_channel=True))
    for q in (0.05, 0.5, 0.9):
        assert abs(whole.quantile(q) - x.quantile(q).item()) <= 0.08
        assert (abs(rows.quantile(q) - x.quantile(q, dim=1).numpy()) <= 0.08).all()
    assert 2 < whole.quantile(0.999) < x.max().item()
    assert whole.quantile(0) == pytest.approx(x.min().item())
    assert whole.quantile(1) == pytest.approx(x.max().item())
