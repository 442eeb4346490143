"""A mixture of experts in the forward pass: a router chooses a few of a layer's gated MLPs for every token.

As Qwen3-MoE in transformers: probabilities over all experts in float32, the ``top_k`` largest, divided by their sum where the
model's config says so. Which experts a token was given is returned, so that a trainer can compute it with the same ones (Rollout
Routing Replay, arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Experts:
    """The router and experts of one layer, ready to compute."""

    router: torch.Tensor  # [experts, hidden]
    gate_up: tuple[Linear, ...]  # of each expert, [*, hidden] -> [*, 2 * intermediate]: all gate, then all up
    down: tuple[Linear, ...]  # of each expert, [*, intermediate] -> [*, hidden]
    top_k: int
    normalised: bool  # a token's gates add up to 1

    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gates [N, k], in the dtype of ``hidden`` [N, hidden], and the chosen experts [N, k] int64."""
        logits = functional.linear(hidden, self.router)
        gates, chosen = logits.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.normalised:
            gates = gates / gates.sum(-1, keepdim=True)
        return gates.to(logits.dtype), chosen

    def compute(self, hidden: torch.Tensor, gates: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the sum of the chosen experts' outputs, each times its gate, [N, hidden]."""
        products = hidden.new_empty(*chosen.shape, hidden.shape[1])  # [N, k, hidden]
        for expert in chosen.unique().tolist():
            token, place = torch.where(chosen == expert)
            gate, up = self.gate_up[expert](hidden[token]).chunk(2, dim=-1)
            products[token, place] = self.down[expert](functional.silu(gate).mul_(up))
        return (products * gates.unsqueeze(-1)).sum(1)
