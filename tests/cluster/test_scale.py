"""benchmarks/scale.py: what it says of large jobs follows from what attach does, and from how ranks merge."""

from __future__ import annotations

from unittest import mock

import hookstats
from benchmarks import scale
from benchmarks.scale import KINDS, Mesh, Shape, Stage, accuracy_of, merge_of, state_of

TINY = Shape(layers=2, width=16, hidden=24, heads=4, kv_heads=2, head=4, vocabulary=32)


def test_the_state_of_a_rank_is_what_attach_takes_for_it() -> None:
    mesh = Mesh(1, sharded=False)
    model = Stage(TINY, mesh)
    monitor = hookstats.attach(model, channels=False, tensors=KINDS)
    assert state_of(TINY, mesh)[0] == len(monitor.sites)
    assert state_of(TINY, mesh).totals == monitor.state_bytes
    learned = 2 * len(model.layers) * 8 * 10 * (TINY.width - 1 + TINY.hidden - 1)  # of Block and SiLU, in a forward
    assert state_of(TINY, mesh).bytes == hookstats.attach(Stage(TINY, mesh), tensors=KINDS).state_bytes + learned


def test_what_is_merged_falls_to_totals_where_the_whole_would_not_fit() -> None:
    assert merge_of(TINY, Mesh(8)).kept == "channels"
    with mock.patch.object(scale, "BUDGET", state_of(TINY, Mesh(8)).bytes - 1):
        assert merge_of(TINY, Mesh(8)).kept == "totals, histograms"
    with mock.patch.object(scale, "BUDGET", state_of(TINY, Mesh(8)).totals // 4):
        assert merge_of(TINY, Mesh(8)).kept == "totals"


def test_merging_means_that_lie_a_thousand_deviations_apart_loses_nothing() -> None:
    for ranks in (2, 64, 1000):
        assert max(accuracy_of(ranks, elements=4)) < 1e-13
