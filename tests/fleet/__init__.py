"""A fleet of short trainings by which the rules are judged; ``python -m tests.fleet`` prints what is said of each."""

from tests.fleet import ill, unseen, unusual, usual  # they register theirs
from tests.fleet.training import ILL, UNSEEN, UNUSUAL, USUAL, alarms, run, thinned

__all__ = ["ILL", "UNSEEN", "UNUSUAL", "USUAL", "alarms", "ill", "run", "thinned", "unseen", "unusual", "usual"]
