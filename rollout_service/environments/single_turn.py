"""One prompt, one completion: one request for all tasks with the same sampling parameters, unless they have redundant completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.protocol.facts import Sampling, Task
from penstock.protocol.trajectory import Trajectory
from penstock.rollout_service.engines.engine_client import KeptCompletions
from penstock.rollout_service.engines.redundancy import Redundancy
from penstock.rollout_service.environments.build_trajectory import build_trajectory
from penstock.rollout_service.environments.environment import (
    Environment,
    KeptTrajectories,
    Sampler,
    SamplesRedundantly,
)
from penstock.rollout_service.errors import EngineError, TaskRefused


class SingleTurn(Environment):
    """The environment ``single_turn``."""

    name = "single_turn"

    async def rollout(self, tasks: Sequence[Task], sampler: Sampler) -> list[list[Trajectory]]:
        """Return the trajectories of each task, in order; raises EngineError, and TaskRefused.

        One call of the sampler for each distinct (sampling, redundancy): it has one number of completions.
        """
        equal: dict[tuple[Sampling, Redundancy], list[int]] = {}
        for index, task in enumerate(tasks):
            redundancy = Redundancy(task.group_size, task.redundant_completions, task.redundant_wait)
            equal.setdefault((task.sampling, redundancy), []).append(index)
        try:
            async with asyncio.TaskGroup() as requests:
                replies = [
                    (indices, requests.create_task(_sample([tasks[i] for i in indices], *kind, sampler)))
                    for kind, indices in equal.items()
                ]
        except* (EngineError, TaskRefused) as failures:
            raise failures.exceptions[0] from None
        groups: list[list[Trajectory]] = [[] for _ in tasks]
        for indices, reply in replies:
            for index, kept in zip(indices, reply.result(), strict=True):
                _check_experts(tasks[index], kept)
                trajectories = [build_trajectory(tasks[index].prompt_ids, one) for one in kept.completions]
                is_redundant = tasks[index].redundant_completions > 0
                groups[index] = KeptTrajectories(trajectories, kept.abandoned) if is_redundant else trajectories
        return groups


def _check_experts(task: Task, kept: KeptCompletions) -> None:
    """Raise TaskRefused if the trainer wants to know the experts of each token, and the engine does not say."""
    if task.sampling.routers is not None and any(one.experts is None for one in kept.completions):
        raise TaskRefused(
            "experts_not_returned",
            f"{task.group_id}: this worker's engine does not say which experts computed a token; set trainer.router_replay = false, or "
            "use the embedded engine or SGLang",
        )


async def _sample(
    tasks: Sequence[Task], sampling: Sampling, redundancy: Redundancy, sampler: Sampler
) -> list[KeptCompletions]:
    prompts = [task.prompt_ids for task in tasks]
    if redundancy.extra:  # which completions are kept depends on when they end: no seed would repeat them
        assert isinstance(
            sampler, SamplesRedundantly
        )  # tasks with redundant completions come from a worker's queue only
        return await sampler.generate_redundantly(prompts, sampling, redundancy)
    seeds = [task.seed for task in tasks if task.seed is not None]
    if len(seeds) < len(tasks):  # of a trainer that sets none
        completions = await sampler.generate(prompts, sampling, redundancy.enough)
    else:
        completions = await sampler.generate(prompts, sampling, redundancy.enough, seeds=seeds)
    return [KeptCompletions(of_prompt, ()) for of_prompt in completions]


SINGLE_TURN = SingleTurn()
