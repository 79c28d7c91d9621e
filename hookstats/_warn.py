"""Warnings for users while training goes on, which never stop it. Knows nothing of torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable

_log = logging.getLogger("hookstats")


def warn(text: str) -> None:
    """A warning, also where warnings are made errors: a training run must not die of what it is told."""
    try:
        warnings.warn(f"hookstats: {text}", stacklevel=3)
    except UserWarning:
        _log.warning(text)


class WarnOnce:
    """The first warning of each thing only.

    A thing is told by what can be hashed, such as a name: an object of somebody else (a sink, a recorder) by its id, as
    it may compare with others in any way.
    """

    def __init__(self) -> None:
        self._told: set[Hashable] = set()

    def __call__(self, what: Hashable, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warn(text)
