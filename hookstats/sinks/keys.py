"""Chooses which numbers of a snapshot a sink sends, and the key of each through the run: the same for every sink."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from hookstats._warn import WarnOnce
from hookstats.numbers.fields import STATISTICS, Array, Counts, Site
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.selection import as_globs, explain_unmatched, matches
from hookstats.numbers.site_stats import SiteStats
from hookstats.numbers.snapshot import Snapshot

# What vanishes or explodes; what collapses around a mean that stays; outliers, and what overflows in low precision.
DEFAULT_STATISTICS = ("rms", "std", "abs_max")
# With three statistics 192 curves: W&B's users complain of 224 (its issues 1537, 4759), and 4,000 freeze its page.
MOST_SITES = 64
MOST_BARS = 512  # of wandb.Histogram; exponent bins are 509
PREFIX = "hookstats/"  # with what follows at most 241 characters: mlflow takes 250

_MODEL = "whole-model"  # as `Snapshot.flat` has it
_MOST_BYTES = {"name": 160, "tensor": 60}
_MARKED = re.compile(r".*-[0-9a-f]{8}", re.DOTALL)


class Bars(NamedTuple):
    """A histogram as loggers take it: counts ``[n]`` and finite edges ``[n + 1]``, n at most 512."""

    counts: Counts
    edges: Array
    sum: float  # of the finite values
    square_sum: float


class Keys:
    """The chosen numbers of one snapshot after the other.

    A site that was chosen keeps its keys: the choice is made when the first snapshot comes, among the sites that it
    knows, fired or not. So it is the same in every run of the same model. Sites that appear later are added while there
    are fewer than 64.
    """

    def __init__(
        self, sink: str, statistics: str | Iterable[str], sites: str | Iterable[str] | None, histograms: bool = False
    ) -> None:
        """Take arguments as `JsonLines` does. ValueError for an unknown statistic; TypeError for a wrong type."""
        self._sink = sink
        self._statistics = _strings(f"{sink}: statistics", statistics)
        unknown = [name for name in self._statistics if name not in STATISTICS]
        if unknown:
            raise ValueError(f"{sink}: statistics: expected some of {', '.join(STATISTICS)}; got {', '.join(unknown)}")
        self._globs = None if sites is None else as_globs(f"{sink}: sites", sites, None)
        if not isinstance(histograms, bool):
            raise TypeError(f"{sink}: histograms: expected True or False, got {histograms!r}")
        self._histograms = histograms
        self._known: dict[Site, None] = {}  # in their order
        self._sent: dict[Site, tuple[str, str]] = {}  # tensor and name in the keys
        self._had_nonfinite: set[Site] = set()
        self._tell = WarnOnce()

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments in JSON's types."""
        return {"statistics": list(self._statistics), "sites": self._globs, "histograms": self._histograms}

    def values(self, snapshot: Snapshot) -> dict[str, float]:
        """Return values without the prefix: "step", "nonfinite", "grad_norm", "scalars/loss", "output/rms/layers.0"."""
        self._choose(snapshot)
        totals = snapshot.totals
        nonfinite = totals.nans + totals.posinfs + totals.neginfs
        values = {"step": snapshot.step, "nonfinite": float(nonfinite.sum())}
        if (norm := snapshot.grad_norm) is not None:
            values["grad_norm"] = norm
        values |= {f"scalars/{spell_key(name, _MOST_BYTES['name'])}": each for name, each in snapshot.scalars.items()}
        columns = [(statistic, getattr(totals, statistic).tolist()) for statistic in self._statistics]
        for i, site in enumerate(snapshot.order):
            if site not in self._sent:
                continue
            tensor, name = self._sent[site]
            values |= {f"{tensor}/{statistic}/{name}": column[i] for statistic, column in columns}
            if nonfinite[i] > 0:
                self._had_nonfinite.add(site)
            if site in self._had_nonfinite:
                values[f"{tensor}/nonfinite/{name}"] = float(nonfinite[i])
        return values

    def row(self, snapshot: Snapshot, histogram: Callable[..., Any]) -> dict[str, Any]:
        """Return a row with the prefix, "hookstats/step" among it; histograms as W&B and Trackio take numpy's."""
        row: dict[str, Any] = self.values(snapshot)
        for key, bars in self.histograms(snapshot).items():
            row[key] = histogram(np_histogram=(bars.counts, bars.edges))
        return {PREFIX + key: value for key, value in row.items()}

    def histograms(self, snapshot: Snapshot) -> dict[str, Bars]:
        """Return histograms without the prefix: "output/histogram/layers.0". After `values`; empty if not asked for."""
        found = {}
        for i, site in enumerate(snapshot.order if self._histograms else ()):
            if site in self._sent and (bars := _bars(snapshot, i)) is not None:
                tensor, name = self._sent[site]
                found[f"{tensor}/histogram/{name}"] = bars
        return found

    def _choose(self, snapshot: Snapshot) -> None:
        first = not self._known
        new = [site for site in snapshot if site not in self._known]
        self._known |= dict.fromkeys(new)
        if self._globs is not None:
            self._send(site for site in new if matches(site.name, self._globs))
            problem = explain_unmatched(f"{self._sink}: sites", self._globs, [site.name for site in self._known])
            if problem is not None:
                self._tell("sites", problem)
        else:
            self._send(_spread(new, MOST_SITES) if first else new[: MOST_SITES - len(self._sent)])
            if len(self._known) > len(self._sent):
                self._tell(
                    "sites",
                    f"{self._sink} gets {len(self._sent)} of {len(self._known)} sites, evenly from first to last; "
                    "sites=[globs] chooses others, or all",
                )

    def _send(self, sites: Iterable[Site]) -> None:
        for site in sites:
            tensor = spell_key(site.tensor, _MOST_BYTES["tensor"])
            self._sent[site] = tensor, spell_key(site.name, _MOST_BYTES["name"]) if site.name else _MODEL


def _strings(what: str, given: Any) -> tuple[str, ...]:
    listed = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(each, str) for each in listed):
        raise TypeError(f"{what}: expected strings, got {given!r}")
    return listed


def _spread(sites: list[Site], most: int) -> list[Site]:
    """Choose at most so many sites: each kind of tensor its share, evenly from its first site to its last, in order."""
    kinds: dict[str, list[Site]] = {}
    for site in sites:
        kinds.setdefault(kind_of(site.tensor).name, []).append(site)
    chosen: set[Site] = set()
    for i, group in enumerate(sorted(kinds.values(), key=len)):  # what a small kind leaves goes to the larger ones
        share = min(len(group), (most - len(chosen)) // (len(kinds) - i))
        chosen.update(group[at] for at in np.linspace(0, len(group) - 1, share).round().astype(int))
    return [site for site in sites if site in chosen]


def spell_key(text: str, most: int) -> str:
    """Spell a key so that every service takes it: letters, digits, "_", ".", "-" and spaces, without a slash.

    Text that is changed, or longer than so many bytes of UTF-8, ends in eight digits of its SHA-256, and so does text
    that looks as if it had been changed: two texts are spelled the same only where these digits agree.
    """
    kept = re.sub(r"[^\w.\- ]", "_", text)
    is_name = text.strip(".") and text != _MODEL and not _MARKED.fullmatch(text)
    if kept == text and len(text.encode()) <= most and is_name:
        return text
    digits = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{kept.encode()[: most - 9].decode(errors='ignore')}-{digits}"


def _bars(snapshot: Snapshot, i: int) -> Bars | None:
    """The histogram of the i-th site in order, all channels together; None where it has none, or counted nothing.

    Empty bins at the ends are left out, and the outermost edges are the smallest and the largest value. What lies
    outside of linear bins is in a bar on either side of them. Empty bins side by side are one bar; of more bars than
    MOST_BARS neighbours are put together.
    """
    stats: SiteStats = snapshot[snapshot.order[i]]
    if (histogram := stats.histogram) is None:
        return None
    totals = snapshot.totals
    inside = histogram.counts.reshape(-1, len(histogram.edges) - 1).sum(0)
    counts = np.concatenate([[np.sum(histogram.underflow)], inside, [np.sum(histogram.overflow)]]).astype(np.int64)
    filled = np.flatnonzero(counts)
    if not len(filled):
        return None
    first, end = filled[0], filled[-1] + 1
    edges = np.concatenate([[-np.inf], histogram.edges, [np.inf]])[first : end + 1]
    of_magnitudes = np.isinf(histogram.edges[-1])  # octaves of |x|, whose smallest one nothing tells
    edges[0] = edges[0] if of_magnitudes else totals.min[i]
    edges[-1] = totals.abs_max[i] if of_magnitudes else totals.max[i]
    counts = counts[first:end]
    starts = np.flatnonzero(
        np.append(True, (counts[1:] > 0) | (counts[:-1] > 0))
    )  # one bar for empty ones side by side
    starts = starts[:: -(-len(starts) // MOST_BARS)]
    return Bars(
        np.add.reduceat(counts, starts),
        np.append(edges[starts], edges[-1]),
        float(totals.mean[i] * totals.count[i]),
        float(totals.l2_norm[i] ** 2),
    )
