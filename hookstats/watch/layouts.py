"""Where all sites lie when a step is closed: made anew only where something has moved."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from hookstats import _native
from hookstats.modules.sharding import LocalShard
from hookstats.numbers.blocks import COUNTERS, Layout, Part, Row
from hookstats.numbers.fields import Site
from hookstats.watch.memory import Entry, Place, Store

Key: TypeAlias = tuple[torch.device, int]  # a block of state, by device and number

assert COUNTERS == _native.COUNTERS


class Placed(NamedTuple):
    """What is needed to read blocks, or totals, that are copied now."""

    layout: Layout
    keys: list[Key]  # of the layout's blocks
    hidden: list[bool]  # of each row: whether nothing is said of it where it was silent
    readings: list[int]  # of each row: with which others it was measured
    held: dict[Site, LocalShard]  # the same object while nothing of it has changed


class Layouts:
    """Those of a store: of blocks, and of totals."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[bool, tuple[list[tuple[object, ...]], Layout, list[Key]]] = {}
        self._held: tuple[list[tuple[object, ...]], dict[Site, LocalShard]] = ([], {})

    def now(self, totals_only: bool) -> Placed:
        entries = self._store.entries
        sign: list[tuple[object, ...]] = [
            (len(e.places), e.places[-1].number, e.keep_channels, e.channel_dim, e.sharding) for e in entries
        ]
        known = self._known.get(totals_only)
        if known is None or known[0] != sign:
            known = self._known[totals_only] = (sign, *_layout(entries, self._store, totals_only))
        if self._held[0] != sign:
            self._held = sign, {e.site: e.held for e in entries}
        _, layout, keys = known
        hidden, readings = [e.hidden_if_silent for e in entries], [e.reading for e in entries]
        return Placed(layout, keys, hidden, readings, self._held[1])


def _layout(entries: list[Entry], store: Store, totals_only: bool) -> tuple[Layout, list[Key]]:
    places = [[place.totals() if totals_only else place for place in e.places] for e in entries]
    keys = list(dict.fromkeys((place.device, place.block) for each in places for place in each))
    number = {key: i for i, key in enumerate(keys)}
    devices = list(dict.fromkeys(device for device, _ in keys))

    def part(place: Place) -> Part:
        return Part(number[place.device, place.block], place.offset, place.channels, place.bins)

    rows = [
        Row(
            e.site,
            tuple(map(part, each)),
            e.keep_channels and not totals_only,
            e.channel_dim if e.keep_channels else None,
            e.is_parameter,
        )
        for e, each in zip(entries, places, strict=True)
    ]
    return Layout([devices.index(device) for device, _ in keys], rows, store.histogram), keys
