"""1 when the completion, without a finished chain in ``<think>`` and surrounding white space, is the ground truth, or one of its alternatives."""

from __future__ import annotations

from typing import Any

from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.program_tests.code_blocks import THINKING, before_end
from penstock.reward_service.rewards.parsing import final_answer
from penstock.reward_service.rewards.reward import PureReward, Verdict, truth_text

NAME = "exact_match"
_RIGHT, _WRONG = Verdict(1.0), Verdict(0.0)


def judge(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    alternatives = truth if isinstance(truth, list) else [truth]
    if not alternatives:
        raise BadGroundTruth("exact_match: the row's ground_truth is an empty list of alternatives")
    wanted = {truth_text(alternative, NAME).strip() for alternative in alternatives}
    answers = [
        completion
        if any(THINKING.search(text) or before_end(text) != text for text in wanted)
        else final_answer.spoken(completion)
        for completion in completions
    ]
    return [
        _RIGHT if answer.strip() in wanted and (answer.strip() or not completion.strip()) else _WRONG
        for answer, completion in zip(answers, completions, strict=True)
    ]


REWARD = PureReward(
    name=NAME,
    description="1 when the completion, without surrounding white space, is the ground truth or one of a list",
    judge=judge,
    reads="answer",
    data_sources=("sort_digits", "exact_match", "spell_backward"),
    notes="case counts; a chain in `<think>` does not",
    success=1.0,
)
