"""What a pack may hold of tokens besides log-probabilities: their experts, and what a teacher says; pure.

A router chooses ``top_k`` of a layer's experts for every token. A trainer whose routers choose others for the same
tokens than the engine's computes another policy than the one that sampled: rounding, or weights that are a version
newer, are enough. So a pack has the engine's choices, and the trainer computes with those (arXiv:2510.11370).

A teacher is any model of the same vocabulary that is not trained. A rollout worker asks it for every group whose task
wants it (`Task.teacher_top_k`), and the pack stores what it says: a replay trains on the very same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import PackError
from penstock.protocol.groups import MAX_EXPERTS, MAX_TEACHER_TOP_K, RouterShape

FAMILIES = ("qwen3_moe",)  # model_type whose routers are compared with transformers' in tests
_MAX_LAYERS = 10_000
_SLACK = 1e-3  # rounding may put a log-probability of 0 a little above it
_MASS_SLACK = 1e-2  # and the sum of many probabilities above 1


@dataclass(frozen=True, slots=True)
class Routers:
    layers: tuple[int, ...]  # numbers of the layers, rising
    num_experts: int  # of a layer
    top_k: int  # different experts for each token

    @property
    def shape(self) -> RouterShape:
        return RouterShape(num_layers=len(self.layers), num_experts=self.num_experts, top_k=self.top_k)


def routers_of(config: Mapping[str, Any]) -> Routers | None:
    """Return the routers of a model; None for one without experts, or of a family that is not in `FAMILIES`.

    Raises ValueError for numbers that cannot be a model's.
    """
    if config.get("model_type") not in FAMILIES:
        return None
    num_layers = _number(config, "num_hidden_layers", 1, _MAX_LAYERS)
    num_experts = _number(config, "num_experts" if "num_experts" in config else "num_local_experts", 0, MAX_EXPERTS)
    step = _number({"decoder_sparse_step": 1, **config}, "decoder_sparse_step", 1, _MAX_LAYERS)
    dense = config.get("mlp_only_layers") or ()
    layers = tuple(n for n in range(num_layers) if n not in dense and (n + 1) % step == 0)
    if not num_experts or not layers:
        return None
    return Routers(layers, num_experts, _number(config, "num_experts_per_tok", 1, num_experts))


def _number(config: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{key} = {value!r}: expected a number from {least} to {most}")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class ExpertChoices:
    shape: RouterShape
    # [T - 1, layers, k] uint8, or uint16 with more than 256 experts; rising along k
    ids: npt.NDArray[np.unsignedinteger]

    def __post_init__(self) -> None:
        expected = (self.shape.num_layers, self.shape.top_k)
        if self.ids.ndim != 3 or self.ids.shape[1:] != expected or self.ids.dtype != dtype_of(self.shape):
            raise PackError(
                f"experts of tokens are {self.ids.dtype} of shape {self.ids.shape}, expected {dtype_of(self.shape)} "
                f"of shape (tokens, {expected[0]}, {expected[1]}): {self.shape}"
            )
        if not self.ids.size:
            return
        if (highest := int(self.ids.max())) >= self.shape.num_experts:
            raise PackError(f"a token has expert {highest}, expected one of 0 to {self.shape.num_experts - 1}")
        if self.shape.top_k > 1 and not bool((self.ids[:, :, 1:] > self.ids[:, :, :-1]).all()):
            raise PackError(f"a token has the same expert twice, or its {self.shape.top_k} experts do not rise")

    def check_length(self, num_tokens: int) -> None:
        if len(self.ids) != num_tokens - 1:
            raise PackError(
                f"experts of {len(self.ids)} tokens of {num_tokens}, expected {num_tokens - 1}: all but the last"
            )


def dtype_of(shape: RouterShape) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint8 if shape.num_experts <= 256 else np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class TeacherRow:
    """The log-probabilities for the sampled tokens of one trajectory, N of them, in their order; at temperature 1."""

    logprobs: npt.NDArray[np.float32]  # [N] of the sampled tokens
    top_ids: npt.NDArray[np.int32]  # [N, k] the teacher's likeliest tokens in their place
    top_logprobs: npt.NDArray[np.float32]  # [N, k]


@dataclass(frozen=True, slots=True, eq=False)
class TeacherScores:
    model: str  # which model of which version, as its server names them
    top_k: int
    rows: tuple[TeacherRow, ...]  # of each trajectory, in order; a baseline, which is not trained on, has no token

    def __post_init__(self) -> None:
        if not self.model or len(self.model) > 500:
            raise PackError(f"a teacher named {self.model[:100]!r}, expected 1 to 500 characters")
        if not 0 <= self.top_k <= MAX_TEACHER_TOP_K:
            raise PackError(f"a teacher's {self.top_k} likeliest tokens, expected 0 to {MAX_TEACHER_TOP_K}")
        for row in self.rows:
            shape = (len(row.logprobs), self.top_k)
            if row.top_ids.shape != shape or row.top_logprobs.shape != shape:
                raise PackError(
                    f"a teacher's likeliest are {row.top_ids.shape} and {row.top_logprobs.shape}, expected {shape}"
                )

    def check(self, num_sampled: Sequence[int], vocab_size: int | None) -> None:
        counts = [len(row.logprobs) for row in self.rows]
        if counts != list(num_sampled):
            raise PackError(f"a teacher's log-probabilities of {counts[:8]} tokens, expected {list(num_sampled)[:8]}")
        of_rows = (values for row in self.rows for values in (row.logprobs, row.top_logprobs))
        logprobs = np.concatenate([values.reshape(-1) for values in of_rows])
        if len(logprobs) and not (np.isfinite(logprobs).all() and float(logprobs.max()) <= _SLACK):
            raise PackError("a teacher's log-probability is not finite, or above 0")
        for row in self.rows if self.top_k else ():
            if not len(row.logprobs):
                continue
            lowest, highest = int(row.top_ids.min()), int(row.top_ids.max())
            if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
                raise PackError(
                    f"a teacher's token id {lowest if lowest < 0 else highest} is none of a vocabulary of {vocab_size}"
                )
            ordered = np.sort(row.top_ids, axis=1)
            if self.top_k > 1 and bool((ordered[:, 1:] == ordered[:, :-1]).any()):
                raise PackError("a teacher names the same token twice among its likeliest ones")
            mass = float(np.exp(row.top_logprobs.astype(np.float64)).sum(axis=1).max())
            if mass > 1.0 + _MASS_SLACK:
                raise PackError(f"a teacher's likeliest tokens have a probability of {mass:.4f} together")
