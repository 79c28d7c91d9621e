"""Replicas that have drifted apart: the ranks that are to hold the same, and those that do not. Pure numpy."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hookstats.cluster.packing import UNUSED, Held
from hookstats.cluster.union import Union
from hookstats.numbers.fields import Counts, Site
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.ranks import Drift

_STEPS = 3  # measured ones in which ranks that hold the same have changed alike
_MOST = 1 << 20  # hashes of all ranks that are exchanged while these are found out
_PATIENCE = 50  # measured ones without a change, after which it is no longer waited for one
_BEFORE = 8  # measured steps in which a rank that is behind is known by what others held
PAST = (2 + _BEFORE, 2)  # numbers of a site of which somebody differs, from each rank
_NAMED = 16  # sites of a step of which it is found out who differs


class Vote(NamedTuple):
    """The voters who have what most have, and those who have something else."""

    agree: list[int]
    others: list[int]
    majority: bool  # else nobody knows who is wrong: those agree who have what the first of them has


def vote(have: Mapping[int, Hashable]) -> Vote | None:
    """Compare what each one has. None: all have the same."""
    value, count = Counter(have.values()).most_common(1)[0]
    if count == len(have):
        return None
    majority = 2 * count > len(have)
    if not majority:
        value = have[min(have)]
    agree = sorted(place for place, mine in have.items() if mine == value)
    return Vote(agree, sorted(have.keys() - agree), majority)


class Replicas:
    """The ranks that hold the same where neither a DTensor nor DistributedDataParallel says so.

    They are found by comparing: ranks whose states were equal in three measured steps, in each of which they had
    changed, are replicas. All ranks come to the same conclusions.
    """

    def __init__(self, rank: int) -> None:
        self.learned: dict[Site, tuple[int, ...]] = {}  # this rank's peers, itself among them
        self._rank = rank
        self._seen: dict[Site, list[Counts]] = {}  # hashes of all ranks, of steps in which all had changed
        self._waited: dict[Site, int] = {}  # steps without a change
        self._settled: set[Site] = set()  # learned, or given up
        self._before: deque[tuple[Union, Held]] = deque(maxlen=_BEFORE)  # what this rank has held in the steps before

    def to_learn(self, union: Union) -> list[Site]:
        """Return the sites whose hashes are to be exchanged, a million at most, then the next ones."""
        sites = [site for site in union.unknown if site not in self._settled]
        return sites[: max(1, _MOST // len(union.ranks))]

    def learn(self, union: Union, sites: Sequence[Site], hashes: Counts) -> None:
        """Take the hashes of a step, ``[ranks, sites]``."""
        ranks = np.array(union.ranks)
        for site, now in zip(sites, hashes.T, strict=True):
            holders, seen = (now < 0) | (now > UNUSED), self._seen.setdefault(site, [])
            # Zeros that stay: equal, and no replicas for all that is known.
            if not holders.any() or (seen and (now == seen[-1])[holders].any()):
                self._waited[site] = self._waited.get(site, 0) + 1
                if self._waited[site] >= _PATIENCE:
                    self._settled.add(site)
                continue
            seen.append(now)
            if len(seen) < _STEPS:
                continue
            self._settled.add(site)
            columns = np.stack(self._seen.pop(site))
            has_all = ((columns < 0) | (columns > UNUSED)).all(0)
            peers = ranks[has_all & (columns == columns[:, ranks == self._rank]).all(0)]
            if self._rank in peers and len(peers) > 1:
                self.learned[site] = tuple(peers.tolist())

    def remember(self, union: Union, held: Held) -> None:
        """Keep what this rank has held in a step."""
        self._before.appendleft((union, held))

    def history(self, union: Union, sites: Sequence[Site], held: Held) -> Counts:
        """Return ``[sites, *PAST]`` of sites that differ: with whom this rank is to hold the same, and whether that is
        certain; what it holds, and when it was measured; the same of the steps before, the latest first."""
        rows = np.zeros((len(sites), *PAST), np.int64)
        for row, site in zip(rows, sites, strict=True):
            row[0] = min(held.peers.get(site, (-1,))), site not in self.learned
            for place, (of, each) in enumerate([(union, held), *self._before], start=1):
                if site in of.compared:
                    row[place] = each.hashes[of.compared[site]], each.moments[of.compared[site]]
        return rows


def differing(union: Union, sums: Counts) -> list[Site]:
    """Return the sites of parameters of which peers hold other values. sums: of the first round, ``[2, compared]``.

    Only what was measured at the same place of a step, before an optimizer stepped or at its end, can be compared.
    """
    sites = [site for site, i in union.compared.items() if sums[0, i] and not sums[1, i]]
    return [site for site in sites if kind_of(site.tensor).is_replicated][:_NAMED]


def drifts(union: Union, sites: Sequence[Site], everybodys: Counts) -> tuple[tuple[Drift, ...], tuple[int, int] | None]:
    """Find who has drifted. everybodys: the `Replicas.history` of all ranks, ``[ranks, sites, *PAST]``.

    Also returns two ranks that are at different steps, where there are some; nothing of theirs has drifted.
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
    """Return True where two ranks hold different values because they are at different steps; they have not drifted.

    one, other: ``[1 + _BEFORE, 2]``, what each holds and held, and when. One holds now what the other one held. Or, by
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
