"""Encode responses: JSON and server-sent events."""

from __future__ import annotations

import pydantic_core
from starlette.responses import Response


def json_response(content: object, *, status: int = 200) -> Response:
    """Return a response with ``content`` as JSON."""
    return Response(pydantic_core.to_json(content), status_code=status, media_type="application/json")


def event(content: object) -> bytes:
    """Return one server-sent event with ``content`` as JSON."""
    return b"data: " + pydantic_core.to_json(content) + b"\n\n"
