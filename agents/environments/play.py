"""What an environment of several turns is made of: one `Play` for each episode; and calls of its methods with a deadline, whose results are checked.

An author writes a class with ``start`` and ``step``, and an instance of `TurnEnvironment` that makes one of it for a task
(`turn_environment.py`). A play holds its own state and knows nothing of tokens, engines or groups. Its methods may be coroutines;
plain ones run on a thread, so that a slow one does not stop the others.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from penstock.agents.proxy.api.chat_completions import read_message
from penstock.agents.proxy.messages import Message, RequestRefused
from penstock.protocol.facts import Task

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Row:
    messages: tuple[Message, ...]  # the prompt
    ground_truth: Any  # None: the row has none
    extra_info: Mapping[str, Any]
    data_source: str

    @classmethod
    def of(cls, task: Task) -> Row:
        truth, reward = task.reward.ground_truth, task.reward
        return cls(
            _messages(task.messages),
            None if truth is None else json.loads(truth),
            json.loads(reward.extra_info),
            reward.data_source,
        )


def _messages(text: str) -> tuple[Message, ...]:
    try:
        return tuple(read_message(one, f"messages[{n}]") for n, one in enumerate(json.loads(text or "[]")))
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
        """Return what the last turn gets besides its reward, where a limit of the run ended the episode before a last reply."""
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
            value = await asyncio.get_running_loop().run_in_executor(executor, function)
            return await value if inspect.isawaitable(value) else value
    except TimeoutError as err:  # the episode's own deadline cancels this call instead
        if not limit.expired():
            raise EnvironmentFailed(f"TimeoutError: {err}") from err
        raise EnvironmentFailed(f"no reply within {deadline_s:g} s (reply_deadline_s)") from None
    except Exception as err:
        raise EnvironmentFailed(f"{type(err).__name__}: {err}") from err


def checked_messages(value: Any, *, is_first: bool) -> tuple[Message, ...]:
    messages = tuple(value) if isinstance(value, Sequence) else ()
    wrong = [message for message in messages if not (isinstance(message, Message) and message.role in _ROLES)]
    if wrong or not messages or messages[-1].role not in ("user", "tool"):
        last = f"the last of role {messages[-1].role!r}" if messages and not wrong else f"got {str(value)[:200]!r}"
        what = "start() returns" if is_first else "a reply that is not the last has"
        raise EnvironmentFailed(f"{what} at least one Message, the last of role user or tool; {last}")
    return messages


def checked_score(value: Any) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise EnvironmentFailed(f"score() returns a finite number, got {value!r}")
    return float(value)


def checked_reply(value: Any) -> Reply:
    if not isinstance(value, Reply):
        raise EnvironmentFailed(f"step() returns a Reply, got {type(value).__name__}")
    numbers = {"reward": value.reward, **value.parts}
    for name, number in numbers.items():
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise EnvironmentFailed(f"{name} is {number!r}, expected a finite number")
    return value
