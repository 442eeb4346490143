"""REINFORCE with a baseline or none: `reinforce`, `remax`, `rloo`, `opo`, `opob`, `gpg`; and `zero`, no advantage from rewards.

With `zero` the loss has only what is added to it, such as the KL to a teacher.
"""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import (
    Outcomes,
    StdNormalisation,
    advantage_estimator,
    group_mean,
    group_sizes,
    rewards_differ,
    weighted_mean,
)
from penstock.trainer.algorithm.lazy_torch import Tensor, torch


@advantage_estimator(source="Williams 1992")
def reinforce(outcomes: Outcomes) -> Tensor:
    """Return the reward itself, [B]."""
    return outcomes.rewards.clone()


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


@advantage_estimator(
    source="arXiv 2402.14740",
    presets={"rloo": {"advantage": "rloo", "loss": "ppo_clip", "aggregation": "seq-mean-token-sum"}},
    group_relative=True,
)
def rloo(outcomes: Outcomes) -> Tensor:
    """Subtract the mean reward of the group's other members, [B]; a group of one gets 0.

    In verl, a group of one gets its reward as its advantage, whatever other prompts get.
    """
    sizes = group_sizes(outcomes)
    centred = outcomes.rewards - group_mean(outcomes, outcomes.rewards)
    return centred * sizes / (sizes - 1.0).clamp(min=1.0)


@advantage_estimator(
    source="arXiv 2505.23585",
    presets={"opo": {"advantage": "opo", "loss": "ppo_clip", "aggregation": "token-mean"}},
    group_relative=True,
)
def opo(outcomes: Outcomes) -> Tensor:
    """Subtract the group's mean reward weighted by length, [B]; a group of one gets 0 (verl: its reward)."""
    return outcomes.rewards - weighted_mean(outcomes, outcomes.lengths.to(outcomes.rewards.dtype))


@advantage_estimator(
    options=StdNormalisation,
    source="arXiv 2602.17616",
    presets={
        "vcpo": {
            "advantage": "opob", "normalise_by_std": True, "loss": "reinforce", "aggregation": "seq-mean-token-mean",
            "importance": "sequence", "importance_high": 8.0, "ess_level": "sequence", "ess_power": 0.5, "ess_floor": 0.0,
        }
    },
    group_relative=True,
    by_gradient=True,
)  # fmt: skip
def opob(outcomes: Outcomes, *, normalise_by_std: bool = True) -> Tensor:
    """Subtract the off-policy optimal baseline of VCPO, which has the least variance, [B].

    ``A_i = R_i - sum_j(w_j² g_j² R_j) / sum_j(w_j² g_j²)`` over the group, with w the product of a trajectory's ratios to the sampler and
    g the norm of the gradient of its log-probability; with ``normalise_by_std`` divided by the
    population standard deviation of the group's rewards.
    """
    if outcomes.influences is None or len(outcomes.influences) < len(outcomes.rewards):
        raise ValueError("opob needs the gradient of every trajectory, and none was computed")
    centred = outcomes.rewards - weighted_mean(outcomes, outcomes.influences)
    if normalise_by_std:
        spread = group_mean(outcomes, (outcomes.rewards - group_mean(outcomes, outcomes.rewards)).square()).sqrt()
        centred = centred / spread.where(spread > 1e-8, 1.0)  # as in the authors' code
    return torch.where(rewards_differ(outcomes), centred, torch.zeros_like(centred))


@advantage_estimator(
    source="arXiv 2504.02546",
    presets={"gpg": {"advantage": "gpg", "loss": "ppo_clip", "aggregation": "token-mean"}},
    group_relative=True,
)
def gpg(outcomes: Outcomes) -> Tensor:
    """Subtract the group's mean reward and multiply by trajectories / nonzero rewards of the batch, [B]."""
    nonzero = int((outcomes.rewards != 0).sum())
    alpha = len(outcomes.rewards) / max(nonzero, 1)
    return alpha * (outcomes.rewards - group_mean(outcomes, outcomes.rewards))


@advantage_estimator(source="thinkingmachines.ai/blog/on-policy-distillation")
def zero(outcomes: Outcomes) -> Tensor:
    """Return 0 whatever the rewards are, [B]."""
    return torch.zeros_like(outcomes.rewards)
