"""What users are told while training goes on: warnings, which never stop it. Knows nothing of torch."""

from __future__ import annotations

import logging
import warnings

_log = logging.getLogger("hookstats")


def warn(text: str) -> None:
    """A warning, also where warnings are made errors: a training run must not die of what it is told."""
    try:
        warnings.warn(f"hookstats: {text}", stacklevel=3)
    except UserWarning:
        _log.warning(text)


class WarnOnce:
    """The first warning of each thing only."""

    def __init__(self) -> None:
        self._told: list[object] = []

    def __call__(self, what: object, text: str) -> None:
        if what not in self._told:
            self._told.append(what)
            warn(text)
