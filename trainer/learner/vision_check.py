"""Checks of settings for a model that reads images, by its config.json; without torch, so that a start can make them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import SINGLE_TURN
from penstock.protocol.images.processor import read_processor
from penstock.trainer.eval_settings import DATA_EVAL
from penstock.trainer.settings import TrainerSettings


def check_vision(settings: TrainerSettings) -> None:
    """Raise ConfigError for settings that a model which reads images is not trained with, all of them named.

    Raises UnsupportedModel for a family or an image processor that is not known.
    """
    if read_processor(settings.model.path) is None:
        if settings.model.train_vision_tower:
            raise ConfigError(
                f"model.train_vision_tower = true, and model.path = {settings.model.path} reads text alone; set it to false"
            )
        return
    if found := list(_not_exact(settings)):
        raise ConfigError(
            f"model.path = {settings.model.path} reads images, and is not trained with {'; '.join(found)}"
        )


def _not_exact(settings: TrainerSettings) -> Iterator[str]:
    trainer, algorithm = settings.trainer, settings.algorithm
    for name in ("tensor_parallel", "sequence_parallel"):
        if (ranks := getattr(trainer, name)) > 1:
            yield f"trainer.{name} = {ranks} (set it to 1)"
    if trainer.router_replay:
        yield "trainer.router_replay = true (set it to false)"
    if algorithm.has_critic:
        yield f"a critic, which algorithm.advantage = {algorithm.advantage} needs (use an advantage of groups)"
    if settings.model.lora.rank:
        yield f"adapters, model.lora.rank = {settings.model.lora.rank} (set it to 0)"
    if settings.teacher_top_k is not None:
        yield "the model of section [teacher], which is not shown the images (leave it out)"
    if algorithm.dpo_coefficient:
        yield f"pairs, algorithm.dpo_coefficient = {algorithm.dpo_coefficient} (set it to 0)"
    if settings.data.from_run is not None:
        yield f"groups of another run, data.from_run = {settings.data.from_run} (generate them)"


def refuse_vision(settings: TrainerSettings, command: str) -> None:
    if read_processor(settings.model.path) is not None or settings.model.train_vision_tower:
        raise ConfigError(
            f"model.path = {settings.model.path} reads images, or model.train_vision_tower = true: `penstock {command}` reads text "
            "alone; use a model that reads text alone, or `penstock train`"
        )


def check_environments(settings: TrainerSettings, num_with_images: Mapping[str | None, int]) -> None:
    """Raise ConfigError if rows with images would be played by an environment that renders their messages without them.

    ``num_with_images`` are the rows with images of each evaluated source, by name, and of data.train, by None.
    """
    for source, num in num_with_images.items():
        own = None if source is None else settings.eval.of(source).environment
        environment = own or settings.rollout.environment
        if num and environment != SINGLE_TURN:
            data, setting = ("data.train", "rollout.environment") if source is None else _of_source(source)
            raise ConfigError(
                f"{num} rows of {data} have images, and the environment {environment} would render them without; use {setting} = "
                f"{SINGLE_TURN}"
            )


def _of_source(name: str) -> tuple[str, str]:
    return (
        ("data.eval", "eval.environment")
        if name == DATA_EVAL
        else (f"eval.source.{name}.data", f"eval.source.{name}.environment")
    )
