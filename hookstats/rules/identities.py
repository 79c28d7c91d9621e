"""A law: sums of weight times gradient that a network's symmetries make equal, on both sides of a layer's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hookstats.numbers.fields import FIELDS, Array, Counts
from hookstats.numbers.identities import (
    MANY,
    ROUNDING,
    SIDES,
    Named,
    deviations,
    has_own_factors,
    relative_of,
    slope_of,
    suspects,
)
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number, times
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step

_MEAN = FIELDS.index("mean")
_MOST_NAMED = 3  # parameters of a side


class _Identity(NamedTuple):
    """The ids of its sites."""

    left: list[int]
    right: list[int]
    rounding: int

    @property
    def sites(self) -> list[int]:
        return [*self.left, *self.right]


class _Compared(NamedTuple):
    """Both sides of an identity in a step."""

    identity: _Identity
    z: Array  # of each of its sums
    variance: Array  # of their difference, by rounding
    left: list[Named]
    right: list[Named]


@rule(of="identity", depth=3, law="identity")
def identity(
    step: Step,
    memory: Memory,
    deviation: float = 8.0,
    single: float = 64.0,
    consecutive_steps: int = 2,
    share: float = 0.005,
    share_consecutive_steps: int = 3,
) -> list[Ill] | None:
    """Gradients contradict a symmetry of the network (critical if they agreed before, or warning).

    Needs ``Options(identities=hookstats.find_identities(model, forward))``. Multiply a channel of a layer's output, and
    divide the columns that read it by the same: the network computes the same. So the sum of weight times gradient over
    the one equals that over the other, whatever the loss and the data (Kunin et al., arXiv 2012.04728). Their
    difference is compared with what rounding explains: that of each product, and of the sums over tokens in between. It
    is told where it is more than ``deviation`` = 8 times that in ``consecutive_steps`` = 2 measured steps in a row, or
    more than ``single`` = 64 times in one; or where all sums of one side are larger by more than ``share`` = 0.5 %, and
    8 times what rounding explains of that, in ``share_consecutive_steps`` = 3 measured steps in a row. Where a single
    parameter's gradient explains it, that is named with its factor. More than half of all identities broken at once is
    one finding: gradients are changed after backward, parameter by parameter. The theory is published; the figures are
    ours: healthy trainings reach 5.

    What else looks like it: by design, a loss of more than what the model returns, such as a penalty on hidden values
    or on weights; clipping by value, or each gradient by its own norm; gradient noise;
    ``Options(laws={"identity": False})`` declares it. What to do: look at the reductions over ranks of the parameters
    that are named, and at the backward of the kernels between them; docs/identities.md says what each identity sees.

    False-positive guards: only what was proved of this model. Nothing is judged where a gradient is not finite or
    frozen, a parameter was changed since its forward, some of an identity's parameters have no gradient yet, or not all
    ranks that hold a part of it were measured. Wrong gradients that keep the symmetry are not seen.
    """
    if not step.is_of_all_ranks:
        return None
    found = compare(step)
    if not found:
        return None
    largest = np.array([float(each.z.max()) for each in found])
    broken = largest > deviation
    latest = memory.keep_by_site("latest", np.nan)  # of all identities: a step may bring some of them
    latest[[each.identity.left[0] for each in found]] = largest
    count, total = (int(np.count_nonzero(each)) for each in (latest > deviation, ~np.isnan(latest)))
    is_of_all = 2 * count > total >= MANY

    larger, smaller = (np.zeros(len(step.sites), bool) for _ in range(2))
    shares = np.full(len(step.sites), np.nan)
    held = memory.keep_by_site("held", False)  # once, in the run
    where, far, judged = (np.zeros(len(step.sites), bool) for _ in range(3))
    value = np.full(len(step.sites), np.nan)
    by_site: dict[int, _Compared] = {}
    fits = [each.identity for each, off in zip(found, broken, strict=True) if not off]
    fitting = {step.sites[site].name for each in fits for site in each.sites}
    for each, z in zip(found, largest.tolist(), strict=True):
        site = each.identity.left[0]
        by_site[site], judged[site], value[site] = each, True, z
        if not is_of_all:
            far[site] = z > single
            where[site] = z > deviation and not far[site]
            if z <= deviation:
                shares[site], size = slope_of(each.left, each.right, each.variance)
                larger[site] = shares[site] > share and size > deviation
                smaller[site] = shares[site] < -share and size > deviation
    held |= judged & ~(value > deviation)

    def say(site: int, since: int) -> str:
        return _say_break(step, by_site[site], deviation, fitting, since)

    def say_share(site: int, since: int) -> str:
        left, right = _name_sides(by_site[site])
        more = "larger" if shares[site] > 0 else "smaller"
        return (
            f"the gradients of {left} and {right} do not fit together, since step {since}: weight times gradient is "
            f"{abs(shares[site]):.1%} {more} over the one than over the other, in all sums alike. "
            f"{_say_suspects(by_site[site], fitting)}"
            "Check what scales one of these gradients, and sums in low precision."
        )

    severity = np.where(held, "critical", "warning")

    def say_of_all(_: None, since: int) -> str:
        return (
            f"the gradients of {count} of {total} identities do not fit together, since step {since}: they are "
            "changed after backward, parameter by parameter. "
        ) + (
            "Each has a factor of its own, as when each parameter's gradient is clipped by its own norm: that breaks "
            'identities by design, and Options(laws={"identity": False}) declares it; monitor.measure_gradients() '
            "before clipping measures what backward computed."
            if all(has_own_factors(e.left, e.right) for e, off in zip(found, broken, strict=True) if off)
            else "Look for clipping by value, gradient noise, centralisation, or hooks on parameters. If these are "
            "intended, call monitor.measure_gradients() before them."
        )

    return [
        Ill(far, say, value, single, severity, judged, 0),
        Ill(where, say, value, deviation, severity, judged & ~far, consecutive_steps, key="slight"),
        Ill(larger, say_share, shares, share, "warning", judged, share_consecutive_steps, key="larger"),
        Ill(smaller, say_share, shares, -share, "warning", judged, share_consecutive_steps, key="smaller"),
        Ill(is_of_all, say_of_all, count / total, 0.5, steps=consecutive_steps, key="all"),
    ]


def list_identities(step: Step) -> list[_Identity]:
    """Return the identities whose sites the run has shown."""
    by_number: dict[str, Mapping[str, list[int]]] = {}
    for site in np.flatnonzero(step.is_kind("identity")).tolist():
        _, of, part = step.sites[site].tensor.split(".")
        by_number.setdefault(of, {name: [] for name in (*SIDES, ROUNDING)})[part].append(site)
    return [
        _Identity(parts["left"], parts["right"], parts[ROUNDING][0])
        for parts in by_number.values()
        if parts["left"] and parts["right"] and parts[ROUNDING]
    ]


def compare(step: Step) -> list[_Compared]:
    """Return the identities of which all sites fired with finite sums."""
    fired = step.calls > 0
    if step.has_nonfinite:
        fired &= step.nonfinite == 0
    found = []
    for each in step.make_for_sites(list_identities):
        if not all(fired[site] for site in (*each.sites, each.rounding)):
            continue
        sides, variance = _read_sums(step, each)
        residual = np.sum(sides[0], axis=0) - np.sum(sides[1], axis=0)
        z = deviations(residual, variance)
        named = [
            [(step.sites[site].name, sums) for site, sums in zip(sites, side, strict=True)]
            for sites, side in zip((each.left, each.right), sides, strict=True)
        ]
        found.append(_Compared(each, z, variance, *named))
    return found


def _read_sums(step: Step, each: _Identity) -> tuple[list[list[Array]], Array]:
    """Return the sums of each side, and the variance of their difference: by groups, or of all groups together.

    Ranks bring numbers whose mean is that of the whole.
    """
    states = [step.state(site) for site in (*each.sites, each.rounding)]
    if all(state is not None for state in states):
        means = [state[_MEAN] for state in states if state is not None]
        variance = means[-1]
    else:  # channels were not sent: the mean over groups
        means = [step.totals.mean[site : site + 1] for site in (*each.sites, each.rounding)]
        groups = step.totals.count[each.rounding] / step.calls[each.rounding]
        variance = means[-1] / groups
    count = len(each.left)
    return [means[:count], means[count:-1]], variance


def _say_break(step: Step, each: _Compared, deviation: float, fitting: set[str], since: int) -> str:
    left, right = _name_sides(each)
    which = f" in {_say_which(np.flatnonzero(each.z > deviation), len(each.z))}" if len(each.z) > 1 else ""
    sentence = (
        f"the gradients of {left} and {right} do not fit together, since step {since}: weight times gradient differs "
        f"between them{which} by {number(relative_of(each.left, each.right))} of its size, {number(each.z.max())} "
        "times what rounding explains. "
    )
    found = suspects(each.left, each.right, fitting)
    if not found:
        return sentence + "Check reductions over ranks, and the backward of the kernels between them."
    sentence += _say_suspects(each, fitting)
    counts = [1 / factor for _, factor in found if factor > 0]
    ranks = [round(count) for count in counts if abs(count - round(count)) < 0.01 * count]
    if any(1 < count <= step.ranks and step.ranks % count == 0 for count in ranks):
        return sentence + "Its sum over the ranks fits: an all-reduce is missing, as of norms in sequence parallelism."
    return sentence + "Check reductions over ranks of these, and the backward of what computes them."


def _say_which(off: Counts, count: int) -> str:
    """Say which sums, of those that are read."""
    if 1 < len(off) == off[-1] - off[0] + 1 < count:
        return f"the sums {off[0]} to {off[-1]} of {count}"
    return f"the sum {off[0]} of {count}" if len(off) == 1 else f"{len(off)} of {count} sums"


def _say_suspects(each: _Compared, fitting: set[str]) -> str:
    """Name the parameters of which a single one explains the difference."""
    said = [_say_factor(name, factor) for name, factor in suspects(each.left, each.right, fitting)[:2]]
    return f"T{', or '.join(said)[1:]}. " if said else ""


def _say_factor(name: str, factor: float) -> str:
    if not factor:
        return f"the gradient of {name} is 0"
    return f"the gradient of {name} looks {number(factor)} times as large as it should be"


def _name_sides(each: _Compared) -> tuple[str, str]:
    left, right = (_join_names([name for name, _ in side]) for side in (each.left, each.right))
    return left, right


def _join_names(names: list[str]) -> str:
    shown = " + ".join(names[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown} + {times(len(names) - _MOST_NAMED, 'other')}"
