"""Checks of a model folder that is trained, after those of any folder, and of settings for a model that reads images; imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.protocol import model_folder
from penstock.protocol.errors import ConfigError, MalformedWeights
from penstock.protocol.groups import SINGLE_TURN
from penstock.protocol.images.processor import read_processor
from penstock.protocol.model_folder import read_object
from penstock.protocol.token_annotations import FAMILIES, Routers, routers_of
from penstock.protocol.weights.adapter_format import (
    ADAPTER_WEIGHTS,
    MERGE_ADAPTER,
    AdapterConfig,
    check_served,
    pair_tensors,
)
from penstock.trainer.data_settings import DATA_EVAL
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.parallel_dims import ParallelLayout
from penstock.trainer.settings import TrainerSettings

_EMBEDDINGS = frozenset({"embed_tokens", "wte", "word_embeddings", "embed_in"})  # their names in model families
_HEADS = frozenset({"lm_head", "embed_out"})


def check_folder(folder: Path) -> None:
    """Raise UnsupportedModel for a folder that transformers must not read, or whose model is not trained."""

    def check_config(config: dict[str, Any]) -> None:
        if (method := _quantisation(config)) is not None:
            raise UnsupportedModel(
                f"{folder / 'config.json'}: quantization_config ({method}): a quantised model is not trained, nor is it the base of adapters "
                "(QLoRA), with or without a GPU: engines would serve another base than the one that the trainer computes with. Set "
                "model.path to the plain weights, and save memory with model.lora.rank, model.dtype = bfloat16, trainer.zero_stage and "
                "trainer.offload (docs/memory.md)"
            )

    model_folder.check_folder(folder, check_config)


def check_layout(folder: Path, layout: ParallelLayout) -> None:
    layout.check(read_object(folder / "config.json"), str(folder))


def check_routers(folder: Path, *, router_replay: bool) -> Routers | None:
    """Return the routers whose choices are replayed; None where they are not to be. Raises ConfigError if a model has none."""
    if not router_replay:
        return None
    config = read_object(folder / "config.json")
    try:
        routers = routers_of(config)
    except ValueError as err:
        raise UnsupportedModel(f"{folder / 'config.json'}: {err}; restore the file") from None
    if routers is None:
        raise ConfigError(
            f"trainer.router_replay = true, and model.path = {folder} is a {config.get('model_type')} model without routers that are known "
            f"({', '.join(FAMILIES)}); set it to false"
        )
    return routers


def _quantisation(config: dict[str, Any]) -> str | None:
    """Return how a model is quantised; None for one that is not, and for MXFP4, which transformers turns into plain weights."""
    quantisation = config.get("quantization_config")
    if not quantisation:
        return None
    method = str(quantisation.get("quant_method", "unknown"))[:80] if isinstance(quantisation, dict) else "unknown"
    return None if method == "mxfp4" else method


def check_vision(settings: TrainerSettings) -> None:
    """Raise ConfigError naming all settings that a model which reads images is not trained with; UnsupportedModel."""
    if read_processor(settings.model.path) is None:
        if settings.model.train_vision_tower:
            raise ConfigError(
                f"model.train_vision_tower = true, and model.path = {settings.model.path} reads text alone; set it to false"
            )
        return
    if unsupported := list(_not_exact(settings)):
        raise ConfigError(
            f"model.path = {settings.model.path} reads images, and is not trained with {'; '.join(unsupported)}"
        )


def check_adapters(settings: TrainerSettings, command: str) -> None:
    """Raise ConfigError naming a target whose adapters would be in no version or result of ``command``; UnsupportedModel.

    `adapter.check_layers` refuses the same by the layers of the model, where names or config.json say less.
    """
    lora, path = settings.model.lora, settings.model.path / "config.json"
    targets = {target.rpartition(".")[2] for target in lora.targets} if lora.rank else set()
    if lora.path is not None and path.is_file():
        _check_adapter(lora.path, settings.model.path)
    if lora.path is not None:
        _check_reference(settings, command)
    if embedding := sorted(targets & _EMBEDDINGS):
        raise ConfigError(
            f"model.lora.targets = {lora.targets}: {embedding[0]} is an embedding, of which no adapter is published or merged; leave it out"
        )
    config = model_folder.read_object(path) if targets & _HEADS and path.is_file() else {}
    text = config.get("text_config")
    if any(part.get("tie_word_embeddings") is True for part in (config, text) if isinstance(part, dict)):
        raise ConfigError(tied_target(lora.targets, min(targets & _HEADS)))
    if command == "train" and lora.publish == "adapter":
        _check_served(lora.targets, targets)


def _check_served(given: Sequence[str], targets: Collection[str]) -> None:
    where, instead = f"model.lora.targets = {given}", 'or set model.lora.publish = "merged"'
    if heads := sorted(_HEADS.intersection(targets)):
        raise ConfigError(f"{where}: engines serve no adapter of {heads[0]}; leave it out, {instead}")
    if numbered := [target for target in given if any(part.isdigit() for part in target.split("."))]:
        raise ConfigError(
            f"{where}: engines adapt every layer of a name, and {numbered[0]} is one of them; name {numbered[0].rpartition('.')[2]}, {instead}"
        )
    try:
        check_served(targets, where)
    except MalformedWeights as err:
        raise ConfigError(f"{err}, {instead}") from None


def _check_reference(settings: TrainerSettings, command: str) -> None:
    dpo, algorithm = settings.dpo, settings.algorithm
    is_another = algorithm.reference_path is not None or algorithm.reference_device == "remote"
    if command == "train" and settings.needs_reference and not is_another:
        instead = "set algorithm.reference_path"
    elif command == "dpo" and dpo.needs_reference and not dpo.reference_path and dpo.is_live(has_adapters=False):
        instead = 'set dpo.reference = "precomputed", or dpo.reference_path,'
    else:
        return
    raise ConfigError(
        f"the reference would be model.path without the adapter model.lora.path = {settings.model.lora.path} that the training begins with; "
        f"{instead} to a folder: of model.path, or of both merged (penstock model merge)"
    )


def _check_adapter(folder: Path, base: Path) -> None:
    try:
        headers = [
            model_folder.read_header(file)[0] for file in (folder / ADAPTER_WEIGHTS, *model_folder.weight_files(base))
        ]
        tensors, *parts = [{name: tuple(entry["shape"]) for name, entry in header.items()} for header in headers]
        pair_tensors(AdapterConfig.from_peft(folder), tensors, dict(item for part in parts for item in part.items()))
    except MalformedWeights as err:
        raise ConfigError(
            f"model.lora.path = {folder} is no adapter of model.path = {base}: {err}; name its base model, or {MERGE_ADAPTER.format(adapter=folder)}"
        ) from None


def tied_target(targets: Sequence[str], name: str) -> str:
    return (
        f"model.lora.targets = {list(targets)}: {name} has the weight of the input embedding (tie_word_embeddings), so nothing that its "
        "adapter learns could be published or merged; leave it out, or train the whole model: model.lora.rank = 0"
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
        source_environment = None if source is None else settings.eval.of(source).environment
        environment = source_environment or settings.rollout.environment
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
