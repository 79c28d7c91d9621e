"""Numbers and tensors as a person says them."""

from __future__ import annotations

from hookstats.numbers.fields import Site
from hookstats.numbers.kinds import kind_of


def tensor_of(site: Site) -> str:
    """ "the gradient of the output of layers.3.mlp"."""
    part = site.tensor.partition(".")[2]
    return kind_of(site.tensor).one.format(f" {part}" if part else "", site.name or "the model")


def number(value: float) -> str:
    """Counts and what is large with all digits before the point, others with three."""
    if abs(value) < 1e9 and (abs(value) >= 1000 or float(value).is_integer()):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share of 1 in percent, with two digits."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.4g} %"


def times(count: int, what: str) -> str:
    """ "1 channel", "2 channels"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
