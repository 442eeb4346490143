"""Which completions of an evaluation count as correct; without a rule, none do and the mean reward stands for itself."""

from __future__ import annotations

import pytest
from tests.groups import make_generated, make_groups, make_scored

from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.groups import RewardRequest, ScoredGroup
from penstock.protocol.rewards_offered import RewardsOffered
from penstock.trainer.evaluation.eval_result import EvalResult, SuccessRules, summarise

OFFER = RewardsOffered(
    run_id="t", replica="r", at=0.0, names=("exact_match", "gsm8k", "mine"), by_source={"openai/gsm8k": "gsm8k"},
    success={"exact_match": 1.0, "gsm8k": 1.0},
)  # fmt: skip


def scored(*rewards: float, **parts: tuple[float, ...]) -> ScoredGroup:
    (group,) = make_scored(make_generated("t", make_groups(1, size=len(rewards)))).groups
    return group.model_copy(update={"rewards": rewards, "parts": parts})


def result(given: dict[str, object], request: RewardRequest, group: ScoredGroup) -> EvalResult:
    settings = RewardSettings.model_validate({"success": given})
    rules = SuccessRules.make(settings.success, [OFFER])
    return summarise([group], {group.generated.group_id: rules.rule(request)}, step=1, version=1, eval_s=0.0)


def test_a_grader_of_zeros_and_ones_counts_its_ones():
    """A built-in grader needs no setting: correct is the reward of 1; also where the data set chooses the reward."""
    found = result({}, RewardRequest(name="exact_match"), scored(1.0, 0.0, 0.5, 1.0))
    assert (found.accuracy, found.success) == (0.5, "exact_match ≥ 1")
    found = result({}, RewardRequest(name="auto", data_source="openai/gsm8k"), scored(1.0, 1.0))
    assert (found.accuracy, found.success) == (1.0, "gsm8k ≥ 1")


def test_a_reward_of_its_own_scale_has_its_threshold():
    found = result({"mine": 0.5}, RewardRequest(name="mine"), scored(0.9, 0.1, 0.9, 0.9))
    assert (found.accuracy, found.success) == (0.75, "mine ≥ 0.5")
    assert found.pass_at[4] == 1.0


@pytest.mark.parametrize("rewards", [(5.0, 3.0), (0.9, 0.1), (0.5, 0.5)])
def test_without_a_rule_there_is_no_accuracy(rewards: tuple[float, ...]):
    """A length of 5, a reward of 0.9 or weights that sum to 0.5 are no accuracy of 1 or 0: only the mean is reported."""
    found = result({}, RewardRequest(name="mine"), scored(*rewards))
    assert (found.accuracy, found.success, found.pass_at) == (None, "", {})
    assert found.reward_mean == sum(rewards) / 2


def test_weights_that_sum_to_half_are_judged_by_a_part():
    group = scored(0.5, 0.1, 0.4, correct=(1.0, 0.0, 1.0), form=(1.0, 1.0, 0.0))
    assert result({"mine": {"correct": 1.0}}, RewardRequest(name="mine"), group).accuracy == pytest.approx(2 / 3)
    both = result({"mine": {"correct": 1.0, "form": 1.0}}, RewardRequest(name="mine"), group)
    assert (both.accuracy, both.success) == (pytest.approx(1 / 3), "mine.correct ≥ 1 and mine.form ≥ 1")


def test_a_part_that_the_reward_does_not_have_is_named():
    """Nothing is invented for a misspelt part: there is no accuracy, and the text says why."""
    found = result({"mine": {"corect": 1.0}}, RewardRequest(name="mine"), scored(0.5, 0.1, correct=(1.0, 0.0)))
    assert found.accuracy is None
    assert found.success == (
        "unknown: the reward mine has no part corect; its parts are correct; correct reward.success.mine"
    )


def test_a_set_of_several_rewards_needs_a_rule_for_each():
    """Half an accuracy would be none: one reward without a rule leaves the mean reward."""
    first, second = scored(1.0), scored(5.0)
    second = second.model_copy(update={"generated": second.generated.model_copy(update={"group_id": "other"})})
    rules = SuccessRules.make({}, [OFFER])
    by_group = {
        first.generated.group_id: rules.rule(RewardRequest(name="gsm8k")),
        "other": rules.rule(RewardRequest(name="mine")),
    }
    assert summarise([first, second], by_group, step=1, version=1, eval_s=0.0).accuracy is None


def test_the_run_file_has_precedence():
    found = result({"exact_match": 0.5}, RewardRequest(name="exact_match"), scored(0.5, 0.0))
    assert (found.accuracy, found.success) == (0.5, "exact_match ≥ 0.5")
