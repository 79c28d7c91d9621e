"""A rule is a dataclass of thresholds and windows, which are looked at when it is made."""

from __future__ import annotations

import dataclasses
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

__all__ = ["rule"]

_MOST = 2**31 - 1

if TYPE_CHECKING:
    from dataclasses import dataclass as rule
else:

    def rule(cls: type) -> type:
        """As `dataclasses.dataclass`. ValueError, when one is made, for a field that is no number of its type."""
        after = getattr(cls, "__post_init__", None)

        def __post_init__(self: Any) -> None:
            for each in dataclasses.fields(self):
                if each.init:
                    _check(f"{cls.__name__}: {each.name}", each.type, getattr(self, each.name))
            if after is not None:
                after(self)

        cls.__post_init__ = __post_init__
        return dataclasses.dataclass(cls)


def _check(where: str, kind: object, value: object) -> None:
    """kind: as it is annotated, "int" or "float"; others are the rule's own affair."""
    is_number = isinstance(value, Integral if kind == "int" else Real) and not isinstance(value, bool)
    if kind == "int" and not (is_number and 0 <= value <= _MOST):  # type: ignore[operator]
        raise ValueError(f"{where}: expected an int from 0 to {_MOST}, got {value!r}")
    if kind == "float" and not (is_number and value == value):
        raise ValueError(f"{where}: expected a number, got {value!r}")
