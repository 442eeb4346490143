"""One prompt, one completion: the engine is asked once for everything that is sampled alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from protocol.facts import Sampling, Task
from protocol.trajectory import Trajectory
from rollout_service.build_trajectory import build_trajectory
from rollout_service.engine import Generates
from rollout_service.errors import EngineError, TaskRefused


class SingleTurn:
    """The environment ``single_turn``."""

    def __init__(self, client: Callable[[], Generates]) -> None:
        """``client`` gives the engine of the moment: it may have been restarted at another port."""
        self._client = client

    async def rollout(self, tasks: Sequence[Task]) -> list[list[Trajectory]]:
        """Return ``task.group_size`` trajectories for each task, in order; raises EngineError.

        One batched request for each distinct (sampling, group size): the contract allows one ``n``
        a request.
        """
        alike: dict[tuple[Sampling, int], list[int]] = {}
        for index, task in enumerate(tasks):
            alike.setdefault((task.sampling, task.group_size), []).append(index)
        client = self._client()
        try:
            async with asyncio.TaskGroup() as requests:
                replies = [
                    (indices, requests.create_task(client.generate([tasks[i].prompt_ids for i in indices], *kind)))
                    for kind, indices in alike.items()
                ]
        except* (EngineError, TaskRefused) as failures:
            raise failures.exceptions[0] from None
        groups: list[list[Trajectory]] = [[] for _ in tasks]
        for indices, reply in replies:
            for index, completions in zip(indices, reply.result(), strict=True):
                groups[index] = [build_trajectory(tasks[index].prompt_ids, one) for one in completions]
        return groups
