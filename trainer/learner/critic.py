"""The critic of PPO: a network like the policy's that predicts one number per position, the return from there on.

It has its own optimizer, schedule and DeepSpeed engine, at the policy's ZeRO stage. The value of a sampled token is
that of the state before the token. It is read at the position where the policy predicts the token, so the critic can
use a shared prompt as the policy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn

from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.kl import AnyKlForm
from penstock.trainer.algorithm.losses.value import value_loss
from penstock.trainer.algorithm.packed_rows import Layout
from penstock.trainer.algorithm.token_credit import CreditedBatch, TokenCredit, ValueTargets
from penstock.trainer.errors import CheckpointError
from penstock.trainer.learner.attention.models import WHOLE, read_rows, use_packed_rows
from penstock.trainer.learner.captured_state import CapturedPart
from penstock.trainer.learner.load_model import load_language_model
from penstock.trainer.learner.sequence_parallel import TokenShares
from penstock.trainer.learner.trainable import Optimisation, Trainable
from penstock.trainer.parallel_dims import ParallelDims

_TAG = "critic"


class ValueHead(nn.Module):
    """Maps a hidden state to a value, in float32 for any dtype of the backbone; initially 0 everywhere."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        """Start with zeros: the first advantages are then the same as without a baseline."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values [N] float32 of hidden states [N, H]."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


class ValueScorer(nn.Module):
    def __init__(self, language_model: Any, shares: TokenShares = WHOLE) -> None:
        super().__init__()
        config = language_model.config.get_text_config()
        self._packed = use_packed_rows(language_model) is None
        self._shares = shares
        self.body: Any = language_model.base_model  # part of the parameter names in checkpoints
        self.value_head = ValueHead(config.hidden_size, next(language_model.parameters()).dtype)

    def forward(
        self, input_ids: Tensor, predictors: Tensor, *, position_ids: Tensor | None = None, layout: Layout | None = None
    ) -> Tensor:
        """Return the value [N] float32 before each sampled token; arguments as in `CompletionScorer`."""
        hidden = read_rows(self.body, input_ids, position_ids, layout, self._packed, self._shares)
        own, places = self._shares.own_predictors(predictors, input_ids.shape[1])
        return self._shares.whole(self.value_head(hidden.index_select(0, own)), places, len(predictors))


@dataclass(frozen=True, slots=True)
class Regression:
    updates: int = 1
    form: Literal["mse", "huber"] = "mse"
    coefficient: float = 1.0
    clip: float | None = None
    head_start_steps: int = 0  # first steps of the run, in which only the critic learns


class Critic:
    """A value network under DeepSpeed; `credit`, `learn` and `load` are called on all ranks together."""

    def __init__(self, trainable: Trainable, regression: Regression, credit: TokenCredit, dims: ParallelDims) -> None:
        self._trainable = trainable
        self._regression = regression
        self._credit = credit
        self._dims = dims

    @property
    def kl_form(self) -> AnyKlForm:
        return self._credit.kl_form

    def learns_alone(self, steps_done: int) -> bool:
        """Return True if the policy does not change in the step after ``steps_done``."""
        return steps_done < self._regression.head_start_steps

    def credit(self, micro_batches: Sequence[MicroBatch], kl_coefficient: float) -> CreditedBatch:
        """Compute values of every sampled token of this rank's micro-batches, and turn rewards into advantages by token.

        Above 0, ``kl_coefficient`` times the KL to the reference, which the micro-batches hold, is subtracted from rewards.
        """
        with torch.no_grad():
            values = [self._values(batch).cpu() for batch in micro_batches]
        return self._credit(micro_batches, values, self._dims.sum, kl_coefficient=kl_coefficient)

    def learn(self, batch: CreditedBatch) -> dict[str, float]:
        losses, norm, lr = [], 0.0, 0.0
        num_micro_batches = len(batch.micro_batches)
        for _ in range(self._regression.updates):
            loss = 0.0
            for number, pair in enumerate(zip(batch.micro_batches, batch.targets, strict=True), start=1):
                self._trainable.begin(is_last=number == num_micro_batches)
                piece = self._loss(*pair)
                self._trainable.backward(piece)
                loss += float(piece.detach())
            update = self._trainable.update()
            losses.append(loss)
            norm, lr = update.grad_norm, update.lr
        (first,) = self._dims.sum(losses[:1])
        return {"value_loss": first, "critic_grad_norm": norm, "critic_lr": lr, **batch.figures}

    def capture(self) -> CapturedPart:
        return CapturedPart(_TAG, self._trainable.capture({}))

    def load(self, folder: Path) -> None:
        if not (folder / _TAG).is_dir():
            raise CheckpointError(
                f"checkpoint {folder} has no critic: the run was started with another algorithm.advantage; "
                "restore it, or start over with another run.id or trainer.resume = false"
            )
        self._trainable.load(folder / _TAG)

    def _values(self, batch: MicroBatch) -> Tensor:
        batch = batch.to(self._trainable.device)
        return self._trainable(batch.input_ids, batch.predictors, position_ids=batch.position_ids, layout=batch.layout)

    def _loss(self, batch: MicroBatch, target: ValueTargets) -> Tensor:
        values = self._values(batch)
        how = self._regression
        losses = value_loss(values, target.values.to(values), target.returns.to(values), clip=how.clip, form=how.form)
        return how.coefficient * target.weight * losses.sum()


def load_critic(
    model_folder: Path, how: Optimisation, regression: Regression, credit: TokenCredit, dims: ParallelDims
) -> Critic:
    """Load a model folder's backbone with a value head under DeepSpeed; on every rank.

    Raises UnsupportedModel and ConfigError as `load_policy` does.
    """
    model = load_language_model(model_folder, how, dims)
    scorer = ValueScorer(model, TokenShares(dims.token_group))
    return Critic(Trainable(scorer, how, dims), regression, credit, dims)
