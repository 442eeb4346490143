"""How maj@k finds the answer of a completion: as the reward reads it, or where --answer says."""

from __future__ import annotations

import pytest

from penstock.console.evaluation_results import Answers, Outcome
from penstock.deploy.evaluation.prepare import BY_REWARD, answer_rule, check_answer_place
from penstock.protocol.errors import ConfigError
from penstock.reward_service.registry.built_in import BUILT_INS

ONE = Outcome(prompt=0, source="s", reward="r")


def extracted(found: Answers, text: str) -> object:
    assert found.extract is not None
    extract = found.extract(ONE)
    assert extract is not None
    return extract(text)


@pytest.mark.parametrize(
    ("reward", "same", "other"),
    [
        ("gsm8k", ("so #### 1,200", "#### 1200.0"), "#### 1201"),
        ("gsm8k_flexible", ("it is 7", "7.0 it is"), "8"),
        ("math", ("\\boxed{ x + 1 }", "thus \\boxed{x+1}"), "\\boxed{x+2}"),
        ("multiple_choice", ("the answer is (B)", "B. Paris"), "C"),
        ("exact_match", (" 12 ", "12"), "1 2"),
    ],
)
def test_a_reward_reads_equal_answers_as_equal(reward: str, same: tuple[str, str], other: str) -> None:
    found = answer_rule(None, lambda _: reward, {reward})
    assert extracted(found, same[0]) == extracted(found, same[1]) != extracted(found, other)
    assert found.rule == f"{reward}: {BY_REWARD[reward][0]}"


def test_a_completion_without_an_answer_has_none() -> None:
    assert extracted(answer_rule(None, lambda _: "gsm8k", {"gsm8k"}), "no idea") is None
    assert extracted(answer_rule("tags", lambda _: "r", {"r"}), "no idea") is None


def test_a_reward_without_answers_has_no_majority() -> None:
    found = answer_rule(None, lambda _: "length", {"length", "gsm8k"})
    assert found.extract is None
    assert found.rule.startswith("not defined: the reward length does not say what the answer")
    assert "--answer (auto, boxed," in found.rule
    assert extracted(answer_rule("last_number", lambda _: "length", {"length"}), "1 then 2") == 2


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="--answer middle: expected one of auto, boxed"):
        check_answer_place("middle")


def test_the_rewards_with_answers_exist() -> None:
    assert BY_REWARD.keys() <= BUILT_INS.keys()
