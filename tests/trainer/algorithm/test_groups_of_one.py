"""Which algorithms train on one completion per prompt: refused settings agree with what the estimators compute."""

from __future__ import annotations

import pytest
import torch

from penstock.protocol.config.run_file import load
from penstock.trainer.algorithm.algorithm_settings import RECORDED
from penstock.trainer.algorithm.chosen_parts import ESTIMATORS
from penstock.trainer.algorithm.estimators.interface import Outcomes
from penstock.trainer.settings import TrainerSettings

ONE = ["model.path=m", "rollout.group_size=1"]


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS.built_in) - {"zero"}))  # which reads no reward
def test_exactly_the_group_relative_estimators_give_a_group_of_one_nothing(name: str) -> None:
    """Four prompts with one completion each and different rewards: all advantages are 0, or not."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    lengths = torch.tensor([3, 1, 2, 2])
    outcomes = Outcomes(rewards, torch.arange(4), lengths, torch.full((4,), 0.25), influences=lengths.double())
    estimator = ESTIMATORS.find(name).value
    assert bool((estimator(outcomes) == 0).all()) == estimator.group_relative


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline", "remax", "ppo"])
def test_the_algorithms_that_the_error_names_train_on_groups_of_one(name: str) -> None:
    assert load(TrainerSettings, overrides=[*ONE, f"algorithm.name={name}"]).settings.rollout.group_size == 1


def test_stored_groups_and_recorded_runs_are_not_refused() -> None:
    assert load(TrainerSettings, overrides=[*ONE, "data.from_run=other"]).settings.rollout.group_size == 1
    recorded = {"model": {"path": "m"}, "rollout": {"group_size": 1}}
    assert TrainerSettings.model_validate(recorded, context=RECORDED).rollout.group_size == 1
