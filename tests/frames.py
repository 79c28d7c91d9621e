"""Measured steps made of their numbers, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hookstats.numbers.fields import Array, Bins, Counts, Site
from hookstats.numbers.frame import Sites, StepFrame, block_of
from hookstats.numbers.merge import merge
from hookstats.numbers.snapshot import Snapshot
from hookstats.watch.layout import Layout, sites_at


class Measured(NamedTuple):
    """Measurements of one site."""

    site: Site
    state: Array  # [fields, channels]
    counts: Counts | None = None
    calls: int = 1
    keeps: bool = True
    dim: int | None = -1
    group_size: int | None = None


class Part(NamedTuple):
    """A place of a site in copied blocks, in units of 8 bytes."""

    block: int
    begin: int
    channels: int
    counters: int  # of its histogram


class Row(NamedTuple):
    """A site, and its place."""

    site: Site
    part: Part
    keep_channels: bool
    channel_dim: int | None
    group_size: int | None = None


def layout_of(devices: Sequence[int], rows: Sequence[Row], bins: Bins | None) -> Layout:
    """devices: of each block, the number of its device."""
    sites = sites_at(
        np.array([row.part for row in rows], np.int64),
        [row.site for row in rows],
        [row.keep_channels for row in rows],
        [row.channel_dim for row in rows],
        [row.group_size for row in rows],
        bins,
    )
    return Layout(devices, sites)


def sites_of(measured: Sequence[Measured], bins: Bins | None = None) -> Sites:
    """Side by side in one block."""
    return Sites.side_by_side(
        [each.site for each in measured],
        [each.keeps for each in measured],
        [each.dim for each in measured],
        [each.group_size for each in measured],
        bins,
        [each.state.shape[1] for each in measured],
        [0 if each.counts is None else each.counts.size for each in measured],
    )


def frame_of(
    measured: Sequence[Measured], bins: Bins | None = None, sites: Sites | None = None, step: int = 0, **given: Any
) -> StepFrame:
    """A step whose sites run in this order. sites: those of another step, of the same shape. given: its attributes."""
    sites = sites or sites_of(measured, bins)
    calls = np.array([each.calls for each in measured], np.int64)
    return StepFrame(
        sites,
        [block_of([each.state for each in measured], [each.counts for each in measured])],
        calls,
        np.flatnonzero(calls),
        sites.scales(given.get("grad_scale")),
        step,
        **given,
    )


def snapshot_of(frame: StepFrame) -> Snapshot:
    """Make a Snapshot as it is delivered."""
    return Snapshot(frame.drop_hidden())


def merged_snapshot(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Make a Snapshot of several merged ranks."""
    return Snapshot(merge([snapshot.frame for snapshot in snapshots]))
