"""Finds the settings that `penstock sft` does not read, so that none is ignored in silence; pure.

SFT reads its own section, and the parts of the others listed here. On its command line the general names of six settings,
such as ``learning_rate`` or ``trainer.steps``, mean those of SFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.protocol.config.run_file import SECTIONS, Loaded, values_of
from penstock.protocol.config.sources import OVERRIDE, from_overrides
from penstock.protocol.errors import ConfigError
from penstock.trainer.settings import SftSettings, TrainerSettings

READ = frozenset({
    "run.id", "run.dir", "run.seed",
    "model.path", "model.dtype", "model.gradient_checkpointing",
    "data.train", "data.format", "data.map", "data.system_prompt", "data.overlong", "data.max_samples", "data.shuffle",
    "data.text_prompts", "data.template_arguments", "data.use_tools", "data.roles", "data.ignore",
    "trainer.num_ranks", "trainer.micro_batch_tokens", "trainer.zero_stage", "trainer.weight_decay",
    "trainer.min_lr_ratio", "trainer.max_grad_norm",
    *(f"sft.{name}" for name in SftSettings.model_fields),
})  # fmt: skip
"""Keys that SFT reads; also those below them."""

SFT_KEYS = {
    "trainer.lr": "sft.lr",
    "trainer.steps": "sft.steps",
    "trainer.betas": "sft.betas",
    "trainer.warmup_steps": "sft.warmup_steps",
    "trainer.schedule": "sft.schedule",
    "rollout.groups_per_step": "sft.batch_size",
}
"""General keys, and the key of SFT that each means on the command line."""

_INSTEAD = {
    **{key: f"use {own}" for key, own in SFT_KEYS.items()},
    "data.eval": "nothing is evaluated; remove it, and evaluate the resulting model with `penstock train`",
    "data.max_prompt_tokens": "prompt and answer together have at most trainer.micro_batch_tokens tokens",
    "data.answer_is_ground_truth": "answers are what is imitated; remove it",
    "data.from_run": "use sft.data",
    "model.lora": "all weights are trained; remove it",
}
_CONNECTIONS = ("nats.", "s3.", "retention.")  # of the run's services: a run file has them whatever is started with it


def chosen_settings(loaded: Loaded[TrainerSettings], overrides: Sequence[str]) -> tuple[TrainerSettings, list[str]]:
    """Return the settings with those of the command line in place, and the keys of a shared run file that SFT does not read.

    Raises ConfigError for a setting that SFT does not read, on the command line or in a run file without a section [sft].
    """
    problems = [*_of_other_services(overrides), *_given_twice(loaded)]
    is_shared = any(
        key.startswith("sft.") and not origin.startswith((OVERRIDE, "default"))
        for key, origin in loaded.origins.items()
    )
    unread: list[str] = []
    for key, origin in _changed(loaded):
        if _is_read(key) or (key in SFT_KEYS and _is_override(origin)):
            continue
        if not _is_override(origin) and (is_shared or key.startswith(_CONNECTIONS)):
            unread += [] if key.startswith(_CONNECTIONS) else [key]
        else:
            problems.append(f"{origin}: {key} is not read by `penstock sft`; {_advice(key)}")
    if problems:
        raise ConfigError("\n".join(problems))
    return _with_meant(loaded), unread


def check_ranks(loaded: Loaded[TrainerSettings], started: int) -> None:
    """Raise ConfigError if a run file asks for another number of processes than were started."""
    wanted = loaded.settings.trainer.num_ranks
    if loaded.origins["trainer.num_ranks"] != "default" and wanted != started:
        raise ConfigError(
            f"trainer.num_ranks = {wanted}, but {started} process(es) were started; start it with torchrun --nproc-per-node "
            f"{wanted} -m penstock.trainer sft ..., or set trainer.num_ranks={started} on the command line"
        )


def _changed(loaded: Loaded[TrainerSettings]) -> list[tuple[str, str]]:
    """Return the keys whose value differs from the default, with their origin."""
    standard = TrainerSettings.model_validate({"model": {"path": loaded.settings.model.path}})
    defaults = {".".join(path): value for path, value in values_of(standard)}
    return [
        (key, origin)
        for path, value in values_of(loaded.settings)
        if (key := ".".join(path)) not in defaults or value != defaults[key]
        if (origin := loaded.origins[key]) != "default" and not origin.startswith("preset ")
    ]


def _of_other_services(overrides: Sequence[str]) -> list[str]:
    given = from_overrides(overrides, [])
    return [
        f"{OVERRIDE}: {'.'.join(one.path)} is not read by `penstock sft`, which starts no service; remove it"
        for one in given
        if (section := one.path[0].replace("-", "_")) in SECTIONS and section not in TrainerSettings.model_fields
    ]


def _given_twice(loaded: Loaded[TrainerSettings]) -> list[str]:
    return [
        f"{OVERRIDE}: {key} and {own} are both given, and mean the same for `penstock sft`; leave one out"
        for key, own in SFT_KEYS.items()
        if _is_override(loaded.origins[key]) and _is_override(loaded.origins[own])
    ]


def _with_meant(loaded: Loaded[TrainerSettings]) -> TrainerSettings:
    settings = loaded.settings
    values: dict[str, Any] = {
        own.partition(".")[2]: _value(settings, key)
        for key, own in SFT_KEYS.items()
        if _is_override(loaded.origins[key])
    }
    chosen = settings.sft.model_copy(update=values)
    if chosen.warmup_steps > chosen.steps:
        raise ConfigError("sft.warmup_steps is more than sft.steps; lower it, so that the peak is reached")
    return settings.model_copy(update={"sft": chosen})


def _value(settings: TrainerSettings, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


def _is_read(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in READ)


def _is_override(origin: str) -> bool:
    return origin == OVERRIDE or origin.startswith(f"{OVERRIDE} ")


def _advice(key: str) -> str:
    found = next((text for name, text in _INSTEAD.items() if key == name or key.startswith(f"{name}.")), None)
    return found or "remove it, or give the run file a section [sft] if `penstock train` shares it"
