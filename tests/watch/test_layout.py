"""A step of sites that lie anywhere: groups, selections, copies, JSON, and memory that is given back."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, LinearBins, Site, Snapshot
from hookstats.numbers.fields import FIELDS, STATISTICS, Bins, histogram_shape
from hookstats.numbers.frame import Sites, StepFrame
from hookstats.watch.scalars import Kept, Scalars
from tests.frames import Part, Row, layout_of, snapshot_of


class Copied(NamedTuple):
    """The buffers copied from a step."""

    rows: list[Row]
    bins: Bins | None
    devices: list[int]
    blocks: list[Any]
    hidden: list[bool]
    readings: list[int]

    def frame(self) -> StepFrame:
        layout = layout_of(self.devices, self.rows, self.bins)
        given = {"step": 7, "time": 1.5, "scalars": {"loss": 2.0}, "overflowed": False}
        return layout.frame(self.blocks, self.hidden, self.readings, 4.0, **given)


def copied(seed: int, bins: Bins | None) -> Copied:
    """Sites of all widths on two devices, some silent, parameters measured together."""
    draw = np.random.default_rng(seed)
    devices = [0, 1, 0]
    ends = [0, 0, 0]
    rows, words = [], [np.zeros(0, np.int64)] * 3
    kinds = ["output", "grad_output", "param_grad", "param"]
    for number in range(60):
        kind = kinds[draw.integers(4)]
        width, block = int(draw.choice([1, 1, 3, 8])), int(draw.integers(3))
        counts = draw.integers(0, 50, histogram_shape(bins, width))
        calls = int(draw.integers(0, 3))
        moments = draw.normal(1e4, 1, (len(FIELDS), width))
        for name in ("count", "zeros", "nans", "posinfs", "neginfs", "m2", "abs_sum"):
            moments[FIELDS.index(name)] = draw.integers(0, 9, width)
        gap = int(draw.integers(0, 3))
        counters = np.array([calls, draw.integers(1, 40)])
        state = [np.zeros(gap, np.int64), moments.view(np.int64).ravel(), counters, counts.ravel()]
        part = Part(block, ends[block] + gap, width, counts.size)
        words[block] = np.concatenate([words[block], *state])
        ends[block] = len(words[block])
        dim = None if draw.random() < 0.3 else -1
        keeps, size = bool(draw.random() < 0.7), [None, 1, 2, 4][draw.integers(4)]
        rows.append(Row(Site(f"layer.{number}", kind), part, keeps, dim, size))
    hidden, readings = draw.random(60) < 0.5, draw.integers(1, 4, 60)
    return Copied(rows, bins, devices, words, hidden.tolist(), readings.tolist())


@pytest.mark.parametrize("seed", range(3))
def test_groups_of_all_sites_at_once_are_what_each_has(seed: int) -> None:
    d = copied(seed, ExponentBins())
    frame = d.frame().drop_hidden()
    sizes = {row.site: row.group_size for row in d.rows}
    begins = np.cumsum([0, *frame.sites.group_counts]).tolist()
    found = 0
    for (site, stats), begin, end in zip(Snapshot(frame).items(), begins[:-1], begins[1:], strict=True):
        size, channels = sizes[site], stats.channels
        assert stats.group_size == size
        if not size or channels is None or len(channels.count) % size:
            assert (stats.groups, end) == (None, begin)
            continue
        found += size > 1
        parts = [part.sum() for part in np.split(channels.l1_norm, len(channels.count) // size)]
        assert stats.groups.l1_norm.tolist() == pytest.approx(parts, rel=1e-15, nan_ok=True)
        for name in STATISTICS:
            mine = getattr(frame.groups, name)[begin:end]
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
    frame = copied(3, bins).frame()
    snapshot, blocks = snapshot_of(frame), [weakref.ref(block) for block in frame.memory]
    for site in snapshot:
        assert snapshot[site].total.count >= 0
    kept = snapshot.compact(), snapshot.totals, snapshot.frame.channels, snapshot.frame.exponents()
    assert len(kept[0]) == len(snapshot)
    del frame, snapshot
    assert all(block() is None for block in blocks)


@pytest.mark.parametrize("bins", [None, ExponentBins(), ExponentBins(True), LinearBins(-1.5, 2.0, 37)])
def test_sites_come_back_from_json(bins: Bins | None) -> None:
    frame = copied(3, bins).frame()
    sites = Sites.from_json(json.loads(json.dumps(frame.sites.to_json())))
    assert snapshot_of(replace(frame, sites=sites)).equals(snapshot_of(frame))
    assert sites.sizes == frame.sites.sizes
    assert sites.scales(4.0).tolist() == frame.scales.tolist()


def test_sites_that_are_none_are_refused() -> None:
    good = copied(0, ExponentBins()).frame().sites.to_json()
    for row, wrong in ((0, -1), (1, -1), (2, 0), (5, 511), (5, "512"), (1, 1.5)):
        places = [list(each) for each in good["places"]]
        places[row][0] = wrong
        with pytest.raises((ValueError, TypeError), match="expected"):
            Sites.from_json({**good, "places": places})
    for key, wrong in (("names", [["a", 3]] * 60), ("dims", ["1"] * 60), ("group_sizes", [0] * 60), ("keeps", [True])):
        with pytest.raises((ValueError, TypeError), match="expected"):
            Sites.from_json({**good, key: wrong})
    for key in good:
        with pytest.raises((KeyError, ValueError, TypeError)):
            Sites.from_json({name: value for name, value in good.items() if name != key})


@pytest.mark.parametrize("bins", [None, ExponentBins(), ExponentBins(True)])
def test_a_selection_and_its_copies_hold_the_same_numbers(bins: Bins | None) -> None:
    frame = copied(2, bins).frame().drop_hidden()
    chosen = np.array([1, 4, 5, 20])
    some = frame.select(chosen)
    assert some.sites is frame.select(chosen).sites  # which recordings tell apart by being the same
    assert list(some.sites) == [frame.sites[i] for i in chosen]
    for again in (some, pickle.loads(pickle.dumps(some)), copy.deepcopy(some)):
        assert [again.sites[i] for i in again.order] == [s for s in Snapshot(frame).order if s in set(some.sites)]
        for n, i in enumerate(chosen.tolist()):
            assert str(again.stats(n)._to_dict()) == str(frame.stats(i)._to_dict())
    copied_memory = pickle.loads(pickle.dumps(some)).memory
    assert sum(block.size for block in copied_memory) == sum(
        some.state(n).size + (0 if (counts := some.histogram(n)) is None else counts.size) for n in range(4)
    )


def test_a_layout_is_made_anew_only_where_a_site_moves() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    monitor = hookstats.attach(model, every=1)
    drain = monitor._delivery._drain

    def now() -> Sites:
        model(torch.randn(3, 4)).sum().backward()
        return drain.begin(Kept.of(0, Scalars({}))).finish().sites

    first = now()
    assert now() is first
    model.append(nn.Linear(2, 2))
    assert now() is first
    monitor.tap(torch.randn(3, 5), "tapped")
    moved = now()
    assert moved is not first
    assert moved.names[: len(first)] == first.names
    assert moved.names[-1].name == "tapped"
