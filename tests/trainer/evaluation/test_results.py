"""What is made of results: which answers are correct, by what versions are compared, and when a run ends early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.groups import make_generated, make_groups, make_scored

from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.groups import RewardRequest, ScoredGroup
from penstock.protocol.rewards_offered import RewardsOffered
from penstock.trainer.data_settings import BestBy, EvalSettings, EvalSource
from penstock.trainer.evaluation.eval_result import EvalResult, SuccessRules, summarise
from penstock.trainer.evaluation.evaluation_schedule import EarlyStop, stored_scores

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


DATA = [Path("x.jsonl")]


def test_a_run_ends_after_so_many_evaluations_without_a_better_result() -> None:
    """Equal is not better; a better one starts the count again; the reason names both steps."""
    stop = EarlyStop(2)
    for step, score in ((0, 0.1), (4, 0.3), (8, 0.3), (12, 0.4), (16, 0.2)):
        stop.add(step, "aime pass@8", score)
        assert stop.ended is None
    stop.add(20, "aime pass@8", 0.4)
    end = stop.ended
    assert end is not None
    assert (end.step, end.best_step, end.best, end.evaluations) == (20, 12, 0.4, 2)
    assert end.text == (
        "ended early: the last 2 evaluations, up to step 20, were not better than 0.4 (aime pass@8) of step 12"
    )


def test_without_a_limit_a_run_never_ends_early() -> None:
    stop = EarlyStop(0, [(step, 0.0) for step in range(50)])
    assert (stop.ended, stop.document()) == (None, None)


def test_a_repeated_evaluation_counts_once() -> None:
    stop = EarlyStop(2, [(0, 0.5), (4, 0.4)])
    stop.add(4, "m", 0.3)
    assert stop.ended is None
    stop.add(8, "m", 0.3)
    assert stop.ended is not None


def test_a_resumed_session_counts_the_evaluations_before_it(tmp_path: Path) -> None:
    """By the source and the metric that decide; other rows and torn lines are left out."""
    rows = [
        {"kind": "eval", "split": "eval", "step": 0, "accuracy": 0.5, "reward_mean": 1.0, "pass_at": {"4": 0.7}},
        {"kind": "eval", "split": "other", "step": 0, "accuracy": 0.9},
        {"kind": "step", "step": 1, "reward_mean": 0.1},
        {"kind": "eval", "split": "eval", "step": 4, "accuracy": None, "reward_mean": 2.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "ev')
    assert list(stored_scores(path, BestBy("eval"))) == [(0, 0.5), (4, 2.0)]
    assert list(stored_scores(path, BestBy("eval", "accuracy"))) == [(0, 0.5)]
    assert list(stored_scores(path, BestBy("eval", "reward"))) == [(0, 1.0), (4, 2.0)]
    assert list(stored_scores(path, BestBy("eval", "pass@4"))) == [(0, 0.7)]
    assert list(stored_scores(tmp_path / "none", BestBy("eval"))) == []


def test_versions_are_compared_by_the_named_metric() -> None:
    result = EvalResult(
        step=1, version=1, num_prompts=2, num_samples=4, accuracy=0.25, reward_mean=0.3, pass_at={4: 0.5},
        completion_tokens_mean=1.0,
        truncated_share=0.0, eval_s=1.0, success="r ≥ 1", split="aime",
    )  # fmt: skip
    assert result.score_by("") == ("r ≥ 1", 0.25)
    assert result.score_by("accuracy") == ("aime accuracy", 0.25)
    assert result.score_by("reward") == ("mean reward", 0.3)
    assert result.score_by("pass@4") == ("aime pass@4", 0.5)
    assert result.score_by("pass@8") is None


def test_a_source_has_its_own_settings_and_those_of_eval() -> None:
    settings = EvalSettings(
        every=5, temperature=0.5, source={"aime": EvalSource(data=DATA, every=20, samples=8, max_new_tokens=99)}
    )
    aime = settings.of("aime")
    assert (aime.every, aime.samples, aime.temperature, aime.max_new_tokens) == (20, 8, 0.5, 99)
    assert settings.of("eval") is settings
    assert settings.names(has_data_eval=True) == ["eval", "aime"]
    assert settings.best(has_data_eval=True) == BestBy("eval")
    assert settings.best(has_data_eval=False) == BestBy("aime")
    assert EvalSettings().best(has_data_eval=False) is None
