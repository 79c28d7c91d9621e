"""Both sides of identities compared: whether rounding explains their difference, or a wrong gradient. Pure numpy."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from hookstats.numbers.fields import Array

KIND = "identity"
SIDES = ("left", "right")
ROUNDING = "rounding"  # beside the sides: the variance that rounding gives to the difference of both
LARGEST_Z = 8.0  # healthy: 1.5 at most, 6.7 where the output between both sides was not measured
MANY = 4  # identities, of which more than half are broken by something else than a wrong gradient
_LEFT_OVER = 0.3  # of a difference, where a single parameter is said to explain it
_DEPENDENT = 0.02  # of a side, by which sums may miss that each parameter has a factor of its own

Named = tuple[str, Array]  # a parameter and its sums of weight * gradient, of each group


def tensor_of(number: int, part: str) -> str:
    """Return the tensor of a site: of one side of an identity, or of what rounding explains."""
    return f"{KIND}.{number}.{part}"


def deviations(residuals: Array, variances: Array) -> Array:
    """Return z: the differences of both sides over the standard deviation that rounding gives them; NaN: not known."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(residuals == 0, 0.0, abs(residuals) / np.sqrt(variances))


def residual_of(left: Sequence[Named], right: Sequence[Named]) -> Array:
    """Return the difference of both sides, of each group."""
    difference: Array = np.sum([sums for _, sums in left], axis=0) - np.sum([sums for _, sums in right], axis=0)
    return difference


def relative_of(left: Sequence[Named], right: Sequence[Named]) -> float:
    """Return the largest difference over the largest sum of both sides."""
    size = max(float(abs(np.sum([sums for _, sums in side], axis=0)).max()) for side in (left, right))
    return float(abs(residual_of(left, right)).max()) / size


def suspects(
    left: Sequence[Named], right: Sequence[Named], cleared: Collection[str] = ()
) -> tuple[tuple[str, float], ...]:
    """Find the parameters of which a single one explains the difference, each with the factor that its gradient has.

    cleared: those that another identity holds; they are named where nothing else explains it.
    """
    lost = [(name, 0.0) for name, sums in (*left, *right) if not sums.any()]
    if lost:  # nothing else need be wrong
        return tuple(lost)
    residual = residual_of(left, right)
    found = list[tuple[float, str, float]]()
    for sign, side in ((1.0, left), (-1.0, right)):
        for name, own in side:
            share = float(residual @ own / (own @ own))
            rest = float(np.linalg.norm(residual - share * own) / np.linalg.norm(residual))
            if rest < _LEFT_OVER and abs(1 - sign * share) > 1e-6:
                found.append((rest, name, 1 / (1 - sign * share)))
    found = [each for each in found if each[1] not in cleared] or found
    best = min((rest for rest, *_ in found), default=0.0)
    return tuple((name, factor) for rest, name, factor in found if rest <= best + 1e-3)


def slope_of(left: Sequence[Named], right: Sequence[Named], variances: Array) -> tuple[float, float]:
    """Return the share by which the left side is larger than the right one, and that over what rounding gives to it."""
    whole = np.sum([sums for _, sums in (*left, *right)], axis=0) / 2
    power = float(whole @ whole)
    if not power > 0:
        return 0.0, 0.0
    share = float(residual_of(left, right) @ whole) / power
    deviation = float(np.sqrt(variances @ whole**2)) / power
    return share, abs(share) / deviation if deviation > 0 else 0.0


def has_own_factors(left: Sequence[Named], right: Sequence[Named]) -> bool:
    """Return whether both sides agree if each parameter's gradient is divided by a number of its own.

    So it is where each gradient is clipped by its own norm; single wrong gradients look so, too.
    """
    terms = np.stack([sums for _, sums in (*left, *right)])
    sizes = np.linalg.norm(terms, axis=1)
    if terms.shape[1] < 2 * len(terms) or not sizes.all():
        return False
    singular = np.linalg.svd(terms / sizes[:, None], compute_uv=False)
    return bool(singular[-1] < _DEPENDENT * singular[0])
