"""The critic of PPO: a network like the policy's that predicts one number per position, the return from there on.

It has a separate optimizer, schedule and DeepSpeed engine, at the policy's ZeRO stage. The value of a sampled token is
that of the state before the token. It is read at the position where the policy predicts the token, so the critic can
use a shared prompt as the policy does.

`TokenCredit` makes advantages that differ by token from its values, over all micro-batches of all ranks.
The plan gives every trajectory, or every turn of an episode's row, its shaped reward in place of an advantage. Here it
becomes the reward of the last token of the trajectory or turn. GAE turns rewards and values into advantages and
returns, and the advantages are whitened and limited over the whole batch. A sequence is whole in one micro-batch;
whether rows share a prompt makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's name for it
from torch import Tensor, nn

from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.device_copy import copied_together
from penstock.trainer.algorithm.estimators.gae import gae_tokens
from penstock.trainer.algorithm.kl import AnyKlForm, kl_estimate
from penstock.trainer.algorithm.losses.value import value_loss
from penstock.trainer.algorithm.objective import required
from penstock.trainer.algorithm.packed_rows import Layout
from penstock.trainer.algorithm.reward_shaping import clip_symmetric, kl_in_reward
from penstock.trainer.errors import CheckpointError
from penstock.trainer.learner.attention.models import WHOLE, read_rows, use_packed_rows
from penstock.trainer.learner.load_model import load_language_model
from penstock.trainer.learner.parallel_shares import TokenShares
from penstock.trainer.learner.shard_files import CapturedPart
from penstock.trainer.learner.trainable import Optimisation, Trainable
from penstock.trainer.optimizer_settings import CriticSettings
from penstock.trainer.parallel_dims import ParallelDims

SumOverRanks = Callable[[Sequence[float]], list[float]]  # of a vector of figures
_EPSILON = 1e-8
_FLAT = 1e-12  # a variance below this, relative to the mean square, is rounding

_TAG = "critic"


@dataclass(frozen=True, slots=True, eq=False)
class ValueTargets:
    values: Tensor  # [N] float32, of the critic before it learned from the batch
    returns: Tensor  # [N] float32
    weight: float  # of each token: 1 / tokens of the whole batch


@dataclass(frozen=True, slots=True)
class CreditedBatch:
    micro_batches: list[MicroBatch]
    targets: list[ValueTargets]
    figures: dict[str, float]  # over all ranks


@dataclass(frozen=True, slots=True)
class TokenCredit:
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    clip: float | None = None
    kl_form: AnyKlForm = "k1"  # of the KL to the reference in every token's reward
    whiten_rewards: bool = False  # the rewards of all tokens of the batch, before GAE

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        values: Sequence[Tensor],
        sum_over_ranks: SumOverRanks = list,
        *,
        kl_coefficient: float = 0.0,
    ) -> CreditedBatch:
        """Return a batch with an advantage for every token, from ``values`` [N] of each micro-batch."""
        rewards = [self._rewards(batch, kl_coefficient) for batch in micro_batches]
        if self.whiten_rewards:
            _, mean, variance = moments(rewards, sum_over_ranks)
            rewards = [_whitened(some, mean, variance) for some in rewards]
        estimates = [
            gae_tokens(some, value, batch.sequences, gamma=self.gamma, lam=self.lam, whitened=False)
            for some, value, batch in zip(rewards, values, micro_batches, strict=True)
        ]
        count, mean, variance = moments([advantages for advantages, _ in estimates], sum_over_ranks)
        weight = 1.0 / max(count, 1.0)
        credited = [
            replace(batch, advantages=self._finished(advantages, mean, variance))
            for batch, (advantages, _) in zip(micro_batches, estimates, strict=True)
        ]
        targets = [ValueTargets(value, returns, weight) for value, (_, returns) in zip(values, estimates, strict=True)]
        return CreditedBatch(credited, targets, value_figures(targets, sum_over_ranks))

    def _rewards(self, batch: MicroBatch, kl_coefficient: float) -> Tensor:
        """Return every token's reward, [N]: minus its KL, plus the turn's at its last token."""
        scores = batch.turns.maximum(batch.advantages)  # equal for all tokens of a turn
        kl = self._kl(batch) if kl_coefficient else torch.zeros_like(batch.advantages)
        return kl_in_reward(scores, kl, batch.turns, coefficient=kl_coefficient)

    def _kl(self, batch: MicroBatch) -> Tensor:
        if self.kl_form == "full":
            return required(batch.reference_kl, "full KL")
        reference = required(batch.reference_logprobs, "reference")
        return kl_estimate(batch.behaviour_logprobs, reference.cpu(), self.kl_form)

    def _finished(self, advantages: Tensor, mean: float, variance: float) -> Tensor:
        return clip_symmetric(_whitened(advantages, mean, variance) if self.whiten else advantages, self.clip)


def _whitened(values: Tensor, mean: float, variance: float) -> Tensor:
    if variance <= _FLAT * mean * mean:
        return torch.zeros_like(values)
    return (values - mean) / math.sqrt(variance + _EPSILON)


def moments(parts: Sequence[Tensor], sum_over_ranks: SumOverRanks = list) -> tuple[float, float, float]:
    count, total = sum_over_ranks(
        [float(sum(len(part) for part in parts)), sum(float(part.double().sum()) for part in parts)]
    )
    mean = total / max(count, 1.0)
    (squares,) = sum_over_ranks([sum(float((part.double() - mean).square().sum()) for part in parts)])
    return count, mean, squares / max(count - 1.0, 1.0)


def value_figures(targets: Sequence[ValueTargets], sum_over_ranks: SumOverRanks = list) -> dict[str, float]:
    """Return how well the critic predicted the batch before it learned from it.

    ``explained_variance`` is 1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 one that
    predicts the mean alone, below 0 one that is worse than that; 0 where all returns are equal.
    """
    count, mean_return, spread = moments([target.returns for target in targets], sum_over_ranks)
    _, mean_error, unexplained = moments([target.returns - target.values for target in targets], sum_over_ranks)
    if count < 1.0:
        return {}
    is_flat = spread <= _FLAT * mean_return * mean_return
    return {
        "value_mean": mean_return - mean_error,
        "return_mean": mean_return,
        "explained_variance": 0.0 if is_flat else 1.0 - unexplained / spread,
    }


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
        local_predictors, places = self._shares.own_predictors(predictors, input_ids.shape[1])
        return self._shares.whole(self.value_head(hidden.index_select(0, local_predictors)), places, len(predictors))


class Critic:
    """A value network under DeepSpeed; `credit`, `learn` and `load` are called on all ranks together."""

    def __init__(self, trainable: Trainable, chosen: CriticSettings, credit: TokenCredit, dims: ParallelDims) -> None:
        self._trainable, self._chosen, self._credit = trainable, chosen, credit
        self._dims = dims

    @property
    def kl_form(self) -> AnyKlForm:
        return self._credit.kl_form

    def learns_alone(self, steps_done: int) -> bool:
        return steps_done < self._chosen.head_start_steps

    def credit(self, micro_batches: Sequence[MicroBatch], kl_coefficient: float) -> CreditedBatch:
        with torch.no_grad():
            values = [self._values(batch) for batch in micro_batches]
        values = list(torch.cat(values).cpu().split(list(map(len, values)))) if values else []
        return self._credit(micro_batches, values, self._dims.sum, kl_coefficient=kl_coefficient)

    def learn(self, batch: CreditedBatch) -> dict[str, float]:
        losses, norm, lr = [], 0.0, 0.0
        num_micro_batches = len(batch.micro_batches)
        for _ in range(self._chosen.updates):
            pieces = []
            for number, pair in enumerate(zip(batch.micro_batches, batch.targets, strict=True), start=1):
                self._trainable.begin(is_last=number == num_micro_batches)
                piece = self._loss(*pair)
                self._trainable.backward(piece)
                pieces.append(piece.detach())
            update = self._trainable.update()
            losses.append(sum(torch.stack(pieces).tolist()))
            norm, lr = update.grad_norm, update.lr
        (first,) = self._dims.sum(losses[:1])
        return {"value_loss": first, "critic_grad_norm": norm, "critic_lr": lr, **batch.figures}

    def skip(self, batch: CreditedBatch) -> dict[str, float]:
        for _ in range(self._chosen.updates):
            self._trainable.skip_update()
        return {"value_loss": 0.0, "critic_grad_norm": 0.0, "critic_lr": 0.0, **batch.figures}

    def leave_device(self) -> int:
        return self._trainable.leave_device()

    def enter_device(self) -> None:
        self._trainable.host.move_back()

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
        chosen = self._chosen
        before, returns = copied_together([target.values, target.returns], values.device)
        losses = value_loss(values, before, returns, clip=chosen.value_clip, form=chosen.loss)
        return chosen.loss_coefficient * target.weight * losses.sum()


def load_critic(
    model_folder: Path, how: Optimisation, chosen: CriticSettings, credit: TokenCredit, dims: ParallelDims
) -> Critic:
    """Load a model folder's backbone with a value head under DeepSpeed, on every rank; raises as `load_policy` does."""
    model = load_language_model(model_folder, how, dims)
    scorer = ValueScorer(model, TokenShares(dims.token_group))
    return Critic(Trainable(scorer, how, dims), chosen, credit, dims)
