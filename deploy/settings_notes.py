"""Settings that are accepted and have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.config.run_file import Loaded
from penstock.trainer.settings import TrainerSettings

_EVALUATION = ("num_prompts", "at_start", "at_end", "temperature", "samples", "max_new_tokens", "environment")


def notes(loaded: Loaded[TrainerSettings]) -> list[str]:
    """Return a line for each setting that was given and does nothing here."""
    settings, origins = loaded.settings, loaded.origins
    return [
        f"{key} has no effect {why} [{origins[key]}]"
        for key, why in _idle(settings)
        if origins.get(key, "default") != "default"
    ]


def _idle(settings: TrainerSettings) -> Iterator[tuple[str, str]]:
    """Yield keys that do nothing beside the others, and why."""
    if settings.trainer.schedule == "constant" and settings.sft.schedule == "constant":
        yield "trainer.min_lr_ratio", "with trainer.schedule = constant"
    if settings.trainer.max_mismatch is None:
        yield "trainer.mismatch_patience", "without trainer.max_mismatch"
    if settings.trainer.skip_step_above_grad_norm is None:
        yield "trainer.skip_step_after", "without trainer.skip_step_above_grad_norm"
    if not settings.trainer.resume:
        yield "trainer.resume_older_step", "with trainer.resume = false"
    if settings.data.from_run is not None:
        yield from ((key, "with data.from_run") for key in ("data.train", "data.eval"))
    if settings.data.from_run is not None or not settings.evaluated:
        yield from ((f"eval.{name}", "without data.eval") for name in _EVALUATION)
