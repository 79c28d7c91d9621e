"""Trainings of the fleet: healthy ones give no warning and ill ones are found, at every step and at every tenth.

Of those that are much alike one is here, and none that test_illnesses.py has. All: ``python -m benchmarks.illnesses``.
"""

from __future__ import annotations

import pytest

from hookstats.rules import judge
from tests.rules import fleet

USUAL = ["mlp_adam", "gpt_adamw", "autoencoder", "logistic_regression_adagrad", "batches_of_four"]
UNUSUAL = [
    "warm_restarts", "muon_like", "task_added", "dqn", "curriculum", "policy_gradient",
    "normalising_flow_that_keeps_volumes", "cauchy_losses", "sparse_embeddings",
]  # fmt: skip
ILL = [
    "jump_of_a_language_model", "spike_of_the_learning_rate", "labels_that_are_random_in_one_batch",
    "weights_that_a_bit_has_flipped", "nan_by_the_loss",
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", [*USUAL, *UNUSUAL])
def test_a_healthy_training_gives_no_warning(name: str) -> None:
    snapshots = fleet.run((fleet.USUAL | fleet.UNUSUAL)[name])
    assert fleet.alarms(snapshots) == []
    assert fleet.alarms(fleet.thinned(snapshots, 10)) == []


# One loss, 1.17 times the first ones, that comes back in the next step: so does that of a noisy batch. Whether outputs
# changed with it is known only where the step was measured; a note, otherwise.
ONLY_MEASURED = {"weights_that_a_bit_has_flipped"}


@pytest.mark.parametrize("name", ILL)
def test_an_ill_training_is_found(name: str) -> None:
    make, rules = fleet.ILL[name]
    snapshots = fleet.run(make)
    assert {each.rule for each in judge(snapshots) if each.severity != "note"} & rules
    thinned = judge(fleet.thinned(snapshots, 10))
    assert {each.rule for each in thinned if each.severity != "note" or name in ONLY_MEASURED} & rules
