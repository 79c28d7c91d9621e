"""What goes wrong with a recorded run."""


class RunError(ValueError):
    """A directory holds something else than a recorded run, or one that is torn."""


class SchemaError(RunError):
    """A run that another version of hookstats recorded."""
