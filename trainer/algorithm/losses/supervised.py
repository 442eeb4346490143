"""Losses towards given tokens: cross-entropy, and the entropy whose bonus keeps a policy exploring; pure."""

from __future__ import annotations

from penstock.trainer.algorithm.lazy_torch import Tensor, torch


def cross_entropy(logprobs: Tensor) -> Tensor:
    """Minus the log-probability of every token, [N]; averaged over the whole batch's tokens by aggregation."""
    return -logprobs


def entropy(logits: Tensor) -> Tensor:
    """Entropy of each position's distribution in nats, [..., V] -> [...]; computed in float32 at least."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
