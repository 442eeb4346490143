"""What every endpoint shares: bodies are checked on the way in, errors become statuses on the way out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.rollout_service.embedded_engine.errors import EngineAtFault, EngineStopped, RequestRefused

AnyBody = TypeVar("AnyBody", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


def route(path: str, handler: Handler, *methods: str) -> Route:
    """Return a route whose handler may raise what a client or the engine did wrong."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestRefused as error:
            return _error(str(error), 400)
        except EngineAtFault as error:
            return _error(str(error), 500)
        except EngineStopped as error:
            return _error(str(error), 503)

    return Route(path, guarded, methods=list(methods))


async def read_body(request: Request, kind: type[AnyBody]) -> AnyBody:
    """Return the checked body; raises RequestRefused, naming every place that does not fit."""
    raw = await request.body()
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        places = [f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in details]
        raise RequestRefused("; ".join(places)) from error


def json_response(content: object, *, status: int = 200) -> Response:
    """Return JSON."""
    return Response(pydantic_core.to_json(content), status_code=status, media_type="application/json")


def event(content: object) -> bytes:
    """Return one server-sent event."""
    return b"data: " + pydantic_core.to_json(content) + b"\n\n"


def _error(message: str, status: int) -> Response:
    return json_response({"error": {"message": message}}, status=status)
