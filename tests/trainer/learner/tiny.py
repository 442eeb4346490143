"""Tiny models, their rows and the settings of their training, for tests of the learner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.trainer.algorithm.batch import Row
from penstock.trainer.learner.trainable import Optimisation

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
