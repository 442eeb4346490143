"""Scoring a batch of groups, each by the reward that its row requests. An error is an error, never a reward of 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.errors import RewardError
from penstock.reward_service.registry.reward_registry import RewardRegistry
from penstock.reward_service.scores import Outcome, Scorer

_TOGETHER_S = 0.1  # outcomes that are ready within this time are yielded together


async def score_groups(reward_registry: RewardRegistry, groups: Sequence[GroupTexts]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    async for some in as_scored(reward_registry, groups, attempts=[1] * len(groups)):
        outcomes |= some
    return [outcomes[index] for index in range(len(groups))]


async def as_scored(
    reward_registry: RewardRegistry, groups: Sequence[GroupTexts], *, attempts: Sequence[int],
    only_slow_left: Callable[[], None] = lambda: None,
) -> AsyncGenerator[dict[int, Outcome], None]:  # fmt: skip
    """Yield outcomes by the groups' indices as they get ready, so that no group waits for another's slow endpoint.

    Groups of one reward at the same attempt (from 1) are scored together. ``only_slow_left`` is called as soon as all
    that is left is waiting for other processes.
    """
    done: dict[int, Outcome] = {}
    by_scorer: dict[tuple[Scorer, int], list[int]] = {}
    for index, group in enumerate(groups):
        try:
            by_scorer.setdefault((await reward_registry.find(group.reward), attempts[index]), []).append(index)
        except RewardError as err:
            done[index] = err

    async def score(scorer: Scorer, attempt: int, indices: list[int]) -> dict[int, Outcome]:
        outcomes = await scorer.score([groups[index] for index in indices], attempt=attempt)
        return dict(zip(indices, outcomes, strict=True))

    under_way = {
        asyncio.create_task(score(scorer, attempt, indices))
        for (scorer, attempt), indices in by_scorer.items()
        if scorer.slow
    }
    try:
        for (scorer, attempt), indices in by_scorer.items():
            if not scorer.slow:
                done |= await score(scorer, attempt, indices)
        only_slow_left()
        ready, under_way = await asyncio.wait(under_way, timeout=_TOGETHER_S) if under_way else (set(), set())
        yield done | {index: outcome for task in ready for index, outcome in task.result().items()}
        while under_way:
            ready, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            yield {index: outcome for task in ready for index, outcome in task.result().items()}
    finally:
        for task in under_way:
            task.cancel()
