"""Why a group, or one of its trajectories, has no log-probabilities of the trainer, in one sentence each; pure, without numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_TRAINED = {
    "dropped": "A dropped group is not trained on: the trainer computes no log-probabilities of its tokens.",
    "evaluated": "An evaluated group is not trained on: the trainer computes no log-probabilities of its tokens.",
    "in_flight": "The group is not trained yet.",
}
NOT_THIS_ONE = "This trajectory was not trained on: it is a baseline, or a filter left it out."


@dataclass(frozen=True, slots=True)
class Storing:
    """What is known of how the run stores its log-probabilities."""

    setting: object = None  # ``trainer.store_logprobs``; None: the settings do not have it
    num_lost: int = 0  # steps of the newest session that could not be stored

    @classmethod
    def of(cls, config: Mapping[str, Any], num_lost: float | None) -> Storing:
        """Read the settings of a run, as `RunReading.known_config` returns them."""
        settings = config.get("settings")
        trainer = settings.get("trainer") if isinstance(settings, dict) else None
        setting = trainer.get("store_logprobs") if isinstance(trainer, dict) else None
        return cls(setting, int(num_lost or 0))


def why_absent(step: int, storing: Storing) -> str:
    """Return why the object store has nothing of a step."""
    if storing.setting == 0:
        return "trainer.store_logprobs is 0: the trainer stored no log-probabilities of its own."
    if storing.setting is None:
        return (
            "The run's settings have no trainer.store_logprobs: its release stored no log-probabilities of the trainer."
        )
    lost = f"the trainer could not store {storing.num_lost} steps of its newest session" if storing.num_lost else ""
    return (
        f"The object store has no log-probabilities of step {step}: "
        f"{lost or 'they were deleted with their packs, or the trainer was killed before it wrote them'}."
    )


def why_not_this_group(step: int, num_groups: int, storing: Storing) -> str:
    """Return why a step stored ``num_groups`` groups, and not this one."""
    why = (
        f"trainer.store_logprobs is {storing.setting}"
        if storing.setting not in (None, "all")
        else "filters left out all of its trajectories, or the step had too many tokens"
    )
    return f"Step {step} stored those of {num_groups} groups, and this one is not among them: {why}."
