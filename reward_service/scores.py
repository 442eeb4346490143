"""The outcome of scoring a group: its rewards, or the error that left it without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.protocol.groups import GeneratedGroup, RewardRequest, ScoredGroup
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.errors import RewardError
from penstock.reward_service.rewards.reward import Verdict


@dataclass(frozen=True, slots=True)
class GroupScores:
    """One reward for every completion of a group, named parts of the same length, and the scorer's name."""

    rewards: tuple[float, ...]
    scorer: str
    parts: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, verdicts: Sequence[Verdict], scorer: str) -> GroupScores:
        """Return verdicts as columns; a part that only some completions have is 0.0 for the others."""
        names = sorted({name for verdict in verdicts for name in verdict.parts})
        return cls(
            rewards=tuple(verdict.reward for verdict in verdicts),
            scorer=scorer,
            parts={name: tuple(float(verdict.parts.get(name, 0.0)) for verdict in verdicts) for name in names},
        )

    def announce(self, generated: GeneratedGroup) -> ScoredGroup:
        return ScoredGroup(generated=generated, rewards=self.rewards, parts=self.parts, scorer=self.scorer)


Outcome = GroupScores | RewardError


class Scorer(Protocol):
    """Scores groups; every group gets a separate outcome, in the order of the groups. Never raises RewardError.

    A scorer is ``slow`` when it waits for another process (an endpoint, a grader): a pack that only waits for slow
    scorers holds no work slot.
    """

    @property
    def slow(self) -> bool:
        """True when another process does the work."""
        ...

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        """Score the groups; ``attempt`` counts from 1 how often they were delivered."""
        ...


def ground_truth(request: RewardRequest) -> Any:
    return None if request.ground_truth is None else json.loads(request.ground_truth)


def extra_info(request: RewardRequest) -> Any:
    return json.loads(request.extra_info)
