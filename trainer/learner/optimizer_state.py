"""Where DeepSpeed 0.19 keeps this rank's master weights and moments, by parameter and offset, at every ZeRO stage.

| stage | master weights and moments of a rank                        | found by                                          |
|-------|-------------------------------------------------------------|---------------------------------------------------|
| 0     | of every parameter; each rank writes those of its own number | the optimizer's state by parameter                |
| 1, 2  | one flat partition of a parameter group                     | ``_hp_mapping`` of a parameter                    |
| 3     | one part of each parameter, the last ones padded            | ``grad_position`` of a parameter                  |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.trainer.learner.shard_files import WEIGHT, Fragment, Part, Shard, ShardFiles
from penstock.trainer.learner.tensor_parallel import WeightShares, cut_of
from penstock.trainer.parallel_dims import Share

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, besides its number of steps
_STEPS = "optimizer_steps"


@dataclass(frozen=True, slots=True)
class Place:
    """A contiguous part of a parameter, inside a tensor that the optimizer steps."""

    name: str
    start: int  # in the flattened parameter, or in this rank's part of it
    num: int
    stepped: Tensor  # what the optimizer holds state of
    offset: int  # in the flattened ``stepped``
    is_written: bool = True  # by this rank, into its shard


class OptimizerState:
    def __init__(self, engine: Any, share: Share, *, file: Share, weights: WeightShares) -> None:
        """Read and write the state of ``engine``, this rank's ``share`` of that of its weights, as one of the checkpoint's files."""
        self._engine, self._share, self._file, self._weights = engine, share, file, weights
        self._stage: int = engine.zero_optimization_stage()
        self.base: Any = engine.optimizer if self._stage == 0 else engine.optimizer.optimizer
        self._named = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self._parts = {
            name: Part(cut, weights.share.index) for name, p in self._named.items() if (cut := cut_of(p)) is not None
        }

    def capture(self, state: Mapping[str, Any]) -> Shard:
        """Copy what this rank writes to the CPU; later steps do not change the copy."""
        steps, fragments = 0.0, []
        for place in self.places():
            own = self.base.state.get(place.stepped, {})
            steps = max(steps, float(own.get("step", 0.0)))
            if place.is_written:
                tensors = {WEIGHT: place.stepped, **{kind: own[kind] for kind in MOMENTS if kind in own}}
                copies = {
                    kind: part_of(tensor, place).to("cpu", torch.float32, copy=True) for kind, tensor in tensors.items()
                }
                fragments.append(Fragment(place.name, place.start, copies))
        shapes = {name: self._weights.whole_shape(p) for name, p in self._named.items()}
        file = self._file
        return Shard(file.index, file.count, shapes, fragments, {**state, _STEPS: steps}, self._parts)

    def restore(self, files: ShardFiles, whole: Any) -> None:
        """Read this rank's part of shards that any layout wrote, and the weights that are computed with; collective.

        ``whole`` is `Trainable.whole`, with which a partitioned parameter is changed. Raises ValueError for parameters other
        than this model's.
        """
        self._check_shapes(files)
        kinds = {name: files.kinds(name) for name in self._named}
        with torch.no_grad():
            for place in self.places():
                self._restore(place, files, kinds[place.name])
            for name, parameter in self._named.items():
                with whole(parameter):
                    if self._stage < 3 or self._share.index == 0:
                        num = parameter.numel()
                        part = self._parts.get(name)
                        parameter.copy_(files.read(name, WEIGHT, 0, num, part).view(parameter.shape))

    def _restore(self, place: Place, files: ShardFiles, kinds: Sequence[str]) -> None:
        def stored(kind: str) -> Tensor:
            return files.read(place.name, kind, place.start, place.num, self._parts.get(place.name))

        part_of(place.stepped, place).copy_(stored(WEIGHT))
        own = self.base.state[place.stepped]
        for kind in MOMENTS:
            if kind in kinds and kind not in own:
                own["step"] = torch.zeros((), dtype=torch.float32)
                own[kind] = torch.zeros_like(place.stepped).detach()
            if kind in own:
                part_of(own[kind], place).copy_(stored(kind) if kind in kinds else torch.zeros(place.num))
        if own:
            own["step"].fill_(float(files.state[_STEPS]))

    def _check_shapes(self, files: ShardFiles) -> None:
        own = {name: list(self._weights.whole_shape(p)) for name, p in self._named.items()}
        if own != files.shapes:
            differing = sorted(
                name for name in own.keys() | files.shapes.keys() if own.get(name) != files.shapes.get(name)
            )
            name = differing[0]
            raise ValueError(
                f"{name} has shape {files.shapes.get(name, '(not there)')} in the checkpoint, and "
                f"{own.get(name, '(not there)')} in the model"
            )

    def places(self) -> Iterator[Place]:
        """Yield the parts of parameters that this rank's optimizer steps; whole ones of ranks that share weights are written by the first."""
        for place in self._stepped():
            is_counted = self._weights.share.index == 0 or place.name in self._parts
            yield place if is_counted else replace(place, is_written=False)

    def _stepped(self) -> Iterator[Place]:
        match self._stage:
            case 0:
                for number, (name, parameter) in enumerate(self._named.items()):
                    is_own = number % self._share.count == self._share.index
                    yield Place(name, 0, parameter.numel(), parameter, 0, is_own)
            case 3:
                yield from self._partitioned_places()
            case _:
                yield from self._flat_places()

    def _flat_places(self) -> Iterator[Place]:
        zero = self._engine.optimizer
        flat = getattr(zero, "single_partition_of_fp32_groups", None)
        partitions = zero.fp32_groups_flat_partition if flat is None else flat  # None: bf16 with float32 gradients
        for name, parameter in self._named.items():
            if (mapping := parameter._hp_mapping) is not None:  # None: other ranks have all of it
                own, place = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield Place(name, own.start, own.numel, partitions[mapping.param_group_index], place.start)

    def _partitioned_places(self) -> Iterator[Place]:
        zero = self._engine.optimizer
        for name, parameter in self._named.items():
            group, offset, num = zero.grad_position[zero.get_param_id(parameter)]
            start = num * self._share.index
            if (within := min(num, parameter.ds_numel - start)) > 0:  # the rest is padding
                yield Place(name, start, within, zero.fp32_partitioned_groups_flat[group], offset)


def part_of(tensor: Tensor, place: Place) -> Tensor:
    """Return the part of a tensor of the shape of ``place.stepped`` that is at a place, flattened; a view."""
    return tensor.detach().view(-1).narrow(0, place.offset, place.num)
