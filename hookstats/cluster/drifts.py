"""Replicas that are none any more: which ranks are to hold the same, and which of them do not. Pure numpy."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hookstats.cluster.packing import UNUSED, Held
from hookstats.cluster.union import Union
from hookstats.numbers.fields import Array, Counts, Site
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.ranks import Drift

_STEPS = 3  # measured ones in which ranks that hold the same have changed alike
_MOST = 1 << 20  # hashes of all ranks that are exchanged while these are found out
_PATIENCE = 50  # measured ones without a change, after which it is no longer waited for one
_PAST = 8  # measured steps in which a rank that is behind is known by what others held
_NAMED = 16  # sites of a step of which it is found out who differs


class Vote(NamedTuple):
    """The voters who have what most have, and those who have something else."""

    agree: list[int]
    others: list[int]
    majority: bool  # else nobody knows who is wrong: those agree who have what the first of them has


def vote(have: Mapping[int, Hashable]) -> Vote | None:
    """have: what each has. None: all the same."""
    value, count = Counter(have.values()).most_common(1)[0]
    if count == len(have):
        return None
    majority = 2 * count > len(have)
    if not majority:
        value = have[min(have)]
    agree = sorted(place for place, mine in have.items() if mine == value)
    return Vote(agree, sorted(have.keys() - agree), majority)


class Replicas:
    """Who holds the same, where neither a DTensor nor DistributedDataParallel says it: found by its being so.

    Ranks whose states were equal in three measured steps, in each of which they had changed, are replicas. All ranks
    come to the same conclusions.
    """

    def __init__(self, rank: int) -> None:
        self.learned: dict[Site, tuple[int, ...]] = {}  # this rank's peers, itself among them
        self._rank = rank
        self._groups: dict[Site, list[tuple[int, ...]]] = {}
        self._seen: dict[Site, tuple[int, Counts]] = {}  # in how many steps; the latest hashes, of all ranks
        self._waited: dict[Site, int] = {}  # steps without a change
        self._settled: set[Site] = set()  # learned, or given up
        self._past: deque[tuple[Union, Counts]] = deque(maxlen=_PAST)  # this rank's hashes of the steps before

    def to_learn(self, union: Union) -> list[Site]:
        """The sites whose hashes are to be exchanged, a million at most, then the next ones."""
        sites = [site for site in union.unknown if site not in self._settled]
        return sites[: max(1, _MOST // len(union.ranks))]

    def learn(self, union: Union, sites: Sequence[Site], hashes: Counts) -> None:
        """hashes: ``[ranks, sites]``."""
        for site, now in zip(sites, hashes.T, strict=True):
            holders = (now < 0) | (now > UNUSED)
            seen, before = self._seen.get(site, (0, np.zeros_like(now)))
            # Zeros that stay: equal, and no replicas for all that is known.
            if not holders.any() or (now == before)[holders].any():
                self._waited[site] = self._waited.get(site, 0) + 1
                if self._waited[site] >= _PATIENCE:
                    self._settled.add(site)
                continue
            ranks = np.array(union.ranks)[holders]
            alike: dict[tuple[int, int], list[int]] = {}
            groups = self._groups.get(site, [tuple(union.ranks)])
            earlier = {rank: n for n, group in enumerate(groups) for rank in group}
            for rank, value in zip(ranks.tolist(), now[holders].tolist(), strict=True):
                if rank in earlier:
                    alike.setdefault((earlier[rank], value), []).append(rank)
            self._groups[site] = [tuple(group) for group in alike.values() if len(group) > 1]
            self._seen[site] = seen + 1, now
            if seen + 1 == _STEPS:
                self._settled.add(site)
                for group in self._groups[site]:
                    if self._rank in group:
                        self.learned[site] = group

    def remember(self, union: Union, held: Held) -> None:
        """What this rank has held in a step."""
        self._past.append((union, held.hashes))

    def told(self, union: Union, sites: Sequence[Site], held: Held) -> Counts:
        """``[sites, 3 + _PAST]``: of sites that differ, what this rank holds, with whom it is to be the same, whether
        that is certain, and what it held before."""
        rows = np.zeros((len(sites), 3 + _PAST), np.int64)
        for row, site in zip(rows, sites, strict=True):
            row[:3] = held.hashes[union.compared[site]], min(held.peers.get(site, (-1,))), site not in self.learned
            past = [hashes[of.compared[site]] for of, hashes in self._past if site in of.compared]
            row[3 : 3 + len(past)] = past
        return rows


def differing(union: Union, sums: Array) -> list[Site]:
    """The sites of parameters of which peers hold other values. sums: of the first round, ``[3, compared]``.

    Only what was measured at the same place of a step, before an optimizer stepped or at its end, can be compared.
    """
    sites = [site for site, i in union.compared.items() if sums[:2, i].any() and not sums[2, i]]
    return [site for site in sites if kind_of(site.tensor).is_replicated][:_NAMED]


def drifts(union: Union, sites: Sequence[Site], everybodys: Counts) -> tuple[tuple[Drift, ...], tuple[int, int] | None]:
    """everybodys: what `Replicas.told` gave, ``[ranks, sites, 3 + _PAST]``.

    The second: two ranks that are at different steps, where there are some; nothing of theirs has drifted.
    """
    found, apart = [], None
    for n, site in enumerate(sites):
        groups: dict[int, list[int]] = {}
        for place, (there, group, *_) in enumerate(everybodys[:, n].tolist()):
            if (group >= 0 and there > UNUSED) or there < 0:
                groups.setdefault(group, []).append(place)
        for places in groups.values():
            hashes = {place: int(everybodys[place, n, 0]) for place in places}
            decided = vote(hashes)
            if decided is None:
                continue
            first = decided.agree[0]
            ranks, past = tuple(union.ranks[place] for place in decided.others), everybodys[:, n, 3:]
            if all(hashes[each] in past[first] or hashes[first] in past[each] for each in decided.others):
                apart = ranks[0], union.ranks[first]
                continue
            agree, is_certain = len(decided.agree), bool(everybodys[places, n, 2].all())
            found.append(Drift(site, ranks, union.ranks[first], agree, decided.majority, is_certain))
    return tuple(found), apart
