"""The system messages of a request as the policy sees them: without lines that change with every request, and one where one is wanted; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from penstock.agents.proxy.messages import Message


def without_lines(messages: Sequence[Message], patterns: Sequence[str]) -> tuple[tuple[Message, ...], int]:
    """Return messages whose system messages have no line that a pattern matches as a whole, and how many lines that were."""
    if not patterns:
        return tuple(messages), 0
    line = re.compile(rf"^[^\S\n]*(?:{'|'.join(f'(?:{one})' for one in patterns)})[^\S\n]*(?:\n|\Z)", re.I | re.M)
    left: list[Message] = []
    stripped = 0
    for message in messages:
        if message.role == "system":
            content, count = line.subn("", message.content)
            stripped += count
            if count and not content.strip():
                continue
            message = replace(message, content=content.lstrip("\n") if count else content)
        left.append(message)
    return tuple(left), stripped


def merged(messages: Sequence[Message]) -> tuple[tuple[Message, ...], int]:
    """Return messages with one system message, the first, and how many others there were.

    Where nothing else stands between two answers, or behind the last, a system message becomes one of the user: an answer answers something.
    """
    texts: list[str] = []
    rest: list[Message] = []
    for number, message in enumerate(messages):
        if message.role != "system":
            rest.append(message)
        elif number and _is_alone(messages, number):
            rest.append(replace(message, role="user"))
        else:
            texts.append(message.content)
    first = [Message("system", "\n\n".join(texts))] if texts else []
    return (*first, *rest), sum(message.role == "system" for message in messages[1:])


def _is_alone(messages: Sequence[Message], number: int) -> bool:
    """Return True if only system messages stand between the answer before this message and the one behind it."""
    before = next((other.role for other in reversed(messages[:number]) if other.role != "system"), "")
    behind = next((other.role for other in messages[number + 1 :] if other.role != "system"), "assistant")
    return before == behind == "assistant"
