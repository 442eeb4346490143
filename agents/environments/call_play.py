"""Call the methods of a play with a deadline, and check what they return.

Used where an episode is played (`play_episode.py`) and where an environment is served over HTTP (`agents/hosting`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from penstock.agents.environments.play import Reply
from penstock.agents.proxy.messages import Message

_ROLES = ("system", "user", "assistant", "tool")


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
    """Return messages that the policy can answer; raises EnvironmentFailed."""
    messages = tuple(value) if isinstance(value, Sequence) else ()
    wrong = [one for one in messages if not (isinstance(one, Message) and one.role in _ROLES)]
    if wrong or not messages or messages[-1].role not in ("user", "tool"):
        last = f"the last of role {messages[-1].role!r}" if messages and not wrong else f"got {str(value)[:200]!r}"
        what = "start() returns" if is_first else "a reply that is not the last has"
        raise EnvironmentFailed(f"{what} at least one Message, the last of role user or tool; {last}")
    return messages


def checked_score(value: Any) -> float:
    """Return what a play's score() returns; raises EnvironmentFailed for what is no finite number."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise EnvironmentFailed(f"score() returns a finite number, got {value!r}")
    return float(value)


def checked_reply(value: Any) -> Reply:
    """Return a play's reply; raises EnvironmentFailed for another value, or numbers that are not finite."""
    if not isinstance(value, Reply):
        raise EnvironmentFailed(f"step() returns a Reply, got {type(value).__name__}")
    numbers = {"reward": value.reward, **value.parts}
    for name, number in numbers.items():
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise EnvironmentFailed(f"{name} is {number!r}, expected a finite number")
    return value
