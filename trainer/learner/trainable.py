"""A module under DeepSpeed: the adapter of the library.

`optimizer_state.py` knows where it keeps its state, and reads the files that it wrote in earlier releases.

Every rank has one `Trainable` for each network that learns (policy, critic). The methods that change or gather
weights are called on all ranks together.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.trainer.attention_choice import Attention
from penstock.trainer.data_settings import FineTuningSettings, Schedule
from penstock.trainer.errors import TrainingDiverged
from penstock.trainer.learner.adapter import Lora
from penstock.trainer.learner.host_states import HostStates
from penstock.trainer.learner.optimizer_state import (
    KEEP_WHOLE_BELOW,
    Communication,
    OptimizerState,
    RateSchedule,
    another_model,
    load_written_by_deepspeed,
    lr_factor,
    variable_set,
    zero_config,
)
from penstock.trainer.learner.parallel_shares import WeightShares
from penstock.trainer.learner.shard_files import Shard, ShardFiles, has_shards
from penstock.trainer.learner.step_metrics import LayerMetrics, Outliers, StepWatch
from penstock.trainer.optimizer_settings import OptimizerSettings
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.settings import TrainerSettings

_NORMS = "recent_grad_norms"  # in the state of a checkpoint
_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")  # of a DeepSpeed engine


@dataclass(frozen=True, slots=True)
class Optimisation:
    num_steps: int
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_steps: int
    schedule: Schedule
    min_lr_ratio: float
    max_grad_norm: float
    zero_stage: int
    dtype: Literal["float32", "bfloat16"]
    attention: Attention = "auto"  # over packed rows
    head_dtype: Literal["as-trained", "float32"] = "as-trained"  # of logits
    max_logits: int | None = None  # of a chunk; None: as the device's memory allows
    gradient_checkpointing: bool = False
    activation_offload: bool = False  # of what gradient checkpointing keeps
    offload: Literal["none", "optimizer", "parameters"] = "none"  # to host memory
    gradient_dtype: Literal["float32", "as-trained"] = "float32"  # of sums over micro-batches and ranks
    keep_whole_below: int = KEEP_WHOLE_BELOW
    communication: Communication = field(default_factory=Communication)
    router_replay: bool = False  # compute tokens with the experts that the engine chose
    train_vision_tower: bool = False  # of a model that reads images; else it is frozen
    lora: Lora | None = None  # adapters learn, the model stays; None: the model learns
    skip_above: float | None = None  # steps whose gradient norm is above this multiple of recent ones are left out
    skip_after: int = 1  # the first steps, of which none is left out


def optimisation(
    settings: TrainerSettings, section: OptimizerSettings | FineTuningSettings, num_steps: int
) -> Optimisation:
    trainer, model = settings.trainer, settings.model
    lora = model.lora
    return Optimisation(
        num_steps=num_steps,
        lr=section.lr,
        betas=section.betas,
        weight_decay=trainer.weight_decay,
        warmup_steps=section.warmup_steps,
        schedule=section.schedule,
        min_lr_ratio=trainer.min_lr_ratio,
        max_grad_norm=trainer.max_grad_norm,
        zero_stage=trainer.zero_stage,
        dtype=model.dtype,
        attention=trainer.attention,
        head_dtype=model.head_dtype,
        max_logits=trainer.max_logits,
        gradient_checkpointing=model.gradient_checkpointing,
        activation_offload=model.activation_offload,
        offload=trainer.offload,
        gradient_dtype=trainer.gradient_dtype,
        communication=Communication(**{of.name: getattr(trainer, of.name) for of in fields(Communication)}),
        lora=Lora(lora.rank, lora.scaled_alpha, lora.dropout, tuple(lora.targets), settings.first_seed, lora.path)
        if lora.rank
        else None,
    )


@dataclass(frozen=True, slots=True)
class Update:
    grad_norm: float  # before clipping
    lr: float
    layers: Mapping[str, LayerMetrics] = field(default_factory=dict)  # by group of layers, if they are watched
    is_left_out: bool = False  # nothing has changed


class Trainable:
    def __init__(
        self,
        module: nn.Module,
        how: Optimisation,
        dims: ParallelDims,
        layers: Mapping[str, Sequence[str]] | None = None,
        *,
        model: Any = None,
    ) -> None:
        """Put a module under DeepSpeed; ``model`` is the `transformers` model in it.

        Raises UnsupportedModel if DeepSpeed did not divide the weights as planned.
        """
        self._weights = WeightShares(dims.weight_group)
        self._weights.expose_plan(module, model)
        config = self._weights.config() | zero_config(how, module)
        deepspeed = import_deepspeed()
        optimizer = torch.optim.AdamW(
            (p for p in module.parameters() if p.requires_grad),
            lr=how.lr,
            betas=how.betas,
            weight_decay=how.weight_decay,
            # One kernel, without temporary tensors as large as what is stepped, of the GPU or, offloaded, of the CPU:
            # there 13 times faster than the plain form, whose rounding a CPU that trains keeps.
            fused=torch.cuda.is_available(),
        )
        factor = functools.partial(lr_factor, how)
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, lr_scheduler=lambda wrapped: RateSchedule(wrapped, factor), config=config
        )
        self._weights.check(self._engine, module)
        self._engine.train()
        self._dims = dims
        self._has_frozen = any(not p.requires_grad for p in module.parameters())
        self.module = module
        self.device: torch.device = self._engine.device
        self.host = HostStates(self.device)  # `move_back` ends what `leave_device` began
        self._own_norm = 0.0  # at stage 0, of the step that is being made
        self._is_empty = False  # that step is left out, whatever its norm
        self._outliers = None if how.skip_above is None else Outliers(how.skip_above, how.skip_after)
        state = self._optimizer_state()
        self._watch = None if layers is None else StepWatch(state.base, state.places, layers, self._leaves_out)

    @property
    def dtype(self) -> str:
        return str(next(self.module.parameters()).dtype).removeprefix("torch.")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._engine(*args, **kwargs)
        if self.is_partitioned and not torch.is_grad_enabled():
            # DeepSpeed fetches ahead by the order of the layers in the pass that it recorded. Every backward pass would
            # end that of one without a gradient, while such a pass is the beginning of one with it.
            coordinator = self._engine.optimizer.parameter_offload.get_param_coordinator()
            if coordinator.is_record_trace():
                coordinator._invalidate_trace()
        return found

    def begin(self, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: Tensor) -> None:
        """Add a micro-batch's gradient; the losses of all micro-batches and shares of the rows add up.

        Ranks that compute the same rows give the same loss, of which each has a part of the gradient.
        """
        self._engine.backward(loss * self._dims.states.count)  # DeepSpeed averages over them
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()

    def update(self, lr_scale: float = 1.0, *, ends_batch: bool = True, is_left_out: bool = False) -> Update:
        """Make the optimizer step after the last backward pass, with its learning rate multiplied by ``lr_scale``.

        The schedule advances if the step ``ends_batch``; else `end_batch` must follow the last step. One that
        ``is_left_out``, as an outlier is, changes neither weights nor moments; its norm is none that outliers are
        compared with.

        Raises TrainingDiverged, on every rank, if the gradient is not finite; the weights are those before the step.
        """
        self._own_norm = self._plain_grad_norm() if self._engine.zero_optimization_stage() == 0 else 0.0
        if not math.isfinite(self._own_norm):  # DeepSpeed's stage 0 would write it into the weights
            raise _diverged(self._own_norm, self._engine.global_steps + 1)
        self._is_empty = is_left_out
        if self._watch is not None:
            self._watch.begin()
        for group in self._engine.optimizer.param_groups:
            group["lr"] *= lr_scale
        lr = self._engine.get_lr()[0]
        self._engine.step({"ends_batch": ends_batch})  # the scheduler sets the next step's rate
        norm = self._engine.get_global_grad_norm()
        norm = self._own_norm if norm is None else float(norm)
        if not self._engine.was_step_applied():  # the other stages leave such a step out without an error
            raise _diverged(norm, self._engine.global_steps)
        if self._watch is None:
            return Update(norm, lr)
        return Update(norm, lr, self._watch.figures(norm, self._dims.ranks.sum), self._watch.left_out)

    def end_batch(self) -> None:
        self._engine.lr_scheduler.step()

    def skip_update(self) -> None:
        """Set the next batch's rate where this one has no update; torch's own step would warn before the first."""
        schedule = self._engine.lr_scheduler
        schedule.continue_after(schedule.last_epoch + 1)

    @contextlib.contextmanager
    def whole(self, *parameters: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Make parameters whole on every rank inside the block, and return them; collective where ranks share them."""
        import deepspeed  # noqa: PLC0415

        is_partitioned = any(hasattr(p, "ds_id") for p in parameters)
        with deepspeed.zero.GatheredParameters(list(parameters), enabled=is_partitioned):
            yield tuple(map(self._weights.whole, parameters))

    @property
    def is_partitioned(self) -> bool:
        """True if a rank holds a part of each parameter (ZeRO-3)."""
        return self._engine.zero_optimization_stage() == 3

    @property
    def is_gathered(self) -> bool:
        """True if `whole` is collective."""
        return self.is_partitioned or self._dims.weight_group is not None

    def own_part(self, parameter: Tensor) -> tuple[int, Tensor]:
        """Return this rank's part of a parameter under ZeRO-3, [n] of the flattened parameter, and where it begins."""
        part: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        start = part.numel() * self._dims.states.index
        within = max(0, min(part.numel(), parameter.ds_numel - start))  # type: ignore[attr-defined]
        return start, part.detach().view(-1)[:within]  # the rest is padding

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        return self._weights.whole_shape(parameter)

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()

    def capture(self, state: Mapping[str, Any]) -> Shard:
        counts = {name: int(getattr(self._engine, name)) for name in _COUNTS}
        norms = {_NORMS: list(self._outliers.norms)} if self._outliers is not None else {}
        state = {**state, **norms, "counts": counts, "schedule": self._engine.lr_scheduler.last_epoch}
        return self._optimizer_state().capture(state, self.host.readable)

    def leave_device(self) -> int:
        """Move what the device holds of it to host memory, and return the bytes; only `capture` may follow."""
        buckets = self._engine.optimizer.ipg_buckets.values() if self.is_partitioned else ()  # of gradients under way
        return self.host.move_out(self.module, self._engine.optimizer, scratch=[bucket.buffer for bucket in buckets])

    def load(self, folder: Path) -> dict[str, Any]:
        """Read the shards that `capture` and `Shard.write` left in ``folder``, and return their state; collective.

        Number of ranks and ZeRO stage may differ from those that wrote them; a checkpoint of a release that let
        DeepSpeed write it needs as many ranks. Raises CheckpointError for another model, or a broken folder.
        """
        if not has_shards(folder):
            state = load_written_by_deepspeed(
                self._engine, folder, num_ranks=self._dims.ranks.num_ranks, strict=not self._has_frozen
            )
            self._optimizer_state().place_steps()
            return state
        with ShardFiles(folder) as files:
            try:
                self._optimizer_state().restore(files, self._to_change)
            except ValueError as err:
                raise another_model(folder, err) from err
            state = dict(files.state)
        for name, count in state.pop("counts").items():
            setattr(self._engine, name, count)
        self._engine.lr_scheduler.continue_after(state.pop("schedule"))
        norms = state.pop(_NORMS, [])
        if self._outliers is not None:
            self._outliers.restore(norms)
        return state

    def _optimizer_state(self) -> OptimizerState:
        return OptimizerState(self._engine, self._dims.states, file=self._dims.files, weights=self._weights)

    def _to_change(self, parameter: Tensor) -> Any:
        import deepspeed  # noqa: PLC0415

        return deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=hasattr(parameter, "ds_id"))

    def _leaves_out(self) -> bool:
        if self._is_empty or self._outliers is None:
            return self._is_empty
        is_plain = self._engine.zero_optimization_stage() == 0
        norm = self._own_norm if is_plain else float(self._engine.optimizer._global_grad_norm)
        (norm,) = self._dims.maximum([norm])  # bit for bit the same on every rank, and so is the decision
        return self._outliers.is_outlier(norm)

    def _plain_grad_norm(self) -> float:
        """Global gradient norm where DeepSpeed reports none (stage 0: every rank holds all gradients)."""
        return self._weights.norm([(p, p.grad) for p in self.module.parameters() if p.grad is not None])


def frozen(module: nn.Module, how: Optimisation) -> Any:
    """Put a module that does not learn under ZeRO 3; returns what computes it, collective."""
    engine, *_ = import_deepspeed().initialize(model=module, config=zero_config(how, module))
    return engine.eval()


def _diverged(norm: float, optimizer_step: int) -> TrainingDiverged:
    return TrainingDiverged(
        f"optimizer step {optimizer_step} of this process: the gradient norm is {norm}, not a finite number; nothing "
        "of this step is kept. Lower the learning rate, look at the data of this step, and start again: the training "
        "resumes from its last checkpoint"
    )


def _say_nothing(*_: object, **__: object) -> None:
    pass


def import_deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: PLC0415  seconds of import, and the accelerator must be chosen before

    # Its Muon optimizer, which nothing here uses, is decorated with `torch.compile`. That imports the compiler: more
    # than a second of CPU time, a tenth of the time until a killed trainer is productive again.
    with variable_set("TORCHDYNAMO_DISABLE"), contextlib.suppress(ImportError):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: PLC0415  else `initialize` imports it
    from deepspeed.module_inject import auto_tp  # noqa: PLC0415
    from deepspeed.runtime import bf16_optimizer  # noqa: PLC0415
    from deepspeed.utils import logger  # noqa: PLC0415

    logger.setLevel(logging.WARNING)
    if logging.lastResort is not None:  # stderr: on stdout a replay writes its JSON
        logger.handlers[:] = [logging.lastResort]
    # DeepSpeed 0.19 calls torch 2.13's collectives by their old names, once per step and rank.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Used by tensor-parallel inference only; DeepSpeed would compile it with g++ for minutes at the
    # first start, and wait without a deadline for the lock of a build that was killed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    auto_tp.print_dist = _say_nothing  # on stdout, where a replay writes its JSON
    bf16_optimizer.see_memory_usage = _say_nothing  # else it prints at every start, whatever is configured
    return deepspeed
