"""A reward made of parts: every part is scored and kept, and the definition's rule makes one reward of them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.protocol.config.reward_settings import RewardDefinition
from penstock.protocol.facts import RewardRequest
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.errors import NotCalled, RewardError
from penstock.reward_service.scores import GroupScores, Outcome, Scorer

Find = Callable[[RewardRequest], Awaitable[Scorer]]


@dataclass(frozen=True, slots=True, eq=False)
class ComposedReward:
    """Scores groups by all parts of a definition. Parts in ``own`` are made already, ``find`` looks the others up."""

    name: str
    definition: RewardDefinition
    own: Mapping[str, Scorer]
    find: Find

    @property
    def slow(self) -> bool:
        """True when another process may score a part."""
        return any(name not in self.own or self.own[name].slow for name in self.definition.parts)

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        """Score every part of every group and combine them; an error in any part is the group's."""
        names = list(self.definition.parts)
        columns = await asyncio.gather(*(self._part(name, groups, attempt) for name in names))
        return [self._combine(dict(zip(names, outcomes, strict=True))) for outcomes in zip(*columns, strict=True)]

    async def _part(self, name: str, groups: Sequence[GroupTexts], attempt: int) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        by_scorer: dict[Scorer, list[int]] = {}
        asked = [self._part_of(name, group) for group in groups]
        for place, group in enumerate(asked):
            try:
                scorer = self.own.get(name) or await self.find(group.reward)
            except RewardError as err:
                outcomes[place] = err
            else:
                by_scorer.setdefault(scorer, []).append(place)
        found = await asyncio.gather(
            *(scorer.score([asked[place] for place in places], attempt=attempt) for scorer, places in by_scorer.items())
        )
        for places, some in zip(by_scorer.values(), found, strict=True):
            outcomes |= dict(zip(places, some, strict=True))
        return [outcomes[place] for place in range(len(groups))]

    def _part_of(self, name: str, group: GroupTexts) -> GroupTexts:
        request = group.reward.model_copy(update={"name": self.definition.parts[name].reward})
        return replace(group, reward=request)

    def _combine(self, outcomes: Mapping[str, Outcome]) -> Outcome:
        errors = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, RewardError)}
        if errors:
            return _first_cause(errors)
        scores = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, GroupScores)}
        parts = {name: outcome.rewards for name, outcome in scores.items()}
        details = {f"{name}.{sub}": values for name, one in scores.items() for sub, values in one.parts.items()}
        scorers = dict.fromkeys(outcome.scorer for outcome in scores.values())
        return GroupScores(
            rewards=self.definition.totals(parts),
            scorer=f"{self.name}({', '.join(scorers)})",
            parts={**parts, **details},
        )


def _first_cause(errors: Mapping[str, RewardError]) -> RewardError:
    """Return the error of the group, with its part's name: permanent errors first, then failed calls, then calls not made."""
    name, err = min(errors.items(), key=lambda item: (not item[1].permanent, isinstance(item[1], NotCalled)))
    named = copy.copy(err)
    named.args = (f"part {name}: {err}",)
    return named
