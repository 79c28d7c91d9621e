"""What goes wrong with a recorded run."""

NO_STEP = "expected a recorded step, got none: monitor.step() was never called, or no measured step is written yet"


class RunError(ValueError):
    """A directory holds something other than a recorded run, or a run that is torn."""


class SchemaError(RunError):
    """A run that another version of hookstats recorded."""
