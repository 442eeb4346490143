"""Spans, and the trace that a group has in every service; pure.

A message carries one W3C ``traceparent`` for all of its groups. The trace of one group follows from it and from the group's
id, the same in every service, so that each group of a pack has a trace of its own and no message gets longer.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.protocol import trace_context

Value = str | int | float | bool
MAX_TEXT = 200  # characters of an attribute


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Identity of a span: 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Span:
    """A finished span; times in seconds since the epoch."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    links: tuple[SpanContext, ...] = ()
    error: str = ""  # empty: it succeeded


def group_context(traceparent: str, group_id: str) -> SpanContext | None:
    """Return the first span of a group's trace; None for a missing, malformed or unsampled header."""
    trace_id = trace_context.trace_id(traceparent)
    if not trace_id.strip("0") or not int(traceparent[-2:], 16) & 1:
        return None
    digest = hashlib.sha256(f"{trace_id}:{group_id}".encode()).hexdigest()
    return SpanContext(digest[:32], digest[32:48])


def new_context(trace_id: str = "") -> SpanContext:
    """Return a span in a trace; in a new one unless it is given."""
    return SpanContext(trace_id or secrets.token_hex(16), secrets.token_hex(8))


def short(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Return attributes with long texts cut: ids of other services are in them."""
    return {key: value[:MAX_TEXT] if isinstance(value, str) else value for key, value in attributes.items()}
