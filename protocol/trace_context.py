"""W3C trace context: one trace id follows a group from its task to the step that trained it."""

from __future__ import annotations

import re
import secrets

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def new_trace() -> str:
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def trace_id(traceparent: str) -> str:
    """Return the trace id of a header, 32 hex digits; empty when the header is missing or malformed.

    It is random, and a service reads it only in a message that it holds. A message id that contains it can therefore not be
    taken beforehand by another login, and is the same whenever that message is delivered again.
    """
    match = _TRACEPARENT.fullmatch(traceparent)
    return "" if match is None else match[1]


def child(traceparent: str) -> str:
    """Continue a trace in a new span; starts a new trace when the header is missing or malformed."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return new_trace()
    return f"00-{match[1]}-{secrets.token_hex(8)}-{match[3]}"
