"""Losses towards given tokens: cross-entropy, the mix on successes, and the entropy bonus; pure."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(logprobs: Tensor) -> Tensor:
    """Minus the log-probability of every token, [N]; averaged over the whole batch's tokens by aggregation."""
    return -logprobs


def dynamic_fine_tuning(logprobs: Tensor) -> Tensor:
    """Cross-entropy weighted by the token's own detached probability (DFT, arXiv 2508.05629), [N]."""
    return -logprobs.detach().exp() * logprobs


def on_successes(logprobs: Tensor, rewards: Tensor, num_success_tokens: Tensor | float) -> Tensor:
    """The SFT part of a mixed loss: cross-entropy on the tokens of rewarded trajectories alone.

    ``-1[R > 0] log p / tokens of rewarded trajectories`` for every token, already divided by the whole
    batch's number of such tokens. What ROLL's ``sft_loss_coef`` meant to be.

    Args:
        logprobs: [N] with gradient.
        rewards: [N] the trajectory's reward at each of its tokens.
        num_success_tokens: Tokens of the whole batch's rewarded trajectories, over all ranks.
    """
    return -logprobs * (rewards > 0) / max(float(num_success_tokens), 1.0)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of each position's distribution in nats, [..., V] -> [...]; computed in float32 at least."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
