"""What environments of several turns and programs share: a group of episodes for each task, restarted where they fail.

`TurnEnvironment` plays an author's class, `Program` runs a program; each makes one attempt at an episode, recorded
token for token by `proxy/`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import structlog
from pydantic import ValidationError

from penstock.agents.environments.play import Played
from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS
from penstock.agents.proxy.rows import TreeRows, counts_of, messages_json, stored_rows
from penstock.agents.proxy.session import AgentModel, EpisodeLimits, EpisodeSession
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.connection import Section
from penstock.protocol.config.environment_settings import EnvironmentDefinition, EpisodeSettings, RequestRules
from penstock.protocol.episode import Episode, EpisodeRow, Turn
from penstock.protocol.errors import ConfigError, PackError, PenstockError
from penstock.protocol.groups import Task, derived_seed
from penstock.protocol.secret_values import resolved
from penstock.rollout_service.environments.environment import Environment, EpisodeStore, Sampler, in_episode
from penstock.rollout_service.errors import EngineError, TaskRefused
from penstock.rollout_service.run_images import RunImages
from penstock.serving.target_policy import OwnServer

log = structlog.get_logger("rollout.environment")

_FAILED = "environment_failed"  # the reason of a dead letter
_THREADS = 32  # plain methods of plays run on these; one that never returns keeps its thread


class PlayOptions(Section):
    """Base class of the options of an environment or a tool; this one has none. Its fields are keys of the run file."""

    @classmethod
    def checked(cls, values: Mapping[str, Any], place: str, name: str) -> Self:
        """Return checked options; raises ConfigError, which names their ``place`` and what ``name`` has."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as err:
            problems = (f"{'.'.join(map(str, error['loc'])) or 'options'}: {error['msg']}" for error in err.errors())
            known = ", ".join(cls.model_fields) or "no options"
            raise ConfigError(f"{place}: {'; '.join(problems)}; {name} has {known}") from None


@dataclass(frozen=True, slots=True)
class Site:
    model: AgentModel
    running: asyncio.Semaphore  # one place for each episode that is played
    executor: ThreadPoolExecutor  # for what would stop the event loop


@dataclass(frozen=True, slots=True)
class Begun:
    name: str  # the same in every attempt
    task: Task
    attempt: int
    seed: int

    @property
    def sampling_seed(self) -> int | None:
        """The seed of this attempt's answers; None: they are random."""
        return None if self.task.seed is None else derived_seed(self.task.seed, self.name, self.attempt)


@dataclass(frozen=True, slots=True)
class Attempt:
    session: EpisodeSession
    made: TreeRows
    played: Played
    version: str = ""  # of the rules, where the environment learns it with the episode


class RowUnfit(Exception):
    """No episode can be made of a row; trying again would not help."""


class NotStarted(PenstockError):
    """The episode could not be started; another attempt may succeed."""


class EpisodeEnvironment(Environment):
    version: ClassVar[str] = ""  # recorded with each episode; raise it when the rules change
    options: ClassVar[type[PlayOptions]] = PlayOptions  # what `environment.define.NAME.options` may hold

    def __init__(self) -> None:
        self.settings: EpisodeSettings = EpisodeSettings()  # pyright: ignore[reportCallIssue]
        self.chosen: Any = None  # an instance of ``options``; None: its defaults
        self.own_servers: tuple[OwnServer, ...] = ()  # of the run, which no URL may lead to
        self._folder = Path()
        self._context_tokens: int | None = None
        self._site: Site | None = None
        self._store: EpisodeStore | None = None
        self._worker_places: asyncio.Semaphore | None = None
        self._images: RunImages | None = None
        self._has_warned = False

    @abstractmethod
    async def attempt(self, site: Site, begun: Begun, sampler: Sampler) -> Attempt:
        """Make one attempt at an episode, and end its session; raises EngineError, or RowUnfit."""

    def defined(self, name: str, definition: EnvironmentDefinition) -> Self:
        """Return this environment under another name, with options and limits; raises ConfigError for wrong options."""
        where = f"environment.define.{name}.options"
        options = resolved(definition.options, where, os.environ, tuple(self.options.model_fields))
        chosen = self.options.checked(options, where, self.name)
        ANSWER_FORMATS.find(definition.answer_format)
        other = copy.copy(self)
        other.name = name  # pyright: ignore[reportAttributeAccessIssue]  (a defined one has another name)
        other.settings, other.chosen = definition, chosen
        return other

    def needs_definition(self, needed: str) -> str:
        """Return what to write where an environment is named that plays nothing without options of the run file."""
        kind = f'[environment.define.NAME] with type = "{self.name}" and {needed}'
        return f"{self.name} is not played without options: write {kind}, and name that"

    @property
    def kept_staleness(self) -> int:
        return self.settings.kept_staleness

    def never_call(self, servers: Sequence[OwnServer]) -> None:
        self.own_servers = tuple(servers)

    def use_worker(self, store: EpisodeStore, running: asyncio.Semaphore | None) -> None:
        """Note where ended episodes are stored, and the places that all episodes of the worker share."""
        self._store, self._worker_places = store, running

    def use_images(self, images: RunImages) -> None:
        self._images = images

    def use_model(self, folder: Path, context_tokens: int | None) -> None:
        """Note where the model is; its tokenizer and chat template are read with the first task."""
        self._folder, self._context_tokens, self._site = folder, context_tokens, None

    async def rollout(self, tasks: Sequence[Task], sampler: Sampler) -> list[list[Episode] | TaskRefused]:
        """Return the episodes of each task, or why it has too few; raises EngineError."""
        try:
            site = self._site = self._site or await asyncio.to_thread(self._prepare)
        except PenstockError as err:  # the model has no chat template, or none that can be used
            return [TaskRefused(_FAILED, f"{task.group_id}: {self.name}: {err}") for task in tasks]
        try:
            async with asyncio.TaskGroup() as playing:
                groups = [playing.create_task(self._group(site, self._limited(task), sampler)) for task in tasks]
        except* EngineError as failures:
            raise _first(failures) from None
        return [group.result() for group in groups]

    def _prepare(self) -> Site:
        tokenizer, settings = ChatTokenizer.read(self._folder), self.settings
        model = AgentModel.of(tokenizer, settings.answer_format, self._context_tokens, settings.thinking)
        executor = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"environment-{self.name}")
        return Site(model, asyncio.Semaphore(settings.max_running), executor)

    def _limited(self, task: Task) -> Task:
        most, sampling = self.settings.max_answer_tokens, task.sampling
        if most is None or most >= sampling.max_new_tokens:
            return task
        return task.model_copy(update={"sampling": sampling.model_copy(update={"max_new_tokens": most})})

    async def _group(self, site: Site, task: Task, sampler: Sampler) -> list[Episode] | TaskRefused:
        stored = self._store.take(task) if self._store else ()
        ended = {played.index: played for played in stored if self._continues(task, played)}
        async with asyncio.TaskGroup() as playing:
            numbers = [index for index in range(task.group_size) if index not in ended]
            attempts = [playing.create_task(self._episode(site, task, index, sampler)) for index in numbers]
        results = [attempt.result() for attempt in attempts]
        episodes = [*ended.values(), *(episode for episode in results if isinstance(episode, Episode))]
        episodes.sort(key=lambda one: one.index)
        needed = task.group_size if task.min_episodes is None else task.min_episodes
        if len(episodes) >= max(needed, 1):
            return episodes
        problems = dict.fromkeys(problem for problem in results if isinstance(problem, str))
        return TaskRefused(
            _FAILED,
            f"{task.group_id}: {len(episodes)} of {task.group_size} episodes of {self.name} could be played, "
            f"{needed} are needed; in each of {self.settings.attempts} attempts: {'; '.join(problems)}",
        )

    async def _episode(self, site: Site, task: Task, index: int, sampler: Sampler) -> Episode | str:
        """Return the episode, or why the last attempt at it was none."""
        seed, problem, begun_at = group_seed(task), "", time.monotonic()
        for number in range(self.settings.attempts):
            begun = Begun(f"{task.group_id}.{index}", task, number, seed)
            async with site.running, self._worker_places or contextlib.nullcontext():
                try:
                    with in_episode(sampler) as episode_sampler:
                        attempt = await self.attempt(site, begun, episode_sampler)
                except RowUnfit as err:
                    return f"no play for this row: {err}"
                episode = self._record(begun, index, attempt)
            if episode is not None:
                if self._store is not None and time.monotonic() - begun_at >= self.settings.keep_after_s:
                    await self._store.keep(task, episode, begun_at=begun_at)
                return episode
            problem = f"{attempt.played.status}: {attempt.played.problem}"
            log.warning("episode restarted", episode=begun.name, attempt=number, problem=problem)
        return problem

    def _continues(self, task: Task, episode: Episode) -> bool:
        return (episode.environment, episode.seed) == (self.name, group_seed(task)) and episode.index < task.group_size

    def limits(self) -> EpisodeLimits:
        deadline_s = self.settings.episode_deadline_s
        return EpisodeLimits(  # pyright: ignore[reportCallIssue]
            max_turns=self.settings.max_turns, answer_deadline_s=deadline_s,
            **{name: getattr(self.settings, name) for name in RequestRules.model_fields},
        )  # fmt: skip

    def _record(self, begun: Begun, index: int, attempt: Attempt) -> Episode | None:
        session, made, played = attempt.session, attempt.made, attempt.played
        if played.status == "failed" or played.time_spent_by == "tools" or not made.rows:
            return None
        is_unsure = made.scored != made.last or session.counts["scored_another_agent"]
        if is_unsure and begun.task.reward.name != "environment" and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the reward reads an answer before the last one, which is of a side conversation, or one under another "
                "system message than the first; a program that means another one sends the header "
                "x-penstock-conversation: main (later episodes count last_answer_not_scored, scored_another_agent alone)",
                episode=session.id, read=made.scored, last=made.last,
            )  # fmt: skip
        numbers = sorted(span.turn for row in made.rows for span in row.spans if span.is_trained)
        try:
            rows = [_with_rewards(row, numbers, played) for row in stored_rows(made, session.tree.turns)]
            return Episode(
                episode_id=session.id, group_id=begun.task.group_id, index=index, environment=self.name,
                environment_version=attempt.version or self.version, seed=begun.seed, status=played.status,
                rows=tuple(rows), attempt=begun.attempt, time_spent_by=played.time_spent_by,
                reward=float(sum(played.rewards.values())), reward_parts=tuple(sorted(played.parts.items())),
                messages=messages_json(session.messages), counts=counts_of(session.counts, made),
            )  # fmt: skip
        except PackError as err:  # a sum that is not finite, a name or a state that cannot be stored
            played.status, played.problem = "failed", str(err)
            return None


def group_seed(task: Task) -> int:
    """Return the seed of a task's episodes: equal in the group, and in every attempt at it; 63 bits."""
    if task.seed is not None:
        return task.seed
    digest = hashlib.sha256(f"{task.split}\0{task.group_id}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def _with_rewards(row: EpisodeRow, numbers: Sequence[int], played: Played) -> EpisodeRow:
    def paid(turn: Turn) -> Turn:
        number = numbers[turn.number]
        return turn._replace(reward=float(played.rewards.get(number, 0.0)), state=played.states.get(number, ""))

    return replace(row, turns=tuple(map(paid, row.turns)))


def _first(failures: BaseExceptionGroup[EngineError]) -> EngineError:
    failure = failures.exceptions[0]
    return _first(failure) if isinstance(failure, BaseExceptionGroup) else failure
