"""Copied blocks of state as a StepFrame: where each site lay when they were copied. numpy alone.

What is copied from a device are blocks of int64: for each place, one part after another, its moments (float64
``[fields, channels]``), its counters (calls, and when the first of them came), its histogram. A site that has moved to
another width or device has left places behind, to which backwards may still bring their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hookstats.numbers.fields import FIELDS, Array, Bins, Counts, Site
from hookstats.numbers.frame import COUNTERS, Sites, StepFrame, block_of, merge_states
from hookstats.numbers.kinds import kind_of


def sites_at(
    places: Counts,
    names: Iterable[Site],
    keeps: Sequence[bool],
    dims: Sequence[int | None],
    group_sizes: Sequence[int | None] | None,
    bins: Bins | None,
) -> Sites:
    """Return the sites whose states lie at these places of copied blocks.

    places: int64 ``[n, 4]``: block, beginning, channels, and the size of the histogram, in units of 8 bytes.
    """
    block, begin, channels, counters = places.T
    behind = begin + len(FIELDS) * channels + COUNTERS
    return Sites(names, keeps, dims, group_sizes, bins, np.stack([block, begin, channels, block, behind, counters]))


class Layout:
    """Where all sites of a monitor lie in copied blocks. It holds for many steps."""

    def __init__(self, devices: Sequence[int], sites: Sites, left: Sites) -> None:
        """devices: of each block, the number of its device. left: the places that sites have left behind."""
        self.sites = sites
        self._left = left
        self._row = np.array([*range(len(sites)), *(sites.place[site] for site in left)], np.int64)
        self._block, begin, channels = np.concatenate([sites.places[:3], left.places[:3]], axis=1)
        self._device = np.array(devices, np.int64)[self._block]
        self._counters = begin + len(FIELDS) * channels
        # Measured together with others: what is of parameters.
        self.is_parameter = np.array([kind_of(site.tensor).is_replicated for site in sites], bool)
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(site.tensor for site in sites))}
        self._kind = np.array([kinds[site.tensor] for site in sites], np.int64)

    def frame(
        self,
        blocks: Sequence[Counts],
        hidden: Sequence[bool],
        readings: Sequence[int],
        grad_scale: float | None,
        **given: Any,
    ) -> StepFrame:
        """Return the step that these blocks are of.

        hidden: of each site, whether nothing is said of it where it was silent. readings, given: as the attributes
        of StepFrame.
        """
        calls, first = self._read_counters(blocks)
        sites, memory, n = self.sites, list(blocks), len(self.sites)
        of_sites = calls[:n].copy()
        np.add.at(of_sites, self._row[n:], calls[n:])
        if calls[n:].any():
            sites, block = self._together(blocks, np.flatnonzero(calls[n:]))
            memory.append(block)
        return StepFrame(
            sites,
            memory,
            of_sites,
            self._order(calls, first, np.asarray(readings, np.int64)),
            sites.scales(grad_scale),
            grad_scale=grad_scale,
            hidden=np.asarray(hidden, bool),
            readings=np.asarray(readings, np.int64),
            **given,
        )

    def _read_counters(self, blocks: Sequence[Counts]) -> Counts:
        """``[2, places]``: calls, and when the first of them came."""
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

    def _together(self, blocks: Sequence[Counts], late: Counts) -> tuple[Sites, Counts]:
        """Put what came to places that were left, and the states of their sites, in a place behind the other blocks.

        late: the numbers of these places.
        """
        of, left = (self._read(sites, blocks) for sites in (self.sites, self._left))
        came = self._row[len(self.sites) + late]
        chosen = np.unique(came)
        states: list[Array] = []
        histograms: list[Counts | None] = []
        for row in chosen.tolist():
            parts = [*((left, i) for i in late[came == row].tolist()), (of, row)]
            state, counts = merge_states([f.state(i) for f, i in parts], [f.histogram(i) for f, i in parts])
            states.append(state)
            histograms.append(counts)
        widths = np.array([state.shape[1] for state in states], np.int64)
        counters = np.array([0 if counts is None else counts.size for counts in histograms], np.int64)
        begin = np.cumsum(len(FIELDS) * widths + counters) - counters
        number, sites = np.full(len(chosen), len(blocks)), self.sites
        places, keeps, dims = sites.places.copy(), sites.keeps.copy(), list(sites.dims)
        places[:, chosen] = number, begin - len(FIELDS) * widths, widths, number, begin, counters
        for i, is_alike in zip(chosen.tolist(), (widths == sites.channels[chosen]).tolist(), strict=True):
            if keeps[i] and not is_alike:
                keeps[i], dims[i] = False, None
        return Sites(sites.names, keeps, dims, sites.group_sizes, sites.bins, places), block_of(states, histograms)

    @staticmethod
    def _read(sites: Sites, blocks: Sequence[Counts]) -> StepFrame:
        """The states alone."""
        nothing = np.zeros(0, np.int64)
        return StepFrame(sites, blocks, nothing, nothing, np.zeros(0), 0)
