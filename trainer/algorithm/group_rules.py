"""Which groups may enter a step: what the filters of groups keep, and how often one may be trained on; pure, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.group_filters.interface import GroupRule


class ReuseRefused(StrEnum):
    TRAINED_OFTEN = "trained_often"
    TRAINED_RECENTLY = "trained_recently"


@dataclass(frozen=True, slots=True)
class Reuse:
    """How often, and how far apart, a group may be trained on (AgentRL)."""

    max_trained_count: int = 1
    retrained_interval: int = 1  # versions between two uses

    def reason(self, trained_count: int, last_trained: int | None, version: int) -> ReuseRefused | None:
        if trained_count >= self.max_trained_count:
            return ReuseRefused.TRAINED_OFTEN
        if last_trained is not None and version - last_trained < self.retrained_interval:
            return ReuseRefused.TRAINED_RECENTLY
        return None


ONCE = Reuse()


def group_rules(settings: AlgorithmSettings) -> tuple[GroupRule, ...]:
    return tuple(
        GroupRule(one.name, one.value.reason, partial(one.value.fn, **settings.options_of(one.value).model_dump()))
        for one in settings.parts.group_filters
    )
