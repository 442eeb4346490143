"""Tiny models, their rows and settings, and a process that trains them without DeepSpeed, for tests of the learner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.trainer.algorithm.batch import Row
from penstock.trainer.learner.optimizer_state import Place
from penstock.trainer.learner.parallel_shares import WeightShares
from penstock.trainer.learner.step_metrics import StepWatch, layer_groups
from penstock.trainer.learner.trainable import Optimisation, Update
from penstock.trainer.parallel_dims import Share

VOCABULARY = 17
HOW = Optimisation(
    num_steps=10, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01, warmup_steps=0, schedule="constant", min_lr_ratio=1.0,
    max_grad_norm=1.0, zero_stage=1, dtype="float32", keep_whole_below=0,
)  # fmt: skip


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "initializer_range": 0.2,
}  # fmt: skip


def qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE | changes))


def row_of(prompt: Iterable[int], completion: Iterable[int], weight: float, *, advantage: float = 0.5) -> Row:
    start = list(prompt)
    tokens = np.array([*start, *completion], dtype=np.int32)
    mask = np.arange(len(tokens)) >= len(start)
    return Row(tokens, mask, np.zeros(len(tokens), np.float32), advantage, weight)


class OneProcess:
    """A layout of one rank."""

    rows, writes_files = Share(), True
    ranks = SimpleNamespace(rank=0, num_ranks=1, is_leader=True)

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    maximum = sum

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


class PlainTrainable:
    """A module and an optimizer of torch, in the place of DeepSpeed's engine."""

    dtype = "float32"

    def __init__(self, module: torch.nn.Module, *, sgd_lr: float | None = None) -> None:
        """Step with AdamW, whose steps are watched, or by plain gradient descent."""
        self.module, self.device = module, next(module.parameters()).device
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._optimizer: torch.optim.Optimizer = torch.optim.SGD(named.values(), lr=sgd_lr or 0.0)
        self._watch: StepWatch | None = None
        if sgd_lr is None:
            self._optimizer = torch.optim.AdamW(named.values(), lr=1e-3)
            places = [Place(name, 0, p.numel(), p, 0) for name, p in named.items()]
            self._watch = StepWatch(self._optimizer, lambda: places, layer_groups(named), lambda: False)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)

    def begin(self, *, is_last: bool) -> None:
        pass

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self, lr_scale: float = 1.0, **_: Any) -> Update:
        norm = WeightShares().norm([(p, p.grad) for p in self.module.parameters() if p.grad is not None])
        if self._watch is not None:
            self._watch.begin()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Update(norm, 1e-3, {} if self._watch is None else self._watch.figures(norm, list))
