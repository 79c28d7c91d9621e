"""Selects sites: by globs over names (``*`` crosses dots, "" is the model), and kinds of tensors. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TypeAlias

from hookstats.numbers.fields import Site
from hookstats.numbers.kinds import is_of_kind

Globs: TypeAlias = str | Iterable[str]


def matches(name: str, globs: Iterable[str]) -> bool:
    """Return whether a name matches one of the globs."""
    return any(fnmatchcase(name, glob) for glob in globs)


def as_globs(argument: str, globs: Globs, names: Iterable[str] | None) -> list[str]:
    """Return the globs as a list.

    names: those that there are; None: they are not known yet, see `explain_unmatched`.

    Raises:
        TypeError: for what is no string. ValueError: for a glob that matches no name.
    """
    listed = [globs] if isinstance(globs, str) else list(globs) if isinstance(globs, Iterable) else [globs]
    for glob in listed:
        if not isinstance(glob, str):
            raise TypeError(f"{argument}: expected globs over names, got {glob!r}")
    problem = None if names is None else explain_unmatched(argument, listed, names)
    if problem is not None:
        raise ValueError(problem)
    return listed


def explain_unmatched(argument: str, globs: Iterable[str], names: Iterable[str]) -> str | None:
    """Say which globs match none of the names; None: each matches one."""
    known = list(dict.fromkeys(names))
    lost = [glob for glob in globs if not any(fnmatchcase(name, glob) for name in known)]
    if not lost:
        return None
    listed, some = (", ".join(map(repr, each)) for each in (lost, known[:8]))
    which = f"the glob {listed} matches" if len(lost) == 1 else f"the globs {listed} match"
    return f"{argument}: {which} nothing; the names are {some}, ..."


def choose(
    where: str, known: Iterable[Site], names: Globs = "*", tensors: str | Iterable[str] | None = None
) -> set[Site]:
    """Return the sites whose name matches one of the globs, and whose tensor is of one of these kinds.

    tensors: None: of any; "output" takes "output.0" as well. where: the function whose arguments these are.

    Raises:
        TypeError: for what is no string. ValueError: for a glob or a kind that no site has.
    """
    sites = list(known)
    globs = as_globs(f"{where}: names", names, [site.name for site in sites])
    if not isinstance(tensors, Iterable | None):
        raise TypeError(f"{where}: tensors: expected kinds of tensors, or None for all; got {tensors!r}")
    kinds = None if tensors is None else [tensors] if isinstance(tensors, str) else list(tensors)
    for kind in kinds or ():
        if not isinstance(kind, str) or not any(is_of_kind(site.tensor, kind) for site in sites):
            some = ", ".join(dict.fromkeys(site.tensor for site in sites))
            error = ValueError if isinstance(kind, str) else TypeError
            raise error(f"{where}: tensors: expected some of {some}; got {kind!r}")
    return {
        site
        for site in sites
        if matches(site.name, globs) and (kinds is None or any(is_of_kind(site.tensor, kind) for kind in kinds))
    }
