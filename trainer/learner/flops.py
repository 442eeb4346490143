"""How many floating-point operations a pass through a language model takes, from the shapes of its weights.

A multiplication and an addition are two operations. Counted are matrix products, forward and backward: of the layers for every
token that is computed (a shared prefix once, padding too), of the output head for every sampled token, of attention for every pair
of tokens that attend to each other. What gradient checkpointing computes a second time is not counted, so that a share of the peak
is comparable with others' MFU (arXiv 2204.02311, appendix B). Norms, rotations and the loss are left out: below one percent. So is the
vision tower of a model that reads images, which computes no token of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.trainer.algorithm.packed_rows import Layout
from penstock.trainer.learner.vision import is_of_tower
from penstock.trainer.optimizer_settings import OptimizerSettings

if TYPE_CHECKING:
    from penstock.trainer.learner.policy import Policy

# Part of the name that CUDA reports -> FLOP/s. A longer part is looked for first: an "H100 PCIe" is not an "H100".
_BFLOAT16 = {
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "H20": 148e12,
    "H800": 989.4e12,
    "L4": 121e12,
    "L40S": 362e12,
    "L40": 181e12,
    "MI300X": 1307.4e12,
    "RTX 4090": 165.2e12,
}


@dataclass(frozen=True, slots=True)
class Work:
    flops: float = 0.0
    tokens: float = 0.0  # of all forward passes, as often as each was computed

    def plus(self, flops: float, tokens: float = 0.0) -> Work:
        return Work(self.flops + flops, self.tokens + tokens)


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Load:
    """What one pass computes: T tokens, pairs of tokens that attend to each other, N tokens through the output head."""

    tokens: int
    pairs: int  # of all layers
    predicted: int


@dataclass(frozen=True, slots=True)
class PassCost:
    """The weights of a model that multiply activations, in numbers; of experts those that one token uses."""

    layers: float  # weights of matrices between embedding and output head
    learning: float  # those of them that have a gradient
    head: float  # of the output head
    head_learns: bool
    attended: int  # width of all query heads
    windows: tuple[int | None, ...]  # of each layer

    def forward(self, load: Load) -> float:
        return 2 * self.layers * load.tokens + 2 * self.head * load.predicted + 4 * self.attended * load.pairs

    def backward(self, load: Load) -> float:
        layers = 2 * (self.layers + self.learning) * load.tokens
        head = 2 * self.head * (2 if self.head_learns else 1) * load.predicted
        return layers + head + 8 * self.attended * load.pairs


def pass_cost(model: Any) -> PassCost:
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    tables = {id(held.weight) for held in (model.get_input_embeddings(), head) if held is not None}
    total = learning = 0.0
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties the tensor
        if id(parameter) in tables or len(shape) < 2 or is_of_tower(name):
            continue
        used = float(np.prod(shape)) * (share_of_experts(config) if ".experts." in name else 1.0)
        total += used
        learning += used if parameter.requires_grad else 0.0
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return PassCost(
        layers=total,
        learning=learning,
        head=0.0 if head is None else float(np.prod(getattr(head.weight, "ds_shape", head.weight.shape))),
        head_learns=head is not None and bool(head.weight.requires_grad),
        attended=width,
        windows=windows_of(config),
    )


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Return of each layer to how many tokens of its row, itself included, a token attends; None: to all before it."""
    window = getattr(config, "sliding_window", None) or None
    layers = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if layer == "sliding_attention" else None for layer in layers)


def load_of(
    layout: Layout | None, num_tokens: int, predicted: int, *, padded: bool, windows: Sequence[int | None]
) -> Load:
    rows, depths = 1, np.arange(num_tokens) if layout is None else layout.depths
    if layout is not None and padded:
        rows, depths = len(layout.rows()), np.arange(layout.longest_row)
    attended = depths + 1
    pairs = sum(
        layers * int((attended if window is None else np.minimum(attended, window)).sum())
        for window, layers in Counter(windows).items()
    )
    return Load(rows * len(depths), rows * pairs, predicted)


def share_of_experts(config: Any) -> float:
    total = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    used = getattr(config, "num_experts_per_tok", None)
    return used / total if total and used else 1.0


def peak_of(device: str, dtype: str) -> float | None:
    """Return a device's peak in FLOP/s; None for one that is not in the table, and for another dtype than bfloat16.

    Nothing is assumed for a CPU, whose peak depends on clock, cores and instructions: ``trainer.peak_flops`` sets it.
    """
    if dtype != "bfloat16":
        return None
    words = device.split()
    for part in sorted(_BFLOAT16, key=len, reverse=True):
        if _stands_in(part.split(), words):
            return _BFLOAT16[part]
    return None


def peak_of_ranks(settings: OptimizerSettings, policy: Policy) -> float | None:
    """Return the peak in FLOP/s of all ranks together; None where it is neither set nor known."""
    peak = settings.peak_flops or peak_of(policy.device_name, policy.dtype)
    return peak and peak * settings.num_ranks


def _stands_in(part: list[str], words: list[str]) -> bool:
    remaining = iter(words)
    return all(any(word == part_word or word.startswith(f"{part_word}-") for word in remaining) for part_word in part)
