"""What the endpoints share: the parts of the server, checked bodies, responses, and the HTTP status of each error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.rollout_service.embedded_engine.engine_thread import EngineThread
from penstock.rollout_service.embedded_engine.errors import EngineAtFault, EngineStopped, RequestRefused
from penstock.rollout_service.embedded_engine.http.build_job import ServedModel
from penstock.rollout_service.embedded_engine.http.images import ImageReader
from penstock.rollout_service.embedded_engine.http.run_job import AdapterRegistry, JobRunner
from penstock.rollout_service.embedded_engine.http.text import Text
from penstock.rollout_service.embedded_engine.model.model_config import ModelConfig
from penstock.rollout_service.embedded_engine.settings import EngineSettings

if TYPE_CHECKING:
    from penstock.rollout_service.embedded_engine.model.weights import Weights

AnyBody = TypeVar("AnyBody", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]
ENGINE_VERSION = "penstock-embedded"


def json_response(content: object, *, status: int = 200) -> Response:
    return Response(pydantic_core.to_json(content), status_code=status, media_type="application/json")


def event(content: object) -> bytes:
    return b"data: " + pydantic_core.to_json(content) + b"\n\n"


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
    raw = await request.body()
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        places = [f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in details]
        raise RequestRefused("; ".join(places)) from error


def _error(message: str, status: int) -> Response:
    return json_response({"error": {"message": message}}, status=status)


@dataclass(slots=True)
class ServerState:
    engine: EngineThread
    jobs: JobRunner
    adapters: AdapterRegistry
    settings: EngineSettings
    config: ModelConfig
    model: ServedModel
    text: Text
    images: ImageReader
    read_weights: Callable[[Path], Weights]  # reads and checks a folder; blocks, runs in a thread
    one_update: asyncio.Lock = field(default_factory=asyncio.Lock)
    started_at: float = field(default_factory=time.monotonic)


def server_of(request: Request) -> ServerState:
    return request.app.state.server


def model_name(server: ServerState) -> str:
    return server.settings.served_model_name or str(server.settings.model_path)


def checksum_reply(server: ServerState) -> dict[str, Any]:
    checksum = server.engine.weights_checksum
    rank = {"checksums": {}, "per_gpu_checksum": checksum, "parallelism_info": {"engine": "embedded"}}
    return {"ranks": [rank], "per_engine_checksum": checksum}
