"""What an environment is to the worker; `ENVIRONMENTS` finds it by the name in `Task.environment`. And what it returns as a group, pure.

A new environment is one file with an instance of `Environment` at its top level: in this package or in `penstock.agents.environments`, in an
installed package with an entry point in the group ``penstock.environments``, or in any file that ``worker.environments`` names. Completions
become trajectories without tokenising their text again.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.episode import Episode
from penstock.protocol.errors import ConfigError, PackError
from penstock.protocol.extensions import Registry
from penstock.protocol.groups import AbandonedCompletion, RowImages, Sampling, Task
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.transport.key_value import KeyValue
from penstock.protocol.versions import VersionRun
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.engine_client import KeptCompletions
from penstock.rollout_service.engines.redundancy import Redundancy
from penstock.rollout_service.errors import TaskRefused
from penstock.rollout_service.run_images import RunImages
from penstock.serving.target_policy import OwnServer


class Sampler(Protocol):
    """Samples from the policy version that was chosen for these tasks."""

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int, *, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        """Sample ``n`` completions of every prompt; raises EngineError.

        ``seeds`` has one for each prompt, from which those of its ``n`` samples follow; None: they are random.
        """
        ...


@runtime_checkable
class SamplesRedundantly(Protocol):
    """A sampler that can start more completions than are kept: that of a worker."""

    async def generate_redundantly(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, redundancy: Redundancy
    ) -> list[KeptCompletions]:
        """Return the kept completions of every prompt; raises EngineError, and TaskRefused where no engine can."""
        ...


@runtime_checkable
class SamplesEpisodes(Protocol):
    """A sampler that keeps the turns of an episode on the engine that has computed what they begin with: that of a worker."""

    def in_episode(self) -> AbstractContextManager[Sampler]:
        """Return the sampler of one episode, for the block."""
        ...


def in_episode(sampler: Sampler) -> AbstractContextManager[Sampler]:
    """Return what samples one episode; a sampler of one engine is the same for all."""
    return sampler.in_episode() if isinstance(sampler, SamplesEpisodes) else contextlib.nullcontext(sampler)


class EpisodeStore(Protocol):
    """Holds the episodes of groups that are not complete, so that a killed worker's are not played again."""

    def take(self, task: Task) -> Sequence[Episode]:
        """Return those of a task that an earlier delivery of its pack had ended; the next call returns none."""
        ...

    async def keep(self, task: Task, episode: Episode, *, begun_at: float) -> None:
        """Store an episode that has ended, and began then by `time.monotonic`; a failure to store it is counted, and is no error."""
        ...


class KeptTrajectories(list[Trajectory]):
    """The trajectories of a group for which more were started than are kept."""

    def __init__(self, trajectories: Iterable[Trajectory], abandoned: tuple[AbandonedCompletion, ...]) -> None:
        """``abandoned`` are the others."""
        super().__init__(trajectories)
        self.abandoned = abandoned


class ServerRegistry(Protocol):
    """Tells environments which servers are registered under their names."""

    def follow(self, name: str, on_read: Callable[[Any], None]) -> None:
        """Call ``on_read`` with what is registered under a name, now and after each reading."""

    def following(self) -> AbstractAsyncContextManager[None]:
        """Read inside the block, again and again; raises PenstockError where the first reading fails."""
        ...


class Environment(ABC):
    """Generates whole groups."""

    name: ClassVar[str]  # in `Task.environment`

    @property
    def kept_staleness(self) -> int | None:
        """The most versions by which an ended episode of an earlier delivery may be behind; None: none are stored."""
        return None

    def use_model(self, folder: Path, context_tokens: int | None) -> None:  # noqa: B027 - most need no tokenizer
        """Learn the model, before the first task: its folder, and its context; None: not limited."""

    def never_call(self, servers: Sequence[OwnServer]) -> None:  # noqa: B027 - most call no server
        """Learn the run's servers, before the first task: an environment that calls servers calls none of these."""

    def use_worker(self, store: EpisodeStore, running: asyncio.Semaphore | None) -> None:  # noqa: B027 - most end with their request
        """Learn, before the first task, where ended episodes are stored, and the places of all episodes of the worker; None: enough."""

    def use_images(self, images: RunImages) -> None:  # noqa: B027 - most show none
        """Learn, before the first task, where the images of the run are read and stored."""

    @property
    def registered(self) -> str:
        """The name under which its servers are registered; empty: it has none in the registry."""
        return ""

    def new_registry(self, store: KeyValue) -> ServerRegistry:
        raise NotImplementedError

    def use_registry(self, registry: ServerRegistry) -> None:  # noqa: B027 - most have no servers
        """Learn where its servers are found, before the first task, if they are registered."""

    def defined(self, name: str, definition: EnvironmentDefinition) -> Environment:
        """Return this environment under another name, with separate options and limits; raises ConfigError."""
        raise ConfigError(
            f"environment.define.{name}.type = {definition.type!r}: it is not one of several turns, and takes no options; name it "
            "in rollout.environment"
        )

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give up what the environment holds, at the end of the worker."""

    @abstractmethod
    async def rollout(
        self, tasks: Sequence[Task], sampler: Sampler
    ) -> Sequence[Sequence[Trajectory] | TaskRefused] | Sequence[Sequence[Episode] | TaskRefused]:
        """Return the trajectories or the episodes of each task, in order, all sampled by ``sampler``.

        There are ``task.group_size`` trajectories, or those that are kept of a task with redundant completions; of episodes, as many as ended by the policy's doing, and no fewer than
        ``task.min_episodes``. In place of a group that cannot be had stands the reason: it alone is dead-lettered.

        Raises EngineError when the engine fails: the whole pack is requeued.
        """


ENVIRONMENTS = Registry(
    "environment",
    Environment,  # pyright: ignore[reportAbstractUsage]  (the class is only compared with)
    package="penstock.rollout_service.environments",
    second_package="penstock.agents.environments",
    group="penstock.environments",
)


def load_environments(
    extra: Sequence[str], define: Mapping[str, EnvironmentDefinition] = MappingProxyType({})
) -> dict[str, Environment]:
    """Return the built-in and installed environments, those that ``extra`` names and the defined ones, by the name that tasks use.

    Raises ConfigError when two have the same name, and for a definition that its environment refuses.
    """
    environments: dict[str, Environment] = {}
    for reference in (*ENVIRONMENTS.names(), *extra):
        environment = ENVIRONMENTS.find(reference).value
        if environments.setdefault(environment.name, environment) is not environment:
            raise ConfigError(
                f"worker.environments: {reference!r} has the name {environment.name!r} of another environment; rename it"
            )
    plain = dict(environments)
    for name, definition in define.items():
        if name in plain:
            raise ConfigError(f"environment.define.{name}: there is an environment of this name; choose another")
        kind = plain.get(definition.type) or ENVIRONMENTS.find(definition.type).value
        environments[name] = kind.defined(name, definition)
    return environments


def build_trajectory(prompt_ids: Sequence[int], completion: Completion, images: RowImages | None = None) -> Trajectory:
    """Join a prompt and its completion; version runs move to positions in the whole trajectory.

    The policy sampled every completion token, the matched stop token or stop string included, so the loss mask is
    True on all of them and False on the prompt, which has the ``images``. Raises PackError when lengths do not fit.
    """
    start = len(prompt_ids)
    length = start + len(completion.token_ids)
    token_ids = np.empty(length, dtype=np.int32)
    token_ids[:start] = prompt_ids
    token_ids[start:] = completion.token_ids
    loss_mask = np.zeros(length, dtype=np.bool_)
    loss_mask[start:] = True
    logprobs = np.zeros(length, dtype=np.float32)
    logprobs[start:] = completion.logprobs
    return Trajectory(
        token_ids=token_ids,
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        version_runs=tuple(
            VersionRun(run.version, run.start + start, run.end + start) for run in completion.version_runs
        ),
        finish_reason=completion.finish_reason,
        completion_text=completion.text,
        experts=completion.experts,
        images=images,
    )


def rows_of(member: Trajectory | Episode) -> list[Trajectory]:
    """Return the rows of token ids of what an environment returned for one member of a group."""
    return [row.trajectory for row in member.rows] if isinstance(member, Episode) else [member]


def as_baseline(member: Trajectory | Episode, index: int) -> Trajectory | Episode:
    """Return the greedy member of a group, marked as its baseline; an episode gets the place ``index``."""
    if isinstance(member, Trajectory):
        return replace(member, is_baseline=True)
    rows = [replace(row, trajectory=replace(row.trajectory, is_baseline=True)) for row in member.rows]
    return replace(member, rows=tuple(rows), index=index, episode_id=f"{member.episode_id}.baseline")


def build_group(
    task: Task, members: Sequence[Trajectory | Episode], abandoned: tuple[AbandonedCompletion, ...] = ()
) -> Group:
    """Join the trajectories or episodes of one task with its reward, prompt text and versions.

    ``abandoned`` are completions that were started besides and not kept.

    Raises PackError for episodes that are not those of one group, or did not end by the policy's doing.
    """
    episodes = tuple([member for member in members if isinstance(member, Episode)])
    trajectories = [member for member in members if isinstance(member, Trajectory)]
    if episodes and trajectories:
        raise PackError(
            f"group {task.group_id} has {len(episodes)} episodes and {len(trajectories)} other trajectories"
        )
    if episodes:
        if episodes[0].group_id != task.group_id:
            raise PackError(f"task {task.group_id} came back with an episode of group {episodes[0].group_id}")
        return Group.of_episodes(
            episodes,
            split=task.split,
            attempt=task.attempt,
            issued_version=task.issued_version,
            prompt_text=task.prompt_text,
            reward=task.reward,
        )
    return Group(
        group_id=task.group_id,
        split=task.split,
        attempt=task.attempt,
        issued_version=task.issued_version,
        prompt_text=task.prompt_text,
        num_prompt_tokens=len(task.prompt_ids),
        reward=task.reward,
        trajectories=tuple(trajectories),
        abandoned=abandoned,
    )
