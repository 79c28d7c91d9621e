"""Copied blocks of state as a StepFrame: where each site lay when they were copied. numpy alone.

What is copied from a device are blocks of int64: for each place, one part after another, its moments (float64
``[fields, channels]``), its counters (calls, and when the first of them came), its histogram. A site that has moved to
another width or device lies in several places, the present one last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hookstats.numbers.fields import FIELDS, Array, Bins, Counts, Site
from hookstats.numbers.frame import COUNTERS, Mask, Sites, StepFrame, block_of, merge_states
from hookstats.numbers.kinds import kind_of


class Part(NamedTuple):
    """A place of a site, in units of 8 bytes."""

    block: int
    begin: int
    channels: int
    counters: int  # of its histogram


class Row(NamedTuple):
    """A site, and its places."""

    site: Site
    parts: tuple[Part, ...]
    keep_channels: bool
    channel_dim: int | None
    group_size: int | None = None


class Layout:
    """Where all sites of a monitor lie in copied blocks. It holds for many steps."""

    def __init__(self, devices: Sequence[int], rows: Sequence[Row], bins: Bins | None) -> None:
        """devices: of each block, the number of its device."""
        parts = np.array([part for row in rows for part in row.parts], np.int64).reshape(-1, len(Part._fields))
        self._block, self._begin, self._channels, _ = parts.T
        self._device = np.array(devices, np.int64)[self._block]
        counts = np.array([len(row.parts) for row in rows], np.int64)
        self._row = np.repeat(np.arange(len(rows)), counts)
        self._first = np.cumsum(counts) - counts
        self._last = self._first + counts - 1
        self._has_moved = counts > 1
        self._counters = self._begin + len(FIELDS) * self._channels
        # Measured together with others: what is of parameters.
        self.is_parameter = np.array([kind_of(row.site.tensor).is_replicated for row in rows], bool)
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(row.site.tensor for row in rows))}
        self._kind = np.array([kinds[row.site.tensor] for row in rows], np.int64)
        block, begin, channels, counters = parts[self._last].T
        self.sites = Sites(
            [row.site for row in rows],
            [row.keep_channels for row in rows],
            [row.channel_dim for row in rows],
            [row.group_size for row in rows],
            bins,
            np.stack([block, begin, channels, block, begin + len(FIELDS) * channels + COUNTERS, counters]),
        )
        self._parts = Sites(  # the same of all places
            [rows[i].site for i in self._row.tolist()],
            [False] * len(parts),
            [None] * len(parts),
            None,
            bins,
            np.stack([*parts.T[:3], self._block, self._counters + COUNTERS, parts[:, 3]]),
        )

    def frame(
        self,
        blocks: Sequence[Counts],
        hidden: Sequence[bool],
        readings: Sequence[int],
        grad_scale: float | None,
        **given: Any,
    ) -> StepFrame:
        """Return the step that these blocks are of.

        hidden: of each site, whether nothing is said of it where it was silent. readings: of a parameter, with which
        others it was measured, and when, modulo 4: see StepFrame.phases. given: as the attributes of StepFrame.
        """
        calls, first = self._read_counters(blocks)
        is_live = calls > 0
        is_live[self._last] = True
        of_rows = np.add.reduceat(calls, self._first) if len(self.sites) else calls
        order = self._order(calls, first, np.asarray(readings, np.int64))
        sites, memory = self.sites, list(blocks)
        if self._has_moved.any():
            several = np.flatnonzero(np.add.reduceat(is_live, self._first, dtype=np.int64) > 1)
            if several.size:
                sites, block = self._together(memory, several, is_live)
                memory.append(block)
        return StepFrame(
            sites,
            memory,
            of_rows,
            order,
            sites.scales(grad_scale),
            grad_scale=grad_scale,
            hidden=np.asarray(hidden, bool),
            phases=np.asarray(readings, np.int64) % 4,
            **given,
        )

    def _read_counters(self, blocks: Sequence[Counts]) -> Counts:
        """``[2, parts]``: calls, and when the first of them came."""
        found = np.zeros((COUNTERS, len(self._block)), np.int64)
        for number, block in enumerate(blocks):
            here = np.flatnonzero(self._block == number)
            found[:, here] = block[self._counters[here] + np.arange(COUNTERS)[:, None]]
        return found

    def _order(self, calls: Counts, first: Counts, readings: Counts) -> Counts:
        """The sites that were called, in order of execution; parameters of one reading as the first of them."""
        parts = np.flatnonzero(calls)
        parts = parts[np.lexsort((first[parts], self._device[parts]))]
        rows, earliest = np.unique(self._row[parts], return_index=True)
        device, first = self._device[parts[earliest]], first[parts[earliest]]
        chosen = np.flatnonzero(self.is_parameter[rows])
        together = (readings[rows] * (self._kind.max(initial=0) + 1) + self._kind[rows]) * (device.max(initial=0) + 1)
        _, leader, group = np.unique((together + device)[chosen], return_index=True, return_inverse=True)
        first[chosen] = first[chosen][leader][group]
        result: Counts = rows[np.lexsort((first, device))]
        return result

    def _together(self, blocks: Sequence[Counts], chosen: Counts, is_live: Mask) -> tuple[Sites, Counts]:
        """Put the parts of these sites together, each in a place of its own behind the other blocks."""
        nothing = np.zeros(0, np.int64)
        parts = StepFrame(self._parts, blocks, nothing, nothing, np.zeros(0), 0)
        states: list[Array] = []
        histograms: list[Counts | None] = []
        for row in chosen.tolist():
            live = np.flatnonzero(is_live & (self._row == row)).tolist()
            state, counts = merge_states([parts.state(i) for i in live], [parts.histogram(i) for i in live])
            states.append(state)
            histograms.append(counts)
        widths = np.array([state.shape[1] for state in states], np.int64)
        counters = np.array([0 if counts is None else counts.size for counts in histograms], np.int64)
        begin = np.cumsum(len(FIELDS) * widths + counters) - counters
        number, of = np.full(len(chosen), len(blocks)), self.sites
        places, keeps, dims = of.places.copy(), of.keeps.copy(), list(of.dims)
        places[:, chosen] = number, begin - len(FIELDS) * widths, widths, number, begin, counters
        for i, is_alike in zip(chosen.tolist(), (widths == of.channels[chosen]).tolist(), strict=True):
            if keeps[i] and not is_alike:
                keeps[i], dims[i] = False, None
        sites = Sites(of.names, keeps, dims, of.group_sizes, of.bins, places)
        return sites, block_of(states, histograms)
