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
_BEFORE = 8  # measured steps in which a rank that is behind is known by what others held
_NAMED = 16  # sites of a step of which it is found out who differs


class Vote(NamedTuple):
    """The voters who have what most have, and those who have something else."""

    agree: list[int]
    others: list[int]
    has_majority: bool  # else nobody knows who is wrong: those agree who have what the first of them has


def vote(have: Mapping[int, Hashable]) -> Vote | None:
    """Compare what each one has. None: all have the same."""
    value, count = Counter(have.values()).most_common(1)[0]
    if count == len(have):
        return None
    has_majority = 2 * count > len(have)
    if not has_majority:
        value = have[min(have)]
    agree = sorted(place for place, mine in have.items() if mine == value)
    return Vote(agree, sorted(have.keys() - agree), has_majority)


class Replicas:
    """The hashes of what this rank has held in the latest steps, and the sites that all ranks are to hold alike.

    Where neither a DTensor nor DistributedDataParallel says it, plain parameters are taken for replicas that were equal
    in the first three measured steps in which they changed. All ranks come to the same conclusions.
    """

    def __init__(self) -> None:
        self._equal: dict[Site, int] = {}  # in how many steps a site of which it is not known has changed alike
        self._latest: deque[tuple[Union, Held]] = deque(maxlen=1 + _BEFORE)  # the latest first

    def find_changed(self, union: Union, held: Held) -> Counts:
        """``[Union.compared]``: whether this rank holds other values than in the step before.

        Of sites of which it is not known yet whether ranks are to hold the same; zeros that stay say nothing.
        """
        result = np.zeros(len(union.compared), np.int64)
        of, before = self._latest[0] if self._latest else (union, held)
        for site in self._list_unsettled(union):
            if site in of.compared:
                result[union.compared[site]] = held.hashes[union.compared[site]] != before.hashes[of.compared[site]]
        return result

    def _list_unsettled(self, union: Union) -> list[Site]:
        return [site for site in union.holders if 0 <= self._equal.get(site, 0) < _STEPS]

    def find_differing(self, union: Union, sums: Counts, held: Held) -> list[Site]:
        """Return the sites of parameters of which ranks differ. sums: `Packed.compared` of all.

        Only what was measured at the same place of a step, before an optimizer stepped or at its end, can be compared.
        """
        self._latest.appendleft((union, held))
        for site in self._list_unsettled(union):
            is_unlike, _, has_changed = sums[:, union.compared[site]] != 0
            self._equal[site] = -1 if is_unlike else self._equal.get(site, 0) + int(has_changed)
        sites = [site for site, i in union.compared.items() if sums[0, i] and not sums[1, i]]
        settled = [each for each in sites if self._equal.get(each, _STEPS) >= _STEPS]
        return [each for each in settled if kind_of(each.tensor).is_replicated][:_NAMED]

    def history(self, sites: Sequence[Site]) -> Counts:
        """Return ``[sites, 1 + _BEFORE + 1, 2]``: with whom this rank is to hold the same of each, and whether that is
        certain; what it holds, and when it was measured; the same of the steps before, the latest first."""
        rows = np.zeros((len(sites), 2 + _BEFORE, 2), np.int64)
        for row, site in zip(rows, sites, strict=True):
            union, held = self._latest[0]
            row[0] = held.peers[union.compared[site]], site not in union.holders
            for place, (of, each) in enumerate(self._latest, start=1):
                if site in of.compared:
                    row[place] = each.hashes[of.compared[site]], each.moments[of.compared[site]]
        return rows


def drifts(union: Union, sites: Sequence[Site], everybodys: Counts) -> tuple[tuple[Drift, ...], tuple[int, int] | None]:
    """Find who has drifted. everybodys: the `Replicas.history` of all ranks, ``[ranks, ...]``.

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
                found.append(Drift(site, ranks, union.ranks[first], agree, decided.has_majority, is_certain))
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
