"""What is not worth training on, and what may be trained on again: decisions with a reason each; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Skipped(StrEnum):
    """Why a group or a trajectory is left out of a step."""

    ZERO_ADVANTAGE = "zero_advantage"
    NON_POSITIVE = "non_positive_advantage"
    BELOW_MINIMUM = "below_minimal_advantage"
    TRUNCATED = "truncated"  # overlong masking
    TRAINED_OFTEN = "trained_often"
    TRAINED_RECENTLY = "trained_recently"


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays, by place in what was asked about, and how many went for which reason."""

    places: tuple[int, ...]
    skipped: Counter[Skipped] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class TrajectoryFilter:
    """Which trajectories of a batch reach the loss, by advantage and stop reason."""

    drop_zero_advantage: bool = False  # AgentRL's default is True
    skip_non_positive_advantage: bool = False  # successes alone, as rejection sampling
    minimal_advantage: float | None = None  # only above this
    mask_truncated: bool = False  # DAPO's overlong filtering: cut answers teach nothing

    def reason(self, advantage: float, *, truncated: bool) -> Skipped | None:
        """Say why a trajectory stays out; None: it is trained on."""
        if self.mask_truncated and truncated:
            return Skipped.TRUNCATED
        if self.minimal_advantage is not None and advantage <= self.minimal_advantage:
            return Skipped.BELOW_MINIMUM
        if self.skip_non_positive_advantage and advantage <= 0.0:
            return Skipped.NON_POSITIVE
        if self.drop_zero_advantage and advantage == 0.0:
            return Skipped.ZERO_ADVANTAGE
        return None

    def keep(self, advantages: Sequence[float], truncated: Sequence[bool]) -> Kept:
        """Decide for a batch."""
        reasons = [self.reason(a, truncated=t) for a, t in zip(advantages, truncated, strict=True)]
        return Kept(
            tuple(place for place, reason in enumerate(reasons) if reason is None),
            Counter(reason for reason in reasons if reason is not None),
        )


def differs(rewards: Sequence[float]) -> bool:
    """Say whether a group teaches anything: at least two rewards that differ (DAPO's dynamic sampling)."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > 1e-9 * max(abs(r) for r in rewards)


@dataclass(frozen=True, slots=True)
class Reuse:
    """How often, and how far apart, a group may be trained on (AgentRL)."""

    max_trained_count: int = 1
    retrained_interval: int = 1  # versions between two uses

    def reason(self, trained_count: int, last_trained: int | None, version: int) -> Skipped | None:
        """Say why a group stays out of the step at ``version``; None: it may be used."""
        if trained_count >= self.max_trained_count:
            return Skipped.TRAINED_OFTEN
        if last_trained is not None and version - last_trained < self.retrained_interval:
            return Skipped.TRAINED_RECENTLY
        return None


ONCE = Reuse()
