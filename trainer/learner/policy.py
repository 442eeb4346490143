"""The model that is being trained.

Every rank has one `Policy`; `train_step`, `save`, `load` and the methods of `Policy.weights` are called on all
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.kl import top_of_teacher
from penstock.trainer.algorithm.losses.tokens import MAX_LOG_RATIO
from penstock.trainer.algorithm.objective import Objective, Outcome, TokenOutcomes
from penstock.trainer.algorithm.packed_rows import PairCost
from penstock.trainer.errors import CheckpointError, TrainingDiverged, UnsupportedModel
from penstock.trainer.learner import adapter
from penstock.trainer.learner.flops import NO_WORK, Load, Work, load_of
from penstock.trainer.learner.logprobs import CompletionScorer, HiddenStates, read_batch
from penstock.trainer.learner.policy_weights import PolicyWeights
from penstock.trainer.learner.reference import ReferencePolicy
from penstock.trainer.learner.shard_files import CapturedPart, random_state_name
from penstock.trainer.learner.step_metrics import ALL_REJECTED, OUTLIER_STEP, StepMetrics, StepSums
from penstock.trainer.learner.trainable import Trainable
from penstock.trainer.parallel_dims import ParallelDims

_TAG = "engine"

# Called with what the loss did with the tokens of each micro-batch, in their order; None where it compares no policies.
Observer = Callable[[TokenOutcomes | None, MicroBatch], None]


class Policy:
    def __init__(
        self,
        trainable: Trainable,
        scorer: CompletionScorer,
        dims: ParallelDims,
        *,
        attention: str = "",
        router_replay: bool = False,
    ) -> None:
        self.attention = attention  # what computes it: the name of a backend, or padded
        self._trainable, self._scorer, self._dims = trainable, scorer, dims
        self._cost = scorer.pass_cost
        self._router_replay = router_replay
        self.weights = PolicyWeights(trainable, scorer, dims)
        self._work = NO_WORK  # of this rank since `take_work`
        self.steps_done = 0  # batches, whatever number of optimizer steps each had
        self.device = trainable.device

    @property
    def dtype(self) -> str:
        return self._trainable.dtype

    @property
    def model_class(self) -> str:
        return type(self._scorer.language_model).__name__

    @property
    def vocab_size(self) -> int:
        return int(self._scorer.language_model.config.get_text_config().vocab_size)

    def scorer_around(self, model: nn.Module) -> nn.Module:
        return self._scorer.around(model)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    @property
    def pair_cost(self) -> PairCost:
        return self._scorer.pair_cost

    @property
    def pads_rows(self) -> bool:
        return self._scorer.padding_reason is not None

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        reference: ReferencePolicy | None = None,
        *,
        ends_batch: bool = True,
        observe: Observer | None = None,
        learns: bool = True,
    ) -> StepMetrics:
        """Make one optimizer step from this rank's micro-batches (every rank has equally many).

        The weights in the micro-batches already divide by the whole batch, so the gradients of all
        ranks and micro-batches simply add up. The objective may scale the step's learning rate by
        the sums over all micro-batches. One with a KL over the whole vocabulary needs the reference.
        A step of which the objective says that it does not train changes nothing, as an outlier does. Without
        ``ends_batch`` the step does not count and the schedule does not advance: `end_batch` does both.
        What does not ``learn`` is only measured, and raises nothing.
        """
        loss, sums, maxima = self._pass(micro_batches, objective, reference, observe, learns=learns)
        if not learns:
            self.steps_done += ends_batch
            return StepMetrics(loss, 0.0, 0.0, sums, maxima)
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the loss of step {self.steps_done + 1} is {loss}, not a finite number; nothing of this step is "
                "kept. Look at its data, lower the learning rate, and start again: "
                "the training resumes from its last checkpoint"
            )
        lr_factor = objective.lr_factor(sums)
        trains = objective.trains(sums)
        self.weights.wait_until_read()
        update = self._trainable.update(lr_factor, ends_batch=ends_batch, is_left_out=not trains)
        reason = ALL_REJECTED if not trains else OUTLIER_STEP if update.is_left_out else ""
        self.steps_done += ends_batch
        return StepMetrics(
            loss, update.grad_norm, update.lr, sums, maxima,
            lr_factor=lr_factor, layers=update.layers, left_out=(reason,),
        )  # fmt: skip

    def _pass(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        reference: ReferencePolicy | None,
        observe: Observer | None,
        *,
        learns: bool,
    ) -> tuple[float, dict[str, float], dict[str, float]]:
        step = StepSums()
        with torch.set_grad_enabled(learns):
            for number, batch in enumerate(micro_batches, start=1):
                if learns:
                    self._trainable.begin(is_last=number == len(micro_batches))
                try:
                    outcome = self._outcome(batch.to(self.device), objective, reference)
                    step.add(outcome)
                    if learns:
                        self._trainable.backward(outcome.loss)
                except (RuntimeError, MemoryError) as err:
                    err.add_note(f"micro-batch of {batch.input_ids.numel()} tokens")  # as `hardware_errors` reads it
                    raise
                if learns:
                    self._work = self._work.plus(self._cost.backward(self._load(batch)))
                if observe is not None:
                    observe(outcome.tokens, batch)
        return step.over(self._dims)

    def take_work(self) -> Work:
        flops, tokens = self._dims.sum([self._work.flops, self._work.tokens])
        self._work = NO_WORK
        return Work(flops, tokens)

    def end_batch(self, *, has_learned: bool = True) -> None:
        self.steps_done += 1
        if has_learned:
            self._trainable.end_batch()

    def skip_update(self) -> None:
        self._trainable.skip_update()

    def leave_device(self) -> int:
        self.weights.wait_until_read()
        return self._trainable.leave_device()

    def enter_device(self) -> None:
        self._trainable.host.move_back()

    def capture(self) -> CapturedPart:
        shard = self._trainable.capture({"steps_done": self.steps_done})
        states = {name: generator.get_state() for name, generator in self._generators().items()}
        return CapturedPart(_TAG, shard, {name: state.numpy().tobytes() for name, state in states.items()})

    def save(self, folder: Path) -> None:
        self.capture().write(folder)
        self._dims.ranks.barrier()

    def load(self, folder: Path) -> None:
        """Read what any number of ranks wrote; raises CheckpointError for a broken folder; collective."""
        self.weights.wait_until_read()
        state = self._trainable.load(folder / _TAG)
        try:
            for name, generator in self._generators().items():
                path = folder / name
                # A rank that joined has none, nor has a GPU in a checkpoint of an earlier release.
                if path.exists() or (self._dims.ranks.is_leader and generator is torch.default_generator):
                    generator.set_state(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
        except (OSError, ValueError, RuntimeError) as err:
            raise CheckpointError(f"checkpoint {folder} is not readable ({type(err).__name__}: {err})") from err
        self.steps_done = int(state["steps_done"])

    def _generators(self) -> dict[str, torch.Generator]:
        """Return what this rank's dropout draws from, by the files of their states in a checkpoint."""
        name = random_state_name(self._dims.ranks.rank)
        generators = {name: torch.default_generator}
        if self.device.type == "cuda":
            generators[f"cuda_{name}"] = torch.cuda.default_generators[self.device.index or 0]
        return generators

    def without_dropout(self) -> AbstractContextManager[None]:
        return self._trainable.without_dropout()

    def logprobs(self, batch: MicroBatch, *, replays: bool = True) -> Tensor:
        """Score a micro-batch without a gradient; [N] float32. Unless it ``replays``, the routers choose experts."""
        with torch.no_grad():
            return self._read(batch.to(self.device), replays=replays)

    def influence(self, rows: Sequence[MicroBatch]) -> float:
        """Return w² ‖∇ log π‖² of the trajectory in these rows; w is its product of ratios to the sampler, limited.

        No gradient is kept, and no other rank takes part: every weight must be whole on this one.
        """
        learned = [p for p in self._trainable.module.parameters() if p.requires_grad]
        total: list[Tensor | None] = [None] * len(learned)
        log_ratio = 0.0
        with self.without_dropout():
            for batch in rows:
                if not len(batch.targets):
                    continue
                moved = batch.to(self.device)
                logprobs = self._read(moved, under=self._trainable.module)
                log_ratio += float((logprobs.detach() - moved.behaviour_logprobs).double().sum())
                gradients = torch.autograd.grad(logprobs.sum(), learned, allow_unused=True)
                total = [
                    new if held is None else held if new is None else held.float() + new
                    for held, new in zip(total, gradients, strict=True)
                ]
                self._work = self._work.plus(self._cost.backward(self._load(batch)))
        norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in total if one is not None]
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        return (math.exp(max(-MAX_LOG_RATIO, min(log_ratio, MAX_LOG_RATIO))) * norm) ** 2

    def collisions(self, batch: MicroBatch) -> Tensor:
        """Return, without a gradient, [2, N] float32: log-probabilities, and logs of sums of squared probabilities."""
        moved = batch.to(self.device)
        with torch.no_grad():
            hidden = self._read(moved, hidden_only=True)
            return self._scorer.collisions(hidden, moved.predictors, moved.targets, moved.input_ids.shape[1])

    def full_kl(self, batch: MicroBatch, reference: ReferencePolicy) -> Tensor:
        """Return the exact KL to a reference where each sampled token was chosen, without a gradient; [N] float32."""
        moved = batch.to(self.device)
        with torch.no_grad():
            return self._read(moved, kl_to=reference.hidden_states(moved))[1]

    def logprobs_without_adapter(self, batch: MicroBatch) -> Tensor:
        """Score a micro-batch under the model that training started from; [N] float32."""
        with adapter.switched_off(self._scorer):
            return self.logprobs(batch, replays=False)

    def hidden_states_without_adapter(self, batch: MicroBatch) -> HiddenStates:
        with torch.no_grad(), adapter.switched_off(self._scorer):
            return HiddenStates(self._read(batch.to(self.device), replays=False, hidden_only=True), self._scorer)

    def _outcome(self, batch: MicroBatch, objective: Objective, reference: ReferencePolicy | None) -> Outcome:
        states = None
        if objective.needs_full_kl:
            if reference is None:
                raise ValueError("the objective has a KL to a reference, and no reference was given")
            states = reference.hidden_states(batch)
        top = top_of_teacher(batch) if objective.needs_teacher_kl else None
        read = self._read(batch, with_entropy=objective.needs_entropy, kl_to=states, kl_from=top)
        is_read = {"entropies": objective.needs_entropy, "full_kl": states is not None, "teacher_kl": top is not None}
        logprobs, *scores = torch.atleast_2d(read)
        names = [name for name, is_on in is_read.items() if is_on]
        outcome = objective(logprobs, batch, **dict(zip(names, scores, strict=True)))
        if not self._router_replay:
            return outcome
        # (token, layer) pairs with replayed experts, and those for which the routers now choose others
        changed, total = self._scorer.routing_figures()
        return replace(outcome, sums={**outcome.sums, "routed": total, "rerouted": changed})

    def _load(self, batch: MicroBatch) -> Load:
        num_tokens, windows = batch.input_ids.shape[1], self._cost.windows
        return load_of(batch.layout, num_tokens, len(batch.targets), padded=self.pads_rows, windows=windows)

    def _read(
        self, batch: MicroBatch, *, replays: bool = True, under: Callable[..., Tensor] | None = None, **what: Any
    ) -> Tensor:
        """Return the output of `CompletionScorer`, through DeepSpeed or ``under`` another module; options: ``what``.

        The model that training started from ``replays`` no router: it is another policy, and chooses experts itself.
        """
        if self._router_replay and replays:
            if batch.experts is None and len(batch.targets):
                raise UnsupportedModel(
                    "trainer.router_replay = true, and rows of this batch do not say which experts computed their "
                    "tokens: they were sampled without it; set it to false"
                )
            what["experts"] = batch.experts
        load = self._load(batch)
        self._work = self._work.plus(self._cost.forward(load), load.tokens)
        return read_batch(under or self._trainable, batch, **what)
