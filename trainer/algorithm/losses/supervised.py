"""The entropy of a policy; pure."""

from __future__ import annotations

from penstock.trainer.algorithm.lazy_torch import Tensor, torch


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each position's distribution in nats, [..., V] -> [...]; computed in float32 at least."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
