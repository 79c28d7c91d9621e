"""Step: what a rule sees of a measured step, as arrays over all sites that the run has shown so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.blocks import Drained
from hookstats.numbers.columns import Columns
from hookstats.numbers.fields import FIELDS, Array, Counts, Site, Stats, divided
from hookstats.numbers.snapshot import Snapshot
from hookstats.rules.finding import Finding

Mask: TypeAlias = NDArray[np.bool_]
_Over = TypeVar("_Over", bound=NDArray[Any])


class Sites:
    """All sites that a run has shown so far: each has an id that stays, its place in ``all``."""

    def __init__(self) -> None:
        self.all: list[Site] = []
        self._ids: dict[Site, int] = {}
        self._latest: tuple[Sequence[Site], Counts] = ([], np.empty(0, np.int64))
        self._kinds: dict[str, Mask] = {}

    def ids(self, sites: Sequence[Site]) -> Counts:
        """Of these sites; those that are new get the next ones."""
        known, ids = self._latest
        if known != sites:
            for site in sites:
                if site not in self._ids:
                    self._ids[site] = len(self.all)
                    self.all.append(site)
            ids = np.array([self._ids[site] for site in sites], np.int64)
            self._latest = list(sites), ids
        return ids

    def of(self, kind: str) -> Mask:
        """``[n]``: whether a site's tensor is of this kind: "output" takes "output.0" as well."""
        mask = self._kinds.get(kind)
        if mask is None or len(mask) < len(self.all):
            tensors = [site.tensor for site in self.all]
            mask = np.array([tensor == kind or tensor.startswith(f"{kind}.") for tensor in tensors], bool)
            self._kinds[kind] = mask
        return mask


class Step:
    """A measured step as a rule sees it.

    ``number`` and ``scalars`` as in the Snapshot, and ``rank``. ``sites``: all that the run has shown so far; a site's
    place in this list is its id, which never changes, so that what a rule keeps by id stays aligned when other sites
    appear. All arrays are over ids ``[n]``; a site that was silent in this step, or is not in it, has ``calls`` 0,
    counts of 0, and NaN else.
    """

    def __init__(self, measured: Snapshot | Drained, sites: Sites, rank: int = 0, attempt: int = 0) -> None:
        self.number = measured.step
        self.scalars = measured.scalars
        self.overflowed = measured.overflowed
        self.rank = rank
        self.attempt = attempt
        self._columns: Columns = measured.columns
        self._ids = sites.ids(self._columns.sites)
        self._sites = sites
        self.sites: Sequence[Site] = sites.all
        self._is_aligned = np.array_equal(self._ids, np.arange(len(sites.all)))

    def of(self, kind: str) -> Mask:
        """``[n]``: whether a site's tensor is an "output", a "grad_output", a "param", ..., see attach."""
        return self._sites.of(kind)

    @cached_property
    def calls(self) -> Counts:
        return self._spread(self._columns.calls, 0)

    @cached_property
    def order(self) -> Counts:
        """The ids of the sites that fired, in order of execution."""
        ids: Counts = self._ids[self._columns.order]
        return ids

    @cached_property
    def totals(self) -> Stats[Array]:
        """Statistics of each site, ``[n]``, without the scaler's scale."""
        if self._is_aligned:
            return self._columns.totals
        wholes = np.zeros((len(FIELDS), len(self.sites)))
        wholes[:, self._ids] = divided(self._columns.wholes, self._columns.scales)
        return Stats(wholes)

    @cached_property
    def nonfinite(self) -> Array:
        """``[n]``: how many values are NaN, Inf or -Inf."""
        return self.totals.nans + self.totals.posinfs + self.totals.neginfs

    @cached_property
    def _place(self) -> Counts:
        """Of each id, in the columns; -1 where it is not in this step."""
        return self._spread(np.arange(len(self._ids)), -1)

    def channels(self, site: int) -> Stats[Array] | None:
        """Those of a site by its id, ``[channels]``, without the scaler's scale; None where none were kept, or sent."""
        place = int(self._place[site])
        if place < 0 or not self._columns.keeps[place]:
            return None
        return self._columns.stats(place).channels

    @cached_property
    def has_channels(self) -> Mask:
        """``[n]``: whether channels were kept, and sent in this step."""
        return self._spread(self._columns.keeps, False)

    @cached_property
    def exponents(self) -> tuple[Counts, Counts]:
        """Histograms by exponent of whole tensors: the ids that have one ``[k]``, and counts ``[k, 512]``.

        A bin is ``sign << 8 | exponent`` of float32; of the values as they were measured: with the scaler's scale.
        Empty where histograms are of another kind, or were not sent.
        """
        places, counts = self._columns.exponents
        return self._ids[places], counts

    @cached_property
    def scales(self) -> Array:
        """``[n]``: with which values were multiplied before they were measured (gradients, by a GradScaler)."""
        return self._spread(self._columns.scales, 1.0)

    @cached_property
    def grad_norm(self) -> float | None:
        """As `Snapshot.grad_norm`."""
        chosen = np.flatnonzero(self.of("param_grad") & (self.calls > 0))
        if not chosen.size:
            return None
        if self.totals.nans[chosen].any():
            return float("nan")
        if self.nonfinite[chosen].any():
            return float("inf")
        return float(np.sqrt((self.totals.l2_norm[chosen] ** 2 / self.calls[chosen]).sum()))

    def finding(
        self, rule: str, site: int | None, value: float, threshold: float, severity: str, sentence: str
    ) -> Finding:
        """Of this step; site: an id, or None for the whole step."""
        where = None if site is None else self.sites[site]
        return Finding(
            rule, self.number, where, float(value), float(threshold), severity, sentence, self.rank, self.attempt
        )

    def _spread(self, values: _Over, missing: Any) -> _Over:
        """An array over the columns' sites, over ids."""
        if self._is_aligned:
            return values
        result: Any = np.full(len(self.sites), missing, values.dtype)
        result[self._ids] = values
        return result  # type: ignore[no-any-return]
