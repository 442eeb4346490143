"""Scoring a batch of groups: each by the reward its task named. An error is an error, never a reward of 0."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from protocol.group_pack import GroupTexts
from reward_service.catalogue import Catalogue
from reward_service.errors import RewardError
from reward_service.scores import Outcome, Scorer


async def score_groups(catalogue: Catalogue, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
    """Return an outcome for every group, in order; groups of one reward are scored together.

    ``attempt`` counts from 1 how often the groups were delivered.
    """
    outcomes: list[Outcome | None] = [None] * len(groups)
    by_scorer: dict[Scorer, list[int]] = {}
    for place, group in enumerate(groups):
        try:
            scorer = await catalogue.find(group.reward)
        except RewardError as err:
            outcomes[place] = err
        else:
            by_scorer.setdefault(scorer, []).append(place)

    async def score(scorer: Scorer, places: list[int]) -> None:
        found = await scorer.score([groups[place] for place in places], attempt=attempt)
        for place, outcome in zip(places, found, strict=True):
            outcomes[place] = outcome

    await asyncio.gather(*(score(scorer, places) for scorer, places in by_scorer.items()))
    return [outcome for outcome in outcomes if outcome is not None]
