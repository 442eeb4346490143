"""Generalised advantage estimation with a critic."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.estimators.interface import Options, Outcomes, advantage_estimator
from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.losses.tokens import Sequences
from penstock.trainer.algorithm.reward_shaping import whiten


class GaeOptions(Options):
    """Options of `gae`; gamma and lambda are in the section `critic`."""

    whiten_rewards: bool = Field(
        default=False, description="Whiten the rewards of all tokens of the batch before a critic credits them."
    )


@advantage_estimator(
    options=GaeOptions,
    source="arXiv 1506.02438",
    presets={
        "ppo": {
            "advantage": "gae", "loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "whiten_advantages": True,
            "aggregation": "token-mean",
        },
    },
    has_critic=True,
)  # fmt: skip
def gae(outcomes: Outcomes, *, whiten_rewards: bool = False) -> Tensor:
    """Credit tokens by generalised advantage estimation with a critic.

    Returns the rewards, [B]; `trainer/learner/critic.py` turns them into advantages by token.
    """
    return outcomes.rewards.clone()


def gae_tokens(
    rewards: Tensor, values: Tensor, sequences: Sequences, *, gamma: float, lam: float, whitened: bool = True
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, [N] each.

    ``delta_t = R_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, over the sampled
    tokens: a tool's reply in between is skipped. Returns are A + V, before whitening.

    Args:
        rewards: [N].
        values: [N] of the critic, without gradient.
        sequences: Which token belongs where.
        gamma: Discount.
        lam: 1: low bias, high variance; 0: the reverse.
        whitened: Whiten the advantages over the batch, as verl does.
    """
    reward_rows, _ = sequences.to_rows(rewards)
    value_rows, _ = sequences.to_rows(values)
    advantages = torch.empty_like(reward_rows)
    running = reward_rows.new_zeros(len(reward_rows))
    following = torch.zeros_like(running)
    for place in range(reward_rows.shape[1] - 1, -1, -1):
        delta = reward_rows[:, place] + gamma * following - value_rows[:, place]
        running = delta + gamma * lam * running
        advantages[:, place] = running
        following = value_rows[:, place]
    flat = sequences.from_rows(advantages)
    return (whiten(flat) if whitened else flat), flat + values
