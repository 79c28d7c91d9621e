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
        self._past: deque[tuple[Union, Held]] = deque(maxlen=_PAST)  # what this rank has held in the steps before

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
        self._past.appendleft((union, held))

    def told(self, union: Union, sites: Sequence[Site], held: Held) -> Counts:
        """``[sites, 2 + _PAST, 2]``: of sites that differ, with whom this rank is to hold the same, and whether that is
        certain; what it holds, and when it was measured; the same of the steps before, the latest first."""
        rows = np.zeros((len(sites), 2 + _PAST, 2), np.int64)
        for row, site in zip(rows, sites, strict=True):
            row[0] = min(held.peers.get(site, (-1,))), site not in self.learned
            for place, (of, each) in enumerate([(union, held), *self._past], start=1):
                if site in of.compared:
                    row[place] = each.hashes[of.compared[site]], each.moments[of.compared[site]]
        return rows


def differing(union: Union, sums: Array) -> list[Site]:
    """The sites of parameters of which peers hold other values. sums: of the first round, ``[3, compared]``.

    Only what was measured at the same place of a step, before an optimizer stepped or at its end, can be compared.
    """
    sites = [site for site, i in union.compared.items() if sums[:2, i].any() and not sums[2, i]]
    return [site for site in sites if kind_of(site.tensor).is_replicated][:_NAMED]


def drifts(union: Union, sites: Sequence[Site], everybodys: Counts) -> tuple[tuple[Drift, ...], tuple[int, int] | None]:
    """everybodys: what `Replicas.told` gave, ``[ranks, sites, 2 + _PAST, 2]``.

    The second: two ranks that are at different steps, where there are some; nothing of theirs has drifted.
    """
    found, apart = [], None
    for n, site in enumerate(sites):
        groups: dict[int, list[int]] = {}
        for place, ((group, _), (there, _)) in enumerate(everybodys[:, n, :2].tolist()):
            if (group >= 0 and there > UNUSED) or there < 0:
                groups.setdefault(group, []).append(place)
        for places in groups.values():
            decided = vote({place: int(everybodys[place, n, 1, 0]) for place in places})
            if decided is None:
                continue
            first, *_ = decided.agree
            behind = [each for each in decided.others if _are_apart(everybodys[first, n, 1:], everybodys[each, n, 1:])]
            if behind:
                apart = union.ranks[behind[0]], union.ranks[first]
            if ranks := tuple(union.ranks[place] for place in decided.others if place not in behind):
                agree, is_certain = len(decided.agree), bool(everybodys[places, n, 0, 1].all())
                found.append(Drift(site, ranks, union.ranks[first], agree, decided.majority, is_certain))
    return tuple(found), apart


def _are_apart(one: Counts, other: Counts) -> bool:
    """Whether two ranks that hold different values are at different steps: nothing says that they have drifted.

    one, other: ``[1 + _PAST, 2]``, what each holds and held, and when. One holds now what the other one held. Or, by
    the number of optimizers' steps, they were measured at different moments, and held the same at the latest that both
    know, if any: one has closed fewer steps than it trained.
    """
    (here, at), (there, then) = one[0].tolist(), other[0].tolist()
    if here in other[1:, 0] or there in one[1:, 0]:
        return True
    held = dict(one[::-1, ::-1].tolist())
    common = [(moment, hash_, held[moment]) for hash_, moment in other.tolist() if moment in held and hash_]
    latest = max(common, default=None)
    return at != then and (latest is None or latest[1] == latest[2])
