"""Short trainings by which the rules are judged; ``python -m benchmarks.illnesses`` prints what is found in each."""

from tests.rules.fleet import ill, unseen, unusual, usual  # they register theirs
from tests.rules.fleet.training import ILL, UNSEEN, UNUSUAL, USUAL, alarms, run, thinned

__all__ = ["ILL", "UNSEEN", "UNUSUAL", "USUAL", "alarms", "ill", "run", "thinned", "unseen", "unusual", "usual"]
