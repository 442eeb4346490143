"""How a network is trained, as far as it changes memory, and what it needs where; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FLOAT32 = 4
BFLOAT16 = 2
Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes by what they are for."""

    device: Sizes = field(default_factory=dict)  # the one that trains
    host: Sizes = field(default_factory=dict)
    cpu: Sizes = field(default_factory=dict)  # only where the CPU trains, whose memory is that of device and host too


@dataclass(frozen=True, slots=True)
class Method:
    """How a network is trained, as far as it changes memory."""

    dtype: Literal["float32", "bfloat16"]
    zero_stage: int
    num_ranks: int = 1
    sequence_parallel: int = 1  # ranks that share the tokens of a micro-batch
    tensor_parallel: int = 1  # ranks that share the weights
    checkpointing: bool = False
    activation_offload: bool = False  # of what checkpointing keeps
    gradient_dtype: Literal["float32", "as-trained"] = "float32"  # of sums
    offload: Literal["none", "optimizer", "parameters"] = "none"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    dense_attention: bool = False  # by its definition, with matrices [H, T, T]
    with_entropy: bool = False  # of every distribution, in the loss, or the KL from a teacher over its likeliest tokens

    @property
    def zero_ranks(self) -> int:
        """Ranks with the same part of the weights, over which ZeRO shards."""
        return self.num_ranks // self.tensor_parallel

    @property
    def width(self) -> int:
        """Bytes of a parameter."""
        return FLOAT32 if self.dtype == "float32" else BFLOAT16

    @property
    def gradient_width(self) -> int:
        """Bytes of a gradient that is summed over micro-batches and ranks."""
        return FLOAT32 if self.gradient_dtype == "float32" else self.width

    @property
    def sums_apart(self) -> bool:
        """True if sums of gradients are wider than the gradients themselves."""
        return self.gradient_width > self.width

    def shares(self, stage: int) -> int:
        """Return over how many ranks something is split that ZeRO shards from this stage on."""
        return self.zero_ranks if self.zero_stage >= stage else 1
