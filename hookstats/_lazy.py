"""Names of a module that are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def names_in(homes: Mapping[str, Iterable[str]]) -> list[str]:
    """The public names, in their order."""
    return sorted(name for names in homes.values() for name in names)


def getter(module: str, homes: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module. homes: the names that each module has, or that are modules inside of it."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            known = ", ".join(sorted(home_of))
            raise AttributeError(f"module {module!r} has no attribute {name!r}; expected one of {known}")
        home = import_module(home_of[name])
        value = vars(home)[name] if name in vars(home) else import_module(f"{home.__name__}.{name}")
        vars(import_module(module))[name] = value
        return value

    return get
