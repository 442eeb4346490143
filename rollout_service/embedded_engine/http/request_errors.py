"""Check request bodies, and turn errors into HTTP statuses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.rollout_service.embedded_engine.errors import EngineAtFault, EngineStopped, RequestRefused
from penstock.rollout_service.embedded_engine.http.responses import json_response

AnyBody = TypeVar("AnyBody", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


def route(path: str, handler: Handler, *methods: str) -> Route:
    """Return a route whose handler may raise RequestRefused, EngineAtFault or EngineStopped."""

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
    """Return the checked body; raises RequestRefused, naming every field that is wrong."""
    raw = await request.body()
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        places = [f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in details]
        raise RequestRefused("; ".join(places)) from error


def _error(message: str, status: int) -> Response:
    return json_response({"error": {"message": message}}, status=status)
