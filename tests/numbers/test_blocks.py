"""Blocks read as arrays over all sites say what reading them site by site says, wherever the sites lie."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, LinearBins, Site
from hookstats.numbers.blocks import COUNTERS, Drained, Layout, Part, Row
from hookstats.numbers.fields import FIELDS, STATISTICS, Bins, Stats, fold_channels, histogram_shape
from hookstats.watch.scalars import Kept, Scalars
from tests.conftest import BINS


def drained(seed: int, bins: Bins | None) -> Drained:
    """Sites of all widths on two devices, some in several places, some silent, parameters measured together."""
    draw = np.random.default_rng(seed)
    devices = [0, 1, 0]
    ends = [0, 0, 0]
    rows, words = [], [np.zeros(0, np.int64)] * 3
    kinds = ["output", "grad_output", "param_grad", "param"]
    for number in range(60):
        kind = kinds[draw.integers(4)]
        widths = draw.choice([1, 1, 3, 8], size=draw.choice([1, 1, 1, 3])).tolist()
        if draw.random() < 0.3:
            widths = [widths[0]] * len(widths)
        parts = []
        for width in widths:
            block = int(draw.integers(3))
            counts = draw.integers(0, 50, histogram_shape(bins, width))
            calls = int(draw.integers(0, 3))
            moments = draw.normal(1e4, 1, (len(FIELDS), width))
            for name in ("count", "zeros", "nans", "posinfs", "neginfs", "m2", "abs_sum"):
                moments[FIELDS.index(name)] = draw.integers(0, 9, width)
            gap = int(draw.integers(0, 3))
            counters = np.array([calls, draw.integers(1, 40)])
            state = [np.zeros(gap, np.int64), moments.view(np.int64).ravel(), counters, counts.ravel()]
            parts.append(Part(block, ends[block] + gap, width, counts.size))
            words[block] = np.concatenate([words[block], *state])
            ends[block] = len(words[block])
        is_parameter = kind.startswith("param")
        dim = None if draw.random() < 0.3 else -1
        keeps, size = bool(draw.random() < 0.7), [None, 1, 2, 4][draw.integers(4)]
        rows.append(Row(Site(f"layer.{number}", kind), tuple(parts), keeps, dim, is_parameter, size))
    hidden, readings = draw.random(60) < 0.5, draw.integers(1, 4, 60)
    return Drained(Layout(devices, rows, bins), words, 7, 1.5, {"loss": 2.0}, 4.0, False, hidden, readings)


def one_by_one(d: Drained) -> tuple[dict[Site, tuple[Any, ...]], list[Site]]:
    """The sites that are shown: calls, state, histogram, whether channels are kept; and the order of execution."""
    shown: dict[Site, tuple[Any, ...]] = {}
    fired: dict[Site, tuple[int, int]] = {}
    together: dict[tuple[str, int, int], int] = {}
    for row, hidden, reading in zip(d.layout.rows, d.hidden.tolist(), d.readings.tolist(), strict=True):
        found = []
        for part in row.parts:
            memory = d.blocks[part.block][part.offset : part.offset + part.size]
            fields = len(FIELDS) * part.channels
            calls, first = memory[fields : fields + COUNTERS].tolist()
            moments = memory[:fields].view(np.float64).reshape(len(FIELDS), part.channels)
            shape = histogram_shape(d.layout.bins, part.channels)
            counts = memory[fields + COUNTERS :].reshape(shape) if part.bins else None
            found.append((calls, first, d.layout.devices[part.block], moments, counts))
        alive = [each for each in found[:-1] if each[0]] + found[-1:]
        calls = sum(each[0] for each in alive)
        if hidden and not calls:
            continue
        states, histograms = [each[3] for each in alive], [each[4] for each in alive]
        if len({state.shape for state in states}) > 1:
            states = [fold_channels(state)[:, None] for state in states]
            histograms = [c.sum(0, keepdims=True) if c is not None and c.ndim == 2 else c for c in histograms]
        state, counts = states[0], histograms[0]
        if len(states) > 1:
            columns = range(state.shape[1])
            state = np.stack([fold_channels(np.stack([s[:, i] for s in states], axis=1)) for i in columns], axis=1)
            counts = None if counts is None else sum(histograms)
        keeps = row.keep_channels and state.shape[1] == row.parts[-1].channels
        shown[row.site] = (calls, state, counts, keeps, row.channel_dim if keeps == row.keep_channels else None)
        if calls:
            device, first = min((each[2], each[1]) for each in alive if each[0])
            if row.is_parameter:
                first = together.setdefault((row.site.tensor, device, reading), first)
            fired[row.site] = (device, first)
    return shown, sorted(fired, key=fired.__getitem__)


@pytest.mark.parametrize("bins", ["none", "per_tensor", "per_channel", "linear_per_channel"])
@pytest.mark.parametrize("seed", range(6))
def test_all_sites_at_once_are_what_each_is_by_itself(seed: int, bins: str) -> None:
    d = drained(seed, BINS[bins])
    shown, order = one_by_one(d)
    snapshot = d.snapshot()
    assert list(snapshot) == list(shown)
    assert len({len(row.parts) for row in d.layout.rows}) > 1
    assert snapshot.order == order
    for i, (site, (calls, state, counts, keeps, dim)) in enumerate(shown.items()):
        stats = snapshot[site]
        scale = 4.0 if site.tensor.startswith("grad_") else 1.0
        assert (stats.calls, stats._per_channel, stats.channel_dim, stats._scale) == (calls, keeps, dim, scale)
        np.testing.assert_array_equal(stats._measured, state)
        assert (stats._histogram is None) == (counts is None)
        if counts is not None:
            np.testing.assert_array_equal(stats._histogram, counts)
        np.testing.assert_array_equal(d.columns.wholes[:, i], fold_channels(state))
        if scale == 1:
            assert d.columns.totals.rms[i] == pytest.approx(Stats(fold_channels(state)).rms, nan_ok=True, rel=1e-15)
    widths = [state.shape[1] if keeps else 0 for _, state, _, keeps, _ in shown.values()]
    assert d.columns.widths.tolist() == widths
    assert len(d.columns.channels.mean) == sum(widths)


@pytest.mark.parametrize("seed", range(3))
def test_groups_of_all_sites_at_once_are_what_each_has(seed: int) -> None:
    d = drained(seed, ExponentBins())
    sizes = {row.site: row.group_size for row in d.layout.rows}
    begins = np.cumsum([0, *d.columns.group_counts]).tolist()
    found = 0
    for (site, stats), begin, end in zip(d.snapshot().items(), begins[:-1], begins[1:], strict=True):
        size, channels = sizes[site], stats.channels
        assert stats.group_size == size
        if not size or channels is None or len(channels.count) % size:
            assert (stats.groups, end) == (None, begin)
            continue
        assert stats.groups is not None
        found += size > 1
        parts = [part.sum() for part in np.split(channels.l1_norm, len(channels.count) // size)]
        assert stats.groups.l1_norm.tolist() == pytest.approx(parts, rel=1e-15, nan_ok=True)
        for name in STATISTICS:
            mine = getattr(d.columns.groups, name)[begin:end]
            np.testing.assert_array_equal(mine, getattr(stats.groups, name))
    assert found > 0


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("bins", [None, ExponentBins(), ExponentBins(True), LinearBins(-1.5, 2.0, 37)])
def test_a_step_that_nobody_holds_any_more_is_freed_at_once(bins: Bins | None) -> None:
    d = drained(3, bins)
    snapshot, blocks = d.snapshot(), [weakref.ref(block) for block in d.blocks]
    for site in snapshot:
        assert snapshot[site].total.count >= 0
    kept = snapshot.compact(), snapshot.totals, snapshot.columns.channels, snapshot.columns.exponents()
    assert len(kept[0]) == len(snapshot)
    del d, snapshot
    assert all(block() is None for block in blocks)


@pytest.mark.parametrize("bins", [None, ExponentBins(), ExponentBins(True), LinearBins(-1.5, 2.0, 37)])
def test_a_layout_comes_back_from_json(bins: Bins | None) -> None:
    d = drained(3, bins)
    layout = Layout.from_json(json.loads(json.dumps(d.layout.to_json())))
    again = Drained(layout, d.blocks, d.step, d.time, d.scalars, d.grad_scale, d.overflowed, d.hidden, d.readings)
    assert again.snapshot().equals(d.snapshot())
    assert layout.sizes == d.layout.sizes


def test_a_layout_that_is_none_is_refused() -> None:
    good = drained(0, ExponentBins()).layout.to_json()
    part = good["rows"][0][-1][0]
    for wrong in ([9, *part[1:]], [part[0], -1, *part[2:]], [*part[:2], 0, 512], [*part[:3], 511], [*part[:3], "512"]):
        with pytest.raises((ValueError, TypeError), match="expected"):
            Layout.from_json({**good, "rows": [[*good["rows"][0][:-1], [wrong]]]})
    for key in good:
        with pytest.raises((KeyError, ValueError, TypeError)):
            Layout.from_json({name: value for name, value in good.items() if name != key})


def test_a_layout_is_made_anew_only_where_a_site_moves() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    monitor = hookstats.attach(model, every=1)
    drain = monitor._delivery._drain

    def now() -> Layout:
        model(torch.randn(3, 4)).sum().backward()
        return drain.begin(Kept.of(0, Scalars({}))).finish().layout

    first = now()
    assert now() is first
    model.append(nn.Linear(2, 2))
    assert now() is first
    monitor.tap(torch.randn(3, 5), "tapped")
    moved = now()
    assert moved is not first
    assert [row.site for row in moved.rows][: len(first.rows)] == [row.site for row in first.rows]
    assert moved.rows[-1].site.name == "tapped"
