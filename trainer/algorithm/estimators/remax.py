"""ReMax: the reward of a greedy completion as baseline."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import Outcomes, advantage_estimator
from penstock.trainer.algorithm.lazy_torch import Tensor


@advantage_estimator(
    source="arXiv 2310.10505",
    presets={"remax": {"advantage": "remax", "loss": "ppo_clip", "aggregation": "token-mean"}},
    needs_baseline=True,
)
def remax(outcomes: Outcomes) -> Tensor:
    """Subtract the reward of the prompt's greedy completion, [B]."""
    if outcomes.baselines is None:
        raise ValueError("remax needs the reward of a greedy completion for every prompt, and there is none")
    return outcomes.rewards - outcomes.baselines
