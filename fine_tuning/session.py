"""What every training on given answers begins with: its plan and its model."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch

from penstock.protocol.config.run_file import values_of
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import derived_seed
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.pairs import PairSet
from penstock.trainer.data.turns import TurnSet
from penstock.trainer.data_settings import FineTuningSettings
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.trainable import Optimisation, optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.settings import TrainerSettings

# Settings that do not change which weights a step makes, or that a training may be continued with; all others that the
# command reads must be those of the checkpoint.
_FREE = frozenset({
    "steps", "epochs", "eval_every", "early_stop", "keep_best", "checkpoint_every", "output", "data", "eval_data",
})  # fmt: skip
_FIXED = (
    "run.seed", "model.path", "model.dtype", "model.lora.rank", "model.lora.alpha", "model.lora.dropout",
    "model.lora.targets", "model.lora.path", "model.lora.use_rslora", "data.shuffle", "data.max_samples", "data.format", "data.map", "data.system_prompt",
    "data.text_prompts", "data.template_arguments", "data.use_tools", "data.roles", "data.control_tokens", "data.ignore", "data.overlong",
    "trainer.zero_stage", "trainer.weight_decay", "trainer.min_lr_ratio", "trainer.max_grad_norm",
)  # fmt: skip


def section_of(settings: TrainerSettings, name: str) -> FineTuningSettings:
    section = getattr(settings, name)
    assert isinstance(section, FineTuningSettings)
    return section


@dataclass(frozen=True, slots=True)
class Length:
    """Steps over positions 0, 1, 2, … of the data's order, which begins again after each epoch."""

    num_rows: int
    batch_size: int
    num_steps: int
    num_positions: int  # of all steps: the last one may have fewer than batch_size

    @classmethod
    def of(cls, num_rows: int, batch_size: int, *, steps: int, epochs: float | None) -> Length:
        """Return the length of ``epochs`` passes over the rows, or of ``steps`` steps if there are none."""
        if epochs is None:
            return cls(num_rows, batch_size, steps, steps * batch_size)
        positions = max(1, round(epochs * num_rows))
        return cls(num_rows, batch_size, math.ceil(positions / batch_size), positions)

    def positions(self, step: int) -> range:
        first = step * self.batch_size
        return range(first, min(first + self.batch_size, self.num_positions))

    def epoch_after(self, step: int) -> float:
        return min(step * self.batch_size, self.num_positions) / self.num_rows


def check_warmup(section: str, warmup_steps: int, length: Length) -> None:
    if warmup_steps > length.num_steps:
        raise ConfigError(
            f"{section}.warmup_steps = {warmup_steps}, and {length.num_rows} rows make {length.num_steps} steps of "
            f"{section}.batch_size = {length.batch_size}; lower it, so that the peak is reached"
        )


class Plan:
    """A training by its section of the settings, on ``rows``, and what another session must agree on to continue it."""

    def __init__(
        self,
        settings: TrainerSettings,
        name: str,
        dims: ParallelDims,
        rows: TurnSet | PairSet,
        held_out: TurnSet | PairSet | None,
    ) -> None:
        """Raise ConfigError for a warm-up that is longer than the training; ``name`` is that of the command and the section."""
        self.settings, self.name, self.dims = settings, name, dims
        self.section = section_of(settings, name)
        self.length = Length.of(
            len(rows), self.section.batch_size, steps=self.section.steps, epochs=self.section.epochs
        )
        check_warmup(name, self.section.warmup_steps, self.length)
        self.order = DataOrder(len(rows), settings.run.seed, settings.data.shuffle)
        self.output = self.section.output or settings.run.folder / name
        values = {".".join(path): value for path, value in values_of(settings)}
        section_keys = {key for key in values if key.startswith(f"{name}.") and key.split(".")[1] not in _FREE}
        chosen = {key: value for key, value in values.items() if key in section_keys or key.startswith(_FIXED)}
        if chosen["data.control_tokens"] == "refuse":
            del chosen["data.control_tokens"]  # checkpoints of earlier releases do not have it
        for key in (f"{name}.map", "model.lora.path", "model.lora.use_rslora"):
            if not chosen.get(key, True):
                del chosen[key]  # nor these
        self.fixed = json.loads(json.dumps(chosen, default=str))
        self.data = {f"{name}.data": rows.fingerprint}  # sha256 of the rows' files
        if held_out is not None:
            self.data[f"{name}.eval_data"] = held_out.fingerprint

    @property
    def optimisation(self) -> Optimisation:
        return optimisation(self.settings, self.section, self.length.num_steps)


def load_trained(plan: Plan) -> Policy:
    """Load ``model.path`` under DeepSpeed; the random numbers of dropout follow from ``run.seed`` and the rank."""
    seed_random_numbers(plan)
    policy = load_policy(plan.settings.model.path, plan.optimisation, plan.dims, temperature=1.0)
    policy.weights.check_adapters(plan.settings.model.lora.targets)
    return policy


def seed_random_numbers(plan: Plan) -> None:
    """Begin the random numbers of first values and dropout at a place that follows from ``run.seed``, another one on each rank."""
    seed, rank = plan.settings.first_seed, plan.dims.ranks.rank
    torch.manual_seed(derived_seed(seed, "dropout", rank) if seed else rank)  # 0 begins as in earlier releases
