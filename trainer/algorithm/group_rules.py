"""Which groups may enter a step: rewards that differ, and how often a group may be trained on; pure, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class ReuseRefused(StrEnum):
    """Why a group may not be trained on again."""

    TRAINED_OFTEN = "trained_often"
    TRAINED_RECENTLY = "trained_recently"


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return True if a group carries a signal: at least two rewards that differ (DAPO's dynamic sampling)."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > 1e-9 * max(abs(r) for r in rewards)


@dataclass(frozen=True, slots=True)
class Reuse:
    """How often, and how far apart, a group may be trained on (AgentRL)."""

    max_trained_count: int = 1
    retrained_interval: int = 1  # versions between two uses

    def reason(self, trained_count: int, last_trained: int | None, version: int) -> ReuseRefused | None:
        """Return why a group stays out of the step at ``version``; None: it may be used."""
        if trained_count >= self.max_trained_count:
            return ReuseRefused.TRAINED_OFTEN
        if last_trained is not None and version - last_trained < self.retrained_interval:
            return ReuseRefused.TRAINED_RECENTLY
        return None


ONCE = Reuse()
