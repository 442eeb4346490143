"""What every training on given answers begins with: its folder, its plan, its model."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import torch

from penstock.fine_tuning.loop import Length, Plan, check_warmup
from penstock.fine_tuning.training_folder import TrainingFolder
from penstock.protocol.config.run_file import values_of
from penstock.protocol.groups import derived_seed
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data_settings import FineTuningSettings
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.trainable import optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.settings import TrainerSettings

# Settings that do not change which weights a step makes, or that a training may be continued with; all others that the
# command reads must be those of the checkpoint.
_FREE = frozenset({
    "steps", "epochs", "eval_every", "early_stop", "keep_best", "checkpoint_every", "output", "data", "eval_data",
})  # fmt: skip
_FIXED = (
    "run.seed", "model.path", "model.dtype", "model.lora.rank", "model.lora.alpha", "model.lora.dropout",
    "model.lora.targets", "data.shuffle", "data.max_samples", "data.format", "data.map", "data.system_prompt",
    "data.text_prompts", "data.template_arguments", "data.use_tools", "data.roles", "data.ignore", "data.overlong",
    "trainer.zero_stage", "trainer.weight_decay", "trainer.min_lr_ratio", "trainer.max_grad_norm",
)  # fmt: skip


def section_of(settings: TrainerSettings, name: str) -> FineTuningSettings:
    section = getattr(settings, name)
    assert isinstance(section, FineTuningSettings)
    return section


def open_folder(
    settings: TrainerSettings, name: str, dims: ParallelDims
) -> AbstractContextManager[TrainingFolder | None]:
    """Open the training's folder on rank 0, before anything is loaded; a context with None on the others."""
    return closing(TrainingFolder(settings.run.folder / f"{name}-training")) if dims.writes_files else nullcontext()


def plan_of(settings: TrainerSettings, name: str, dims: ParallelDims, *, num_rows: int, data: dict[str, str]) -> Plan:
    section = section_of(settings, name)
    length = Length.of(num_rows, section.batch_size, steps=section.steps, epochs=section.epochs)
    check_warmup(name, section.warmup_steps, length)
    return Plan(
        name=name,
        settings=section,
        order=DataOrder(num_rows, settings.run.seed, settings.data.shuffle),
        length=length,
        output=section.output or settings.run.folder / name,
        like=settings.model.path,
        dims=dims,
        fixed=_fixed(settings, name),
        data=data,
        resume=settings.trainer.resume,
        checkpoint_every_s=settings.trainer.checkpoint_every_s,
        keep_checkpoints=settings.trainer.keep_checkpoints,
        verify_export=settings.trainer.verify_export,
    )


def load_trained(settings: TrainerSettings, section: FineTuningSettings, length: Length, dims: ParallelDims) -> Policy:
    """Load ``model.path`` under DeepSpeed; the random numbers of dropout follow from ``run.seed`` and the rank."""
    seed_random_numbers(settings, dims)
    return load_policy(settings.model.path, optimisation(settings, section, length.num_steps), dims, temperature=1.0)


def seed_random_numbers(settings: TrainerSettings, dims: ParallelDims) -> None:
    """Begin the random numbers of first values and dropout at a place that follows from ``run.seed``, another one on each rank."""
    seed, rank = settings.first_seed, dims.ranks.rank
    torch.manual_seed(derived_seed(seed, "dropout", rank) if seed else rank)  # 0 begins as in earlier releases


def _fixed(settings: TrainerSettings, name: str) -> dict[str, Any]:
    values = {".".join(path): value for path, value in values_of(settings)}
    own = {key for key in values if key.startswith(f"{name}.") and key.split(".")[1] not in _FREE}
    chosen = {key: value for key, value in values.items() if key in own or key.startswith(_FIXED)}
    return json.loads(json.dumps(chosen, default=str))
