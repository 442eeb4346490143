"""What an environment of several turns is made of: one `Play` for each episode; and checked calls of its methods.

An author writes a class with ``start`` and ``step``, and an instance of `TurnEnvironment` that makes one of it for a
task (`turn_environment.py`). A play holds its state and knows nothing of tokens, engines or groups. Its methods may be
coroutines; plain ones run on a thread, so that a slow one does not stop the others.

The policy answers, the environment replies, until one of them ends the episode; how it ended: `episode_end.py`.

A failure of the engine is not an end: it is raised, and the whole pack is requeued.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.agents.environments.episode_end import ENGINE_CODES, Happened, Spender, Verdict, end_of, spender_of
from penstock.agents.proxy.api.chat_completions import read_message
from penstock.agents.proxy.messages import AgentRequest, Message, RequestRefused, RetryMark, ToolCall
from penstock.protocol.config.environment_settings import EpisodeSettings
from penstock.protocol.episode import EndStatus, TimeSpender
from penstock.protocol.groups import Task
from penstock.rollout_service.errors import EngineError
from penstock.serving import strict_json

if TYPE_CHECKING:
    from penstock.agents.proxy.session import EpisodeSession  # imports what renders and counts tokens
    from penstock.agents.proxy.tree import SampledTurn

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Row:
    messages: tuple[Message, ...]  # the prompt
    ground_truth: Any  # None: the row has none
    extra_info: Mapping[str, Any]
    data_source: str

    @classmethod
    def of(cls, task: Task) -> Row:
        reward = task.reward
        truth = None if reward.ground_truth is None else json.loads(reward.ground_truth)
        return cls(_messages(task.messages), truth, json.loads(reward.extra_info), reward.data_source)

    def asked(self) -> tuple[Message, ...]:
        """Return the prompt; raises ValueError unless it ends with a message of the user."""
        if not self.messages or self.messages[-1].role != "user":
            raise ValueError("the prompt has no messages, or its last message does not have the role user")
        return self.messages


def _messages(text: str) -> tuple[Message, ...]:
    try:
        return tuple(read_message(message, f"messages[{n}]") for n, message in enumerate(json.loads(text or "[]")))
    except (ValueError, TypeError, AttributeError, RecursionError) as err:
        raise ValueError(f"its messages are not the JSON of a chat: {err}") from None
    except RequestRefused as err:
        raise ValueError(str(err)) from None


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment says to one answer of the policy.

    ``reward`` is for this turn alone; an episode's reward is the sum over its turns, and so is each of ``parts``.
    ``state`` is equal where the policy chooses in the same situation; empty: a hash of ``messages``.
    ``is_truncated`` says of the last reply that a limit of the environment ended the episode, not its rules.
    """

    messages: tuple[Message, ...] = ()  # of the roles user and tool; needed unless it is the last
    reward: float = 0.0
    is_done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    state: str = ""
    is_truncated: bool = False


def say(text: str, reward: float = 0.0) -> Reply:
    """Return a reply of one user message, after which the policy answers again."""
    return Reply((Message("user", text),), reward)


def done(reward: float, **parts: float) -> Reply:
    return Reply(reward=reward, is_done=True, parts=parts)


def called(
    calls: Sequence[ToolCall], results: Sequence[tuple[str, bool]], reward: float = 0.0, *, is_done: bool = False
) -> Reply:
    """Return a reply with the text of each call; ``results`` say whether it is an error, and these are counted."""
    messages = [
        Message("tool", text, tool_call_id=call.id, name=call.name)
        for call, (text, _) in zip(calls, results, strict=False)
    ]
    num_errors = sum(is_error for _, is_error in results)
    parts = {"tool_calls": float(len(results)), "tool_errors": float(num_errors)}
    return Reply(tuple(messages), reward, is_done, parts)


def read_arguments(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call; raises ValueError with a text for the policy."""
    try:
        arguments = strict_json.loads((call.arguments or "{}").encode("utf-8", "surrogatepass"))
    except strict_json.AmbiguousJson as err:
        raise ValueError(f"the arguments are not valid JSON: {err}") from None
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not a JSON object")  # noqa: TRY004 - one kind of error, told to the policy
    return arguments


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text, None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class Play(ABC):
    """One episode. The policy answers ``start``'s messages, ``step`` replies, until a reply is the last."""

    tools: tuple[dict[str, Any], ...] = ()  # what the policy may call, as the chat completions API writes it
    version: str = ""  # of the rules, where they are learnt with the episode; else that of the environment is recorded

    @abstractmethod
    def start(self) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Return the first messages, at least one; the last one is of the role user."""

    @abstractmethod
    def step(self, answer: Message) -> Reply | Awaitable[Reply]:
        """Return the reply to an answer: its text without reasoning, and the calls of tools that were found in it."""

    def score(self) -> float | Awaitable[float]:
        """Return what the last turn gets besides its reward, where a limit of the run ended the episode first."""
        return 0.0

    def close(self) -> Awaitable[None] | None:  # noqa: B027 - most plays hold nothing
        """Give up what the play holds; called once, also after a failure."""


class EnvironmentFailed(Exception):
    """The environment failed; the text says how."""


async def call(function: Callable[[], Any], deadline_s: float, executor: Executor) -> Any:
    """Return what a method of a play returns; raises EnvironmentFailed when it raises, or takes too long."""
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            if inspect.iscoroutinefunction(getattr(function, "func", function)):
                return await function()
            value, error = await asyncio.get_running_loop().run_in_executor(executor, caught, function)
            if error is None:
                return await value if inspect.isawaitable(value) else value
    except (Exception, SystemExit, asyncio.CancelledError) as err:
        if limit.expired():
            raise EnvironmentFailed(f"no reply within {deadline_s:g} s (reply_deadline_s)") from None
        task = asyncio.current_task()
        if isinstance(err, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise  # by the episode's deadline, or its worker
        error = err
    raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error


def caught(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what a method returns, or raises: not every exception passes unchanged from a thread to a coroutine."""
    try:
        return function(), None
    except BaseException as err:  # noqa: BLE001
        return None, err


def checked_messages(value: Any, *, is_first: bool) -> tuple[Message, ...]:
    messages = tuple(value) if isinstance(value, Sequence) else ()
    wrong = [message for message in messages if not (isinstance(message, Message) and message.role in _ROLES)]
    if wrong or not messages or messages[-1].role not in ("user", "tool"):
        got = f"a last message of role {messages[-1].role!r}" if messages and not wrong else repr(str(value)[:200])
        what = "start() must return" if is_first else "a reply that is not the last must have"
        raise EnvironmentFailed(f"{what} at least one Message, the last of role user or tool; got {got}")
    return messages


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def checked_score(value: Any) -> float:
    if not _is_finite(value):
        raise EnvironmentFailed(f"score() must return a finite number, got {value!r}")
    return float(value)


def checked_reply(value: Any) -> Reply:
    if not isinstance(value, Reply):
        raise EnvironmentFailed(f"step() must return a Reply, got {type(value).__name__}")
    if not isinstance(value.parts, Mapping) or not isinstance(value.state, str):
        raise EnvironmentFailed("Reply.parts must map names to numbers, and Reply.state must be a string")
    for name, number in (("reward", value.reward), *value.parts.items()):
        if not isinstance(name, str) or not _is_finite(number):
            raise EnvironmentFailed(f"{name} is {number!r}, expected a finite number")
    return value


@dataclass(slots=True)
class Played:
    status: EndStatus = "failed"
    time_spent_by: TimeSpender | None = None
    problem: str = ""  # why it was not played to an end
    rewards: dict[int, float] = field(default_factory=dict)  # by the number of the sampled turn
    states: dict[int, str] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)


async def play_episode(session: EpisodeSession, play: Play, settings: EpisodeSettings, executor: Executor) -> Played:
    played = Played()
    verdict: Verdict = "done"
    over_time: Spender | None = None
    try:
        async with asyncio.timeout(settings.episode_deadline_s):
            verdict = await _play(session, play, settings, executor, played)
        if session.truncated_by:  # the score is the environment's to give, whatever time is left
            played.rewards[max(played.rewards)] += checked_score(
                await call(play.score, settings.reply_deadline_s, executor)
            )
    except TimeoutError:
        over_time = spender_of(session.clock.spent(), settings.episode_deadline_s)
        played.problem = f"not over after {settings.episode_deadline_s:g} s"
    except EnvironmentFailed as err:
        verdict, played.problem = "failed", str(err)
    finally:
        try:
            await call(play.close, settings.reply_deadline_s, executor)
        except EnvironmentFailed as err:
            played.problem = played.problem or f"closing: {err}"
    end = end_of(Happened(bool(session.tree.turns), session.truncated_by, "", over_time, verdict=verdict))
    if end.then == "requeued":
        raise EngineError(f"the engine stalled in episode {session.id}, which was {played.problem}")
    played.status = end.status
    if end.status == "timeout":
        played.time_spent_by = "policy" if end.then == "trained" else "tools"
    return played


async def _play(
    session: EpisodeSession, play: Play, settings: EpisodeSettings, executor: Executor, played: Played
) -> Verdict:
    first = checked_messages(await call(play.start, settings.reply_deadline_s, executor), is_first=True)
    messages = with_system_prompt(first, settings.system_prompt)
    state = state_of(messages)
    while True:
        turn = await _answer(session, messages, play, played)
        if turn is None:
            return "done"
        reply = checked_reply(
            await call(functools.partial(play.step, turn.answer), settings.reply_deadline_s, executor)
        )
        _record(reply, turn, state, played)
        if reply.is_done:
            return "truncated" if reply.is_truncated else "done"
        new = checked_messages(reply.messages, is_first=False)
        messages = (*messages, turn.answer, *new)
        state = reply.state or state_of(new)


def with_system_prompt(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Return the messages with the run file's system prompt before the environment's, in one system message."""
    if not text:
        return messages
    if messages[0].role == "system":
        return (replace(messages[0], content=f"{text}\n\n{messages[0].content}"), *messages[1:])
    return (Message("system", text), *messages)


async def _answer(
    session: EpisodeSession, messages: tuple[Message, ...], play: Play, played: Played
) -> SampledTurn | None:
    mark = RetryMark(b"turn:%d" % len(session.tree.turns))
    try:
        turn = await session.answer(AgentRequest(messages, play.tools, conversation="main"), mark)
    except RequestRefused as err:
        if session.truncated_by and session.tree.turns:
            return None
        if err.code in ENGINE_CODES:
            raise EngineError(str(err)) from None
        raise EnvironmentFailed(f"its messages cannot be answered: {err}") from None
    except (TypeError, ValueError, AttributeError) as err:
        raise EnvironmentFailed(
            f"its messages or tools cannot be sent to a chat API: {type(err).__name__}: {err}"
        ) from err
    turn.delivered = True
    return turn


def _record(reply: Reply, turn: SampledTurn, state: str, played: Played) -> None:
    played.rewards[turn.number], played.states[turn.number] = reply.reward, state
    for name, value in reply.parts.items():
        played.parts[name] = played.parts.get(name, 0.0) + value


def state_of(messages: Sequence[Message]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for message in messages:
        digest.update(f"{message.role}\0{message.content}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
