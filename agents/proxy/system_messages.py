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

    Those before the first answer are joined. A later one becomes text of the user, before the next message of the user or at the end of what
    stands between two answers, so that each request goes on from the one before.
    """
    first_answer = next((n for n, message in enumerate(messages) if message.role == "assistant"), len(messages))
    begin = messages[:first_answer]
    texts = [message.content for message in begin if message.role == "system"]
    rest = [message for message in begin if message.role != "system"]
    late: list[str] = []
    for message in messages[first_answer:]:
        if message.role == "system":
            late.append(message.content)
            continue
        if late and message.role == "user":
            message, late = _with_texts(late, message), []
        elif late and message.role == "assistant":
            _end_with(late, rest)
            late = []
        rest.append(message)
    if late:
        _end_with(late, rest)
    first = [Message("system", "\n\n".join(texts))] if texts else []
    return (*first, *rest), sum(message.role == "system" for message in messages[1:])


def _end_with(texts: Sequence[str], rest: list[Message]) -> None:
    """Add texts to the last message, if it is the user's, else as another one."""
    if rest[-1].role == "user":
        rest[-1] = _with_texts(texts, rest[-1], behind=True)
    else:
        rest.append(Message("user", "\n\n".join(texts)))


def _with_texts(texts: Sequence[str], message: Message, *, behind: bool = False) -> Message:
    joined = "\n\n".join(texts)
    pieces = (message.content, joined) if behind else (joined, message.content)
    parts = (*message.parts, joined) if behind else (joined, *message.parts)
    return replace(message, content="\n\n".join(filter(None, pieces)), parts=parts if message.parts else ())
