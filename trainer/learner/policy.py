"""The model that is being trained.

Every rank has one `Policy`; `train_step`, `snapshot`, `copy_to`, `save` and `load` are called on all ranks together.
The model's parameters keep their Hugging Face names in everything that is exported or published.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.protocol.weights.adapter_format import AdapterConfig
from penstock.protocol.weights.layout import BUCKET_BYTES, TensorSpec, WeightLayout, build_layout
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.distillation import top_of_teacher
from penstock.trainer.algorithm.objective import Objective, Outcome, TokenOutcomes
from penstock.trainer.errors import CheckpointError, TrainingDiverged, UnsupportedModel
from penstock.trainer.learner import adapter, expert_tensors, vision
from penstock.trainer.learner.captured_state import CapturedPart, random_state_name
from penstock.trainer.learner.health.flops import NO_WORK, Load, Work, load_of
from penstock.trainer.learner.health.step_watch import LayerFigures
from penstock.trainer.learner.kept_rows import KeptRows
from penstock.trainer.learner.logprobs import CompletionScorer, Logits
from penstock.trainer.learner.reference import ReferencePolicy
from penstock.trainer.learner.trainable import Trainable
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing.weight_buckets import TensorSink

_PREFIX = "language_model."  # of parameter names, added by wrapping the model
_TAG = "engine"

# Called with what the loss did with the tokens of each micro-batch, in their order; None where it compares no policies.
Observer = Callable[[TokenOutcomes | None, MicroBatch], None]


@dataclass(frozen=True, slots=True)
class PassFigures:
    """What was measured in one of several passes over a batch."""

    num_updates: int  # optimizer steps
    clip_fraction: float
    kl_proximal: float  # per token, from the policy before the batch to the one before each optimizer step


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one optimizer step did, or all those of a batch, over all ranks; the same on every rank."""

    loss: float
    grad_norm: float  # before clipping
    lr: float
    sums: dict[str, float]
    maxima: dict[str, float]
    critic: Mapping[str, float] = field(default_factory=dict)  # its figures, in a run with a critic
    lr_factor: float = 1.0  # of the schedule's learning rate, contained in ``lr``
    passes: tuple[PassFigures, ...] = ()  # in a run with several optimizer steps on a batch
    layers: Mapping[str, LayerFigures] = field(default_factory=dict)  # by group of layers
    left_out: tuple[bool, ...] = ()  # of each optimizer step, in order: whether it was an outlier and not made
    work: Work = NO_WORK  # of all passes of the policy for the batch, over all ranks
    kept: KeptRows | None = field(default=None, compare=False)  # the log-probabilities that were asked for; on rank 0


class Policy:
    """A causal language model under DeepSpeed."""

    def __init__(
        self,
        trainable: Trainable,
        scorer: CompletionScorer,
        dims: ParallelDims,
        *,
        attention: str = "",
        router_replay: bool = False,
    ) -> None:
        """Called by `load_policy`; with ``router_replay`` micro-batches bring the experts of their tokens."""
        self.attention = attention  # what computes it: the name of a backend, or padded
        self._trainable = trainable
        self._scorer = scorer
        self._dims = dims
        self._cost = scorer.pass_cost
        self._router_replay = router_replay
        self._family = str(scorer.language_model.config.get_text_config().model_type)
        self._work = NO_WORK  # of this rank since `take_work`
        self.steps_done = 0  # batches, whatever number of optimizer steps each had
        self.device = trainable.device

    @property
    def dtype(self) -> str:
        """Name of the parameters' dtype, as manifests carry it."""
        return self._trainable.dtype

    @property
    def model_class(self) -> str:
        """Name of the model's class in `transformers`."""
        return type(self._scorer.language_model).__name__

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows."""
        return int(self._scorer.language_model.config.get_text_config().vocab_size)

    def scorer_around(self, model: nn.Module) -> nn.Module:
        """Return what computes with another model of `model_class` as this policy with its own."""
        return self._scorer.around(model)

    @property
    def device_name(self) -> str:
        """The name of the GPU that computes, as CUDA reports it; ``cpu`` without one."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    @property
    def pair_cost(self) -> float:
        """Computation of one token attending to one, relative to a token's other computation."""
        return self._scorer.pair_cost

    @property
    def pads_rows(self) -> bool:
        """True if the model cannot compute the rows of a micro-batch as one stream."""
        return self._scorer.padding_reason is not None

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        reference: ReferencePolicy | None = None,
        *,
        ends_batch: bool = True,
        observe: Observer | None = None,
    ) -> StepFigures:
        """Make one optimizer step from this rank's micro-batches (every rank has equally many).

        The weights in the micro-batches already divide by the whole batch, so the gradients of all
        ranks and micro-batches simply add up. The objective may scale the step's learning rate by what
        the sums over all micro-batches. One with a KL over the whole vocabulary needs the reference.
        Without ``ends_batch`` the step does not count and the schedule does not advance: `end_batch` does both.
        """
        sums_of_step = _StepSums()
        for number, batch in enumerate(micro_batches, start=1):
            self._trainable.begin(is_last=number == len(micro_batches))
            outcome = self._outcome(batch.to(self.device), objective, reference)
            sums_of_step.add(self._routed(outcome))
            self._trainable.backward(outcome.loss)
            self._work = self._work.plus(self._cost.backward(self._load(batch)))
            if observe is not None:
                observe(outcome.tokens, batch)
        loss, sums, maxima = sums_of_step.over(self._dims)
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the loss of step {self.steps_done + 1} is {loss}, not a finite number; nothing of this step is kept. Look at the data "
                "of this step, lower the learning rate, and start again: the training resumes from its last checkpoint"
            )
        lr_factor = objective.lr_factor(sums)
        update = self._trainable.update(lr_factor, ends_batch=ends_batch)
        self.steps_done += ends_batch
        return StepFigures(
            loss, update.grad_norm, update.lr, sums, maxima,
            lr_factor=lr_factor, layers=update.layers, left_out=(update.is_left_out,),
        )  # fmt: skip

    def measure_step(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        reference: ReferencePolicy | None = None,
        *,
        ends_batch: bool = True,
        observe: Observer | None = None,
    ) -> StepFigures:
        """Report what a step would minimise without making it. The learning-rate schedule does not advance either."""
        sums_of_step = _StepSums()
        with torch.no_grad():
            for batch in micro_batches:
                outcome = self._outcome(batch.to(self.device), objective, reference)
                sums_of_step.add(self._routed(outcome))
                if observe is not None:
                    observe(outcome.tokens, batch)
        self.steps_done += ends_batch
        loss, sums, maxima = sums_of_step.over(self._dims)
        return StepFigures(loss, 0.0, 0.0, sums, maxima)

    def take_work(self) -> Work:
        """Return what all ranks have computed since the last call; collective."""
        flops, tokens = self._dims.sum([self._work.flops, self._work.tokens])
        self._work = NO_WORK
        return Work(flops, tokens)

    def end_batch(self, *, has_learned: bool = True) -> None:
        """Count the step whose optimizer steps were made one by one; if it ``has_learned``, the schedule advances."""
        self.steps_done += 1
        if has_learned:
            self._trainable.end_batch()

    def snapshot(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Copy the whole model to the CPU under its Hugging Face names, adapters merged; empty on ranks that write no files.

        Collective under ZeRO-3, which gathers one parameter at a time. Floating-point tensors are rounded to
        ``dtype`` on their device first, so that only the smaller copy is transferred.
        """
        copies: dict[str, Tensor] = {}
        self._visit(
            lambda _: self._dims.writes_files, lambda name, tensor: copies.__setitem__(name, _to_cpu(tensor, dtype))
        )
        return copies

    def layout(self, dtype: torch.dtype | None = None, *, bucket_bytes: int = BUCKET_BYTES) -> WeightLayout:
        """Return the layout of the model as `copy_to` copies it; the same on every rank, without gathering tensors."""
        specs = []
        for name, tensor, _ in self._published():
            rounded = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            dtype_name = str(rounded).removeprefix("torch.")
            for own_name, shape in expert_tensors.published(
                name, tuple(self._trainable.whole_shape(tensor)), self._family
            ):
                specs.append(TensorSpec(own_name, dtype_name, shape))
        return build_layout(specs, bucket_bytes=bucket_bytes)

    def copy_to(self, sink: TensorSink, *, merge: bool = True, rounding: adapter.Rounding | None = None) -> None:
        """Give a sink its tensors, whole, one after the other. Collective under ZeRO-3, as `snapshot`.

        Adapters are merged, or omitted if ``merge`` is False. ``rounding`` counts the sink's merged weights.
        """
        self._visit(sink.names.__contains__, sink.put, merge=merge, rounding=rounding)

    def adapter_config(self) -> AdapterConfig | None:
        """Return the adapters' configuration; None without adapters."""
        return adapter.config(self._scorer)

    def modules_beside_adapters(self) -> list[str]:
        """Return the names of modules that are trained whole beside adapters: a reward model's score."""
        return sorted({name.removeprefix(_PREFIX).rpartition(".")[0] for name, _ in self._trained_beside_adapters()})

    def adapter_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Copy the adapters to the CPU, by their layer's name followed by ``lora_A.weight`` or ``lora_B.weight``.

        A score that is trained beside adapters is among them, under its own name. Rounded to ``dtype``, if given. Empty without adapters and on ranks that write no files; collective under ZeRO-3.
        """
        copies: dict[str, Tensor] = {}
        for name, (down, up, _) in adapter.factors(self._scorer).items():
            layer = name.removeprefix(_PREFIX).removesuffix(".base_layer.weight")
            with self._trainable.whole(down, up):
                if self._dims.writes_files:
                    copies |= {
                        f"{layer}.lora_A.weight": _to_cpu(down, dtype),
                        f"{layer}.lora_B.weight": _to_cpu(up, dtype),
                    }
        for name, parameter in self._trained_beside_adapters():
            with self._trainable.whole(parameter):
                if self._dims.writes_files:
                    copies[name.removeprefix(_PREFIX)] = _to_cpu(parameter, dtype)
        return copies

    def _trained_beside_adapters(self) -> list[tuple[str, Tensor]]:
        return [
            (name, parameter)
            for name, parameter in self._scorer.named_parameters()
            if parameter.requires_grad and not adapter.is_adapter(name) and adapter.config(self._scorer) is not None
        ]

    def _published(self, *, merge: bool = True) -> Iterator[tuple[str, Tensor, tuple[Any, ...] | None]]:
        """Yield what is published, in the same order on all ranks: name, tensor, and the adapter to merge into it."""
        adapted = adapter.factors(self._scorer) if merge else {}
        for name, parameter in self._scorer.named_parameters():
            if not adapter.is_adapter(name):
                yield self._saved_name(adapter.plain_name(name)), parameter, adapted.get(name)
        persistent = self._scorer.state_dict().keys()
        for name, buffer in self._scorer.named_buffers():
            if name in persistent:
                yield self._saved_name(name), buffer, None

    def _saved_name(self, name: str) -> str:
        return vision.saved_name(self._scorer.language_model, name.removeprefix(_PREFIX))

    def _visit(
        self,
        wanted: Callable[[str], bool],
        take: Callable[[str, Tensor], None],
        *,
        merge: bool = True,
        rounding: adapter.Rounding | None = None,
    ) -> None:
        """Call ``take`` with each wanted tensor, whole; every rank iterates over every tensor, wanted or not."""
        for name, tensor, low_rank in self._published(merge=merge):
            with self._trainable.whole(tensor, *(low_rank[:2] if low_rank else ())) as (whole, *_):
                if low_rank:
                    if wanted(name):
                        take(name, adapter.merged(whole, *low_rank, rounding=rounding))
                    continue
                for own_name, part in expert_tensors.parts(name, whole, self._family):
                    if wanted(own_name):
                        take(own_name, part)

    def capture(self) -> CapturedPart:
        """Copy this rank's part of model, optimizer, schedule and random state, to be written while training goes on."""
        shard = self._trainable.capture({"steps_done": self.steps_done})
        return CapturedPart(_TAG, shard, torch.get_rng_state().numpy().tobytes())

    def save(self, folder: Path) -> None:
        """Write what `capture` copies below ``folder``; collective."""
        self.capture().write(folder)
        self._dims.ranks.barrier()

    def load(self, folder: Path) -> None:
        """Read what was written, by any number of ranks; raises CheckpointError for a broken folder; collective.

        A rank beyond those that wrote it keeps the random state that it has.
        """
        state = self._trainable.load(folder / _TAG)
        path = folder / random_state_name(self._dims.ranks.rank)
        try:
            if path.exists() or self._dims.ranks.is_leader:
                torch.set_rng_state(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
        except (OSError, ValueError, RuntimeError) as err:
            raise CheckpointError(f"checkpoint {folder} is not readable ({type(err).__name__}: {err})") from err
        self.steps_done = int(state["steps_done"])

    def without_dropout(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes as it does at inference."""
        return self._trainable.without_dropout()

    def logprobs(self, batch: MicroBatch, *, replays: bool = True) -> Tensor:
        """Score a micro-batch without a gradient; [N] float32. Unless it ``replays``, the routers choose experts themselves."""
        with torch.no_grad():
            return self._read(batch.to(self.device), replays=replays)

    def collisions(self, batch: MicroBatch) -> Tensor:
        """Return, without a gradient, [2, N] float32: log-probabilities, and logs of the sum of squared probabilities."""
        moved = batch.to(self.device)
        with torch.no_grad():
            hidden = self._read(moved, hidden_only=True)
            return self._scorer.collisions(hidden, moved.predictors, moved.targets, moved.input_ids.shape[1])

    def full_kl(self, batch: MicroBatch, reference: ReferencePolicy) -> Tensor:
        """Return the exact KL to a reference where each sampled token was chosen, without a gradient; [N] float32."""
        moved = batch.to(self.device)
        with torch.no_grad():
            return self._read(moved, kl_to=reference.logits(moved))[1]

    def logprobs_without_adapter(self, batch: MicroBatch) -> Tensor:
        """Score a micro-batch under the model that training started from; [N] float32."""
        with adapter.switched_off(self._scorer):
            return self.logprobs(batch, replays=False)

    def logits_without_adapter(self, batch: MicroBatch) -> Logits:
        """Return the logits of a micro-batch under the model that training started from."""
        with torch.no_grad(), adapter.switched_off(self._scorer):
            hidden = self._read(batch.to(self.device), replays=False, hidden_only=True)

        def logits(start: int, end: int) -> Tensor:
            with torch.no_grad(), adapter.switched_off(self._scorer):
                return self._scorer.logits(hidden[start:end])

        return logits

    def _outcome(self, batch: MicroBatch, objective: Objective, reference: ReferencePolicy | None) -> Outcome:
        logits = None
        if objective.needs_full_kl:
            if reference is None:
                raise ValueError("the objective has a KL to a reference, and no reference was given")
            logits = reference.logits(batch)
        top = top_of_teacher(batch) if objective.needs_teacher_kl else None
        read = self._read(batch, with_entropy=objective.needs_entropy, kl_to=logits, kl_from=top)
        scores = iter(torch.atleast_2d(read))
        logprobs = next(scores)
        entropies = next(scores) if objective.needs_entropy else None
        full_kl = next(scores) if logits is not None else None
        return objective(logprobs, batch, entropies, full_kl, next(scores, None))

    def _routed(self, outcome: Outcome) -> Outcome:
        """Add to an outcome how many (token, layer) pairs had given experts, and for how many the routers now choose others."""
        if not self._router_replay:
            return outcome
        changed, total = self._scorer.routing_figures()
        return replace(outcome, sums={**outcome.sums, "routed": total, "rerouted": changed})

    def _load(self, batch: MicroBatch) -> Load:
        return load_of(batch.layout, batch.input_ids.shape[1], len(batch.targets), padded=self.pads_rows)

    def _read(self, batch: MicroBatch, *, replays: bool = True, **what: Any) -> Tensor:
        """Return the output of `CompletionScorer`; ``what`` are its options.

        The model that training started from ``replays`` no router: it is another policy, and chooses experts itself.
        """
        if self._router_replay and replays:
            if batch.experts is None and len(batch.targets):
                raise UnsupportedModel(
                    "trainer.router_replay = true, and rows of this batch do not say which experts computed their tokens: they were "
                    "sampled without it; set it to false"
                )
            what["experts"] = batch.experts
        load = self._load(batch)
        self._work = self._work.plus(self._cost.forward(load), load.tokens)
        return self._trainable(
            batch.input_ids,
            batch.predictors,
            batch.targets,
            position_ids=batch.position_ids,
            layout=batch.layout,
            images=batch.images,
            **what,
        )


@dataclass(slots=True)
class _StepSums:
    """Adds up the figures of the micro-batches of a step."""

    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.loss += float(outcome.loss.detach())
        for name, value in outcome.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in outcome.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, float("-inf")), float(value))

    def over(self, dims: ParallelDims) -> tuple[float, dict[str, float], dict[str, float]]:
        loss, *sums = dims.sum([self.loss, *self.sums.values()])
        top = dims.maximum(list(self.maxima.values()))
        return loss, dict(zip(self.sums, sums, strict=True)), dict(zip(self.maxima, top, strict=True))


def _to_cpu(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
        return tensor.to(dtype).to("cpu").contiguous()
    return tensor.to("cpu", copy=True).contiguous()
