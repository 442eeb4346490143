"""Tensor parallelism: several ranks have a part of every linear layer each. The adapter of DeepSpeed's AutoTP.

The plan of `transformers` says how each weight is cut: queries, keys, values, gate and up by their outputs, the projections
back by their inputs, after which the ranks add up. Embedding, output head and norms are whole on every rank.

AutoTP takes the plan from the module that it is given. Without it, it cuts by names, trains, and never adds up the gradients of
the norms of queries and keys, which every rank computes for its own heads: wrong weights, and no error. So the plan is put on
the wrapper around the model, and what became of it is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.shard_files import Cut
from penstock.trainer.parallel_dims import Share
from penstock.trainer.ranks import RankSubgroup

_CUT = ("colwise", "rowwise")
_SUMMED = "replicated_with_grad_allreduce"  # whole on every rank, with a gradient that is a part of the sum on each


class WeightShares:
    """The shares of a module's weights; the default is one rank with all of them."""

    def __init__(self, group: RankSubgroup | None = None) -> None:
        self.group = group

    @property
    def share(self) -> Share:
        return Share() if self.group is None else Share(self.group.index, self.group.size)

    def expose_plan(self, module: nn.Module, model: Any) -> None:
        """Put the plan of a `transformers` model inside of ``module`` where AutoTP reads it."""
        if self.group is not None:
            module.config = model.config
            module._tp_plan = dict(model.config.get_text_config().base_model_tp_plan)  # type: ignore[assignment]

    def config(self) -> dict[str, Any]:
        if self.group is None:
            return {}
        return {"tensor_parallel": {"autotp_size": self.group.size, "vocab_parallel_lm_head": False}}

    def check(self, engine: Any, module: nn.Module) -> None:
        """Check that DeepSpeed did what the plan says; raises UnsupportedModel.

        Its own comparison of the first inputs of all ranks, which pickles them, is taken out: ranks read the same plan.
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
        """Return the norm of all gradients, each given with its parameter; whole ones count once. Collective."""
        if self.group is None:
            return float(torch.stack([one.norm() for _, one in gradients]).norm()) if gradients else 0.0
        own = [one for parameter, one in gradients if self.group.index == 0 or cut_of(parameter) is not None]
        total = torch.stack([one.double().square().sum() for one in own]).sum()
        return float(self.group.sum(total).sqrt())


def cut_of(parameter: Tensor) -> Cut | None:
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    meta: dict[str, Any] = parameter.ds_autotp_universal_checkpoint_meta  # type: ignore[attr-defined]
    sizes = meta["partition_sizes"]
    if len(set(sizes)) != 1:
        raise UnsupportedModel(f"a weight of shape {meta['logical_shape']} was cut unequally: {list(sizes)}")
    return Cut(meta["partition_dim"], len(sizes))
