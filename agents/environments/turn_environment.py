"""Environments of several turns: a play for each episode, answered through the token-exact recorder of `proxy/`.

A new one is one file with an instance of `TurnEnvironment` at its top level, found like every environment (`environment.py`).

The policy answers, the environment replies, until one of them ends the episode:

| how it ends                                                  | status      | outcome                          |
|--------------------------------------------------------------|-------------|----------------------------------|
| the environment's last reply                                 | `done`      | trained                          |
| the same, where it says that a limit of its own was reached   | `truncated` | trained                          |
| the turns, the model's context or the record are used up     | `truncated` | trained                          |
| the time is used up, most of it by the policy                | `timeout`   | trained                          |
| the time is used up, most of it by the environment           | `timeout`   | restarted with the same seed   |
| the environment raised an error, or took too long for a reply | `failed`   | restarted with the same seed   |
| its tokens are of versions too far apart                     | `expired`   | restarted with the same seed   |

A failure of the engine is not an end: it is raised, and the whole pack is requeued.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.agents.environments.episode_environment import Attempt, Begun, EpisodeEnvironment, RowUnfit, Site
from penstock.agents.environments.play import (
    EnvironmentFailed,
    Play,
    Reply,
    Row,
    call,
    checked_messages,
    checked_reply,
    checked_score,
)
from penstock.agents.proxy.messages import AgentRequest, Message, RequestRefused, RetryMark
from penstock.agents.proxy.session import EpisodeSession
from penstock.agents.proxy.tree import SampledTurn
from penstock.protocol.config.environment_settings import EnvironmentDefinition, EpisodeSettings
from penstock.protocol.episode import EndStatus, TimeSpender
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.environments.environment import Sampler
from penstock.rollout_service.errors import EngineError

TRUNCATED = ("max_turns", "context", "max_stored_tokens")  # `EpisodeSession.truncated_by`
_ENGINE_CODES = ("engine_error", "engine_timeout")


@dataclass(slots=True)
class Played:
    status: EndStatus = "failed"
    time_spent_by: TimeSpender | None = None
    problem: str = ""  # why it was not played to an end
    rewards: dict[int, float] = field(default_factory=dict)  # by the number of the sampled turn
    states: dict[int, str] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    policy_s: float = 0.0
    environment_s: float = 0.0


async def play_episode(session: EpisodeSession, play: Play, settings: EpisodeSettings, executor: Executor) -> Played:
    """Play until one side ends it; the session stays open. Raises EngineError when the engine fails."""
    played = Played()
    try:
        async with asyncio.timeout(settings.episode_deadline_s):
            await _play(session, play, settings, executor, played)
    except TimeoutError:
        spender: TimeSpender = "policy" if played.policy_s >= played.environment_s else "tools"
        played.status, played.time_spent_by = "timeout", spender
        played.problem = f"not over after {settings.episode_deadline_s:g} s"
    except EnvironmentFailed as err:
        played.status, played.problem = "failed", str(err)
    finally:
        try:
            await call(play.close, settings.reply_deadline_s, executor)
        except EnvironmentFailed as err:
            played.problem = played.problem or f"closing: {err}"
    return played


async def _play(
    session: EpisodeSession, play: Play, settings: EpisodeSettings, executor: Executor, played: Played
) -> None:
    first = checked_messages(await _timed(play.start, settings, executor, played), is_first=True)
    messages = with_system_prompt(first, settings.system_prompt)
    state = _state_of(messages)
    while True:
        turn = await _answer(session, messages, play, played)
        if turn is None:
            if played.status == "truncated":
                score = checked_score(await _timed(play.score, settings, executor, played))
                played.rewards[max(played.rewards)] += score
            return
        reply = checked_reply(await _timed(functools.partial(play.step, turn.answer), settings, executor, played))
        _record(reply, turn, state, played)
        if reply.is_done:
            played.status = "truncated" if reply.is_truncated else "done"
            return
        new = checked_messages(reply.messages, is_first=False)
        messages = (*messages, turn.answer, *new)
        state = reply.state or _state_of(new)


def with_system_prompt(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Return messages that begin with a system message of the run file, which one of the environment follows in the same message."""
    if not text:
        return messages
    if messages[0].role == "system":
        return (replace(messages[0], content=f"{text}\n\n{messages[0].content}"), *messages[1:])
    return (Message("system", text), *messages)


async def _answer(
    session: EpisodeSession, messages: tuple[Message, ...], play: Play, played: Played
) -> SampledTurn | None:
    """Return the policy's answer; None where the episode's limits allow no further one. Raises EngineError."""
    started = time.monotonic()
    mark = RetryMark(b"turn:%d" % len(session.tree.turns))
    try:
        turn = await session.answer(AgentRequest(messages, play.tools), mark)
    except RequestRefused as err:
        if session.truncated_by in TRUNCATED and session.tree.turns:
            played.status = "truncated"
            return None
        if session.truncated_by == "expired":
            played.status, played.problem = "expired", str(err)
            return None
        if err.code in _ENGINE_CODES:
            raise EngineError(str(err)) from None
        raise EnvironmentFailed(f"its messages cannot be answered: {err}") from None
    finally:
        played.policy_s += time.monotonic() - started
    turn.delivered = True
    return turn


def _record(reply: Reply, turn: SampledTurn, state: str, played: Played) -> None:
    played.rewards[turn.number], played.states[turn.number] = reply.reward, state
    for name, value in reply.parts.items():
        played.parts[name] = played.parts.get(name, 0.0) + value


async def _timed(function: Callable[[], Any], settings: EpisodeSettings, executor: Executor, played: Played) -> Any:
    started = time.monotonic()
    try:
        return await call(function, settings.reply_deadline_s, executor)
    finally:
        played.environment_s += time.monotonic() - started


def _state_of(messages: Sequence[Message]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for message in messages:
        digest.update(f"{message.role}\0{message.content}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


class TurnEnvironment(EpisodeEnvironment):
    """Makes a play for each episode of a group, all with the same seed."""

    @abstractmethod
    def play(self, seed: int, row: Row, options: Any) -> Play:
        """Return a new play; equal arguments give the same world. ``options`` is an instance of ``self.options``.

        Raises ValueError for a row that no play can be made of: the group is dead-lettered with the text.
        """

    async def attempt(self, site: Site, begun: Begun, sampler: Sampler) -> Attempt:
        session = EpisodeSession(
            begun.name, site.model, sampler, begun.task.sampling, self.limits(), begun.sampling_seed, self._images
        )
        try:
            play = self.play(begun.seed, Row.of(begun.task), self.chosen or self.options())
        except Exception as err:  # noqa: BLE001 - an author's code, which gets rows of any kind
            raise RowUnfit(f"{type(err).__name__}: {err}") from None
        try:
            played = await play_episode(session, play, self.settings, site.executor)
        finally:
            made = session.end()  # where it is cancelled too: what the engine samples for it is cancelled
        return Attempt(session, made, played, play.version)


class ServerEnvironment(TurnEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self.sessions: Any = None

    @abstractmethod
    def new_sessions(self, options: Any) -> Any:
        """Return the connections to the servers of ``options``, with a coroutine ``close``."""

    def use_model(self, folder: Path, context_tokens: int | None) -> None:
        super().use_model(folder, context_tokens)
        if self.chosen is not None:
            self.sessions = self.new_sessions(self.chosen)

    async def close(self) -> None:
        if self.sessions is not None:
            await self.sessions.close()


def check_reply_deadline(
    name: str, definition: EnvironmentDefinition, call_deadline_s: float, answers_within_s: float
) -> None:
    least = call_deadline_s + answers_within_s
    if definition.reply_deadline_s <= least:
        raise ConfigError(
            f"environment.define.{name}.reply_deadline_s = {definition.reply_deadline_s:g}: expected more than {least:g}, which is "
            f"options.call_deadline_s and {answers_within_s:g} s to see whether the server still answers"
        )
