"""Tensor parallelism and sequence parallelism: several ranks compute one micro-batch together.

Tensor parallelism: several ranks have a part of every linear layer each. The adapter of DeepSpeed's AutoTP.

The plan of `transformers` says how each weight is cut: queries, keys, values, gate and up by their outputs, the projections
back by their inputs, after which the ranks add up. Embedding, output head and norms are whole on every rank.

AutoTP takes the plan from the module that it receives. Without it, it cuts by names, trains, and never adds up the gradients of
the norms of queries and keys, which every rank computes for its heads: wrong weights, and no error. So the plan is put on
the wrapper around the model, and what became of it is checked.

Sequence parallelism: several ranks compute the tokens of one micro-batch together (Ulysses, arXiv 2309.14509).

In every layer but attention a rank computes a range of the stream's tokens. For attention an all-to-all gives it all tokens of
some of the heads, so attention is that of one rank with the layout of the whole stream: packing and shared prefixes stay exact. A second
all-to-all returns its output to the ranges.

Each rank scores the sampled tokens that its range predicts. The scores are added up over the ranks, so each has all of them and
computes the whole loss. The backward pass of that sum takes this rank's part only, and the all-to-alls carry gradients as they carried
values: a rank's gradient is its part of the sum, and DeepSpeed adds the parts up as it does those of other rows. It knows
nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's name for it
from torch import Tensor, nn

from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.shard_files import Cut
from penstock.trainer.parallel_dims import Share
from penstock.trainer.ranks import RankSubgroup

_CUT = ("colwise", "rowwise")
_SUMMED = "replicated_with_grad_allreduce"  # whole on every rank, with a gradient that is a part of the sum on each


class WeightShares:
    def __init__(self, group: RankSubgroup | None = None) -> None:
        self.group = group

    @property
    def share(self) -> Share:
        return Share() if self.group is None else Share(self.group.index, self.group.size)

    def expose_plan(self, module: nn.Module, model: Any) -> None:
        if self.group is not None:
            module.config = model.config
            module._tp_plan = dict(model.config.get_text_config().base_model_tp_plan)  # type: ignore[assignment]

    def config(self) -> dict[str, Any]:
        if self.group is None:
            return {}
        return {"tensor_parallel": {"autotp_size": self.group.size, "vocab_parallel_lm_head": False}}

    def check(self, engine: Any, module: nn.Module) -> None:
        """Check that DeepSpeed did what the plan says; raises UnsupportedModel.

        DeepSpeed's comparison of the first inputs of all ranks, which pickles them, is taken out: ranks read the same plan.
        """
        if self.group is None:
            return
        engine.first_dataloader_check.remove()
        plan: dict[str, str] = module._tp_plan  # type: ignore[assignment]
        for name, parameter in module.named_parameters():
            owner = name.rpartition(".")[0]
            styles = [style for pattern, style in plan.items() if fnmatchcase(owner, f"*{pattern}")]
            expected = styles[0] if styles else None
            if expected == "rowwise" and name.endswith(".bias"):  # which is added to the sum
                expected = None
            is_cut, is_summed = cut_of(parameter) is not None, hasattr(parameter, "_ds_grad_allreduce_registered")
            if (expected in _CUT) != is_cut or (expected == _SUMMED) != is_summed:
                raise UnsupportedModel(
                    f"{name}: the plan says {expected or 'whole'}, and DeepSpeed made it {'cut' if is_cut else 'whole'}"
                    f"{', its gradient added up' if is_summed else ''}; set trainer.tensor_parallel = 1, and report this model"
                )

    def whole(self, parameter: Tensor) -> Tensor:
        cut = cut_of(parameter)
        return parameter if cut is None or self.group is None else self.group.gather(parameter.detach(), cut.dim)

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        shape = list(getattr(parameter, "ds_shape", parameter.shape))  # one that ZeRO partitions looks empty
        if (cut := cut_of(parameter)) is not None:
            shape[cut.dim] *= cut.count
        return tuple(shape)

    def norm(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Return the norm of all gradients, each passed with its parameter; whole ones count once. Collective."""
        if self.group is None:
            return float(torch.stack([gradient.norm() for _, gradient in gradients]).norm()) if gradients else 0.0
        counted = [
            gradient for parameter, gradient in gradients if self.group.index == 0 or cut_of(parameter) is not None
        ]
        total = torch.stack([gradient.double().square().sum() for gradient in counted]).sum()
        return float(self.group.sum(total).sqrt())


def cut_of(parameter: Tensor) -> Cut | None:
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    meta: dict[str, Any] = parameter.ds_autotp_universal_checkpoint_meta  # type: ignore[attr-defined]
    sizes = meta["partition_sizes"]
    if len(set(sizes)) != 1:
        raise UnsupportedModel(f"a weight of shape {meta['logical_shape']} was cut unequally: {list(sizes)}")
    return Cut(meta["partition_dim"], len(sizes))


@dataclass(frozen=True, slots=True)
class TokenShares:
    group: RankSubgroup | None = None

    @property
    def are_several(self) -> bool:
        return self.group is not None

    def own(self, values: Tensor) -> Tensor:
        """Return this rank's range [1, W, …] of values [1, T, …] of all tokens; the last ranges are filled up with 0."""
        if self.group is None:
            return values
        width = self._width(values.shape[1])
        beside = (0, 0) * (values.dim() - 2)
        padded = F.pad(values, (*beside, 0, width * self.group.size - values.shape[1]))
        return padded[:, self.group.index * width : (self.group.index + 1) * width]

    def num_own(self, num_tokens: int) -> int:
        if self.group is None:
            return num_tokens
        width = self._width(num_tokens)
        return min(width, max(0, num_tokens - self.group.index * width))

    def own_predictors(self, predictors: Tensor, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """Return this rank's predictors [n] in its range, and their places among all [N]; None: all."""
        if self.group is None:
            return predictors, None
        width = self._width(num_tokens)
        positions = predictors - self.group.index * width
        places = torch.nonzero((positions >= 0) & (positions < width)).squeeze(1)
        return positions[places], places

    def whole(self, scores: Tensor, places: Tensor | None, num: int) -> Tensor:
        """Return the scores [..., num] of all predictors from this rank's [..., n] in their ``places``; collective."""
        if self.group is None or places is None:
            return scores
        return _Whole.apply(scores, places, num, self.group)  # type: ignore[return-value]

    def sum(self, values: Tensor) -> Tensor:
        return values if self.group is None else self.group.sum(values)

    def by_heads(self, states: Tensor, num_tokens: int) -> Tensor:
        """Exchange this rank's tokens of all heads [1, H, W, D] for all tokens of this rank's heads [1, H / S, T, D]; collective.

        Key heads that are fewer than the ranks are repeated first, so that a rank has the one of its query heads.
        """
        if self.group is None:
            return states
        size, heads = self.group.size, states.shape[1]
        if heads < size:
            states = states.repeat_interleave(size // heads, dim=1)
        return _ByHeads.apply(states, self.group)[:, :, :num_tokens]  # type: ignore[index]

    def of_heads(self, values: Tensor) -> Tensor:
        """Return those of this rank's heads, [H / S], of values [H]."""
        return values if self.group is None else values.unflatten(0, (self.group.size, -1))[self.group.index]

    def by_tokens(self, states: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads [1, H / S, T, D] for this rank's tokens of all heads [1, H, W, D]; collective."""
        if self.group is None:
            return states
        missing = self._width(states.shape[2]) * self.group.size - states.shape[2]
        return _ByTokens.apply(F.pad(states, (0, 0, 0, missing)), self.group)  # type: ignore[return-value]

    def _width(self, num_tokens: int) -> int:
        assert self.group is not None
        return -(-num_tokens // self.group.size)


class _Whole(torch.autograd.Function):
    """The sum of zero-filled scores; gradients of this rank's part only, since every rank computes the same loss."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, places: Tensor, num: int, group: RankSubgroup) -> Tensor:
        ctx.save_for_backward(places)
        filled = scores.new_zeros(*scores.shape[:-1], num)
        return group.sum(filled.index_copy_(-1, places, scores))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(-1, places), None, None, None


class _ByHeads(torch.autograd.Function):
    """[1, H, W, D] of this rank's tokens to [1, H / S, S W, D] of this rank's heads."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: RankSubgroup) -> Tensor:
        ctx.group = group
        return _by_heads(states, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _by_tokens(grads[0], ctx.group), None


class _ByTokens(torch.autograd.Function):
    """[1, H / S, S W, D] of this rank's heads to [1, H, W, D] of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: RankSubgroup) -> Tensor:
        ctx.group = group
        return _by_tokens(states, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _by_heads(grads[0], ctx.group), None


def _by_heads(states: Tensor, group: RankSubgroup) -> Tensor:
    parts = group.exchange(states[0].unflatten(0, (group.size, -1)))  # [S, H / S, W, D], one range from each rank
    return parts.transpose(0, 1).flatten(1, 2)[None]


def _by_tokens(states: Tensor, group: RankSubgroup) -> Tensor:
    heads = states[0].unflatten(1, (group.size, -1)).transpose(0, 1)
    parts = group.exchange(heads)  # [S, H / S, W, D], some heads from each
    return parts.flatten(0, 1)[None]
