"""Where DeepSpeed 0.19 keeps this rank's master weights and moments, by parameter and offset, at every ZeRO stage.

| stage | master weights and moments of a rank                     | found by                           |
|-------|----------------------------------------------------------|------------------------------------|
| 0     | of every parameter; each rank writes those of its number | the optimizer's state by parameter |
| 1, 2  | one flat partition of a parameter group                  | ``_hp_mapping`` of a parameter     |
| 3     | one part of each parameter, the last ones padded         | ``grad_position`` of a parameter   |

Also here: DeepSpeed's configuration, the learning rate over the steps, and checkpoints that DeepSpeed wrote in earlier
releases.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from penstock.trainer.errors import CheckpointError
from penstock.trainer.learner.parallel_shares import WeightShares, cut_of
from penstock.trainer.learner.shard_files import WEIGHT, Fragment, Part, Shard, ShardFiles
from penstock.trainer.parallel_dims import Share

if TYPE_CHECKING:
    from penstock.trainer.learner.trainable import Optimisation

KEEP_WHOLE_BELOW = 100_000  # DeepSpeed's default: smaller parameters are not partitioned by ZeRO-3
_PREFETCHED = 50_000_000  # elements, DeepSpeed's default
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # a setting of torch that stands above what its caller asks for
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, besides its number of steps
_STEPS = "optimizer_steps"


@dataclass(frozen=True, slots=True)
class Communication:
    """What ranks send each other under ZeRO, in elements."""

    overlap_comm: bool | None = None  # None: at stage 3
    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int | None = None  # None: of one layer
    max_live_parameters: int = 1_000_000_000
    hpz_partition_size: int = 1

    def config(self, stage: int, layer_size: int) -> dict[str, Any]:
        of_all = {"reduce_bucket_size": self.reduce_bucket_size, "overlap_comm": self.overlap_comm}
        if stage < 3:
            return of_all if stage == 2 else {}
        ahead = self.prefetch_bucket_size
        return {
            **of_all,
            "stage3_prefetch_bucket_size": max(_PREFETCHED, layer_size) if ahead is None else ahead,
            "stage3_max_live_parameters": self.max_live_parameters,
            "zero_hpz_partition_size": self.hpz_partition_size,
        }


class RateSchedule(LambdaLR):
    """The learning rate of each batch, which may have several optimizer steps."""

    def step(self, epoch: int | None = None, *, ends_batch: bool = True) -> None:
        """Set the next batch's rate or, within a batch, this one's again without the factor of the last step."""
        if ends_batch:
            super().step(epoch)
            return
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = rate

    def continue_after(self, num_batches: int) -> None:
        self.last_epoch, self._step_count = num_batches, num_batches + 1
        self._last_lr = [
            base * factor(num_batches) for factor, base in zip(self.lr_lambdas, self.base_lrs, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def lr_factor(how: Optimisation, step: int) -> float:
    """Return the factor of the peak learning rate at optimizer step ``step`` (0 is the first).

    Warm-up rises linearly to 1, starting above 0 at the first step; then the schedule falls from 1 to
    ``min_lr_ratio`` at the last step (`constant`: stays at 1).
    """
    if step < how.warmup_steps:
        return (step + 1) / how.warmup_steps
    if how.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - how.warmup_steps) / max(1, how.num_steps - 1 - how.warmup_steps))
    fall = progress if how.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
    return 1.0 - (1.0 - how.min_lr_ratio) * fall


def zero_config(how: Optimisation, module: nn.Module | None = None) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a module; None: for one that is still to be read.

    Gradient accumulation is 1 for any number of micro-batches: that number varies from step to step, so
    `Trainable` sets the boundary itself, and the loss is already divided by the whole batch's denominators.
    The optimizer is PyTorch's AdamW, so that no operator is compiled, also where it steps in host memory.

    Gradients of a bfloat16 model are added up in float32 by default, over micro-batches and over ranks: each of
    DeepSpeed's two settings alone leaves the other sum in bfloat16.
    """
    lists = [] if module is None else [one for one in module.modules() if isinstance(one, nn.ModuleList)]
    sizes = [sum(getattr(p, "ds_numel", p.numel()) for p in layer.parameters()) for one in lists for layer in one]
    communication = how.communication.config(how.zero_stage, max(sizes, default=0))
    zero: dict[str, Any] = {"stage": how.zero_stage, **communication}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": how.max_grad_norm,
        "bf16": {"enabled": how.dtype == "bfloat16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    if how.dtype == "bfloat16" and how.gradient_dtype == "float32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
        # Otherwise stage 1 would hold the bfloat16 gradients beside their sums until the next step.
        config["bf16"]["immediate_grad_update"] = True
    in_host_memory = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if how.offload != "none":
        zero["offload_optimizer"] = in_host_memory
    if how.offload == "parameters":
        zero["offload_param"] = dict(in_host_memory)
    if how.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = how.keep_whole_below
    return config


def load_written_by_deepspeed(engine: Any, folder: Path, *, num_ranks: int, strict: bool) -> dict[str, Any]:
    """Read ``folder`` into an engine; raises CheckpointError for another number of ranks or a broken folder."""
    try:
        with _without_pickled_code():
            loaded_path, state = engine.load_checkpoint(str(folder.parent), tag=folder.name, load_module_strict=strict)
    except Exception as err:  # DeepSpeed and torch raise many kinds of errors for a broken folder
        if "Error(s) in loading state_dict" in str(err):
            raise another_model(folder, err) from err
        raise CheckpointError(
            f"checkpoint {folder} is not readable ({type(err).__name__}: {err}); restore it from a copy, or "
            "remove its folder and set trainer.resume_older_step to the step of the one before it"
        ) from err
    if loaded_path is None or state.get("num_ranks") != num_ranks:
        raise CheckpointError(
            f"checkpoint {folder} was written by {(state or {}).get('num_ranks', 'an unknown number of')} rank(s) of a "
            f"release whose checkpoints need as many, this run has {num_ranks}; start it with the same "
            "trainer.num_ranks once: its next checkpoint can be resumed by any number"
        )
    return state


def another_model(folder: Path, err: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} is of another model than model.path ({str(err).splitlines()[0]}); set model.path back to "
        "the model of this run, or start another run from the new model with another run.id"
    )


@contextlib.contextmanager
def _without_pickled_code() -> Iterator[None]:
    """Have ``torch.load`` refuse pickled code inside the block; DeepSpeed lets it run what a checkpoint's files name.

    What is allowed are the classes of DeepSpeed's figures: none of them does anything when it is made.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # noqa: PLC0415
    from deepspeed.runtime.zero.config import ZeroStageEnum  # noqa: PLC0415
    from deepspeed.utils.tensor_fragment import fragment_address  # noqa: PLC0415

    allowed = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    with variable_set(_WEIGHTS_ONLY), torch.serialization.safe_globals(allowed):
        yield


@contextlib.contextmanager
def variable_set(name: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@dataclass(frozen=True, slots=True)
class Place:
    name: str
    start: int  # in the flattened parameter, or in this rank's part of it
    num: int
    stepped: Tensor  # what the optimizer holds state of
    offset: int  # in the flattened ``stepped``
    is_written: bool = True  # by this rank, into its shard


class OptimizerState:
    def __init__(self, engine: Any, share: Share, *, file: Share, weights: WeightShares) -> None:
        self._engine, self._share, self._file, self._weights = engine, share, file, weights
        self._stage: int = engine.zero_optimization_stage()
        self.base: Any = engine.optimizer if self._stage == 0 else engine.optimizer.optimizer
        self._named = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self._parts = {
            name: Part(cut, weights.share.index) for name, p in self._named.items() if (cut := cut_of(p)) is not None
        }

    def capture(self, state: Mapping[str, Any], readable: Callable[[Tensor], Tensor]) -> Shard:
        """Copy this rank's shard; ``readable`` returns a tensor whose values may be in host memory at the moment."""
        steps, fragments = 0.0, []
        for place in self.places():
            param_state = self.base.state.get(place.stepped, {})
            steps = max(steps, float(param_state.get("step", 0.0)))
            if place.is_written:
                tensors = {
                    WEIGHT: place.stepped,
                    **{kind: param_state[kind] for kind in MOMENTS if kind in param_state},
                }
                copies = {
                    kind: part_of(readable(tensor), place).to("cpu", torch.float32, copy=True)
                    for kind, tensor in tensors.items()
                }
                fragments.append(Fragment(place.name, place.start, copies))
        shapes = {name: self._weights.whole_shape(p) for name, p in self._named.items()}
        file = self._file
        return Shard(file.index, file.count, shapes, fragments, {**state, _STEPS: steps}, self._parts)

    def restore(self, files: ShardFiles, whole: Any) -> None:
        """Read this rank's part of shards that any layout wrote, and the weights that are computed with; collective.

        ``whole`` makes a partitioned parameter whole and keeps its changes. Raises ValueError for parameters other than
        this model's.
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
        param_state = self.base.state[place.stepped]
        for kind in MOMENTS:
            if kind in kinds and kind not in param_state:
                param_state["step"] = torch.zeros((), dtype=torch.float32, device=self._step_device(place.stepped))
                param_state[kind] = torch.zeros_like(place.stepped).detach()
            if kind in param_state:
                part_of(param_state[kind], place).copy_(stored(kind) if kind in kinds else torch.zeros(place.num))
        if param_state:
            param_state["step"].fill_(float(files.state[_STEPS]))

    def place_steps(self) -> None:
        """Put AdamW's numbers of steps where it expects them: DeepSpeed's checkpoint may be of another device."""
        for stepped, param_state in self.base.state.items():
            if "step" in param_state:
                param_state["step"] = torch.as_tensor(param_state["step"], dtype=torch.float32).to(
                    self._step_device(stepped)
                )

    def _step_device(self, stepped: Tensor) -> torch.device:
        return stepped.device if self.base.defaults["fused"] else torch.device("cpu")

    def _check_shapes(self, files: ShardFiles) -> None:
        model_shapes = {name: list(self._weights.whole_shape(p)) for name, p in self._named.items()}
        if model_shapes != files.shapes:
            differing = sorted(
                name
                for name in model_shapes.keys() | files.shapes.keys()
                if model_shapes.get(name) != files.shapes.get(name)
            )
            name = differing[0]
            raise ValueError(
                f"{name} has shape {files.shapes.get(name, '(not there)')} in the checkpoint, and "
                f"{model_shapes.get(name, '(not there)')} in the model"
            )

    def places(self) -> Iterator[Place]:
        """Yield the parts of parameters that this rank's optimizer steps.

        Of ranks that share weights, the first writes the whole ones.
        """
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
                lp_fragment, place = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield Place(
                    name, lp_fragment.start, lp_fragment.numel, partitions[mapping.param_group_index], place.start
                )

    def _partitioned_places(self) -> Iterator[Place]:
        zero = self._engine.optimizer
        for name, parameter in self._named.items():
            group, offset, num = zero.grad_position[zero.get_param_id(parameter)]
            start = num * self._share.index
            if (within := min(num, parameter.ds_numel - start)) > 0:  # the rest is padding
                yield Place(name, start, within, zero.fp32_partitioned_groups_flat[group], offset)


def part_of(tensor: Tensor, place: Place) -> Tensor:
    return tensor.detach().view(-1).narrow(0, place.offset, place.num)
