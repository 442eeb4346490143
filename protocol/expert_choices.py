"""Which experts of a mixture computed the tokens of a trajectory, as the engine's routers chose them.

A trainer whose routers choose other experts for the same tokens computes another policy than the one that sampled: rounding, or
weights that are a version newer, are enough. So a pack stores the engine's choices, and the trainer computes with those
(Rollout Routing Replay, arXiv:2510.11370).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import PackError
from penstock.protocol.facts import RouterShape


@dataclass(frozen=True, slots=True, eq=False)
class ExpertChoices:
    """The experts of every token but the last, which no model computes; checked on construction (PackError)."""

    shape: RouterShape
    ids: npt.NDArray[
        np.unsignedinteger
    ]  # [T - 1, layers, k] uint8, or uint16 with more than 256 experts; rising along k

    def __post_init__(self) -> None:
        expected = (self.shape.num_layers, self.shape.top_k)
        if self.ids.ndim != 3 or self.ids.shape[1:] != expected or self.ids.dtype != dtype_of(self.shape):
            raise PackError(
                f"experts of tokens are {self.ids.dtype} of shape {self.ids.shape}, expected {dtype_of(self.shape)} of shape "
                f"(tokens, {expected[0]}, {expected[1]}): {self.shape}"
            )
        if not self.ids.size:
            return
        if (highest := int(self.ids.max())) >= self.shape.num_experts:
            raise PackError(f"a token has expert {highest}, expected one of 0 to {self.shape.num_experts - 1}")
        if self.shape.top_k > 1 and not bool((self.ids[:, :, 1:] > self.ids[:, :, :-1]).all()):
            raise PackError(
                f"a token has the same expert twice, or its {self.shape.top_k} experts are not in rising order"
            )

    def check_length(self, num_tokens: int) -> None:
        """Raise PackError unless these are the choices for a trajectory of ``num_tokens``."""
        if len(self.ids) != num_tokens - 1:
            raise PackError(
                f"experts of {len(self.ids)} tokens in a trajectory of {num_tokens}, expected {num_tokens - 1}: all but the last"
            )


def dtype_of(shape: RouterShape) -> np.dtype[np.unsignedinteger]:
    """Return the dtype in which the numbers of experts are stored."""
    return np.dtype(np.uint8 if shape.num_experts <= 256 else np.uint16)
