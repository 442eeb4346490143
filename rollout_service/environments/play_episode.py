"""One episode: the policy answers, the environment replies, until one of them ends it.

| how it ends                                                  | status      | what becomes of it               |
|--------------------------------------------------------------|-------------|----------------------------------|
| the environment's last reply                                 | `done`      | trained                          |
| the turns, the model's context or the record are used up     | `truncated` | trained                          |
| the time is used up, most of it by the policy                | `timeout`   | trained                          |
| the time is used up, most of it by the environment           | `timeout`   | begun again with the same seed   |
| the environment raised an error, or took too long for a reply | `failed`   | begun again with the same seed   |
| its tokens are of versions too far apart                     | `expired`   | begun again with the same seed   |

A failure of the engine is not an end: it is raised, and the whole pack is requeued.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.protocol.episode import EndStatus, TimeSpender
from penstock.rollout_service.environments.episode_settings import EpisodeSettings
from penstock.rollout_service.environments.play import Play, Reply
from penstock.rollout_service.errors import EngineError
from penstock.rollout_service.proxy.agent_request import AgentRequest, RetryMark
from penstock.rollout_service.proxy.messages import Message
from penstock.rollout_service.proxy.request_errors import RequestRefused
from penstock.rollout_service.proxy.session import EpisodeSession
from penstock.rollout_service.proxy.tree import SampledTurn

Value = TypeVar("Value")

TRUNCATED = ("max_turns", "context", "max_stored_tokens")  # `EpisodeSession.truncated_by`
_ENGINE_CODES = ("engine_error", "engine_timeout")
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(slots=True)
class Played:
    """What became of one attempt at an episode."""

    status: EndStatus = "failed"
    time_spent_by: TimeSpender | None = None
    problem: str = ""  # why it was not played to an end
    rewards: dict[int, float] = field(default_factory=dict)  # by the number of the sampled turn
    states: dict[int, str] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    policy_s: float = 0.0
    environment_s: float = 0.0


class _EnvironmentError(Exception):
    """The environment failed; the text says how."""


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
    except _EnvironmentError as err:
        played.status, played.problem = "failed", str(err)
    finally:
        try:
            await _call(play.close, settings.reply_deadline_s, executor)
        except _EnvironmentError as err:
            played.problem = played.problem or f"closing: {err}"
    return played


async def _play(
    session: EpisodeSession, play: Play, settings: EpisodeSettings, executor: Executor, played: Played
) -> None:
    messages = _checked(await _timed(play.start, settings, executor, played), is_first=True)
    state = _state_of(messages)
    while True:
        turn = await _answer(session, messages, play, played)
        if turn is None:
            return
        reply = _checked_reply(await _timed(functools.partial(play.step, turn.answer), settings, executor, played))
        _record(reply, turn, state, played)
        if reply.is_done:
            played.status = "done"
            return
        new = _checked(reply.messages, is_first=False)
        messages = (*messages, turn.answer, *new)
        state = reply.state or _state_of(new)


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
        raise _EnvironmentError(f"its messages cannot be answered: {err}") from None
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
        return await _call(function, settings.reply_deadline_s, executor)
    finally:
        played.environment_s += time.monotonic() - started


async def _call(function: Callable[[], Any], deadline_s: float, executor: Executor) -> Any:
    """Return what a method of a play returns; raises _EnvironmentError when it raises, or takes too long."""
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            if inspect.iscoroutinefunction(getattr(function, "func", function)):
                return await function()
            value = await asyncio.get_running_loop().run_in_executor(executor, function)
            return await value if inspect.isawaitable(value) else value
    except TimeoutError:
        if not limit.expired():
            raise  # that of the episode
        raise _EnvironmentError(f"no reply within {deadline_s:g} s (reply_deadline_s)") from None
    except Exception as err:
        raise _EnvironmentError(f"{type(err).__name__}: {err}") from err


def _checked(value: Any, *, is_first: bool) -> tuple[Message, ...]:
    """Return messages that the policy can answer; raises _EnvironmentError."""
    messages = tuple(value) if isinstance(value, Sequence) else ()
    wrong = [one for one in messages if not (isinstance(one, Message) and one.role in _ROLES)]
    if wrong or not messages or messages[-1].role not in ("user", "tool"):
        last = f"the last of role {messages[-1].role!r}" if messages and not wrong else f"got {str(value)[:200]!r}"
        what = "start() returns" if is_first else "a reply that is not the last has"
        raise _EnvironmentError(f"{what} at least one Message, the last of role user or tool; {last}")
    return messages


def _checked_reply(value: Any) -> Reply:
    """Return a play's reply; raises _EnvironmentError for another value, or numbers that are not finite."""
    if not isinstance(value, Reply):
        raise _EnvironmentError(f"step() returns a Reply, got {type(value).__name__}")
    numbers = {"reward": value.reward, **value.parts}
    for name, number in numbers.items():
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise _EnvironmentError(f"{name} is {number!r}, expected a finite number")
    return value


def _state_of(messages: Sequence[Message]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for one in messages:
        digest.update(f"{one.role}\0{one.content}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
