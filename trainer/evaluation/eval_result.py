"""The result of an evaluation: accuracy, rewards and pass@k of held-out groups; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.protocol.facts import ScoredGroup
from penstock.trainer.evaluation import success
from penstock.trainer.evaluation.success import SuccessRule


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of one evaluation."""

    step: int
    version: int
    num_prompts: int
    num_samples: int  # completions of each prompt
    accuracy: float | None  # share of correct completions; None: nothing says when one is (`success`)
    reward_mean: float
    pass_at: dict[int, float]  # k -> share of prompts solved by k samples, unbiased; empty without accuracy
    completion_tokens_mean: float
    truncated_share: float  # completions cut off at max_new_tokens
    eval_s: float
    success: str = ""  # what counts as correct, as people read it
    split: str = "eval"  # the source of the prompts

    @property
    def score(self) -> tuple[str, float]:
        """What versions are compared by, as people read it, and its value: the accuracy, else the mean reward."""
        return ("mean reward", self.reward_mean) if self.accuracy is None else (self.success, self.accuracy)

    def score_by(self, metric: str) -> tuple[str, float] | None:
        """Return the score by a named metric, as people read it, and its value; None where it is not measured.

        ``metric`` is accuracy, reward, pass@K, or empty for `score`.
        """
        if not metric:
            return self.score
        if metric == "reward":
            return "mean reward", self.reward_mean
        value = self.accuracy if metric == "accuracy" else self.pass_at.get(int(metric.removeprefix("pass@")))
        return None if value is None else (f"{self.split} {metric}", value)


@dataclass(frozen=True, slots=True)
class LostEvaluation:
    """An evaluation that ended without a result; ``step`` made its version, None if that is no longer known."""

    version: int
    step: int | None
    reason: str
    split: str = "eval"


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of ``k`` samples is correct (unbiased, arXiv 2107.03374)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def summarise(
    groups: Sequence[ScoredGroup], rules: Mapping[str, SuccessRule | None], *, step: int, version: int, eval_s: float
) -> EvalResult:
    """Reduce scored groups, one per prompt, to an evaluation's result; pure. ``rules`` are by group id."""
    rewards = [reward for group in groups for reward in group.rewards]
    tokens = [count for group in groups for count in group.generated.completion_tokens]
    finishes = [reason for group in groups for reason in group.generated.finish_reasons]
    num_samples = min(len(group.rewards) for group in groups)
    correct = success.count_correct(groups, rules)
    by_group = correct.by_group
    ks = [2**i for i in range(num_samples.bit_length())] if num_samples > 1 else []
    return EvalResult(
        step=step,
        version=version,
        num_prompts=len(groups),
        num_samples=num_samples,
        accuracy=None if by_group is None else sum(by_group) / len(rewards),
        reward_mean=sum(rewards) / len(rewards),
        pass_at={k: sum(pass_at_k(num_samples, c, k) for c in by_group) / len(groups) for k in ks} if by_group else {},
        completion_tokens_mean=sum(tokens) / len(tokens),
        truncated_share=finishes.count("length") / len(finishes),
        eval_s=eval_s,
        success=correct.text,
    )
