"""Start more completions of a prompt than are needed; once enough have ended, abort the rest on the engine and count it.

    started ──▶ ``enough`` have ended ──(wait x the time that took)──▶ closed: what has ended is kept, the rest is aborted

Short completions end first, so what is kept is shorter than what was started, the more so the smaller ``wait`` is.
`penstock plan` applies the same rule to simulated requests.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from penstock.protocol.groups import AbandonedCompletion, Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.checks.check_task import ModelLimits, check_request
from penstock.rollout_service.engines.completion import Resumption
from penstock.rollout_service.engines.completion_sampler import CompletionSampler, SingleRequest
from penstock.rollout_service.engines.engine_client import KeptCompletions
from penstock.rollout_service.errors import EngineError, TaskRefused

Abort = Callable[[str], Awaitable[None]]  # ends the request of a name: its reply holds the tokens that it has
_ABORT_AGAIN_S = 0.5  # a request may reach the engine after the abort that was meant for it


@dataclass(frozen=True, slots=True)
class Redundancy:
    enough: int  # a group is complete with so many
    extra: int = 0  # started besides
    # How much longer the rest may take, as a share of the time in which ``enough`` ended; 0: none of it is kept.
    wait: float = 0.0

    @property
    def started(self) -> int:
        return self.enough + self.extra


@dataclass(slots=True)
class RedundantGroup:
    """The completions of one group, by their numbers from 0; times are seconds of any one clock."""

    redundancy: Redundancy
    started_at: float
    ended: list[int] = field(default_factory=list)  # in the order of their ends
    enough_at: float | None = None  # when ``enough`` had ended

    def end(self, number: int, now: float) -> None:
        self.ended.append(number)
        if len(self.ended) == self.redundancy.enough:
            self.enough_at = now

    @property
    def closes_at(self) -> float | None:
        """When the rest is aborted; None while fewer than ``enough`` have ended."""
        if self.enough_at is None:
            return None
        return self.enough_at + self.redundancy.wait * (self.enough_at - self.started_at)

    def is_closed(self, now: float) -> bool:
        """Return True if nothing more is waited for: all have ended, or enough, and the time of the rest is over."""
        if len(self.ended) == self.redundancy.started:
            return True
        closes_at = self.closes_at
        return closes_at is not None and now >= closes_at

    @property
    def kept(self) -> list[int]:
        """The completions of the group, by number: the first ``enough`` that ended, or with a ``wait`` all that have ended."""
        most = len(self.ended) if self.redundancy.wait else self.redundancy.enough
        return sorted(self.ended[:most])


async def generate_redundantly(
    sampler: CompletionSampler,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    redundancy: Redundancy,
    adapter: PolicyVersion | None,
    limits: ModelLimits,
    abort: Abort,
) -> list[KeptCompletions]:
    for prompt in prompts:
        check_request(prompt, sampling, limits)
    batch = _Prompts(sampler, sampling, redundancy, adapter, abort)
    try:
        async with asyncio.TaskGroup() as groups:
            kept = [groups.create_task(batch.group(prompt)) for prompt in prompts]
    except* (EngineError, TaskRefused) as failures:
        raise failures.exceptions[0] from None
    return [group.result() for group in kept]


@dataclass(frozen=True, slots=True)
class _Prompts:
    sampler: CompletionSampler
    sampling: Sampling
    redundancy: Redundancy
    adapter: PolicyVersion | None
    abort: Abort

    async def group(self, prompt: Sequence[int]) -> KeptCompletions:
        name = uuid.uuid4().hex
        requests = [SingleRequest(f"{name}-{number:04d}") for number in range(self.redundancy.started)]
        tasks = [
            asyncio.create_task(self.sampler.generate_single(prompt, self.sampling, self.adapter, request))
            for request in requests
        ]
        try:
            kept = await self._wait(tasks)
            await self._abandon(tasks, requests)
            others = [task.result() for number, task in enumerate(tasks) if number not in kept]
            completions = [await self.sampler.whole(tasks[number].result(), self.sampling.stop) for number in kept]
            return KeptCompletions(completions, tuple(map(_abandoned, others)))
        finally:
            for task in tasks:
                task.cancel()  # the engine ends what its client no longer waits for
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, tasks: Sequence[asyncio.Task[Resumption]]) -> list[int]:
        now = asyncio.get_running_loop().time
        group = RedundantGroup(self.redundancy, now())
        running = dict(enumerate(tasks))
        while not group.is_closed(now()):
            left_s = None if group.closes_at is None else max(0.0, group.closes_at - now())
            await asyncio.wait(running.values(), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for number in [number for number, task in running.items() if task.done()]:
                running.pop(number).result()
                group.end(number, now())
        return group.kept

    async def _abandon(self, tasks: Sequence[asyncio.Task[Resumption]], requests: Sequence[SingleRequest]) -> None:
        running = {task: request for task, request in zip(tasks, requests, strict=True) if not task.done()}
        for request in running.values():
            request.is_abandoned = True
        while running:
            await asyncio.gather(*(self.abort(request.name) for request in running.values()))
            await asyncio.wait(running, timeout=_ABORT_AGAIN_S)
            running = {task: request for task, request in running.items() if not task.done()}


def _abandoned(sequence: Resumption) -> AbandonedCompletion:
    was_aborted = sequence.parts[-1].finish_reason == "abort"
    return AbandonedCompletion(reason="aborted" if was_aborted else "surplus", num_tokens=len(sequence.sampled))
