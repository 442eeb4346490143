"""`trainer.epochs`: passes over the data become steps, once the usable rows are counted."""

from __future__ import annotations

import math

from penstock.protocol.config.run_file import Loaded
from penstock.protocol.config.sources import OVERRIDE
from penstock.protocol.errors import ConfigError
from penstock.protocol.images.processor import read_processor
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data.row_checks import read_tokenizer
from penstock.trainer.settings import TrainerSettings


def with_steps(loaded: Loaded[TrainerSettings]) -> Loaded[TrainerSettings]:
    """Return the settings with the ``trainer.steps`` that ``trainer.epochs`` make; the same ones without epochs.

    ``epochs`` passes over the rows of ``data.train`` that are not left out, ``rollout.groups_per_step`` a step, rounded up.
    Raises ConfigError for both in one place, or a length that other settings do not allow, MalformedData for bad rows.
    """
    settings = loaded.settings
    if settings.trainer.epochs is None:
        return loaded
    if steps_replace_epochs(loaded):
        chosen = settings.trainer.model_copy(update={"epochs": None})
        return Loaded(_checked(settings.model_copy(update={"trainer": chosen})), loaded.origins)
    prompts = PromptSet.open(
        settings.data.train_files,
        data=settings.data,
        reward=settings.reward,
        tokenizer=read_tokenizer(settings),
        max_new_tokens=settings.rollout.max_new_tokens,
        skips_pairs=settings.algorithm.dpo_coefficient > 0.0,
        processor=read_processor(settings.model.path),
    )
    steps = max(1, math.ceil(round(settings.trainer.epochs * len(prompts)) / settings.rollout.groups_per_step))
    chosen = settings.trainer.model_copy(update={"steps": steps})
    origin = f"{loaded.origins['trainer.epochs']}: {settings.trainer.epochs:g} x {len(prompts)} rows"
    return Loaded(
        _checked(settings.model_copy(update={"trainer": chosen})), {**loaded.origins, "trainer.steps": origin}
    )


def known_steps(loaded: Loaded[TrainerSettings]) -> int | None:
    """Return the steps of a run before its rows are counted; None where epochs make them."""
    trainer = loaded.settings.trainer
    return trainer.steps if trainer.epochs is None or steps_replace_epochs(loaded) else None


def steps_replace_epochs(loaded: Loaded[TrainerSettings]) -> bool:
    """Return True if steps of the command line replace epochs of a run file; raises ConfigError for both in one place."""
    steps, epochs = loaded.origins["trainer.steps"], loaded.origins["trainer.epochs"]
    if "default" in (steps, epochs):
        return False
    typed = [origin == OVERRIDE or origin.startswith(f"{OVERRIDE} ") for origin in (steps, epochs)]
    if typed[0] == typed[1]:
        raise ConfigError(f"{epochs}: trainer.steps and trainer.epochs are both given; leave one out")
    return typed[0]


def _checked(settings: TrainerSettings) -> TrainerSettings:
    if problem := settings.problem_of_length():
        raise ConfigError(problem)
    return settings
