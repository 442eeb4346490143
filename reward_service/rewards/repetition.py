"""A punishment of repetition: ``factor`` times the share of n-grams of words that repeat an earlier one.

TRL's `get_repetition_penalty_reward` on words in place of tokens; 0 for a completion too short to have an n-gram.
Linear in the completion. No ground truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.rewards.parsing.final_answer import words
from penstock.reward_service.rewards.reward import PureReward, Verdict

NAME = "repetition"


class Parameters(Section):
    ngram: int = Field(default=3, ge=1, le=64, description="Number of words in an n-gram.")
    factor: float = Field(
        default=-1.0, ge=-1e3, lt=0.0, description="The reward for a completion in which all n-grams repeat."
    )


def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    shares = [repeated_share(words(text), parameters.ngram) for text in completions]
    return [Verdict(parameters.factor * share if share else 0.0, {"repeated": share}) for share in shares]


def repeated_share(tokens: Sequence[object], ngram: int) -> float:
    """Return the share of n-grams that repeat an earlier one, in [0, 1)."""
    total = len(tokens) - ngram + 1
    if total < 1:
        return 0.0
    distinct = set(zip(*(tokens[start : start + total] for start in range(ngram)), strict=True))
    return 1.0 - len(distinct) / total


REWARD = PureReward(
    name=NAME,
    description="factor times the share of n-grams of words that repeat an earlier one, in (factor, 0]",
    judge=judge,
    parameters=Parameters,
    parts=("repeated",),
    notes="code and tables repeat for good reasons",
)
