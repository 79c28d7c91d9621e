"""Trainings that are broken as people break them, and healthy ones: what the rules say of each.

``python -m benchmarks.illnesses`` prints the table; see benchmarks/README.md.
"""

from benchmarks.illnesses import (  # noqa: F401, they register theirs
    counted,
    healthy,
    ill,
    more,
    more_healthy,
    public_healthy,
    public_mistakes,
    spikes,
    twins,
    unseen,
    unusual,
    usual,
)
from benchmarks.illnesses.judging import alarms, diagnosis, thinned
from benchmarks.illnesses.training import HEALTHY, ILL, KINDS, Training, seed

__all__ = ["HEALTHY", "ILL", "KINDS", "Training", "alarms", "diagnosis", "seed", "thinned"]
