"""Keys and values in one rectangular tensor: a row per running sequence, as long as the longest of them.

The experts that computed each token, in a model that has some, stand beside them.

The running sequences always occupy rows 0..n-1, so attention reads views and never gathers. The tensor grows on
demand and never exceeds ``max_tokens`` rows x columns, which the scheduler guarantees by what it admits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.rollout_service.embedded_engine.model.model_config import ModelConfig

_COLUMN_STEP = 32  # columns grow by multiples of this, and by at least a half, so that copies are rare


@dataclass(frozen=True, slots=True)
class Computed:
    """What was computed for tokens that follow each other in a sequence."""

    values: torch.Tensor  # keys and values [layer, kv head, 2, tokens, head_dim]
    experts: torch.Tensor  # [tokens, layer with experts, k] int16

    @property
    def num_tokens(self) -> int:
        return self.values.shape[3]

    def first(self, count: int) -> Computed:
        return Computed(self.values[:, :, :, :count], self.experts[:count])

    def divided(self, count: int) -> tuple[Computed, Computed]:
        """Return copies of the first tokens and of the others: a view would keep the memory of the whole."""
        upper = Computed(self.values[:, :, :, :count].clone(), self.experts[:count].clone())
        return upper, Computed(self.values[:, :, :, count:].clone(), self.experts[count:].clone())


class KVCache:
    """Keys and values [layer, row, kv head, 2, column, head_dim]; index 0 of the fourth axis is the key."""

    def __init__(self, config: ModelConfig, *, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._max_tokens = max_tokens
        self.data = self._zeros(0, 0, device, dtype)
        self.experts = self._no_experts(0, 0, device)  # [row, column, layer with experts, k] int16

    @property
    def num_rows(self) -> int:
        return self.data.shape[1]

    @property
    def num_columns(self) -> int:
        return self.data.shape[4]

    def ensure(self, num_rows: int, num_columns: int) -> None:
        """Allocate ``num_rows`` rows of ``num_columns`` tokens if there are fewer, keeping what is stored."""
        old = self.data
        if num_rows <= self.num_rows and num_columns <= self.num_columns:
            return
        rows, columns = max(num_rows, self.num_rows), max(num_columns, self.num_columns)
        if num_columns > self.num_columns:
            generous = max(num_columns, self.num_columns * 3 // 2)
            columns = -(-generous // _COLUMN_STEP) * _COLUMN_STEP
        if rows * columns > self._max_tokens:
            rows, columns = num_rows, num_columns
        self.data = self._zeros(rows, columns, old.device, old.dtype)
        kept_rows, kept_columns = min(rows, old.shape[1]), min(columns, old.shape[4])
        self.data[:, :kept_rows, :, :, :kept_columns] = old[:, :kept_rows, :, :, :kept_columns]
        old_experts, self.experts = self.experts, self._no_experts(rows, columns, old.device)
        self.experts[:kept_rows, :kept_columns] = old_experts[:kept_rows, :kept_columns]

    def release(self) -> None:
        """Free all rows; what is stored is lost."""
        device, dtype = self.data.device, self.data.dtype
        self.data, self.experts = self._zeros(0, 0, device, dtype), self._no_experts(0, 0, device)

    def fill_rows(self, row: int, num_rows: int, parts: Sequence[Computed]) -> None:
        column = 0
        for part in parts:
            end = column + part.num_tokens
            self.data[:, row : row + num_rows, :, :, column:end] = part.values.unsqueeze(1)
            self.experts[row : row + num_rows, column:end] = part.experts
            column = end

    def read(self, row: int, start: int, end: int) -> Computed:
        return Computed(self.data[:, row, :, :, start:end].clone(), self.experts[row, start:end].clone())

    def move_rows(self, sources: list[int], targets: list[int], num_columns: int) -> None:
        self.data[:, targets, :, :, :num_columns] = self.data[:, sources, :, :, :num_columns]
        self.experts[targets, :num_columns] = self.experts[sources, :num_columns]

    def clear_rows(self, rows: list[int]) -> None:
        """Set rows to zero that are not finite: 0 x NaN would be NaN in the next sequence of that row."""
        self.data[:, rows] = 0

    def _zeros(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        # Zeros, not empty: masked columns are multiplied by probability 0, and 0 x NaN is NaN.
        config = self._config
        shape = (config.num_layers, rows, config.num_kv_heads, 2, columns, config.head_dim)
        return torch.zeros(shape, device=device, dtype=dtype)

    def _no_experts(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        mixture = self._config.mixture
        sizes = (len(mixture.layers), mixture.top_k) if mixture is not None else (0, 0)
        return torch.zeros(rows, columns, *sizes, device=device, dtype=torch.int16)
