"""The model that is being trained: the door to DeepSpeed, and the only file that imports it.

One `Policy` on every rank; `train_step`, `snapshot`, `save` and `load` are called on all ranks
together. The model's parameters keep their Hugging Face names from file to file.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from trainer.batch import MicroBatch
from trainer.deepspeed_config import KEEP_WHOLE_BELOW, deepspeed_config
from trainer.errors import CheckpointError, UnsupportedModel
from trainer.logprobs import CompletionScorer
from trainer.objective import Objective
from trainer.ranks import Ranks
from trainer.reference import Reference
from trainer.schedule import lr_factor
from trainer.settings import Schedule

_PREFIX = "language_model."  # what wrapping the model puts before its parameters' names
_TAG = "engine"


@dataclass(frozen=True, slots=True)
class Optimisation:
    """How the weights move."""

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
    gradient_checkpointing: bool = False
    keep_whole_below: int = KEEP_WHOLE_BELOW


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one optimizer step did, over all ranks; the same on every rank."""

    loss: float
    grad_norm: float  # before clipping
    lr: float
    sums: dict[str, float]
    maxima: dict[str, float]


class Policy:
    """A causal language model under DeepSpeed."""

    def __init__(self, engine: Any, scorer: CompletionScorer, ranks: Ranks) -> None:
        """Use `load_policy` instead."""
        self._engine = engine
        self._scorer = scorer
        self._ranks = ranks
        self.steps_done = 0
        self.device: torch.device = engine.device

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(getattr(p, "ds_numel", p.numel()) for p in self._scorer.parameters())

    @property
    def dtype(self) -> str:
        """Name of the parameters' dtype, as manifests carry it."""
        return str(next(self._scorer.parameters()).dtype).removeprefix("torch.")

    def train_step(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> StepFigures:
        """Make one optimizer step from this rank's micro-batches (every rank has equally many).

        The weights in the micro-batches already divide by the whole batch, so the gradients of all
        ranks and micro-batches simply add up. The objective may scale the step's learning rate by what
        all micro-batches came to.
        """
        loss, sums, maxima = 0.0, dict[str, float](), dict[str, float]()
        for number, batch in enumerate(micro_batches, start=1):
            batch = batch.to(self.device)
            self._engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            logprobs, entropies = self._score(batch, with_entropy=objective.needs_entropy)
            outcome = objective(logprobs, batch, entropies)
            self._engine.backward(outcome.loss * self._ranks.num_ranks)  # DeepSpeed averages over ranks
            loss += float(outcome.loss.detach())
            for name, value in outcome.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            for name, value in outcome.maxima.items():
                maxima[name] = max(maxima.get(name, float("-inf")), float(value))
            if number < len(micro_batches):
                self._engine.step()
        by_hand = self._plain_grad_norm() if self._engine.zero_optimization_stage() == 0 else 0.0
        total = self._ranks.sum([loss, *sums.values()])
        lr = self._scale_lr(objective.lr_factor(dict(zip(sums, total[1:], strict=True))))
        self._engine.step()  # the scheduler sets the next step's rate
        self.steps_done += 1
        norm = self._engine.get_global_grad_norm()
        top = self._ranks.maximum(list(maxima.values()))
        return StepFigures(
            loss=total[0],
            grad_norm=by_hand if norm is None else float(norm),
            lr=lr,
            sums=dict(zip(sums, total[1:], strict=True)),
            maxima=dict(zip(maxima, top, strict=True)),
        )

    def snapshot(self) -> dict[str, Tensor]:
        """Copy the whole model to the CPU under its Hugging Face names; empty on the other ranks.

        Collective under ZeRO-3, which gathers one parameter at a time.
        """
        copies: dict[str, Tensor] = {}
        persistent = self._scorer.state_dict().keys()
        for name, parameter in self._scorer.named_parameters():
            with _whole(parameter):
                if self._ranks.is_leader:
                    copies[name.removeprefix(_PREFIX)] = _to_cpu(parameter)
        if self._ranks.is_leader:
            for name, buffer in self._scorer.named_buffers():
                if name in persistent:
                    copies[name.removeprefix(_PREFIX)] = _to_cpu(buffer)
        return copies

    def save(self, folder: Path) -> None:
        """Write model, optimizer, scheduler and this rank's random state below ``folder``; collective."""
        state = {"steps_done": self.steps_done, "num_ranks": self._ranks.num_ranks}
        self._engine.save_checkpoint(str(folder), tag=_TAG, client_state=state, save_latest=False)
        random_state = torch.get_rng_state().numpy().tobytes()
        (folder / f"random_state_{self._ranks.rank}.bin").write_bytes(random_state)
        self._ranks.barrier()

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; raises CheckpointError for another number of ranks or a broken folder."""
        random_state = folder / f"random_state_{self._ranks.rank}.bin"
        try:
            found, state = self._engine.load_checkpoint(str(folder), tag=_TAG)
            restored = torch.frombuffer(bytearray(random_state.read_bytes()), dtype=torch.uint8)
        except Exception as err:  # DeepSpeed and torch raise whatever their reader meets
            raise CheckpointError(f"checkpoint {folder} is not readable ({type(err).__name__}: {err})") from err
        if found is None or state.get("num_ranks") != self._ranks.num_ranks:
            raise CheckpointError(
                f"checkpoint {folder} was written by {(state or {}).get('num_ranks', 'an unknown number of')} rank(s), "
                f"this run has {self._ranks.num_ranks}; start it with the same trainer.num_ranks"
            )
        torch.set_rng_state(restored)
        self.steps_done = int(state["steps_done"])

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Score a micro-batch without a gradient; [N] float32."""
        with torch.no_grad():
            return self._score(batch.to(self.device), with_entropy=False)[0]

    def _score(self, batch: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities [N], and entropies [N] where they are wanted."""
        scores = self._engine(
            batch.input_ids,
            batch.predictors,
            batch.targets,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            with_entropy=with_entropy,
        )
        return (scores[0], scores[1]) if with_entropy else (scores, None)

    def _scale_lr(self, factor: float) -> float:
        """Multiply the rate of the step that is about to be made; returns it."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] *= factor
        return self._engine.get_lr()[0]

    def _plain_grad_norm(self) -> float:
        """Global gradient norm where DeepSpeed reports none (stage 0: every rank holds all gradients)."""
        norms = [p.grad.norm() for p in self._scorer.parameters() if p.grad is not None]
        return float(torch.stack(norms).norm()) if norms else 0.0


def load_policy(model_folder: Path, how: Optimisation, ranks: Ranks, *, temperature: float) -> Policy:
    """Load a Hugging Face model folder and put it under DeepSpeed; the same call on every rank.

    Args:
        model_folder: Folder with config.json and safetensors.
        how: Optimizer, schedule, ZeRO stage and dtype.
        ranks: The processes that train together.
        temperature: What logits are divided by, the rollouts' sampling temperature.

    Raises:
        UnsupportedModel: The folder is missing or holds no causal language model.
        ConfigError: The dtype does not go with the ZeRO stage.
    """
    config = deepspeed_config(
        zero_stage=how.zero_stage,
        dtype=how.dtype,
        max_grad_norm=how.max_grad_norm,
        keep_whole_below=how.keep_whole_below,
    )
    model = _load_model(model_folder, how)
    deepspeed = _import_deepspeed()
    scorer = CompletionScorer(model, temperature)
    optimizer = torch.optim.AdamW(
        (p for p in scorer.parameters() if p.requires_grad),
        lr=how.lr,
        betas=how.betas,
        weight_decay=how.weight_decay,
    )
    factor = functools.partial(
        lr_factor,
        schedule=how.schedule,
        num_steps=how.num_steps,
        warmup_steps=how.warmup_steps,
        min_lr_ratio=how.min_lr_ratio,
    )
    engine, *_ = deepspeed.initialize(
        model=scorer, optimizer=optimizer, lr_scheduler=lambda wrapped: LambdaLR(wrapped, factor), config=config
    )
    engine.train()
    return Policy(engine, scorer, ranks)


def load_reference(folder: Path, how: Optimisation, device: torch.device, *, temperature: float) -> Reference:
    """Load a model folder as the frozen reference; raises UnsupportedModel as `load_policy` does."""
    return Reference(CompletionScorer(_load_model(folder, how), temperature), device)


def _load_model(folder: Path, how: Optimisation) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"model.path = {folder}: no config.json there; give a Hugging Face model folder")
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  seconds of import, only where it is needed
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, how.dtype))
    except (OSError, ValueError, KeyError, RuntimeError) as err:
        raise UnsupportedModel(f"model.path = {folder} is not a usable causal language model: {err}") from None
    model.config.use_cache = False
    if how.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _import_deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: PLC0415  seconds of import, and the accelerator must be chosen before
    from deepspeed.utils import logger  # noqa: PLC0415

    logger.setLevel(logging.WARNING)
    # DeepSpeed 0.19 calls torch 2.13's collectives by their old names, once per step and rank.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Serves tensor-parallel inference only; DeepSpeed would compile it with g++ for minutes at the
    # first start, and wait for ever on the lock of a build that was killed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _whole(parameter: nn.Parameter) -> Any:
    import deepspeed  # noqa: PLC0415

    return deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id"))


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
