"""A request of an agent, in one form for all APIs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.agents.proxy.messages import Message


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """What the policy is asked."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()  # as the chat completions API writes them
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    reads_calls: bool = True  # False: tool_choice is "none"
    overruled: tuple[str, ...] = ()  # fields whose values the task's own sampling replaces, or that have no effect here


@dataclass(frozen=True, slots=True)
class RetryMark:
    """What tells a repeated request from a new one with the same body."""

    digest: bytes  # of path and body
    key: str | None = None  # the Idempotency-Key header
    is_retry: bool = False  # a client library counts it as a retry
