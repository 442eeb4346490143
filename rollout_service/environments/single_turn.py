"""One prompt, one completion: one request for all tasks with the same sampling parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.protocol.facts import Sampling, Task
from penstock.protocol.trajectory import Trajectory
from penstock.rollout_service.environments.build_trajectory import build_trajectory
from penstock.rollout_service.environments.environment import Environment, Sampler
from penstock.rollout_service.errors import EngineError, TaskRefused


class SingleTurn(Environment):
    """The environment ``single_turn``."""

    name = "single_turn"

    async def rollout(self, tasks: Sequence[Task], sampler: Sampler) -> list[list[Trajectory]]:
        """Return ``task.group_size`` trajectories for each task, in order; raises EngineError.

        One batched request for each distinct (sampling, group size): a request has one ``n``.
        """
        equal: dict[tuple[Sampling, int], list[int]] = {}
        for index, task in enumerate(tasks):
            equal.setdefault((task.sampling, task.group_size), []).append(index)
        try:
            async with asyncio.TaskGroup() as requests:
                replies = [
                    (indices, requests.create_task(sampler.generate([tasks[i].prompt_ids for i in indices], *kind)))
                    for kind, indices in equal.items()
                ]
        except* (EngineError, TaskRefused) as failures:
            raise failures.exceptions[0] from None
        groups: list[list[Trajectory]] = [[] for _ in tasks]
        for indices, reply in replies:
            for index, completions in zip(indices, reply.result(), strict=True):
                groups[index] = [build_trajectory(tasks[index].prompt_ids, one) for one in completions]
        return groups


SINGLE_TURN = SingleTurn()
