"""What goes wrong with a recorded run."""


class RunError(ValueError):
    """A directory holds something other than a recorded run, or a run that is torn."""


class SchemaError(RunError):
    """A run that another version of hookstats recorded."""
