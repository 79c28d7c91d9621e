"""Copied blocks of state as a StepFrame: where each site lay when they were copied. numpy alone.

What is copied from a device are blocks of int64: for each place, one part after another, its moments (float64
``[fields, channels]``), its counters (calls, and when the first of them came), its histogram.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hookstats.numbers.fields import FIELDS, Bins, Counts, Site
from hookstats.numbers.frame import COUNTERS, Sites, StepFrame
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
    """Places of all sites of a monitor in copied blocks, for many steps."""

    def __init__(self, devices: Sequence[int], sites: Sites) -> None:
        """devices: of each block, the number of its device."""
        self.sites = sites
        self._device = np.array(devices, np.int64)[sites.block]
        counters = sites.begin + len(FIELDS) * sites.channels + np.arange(COUNTERS)[:, None]
        held = [np.flatnonzero(sites.block == number) for number in range(len(devices))]
        self._counters = [(here, counters[:, here]) for here in held]  # of each block: its sites, and where theirs lie
        # Measured together with others: what is of parameters.
        self.is_parameter = np.array([kind_of(site.tensor).is_replicated for site in sites], bool)
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(site.tensor for site in sites))}
        self._kinds = max(len(kinds), 1)
        self._kind = np.array([kinds[site.tensor] for site in sites], np.int64)
        self._device_count = 1 + max(devices, default=0)

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
        return StepFrame(
            self.sites,
            list(blocks),
            calls,
            self._order(calls, first, np.asarray(readings, np.int64)),
            self.sites.scales(grad_scale),
            grad_scale=grad_scale,
            hidden=np.asarray(hidden, bool),
            readings=np.asarray(readings, np.int64),
            **given,
        )

    def _read_counters(self, blocks: Sequence[Counts]) -> Counts:
        """``[2, sites]``: calls, and when the first of them came."""
        found = np.zeros((COUNTERS, len(self.sites)), np.int64)
        for block, (here, at) in zip(blocks, self._counters, strict=True):
            found[:, here] = block[at]
        return found

    def _order(self, calls: Counts, first: Counts, readings: Counts) -> Counts:
        """The sites that were called, in order of execution; parameters of one reading as the first of them."""
        fired = np.flatnonzero(calls)
        device, first = self._device[fired], first[fired]
        chosen = np.flatnonzero(self.is_parameter[fired])
        at = fired[chosen]
        together = (readings[at] * self._kinds + self._kind[at]) * self._device_count + self._device[at]
        by_group = np.argsort(together, kind="stable")
        together = together[by_group]
        is_leader = np.ones(len(at), bool)
        is_leader[1:] = together[1:] != together[:-1]
        leader = by_group[is_leader][is_leader.cumsum() - 1]
        first[chosen[by_group]] = first[chosen[leader]]
        result: Counts = fired[np.lexsort((first, device))]
        return result
