"""Faults of the Python package, by its rooms."""

from __future__ import annotations

from tests.mutations import Mutant

MUTANTS = [
    Mutant(
        "m2 of merged parts lacks what lies between their means",
        "hookstats/numbers/fields.py",
        'cut.sum(parts.m2 + parts.count * (parts.mean - cut.spread(whole["mean"])) ** 2)',
        "cut.sum(parts.m2)",
        "tests/numbers",
    ),
    Mutant(
        "an illness that goes on is reported at every step",
        "hookstats/rules/judging.py",
        "self.verdicts - known.last > _ENDED",
        "self.verdicts > known.last",
        "tests/rules/test_telling.py -k illness",
    ),
]
