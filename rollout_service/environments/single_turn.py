"""One prompt, one completion: one request for all tasks with the same sampling parameters, unless they have redundant completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.protocol.groups import Sampling, Task
from penstock.protocol.trajectory import Trajectory
from penstock.rollout_service.engines.engine_client import ImagePrompt, KeptCompletions
from penstock.rollout_service.engines.redundancy import Redundancy
from penstock.rollout_service.environments.environment import (
    Environment,
    KeptTrajectories,
    Sampler,
    SamplesRedundantly,
    build_trajectory,
)
from penstock.rollout_service.errors import EngineError, TaskRefused
from penstock.rollout_service.run_images import RunImages


class SingleTurn(Environment):
    name = "single_turn"

    def __init__(self) -> None:
        self._images: RunImages | None = None

    def use_images(self, images: RunImages) -> None:
        self._images = images

    async def rollout(self, tasks: Sequence[Task], sampler: Sampler) -> list[list[Trajectory] | TaskRefused]:
        """Return the trajectories of each task, in order, or why its images cannot be shown; raises EngineError, and TaskRefused.

        One call of the sampler for each distinct (sampling, redundancy): it has one number of completions.
        """
        prompts = await asyncio.gather(*(self._prompt(task) for task in tasks))
        shown = {index: prompt for index, prompt in enumerate(prompts) if not isinstance(prompt, TaskRefused)}
        equal: dict[tuple[Sampling, Redundancy], list[int]] = {}
        for index in shown:
            task = tasks[index]
            redundancy = Redundancy(task.group_size, task.redundant_completions, task.redundant_wait)
            equal.setdefault((task.sampling, redundancy), []).append(index)
        try:
            async with asyncio.TaskGroup() as requests:
                replies = [
                    (indices, requests.create_task(_sample([(tasks[i], shown[i]) for i in indices], *kind, sampler)))
                    for kind, indices in equal.items()
                ]
        except* (EngineError, TaskRefused) as failures:
            raise failures.exceptions[0] from None
        groups: list[list[Trajectory] | TaskRefused] = [
            outcome if isinstance(outcome, TaskRefused) else [] for outcome in prompts
        ]
        for indices, reply in replies:
            for index, kept in zip(indices, reply.result(), strict=True):
                task = tasks[index]
                trajectories = [
                    build_trajectory(task.prompt_ids, completion, task.images) for completion in kept.completions
                ]
                is_redundant = tasks[index].redundant_completions > 0
                groups[index] = KeptTrajectories(trajectories, kept.abandoned) if is_redundant else trajectories
        return groups

    async def _prompt(self, task: Task) -> Sequence[int] | TaskRefused:
        if task.images is None:
            return task.prompt_ids
        if self._images is None:
            return TaskRefused("images_refused", f"{task.group_id} has images, and this worker reads none from S3")
        try:
            return ImagePrompt(task.prompt_ids, task.images, await self._images.of_task(task))
        except TaskRefused as err:
            return err


async def _sample(
    pairs: Sequence[tuple[Task, Sequence[int]]], sampling: Sampling, redundancy: Redundancy, sampler: Sampler
) -> list[KeptCompletions]:
    tasks, prompts = [task for task, _ in pairs], [prompt for _, prompt in pairs]
    if redundancy.extra:  # which completions are kept depends on when they end: no seed would repeat them
        # tasks with redundant completions come from a worker's queue only
        assert isinstance(sampler, SamplesRedundantly)
        return await sampler.generate_redundantly(prompts, sampling, redundancy)
    seeds = [task.seed for task in tasks if task.seed is not None]
    if len(seeds) < len(tasks):  # of a trainer that sets none
        completions = await sampler.generate(prompts, sampling, redundancy.enough)
    else:
        completions = await sampler.generate(prompts, sampling, redundancy.enough, seeds=seeds)
    return [KeptCompletions(of_prompt, ()) for of_prompt in completions]


SINGLE_TURN = SingleTurn()
