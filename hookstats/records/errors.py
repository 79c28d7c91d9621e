"""Errors of recorded runs."""

from pathlib import Path

from hookstats._warn import WarnOnce

tell_once = WarnOnce()  # of a file that cannot be read, by its path
NO_STEP = "expected a recorded step, got none: monitor.step() was never called, or no measured step is written yet"


class RunError(ValueError):
    """A directory holds something other than a recorded run, or a run that is torn."""


class SchemaError(RunError):
    """A run that another version of hookstats recorded."""


class Damaged(RunError):
    """A file is not as it was written. From then on it is left out: reading again gives what is whole. ``path``."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path


class LeftOut(RunError):
    """Channels or histograms of a step that was read are damaged: read again, it has its totals alone."""
