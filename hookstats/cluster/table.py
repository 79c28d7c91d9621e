"""What a rank has to merge: its sites as they are in the whole, and where its own part of each lies there. Pure numpy.

All ranks that hold equal models have equal tables, whatever their parts are: a table crosses the network once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

from hookstats.numbers import blocks
from hookstats.numbers.blocks import Drained, Layout
from hookstats.numbers.fields import Bins, Site, bins_from_json, bins_to_json, histogram_shape

# Who counts, of the ranks that have a row: "each" (what they hold differs), "first" (all hold the same: the lowest of
# them), or those whose number here, the lowest rank of the mesh on which a tensor lies, is the lowest of all.
Replicas: TypeAlias = str | int

_VERSION = 3
_DIMENSIONS = 64  # that a tensor may have


class TableRow(NamedTuple):
    """A site as it is in the whole, when all ranks' parts are put together."""

    site: Site
    channels: int  # 1 where there are totals alone
    counters: int  # of its histogram; 0 without one
    keep_channels: bool
    channel_dim: int | None
    is_parameter: bool
    replicas: Replicas
    apart_of: str = ""  # the tensor that this is one rank's of, where it is not known whether others hold the same
    group_size: int | None = None

    @property
    def is_narrow(self) -> bool:
        """Totals alone; or no tensor has told its width yet."""
        return self.channels == 1 and not self.keep_channels


class ShardRange(NamedTuple):
    """A rank's own part of a site."""

    offset: int = 0  # its first channel, in the whole
    counts: bool = True  # False: another rank of the same mesh holds the same, and counts
    leads: bool = True  # False: of the ranks that hold parts of one tensor, another one counts the calls
    # The lowest of the ranks that may hold the same. None: how the tensor lies is known.
    group: int | None = None


class Placed(NamedTuple):
    """How a site of this rank lies in the whole."""

    channels: int  # of the whole
    replicas: Replicas
    shard: ShardRange
    site: Site | None = None  # under which it is merged, if not its own: apart from other ranks' tensors


Placing: TypeAlias = Callable[[blocks.Row], Placed]


def whole(row: blocks.Row) -> Placed:
    """The placing of plain tensors: each rank has all channels; parameters are the same on all ranks."""
    return Placed(row.parts[-1].channels, "first" if row.is_parameter else "each", ShardRange())


class Table:
    """What a rank has to merge; equal where all of it is, and `checksum` with it."""

    def __init__(
        self,
        rows: tuple[TableRow, ...],
        bins: Bins | None,
        scalars: tuple[str, ...] = (),
        unmeasured: tuple[Site, ...] = (),
        budget: int = 1 << 28,
        spread: bool = False,
        samples: int = 0,
    ) -> None:
        """scalars: names. unmeasured: sites without a row, of which tensors were left out.

        budget: bytes that the whole may take on each rank. spread: whether the ranks' extremes are wanted.
        samples: how many ids of samples came with a step so far, at most.
        """
        self.rows = rows
        self.bins = bins
        self.scalars = scalars
        self.unmeasured = unmeasured
        self.budget = budget
        self.spread = spread
        self.samples = samples

    @cached_property
    def text(self) -> bytes:
        """JSON, the same for equal tables."""
        told = {
            "version": _VERSION,
            "histogram": None if self.bins is None else bins_to_json(self.bins),
            "scalars": self.scalars,
            "unmeasured": self.unmeasured,
            "budget": self.budget,
            "spread": self.spread,
            "samples": self.samples,
            "rows": [[*row.site, *row[1:]] for row in self.rows],
        }
        return json.dumps(told, separators=(",", ":")).encode()

    @cached_property
    def checksum(self) -> int:
        """64 bits that stand for the text."""
        return int.from_bytes(blake2b(self.text, digest_size=8).digest(), "big")

    @classmethod
    def from_text(cls, text: bytes) -> Table:
        """What `text` was. ValueError for anything else."""
        try:
            d = json.loads(text)
            if d["version"] != _VERSION:
                raise ValueError(f"expected version {_VERSION}, got {d['version']!r}")
            bins = None if d["histogram"] is None else bins_from_json(d["histogram"])
            rows = tuple(_row(each, bins) for each in d["rows"])
            unmeasured = tuple(_site(*each) for each in d["unmeasured"])
            sites = [*(row.site for row in rows), *unmeasured]
            scalars = tuple(_of(str, each) for each in d["scalars"])
            for names in (sites, scalars):
                if len(set(names)) < len(names):
                    raise ValueError("expected each site and scalar once")
            budget, samples = _at_least(0, d["budget"]), _at_least(0, d["samples"])
            return cls(rows, bins, scalars, unmeasured, budget, _of(bool, d["spread"]), samples)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"expected a table of sites, got {error!r}") from None


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {value!r}")
    return value


def _at_least(least: int, value: Any) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"expected a number from {least}, got {value!r}")
    return value


def _site(name: Any, tensor: Any) -> Site:
    return Site(_of(str, name), _of(str, tensor))


def _row(told: Any, bins: Bins | None) -> TableRow:
    name, tensor, channels, counters, keeps, dim, is_parameter, replicas, apart_of, group_size = told
    if counters not in (0, counters_of(bins, _at_least(1, channels))):
        raise ValueError(f"expected the counters of {bins} for {channels} channels, got {counters!r}")
    if dim is not None and not (type(dim) is int and -_DIMENSIONS <= dim < _DIMENSIONS):
        raise ValueError(f"expected a channel dimension, got {dim!r}")
    if replicas not in ("each", "first"):
        _at_least(0, replicas)
    if group_size is not None:
        _at_least(1, group_size)
    counters = _at_least(0, counters)
    kept = _of(bool, keeps), dim, _of(bool, is_parameter)
    return TableRow(_site(name, tensor), channels, counters, *kept, replicas, _of(str, apart_of), group_size)


def counters_of(bins: Bins | None, channels: int) -> int:
    """How many the histogram of a site has."""
    shape = histogram_shape(bins, channels)
    return shape[0] if len(shape) == 1 else shape[0] * shape[1]


class Tables:
    """The tables of a rank's steps: made anew only where something has changed.

    A scalar, or a site without state of which something was left out, stays in them when it was there once, and the
    most ids of samples.
    """

    def __init__(self, budget: int, spread: bool) -> None:
        """budget, spread: see Table."""
        self._budget = budget
        self._spread = spread
        self._scalars: dict[str, None] = {}
        self._left_out: dict[Site, None] = {}
        self._samples = 0
        self._known: dict[Layout, tuple[Placing, tuple[int, int], Table, list[ShardRange]]] = {}

    def table_of(self, drained: Drained, placing: Placing = whole) -> tuple[Table, list[ShardRange]]:
        """The table of a step, and this rank's shards, one for each row.

        placing: another object where anything about it has changed.

        ValueError where a shard does not lie in its whole.
        """
        self._scalars |= dict.fromkeys(drained.scalars)
        self._left_out |= dict.fromkeys(drained.skipped)
        self._samples = max(self._samples, len(drained.sample_ids.get(drained.step, ())))
        seen = len(self._scalars) + len(self._left_out), self._samples
        known = self._known.get(drained.layout)
        if known is None or known[:2] != (placing, seen):
            known = self._known[drained.layout] = (placing, seen, *self._make(drained.layout, placing))
            for layout in list(self._known)[:-2]:  # of whole states, and of totals
                del self._known[layout]
        return known[2:]

    def _make(self, layout: Layout, placing: Placing) -> tuple[Table, list[ShardRange]]:
        placed = [_placed(row, placing) for row in layout.rows]
        rows = tuple(
            TableRow(
                place.site or row.site,
                place.channels,
                counters_of(layout.bins, place.channels) if row.parts[-1].bins else 0,
                row.keep_channels,
                row.channel_dim,
                row.is_parameter,
                place.replicas,
                "" if place.shard.group is None else row.site.tensor,
                row.group_size,
            )
            for row, place in zip(layout.rows, placed, strict=True)
        )
        sites = {row.site for row in rows}
        unmeasured = tuple(site for site in self._left_out if site not in sites)
        names = tuple(self._scalars)
        table = Table(rows, layout.bins, names, unmeasured, self._budget, self._spread, self._samples)
        return table, [place.shard for place in placed]


def _placed(row: blocks.Row, placing: Placing) -> Placed:
    place, channels = placing(row), row.parts[-1].channels
    if channels == 1 and not row.keep_channels:  # totals of the shard are a part of those of the whole
        return place._replace(channels=1, shard=place.shard._replace(offset=0))
    if not 0 <= place.shard.offset <= place.channels - channels:
        offset = place.shard.offset
        raise ValueError(f"{row.site}: expected {channels} channels from {offset} to lie in {place.channels}")
    return place
