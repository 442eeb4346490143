"""What the endpoints share: the engine thread, its model and its settings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from penstock.rollout_service.embedded_engine.engine_thread import EngineThread
from penstock.rollout_service.embedded_engine.http.adapter_registry import AdapterRegistry
from penstock.rollout_service.embedded_engine.http.build_job import ServedModel
from penstock.rollout_service.embedded_engine.http.images import ImageReader
from penstock.rollout_service.embedded_engine.http.run_job import JobRunner
from penstock.rollout_service.embedded_engine.http.text import Text
from penstock.rollout_service.embedded_engine.model.model_config import ModelConfig
from penstock.rollout_service.embedded_engine.settings import EngineSettings

if TYPE_CHECKING:
    from penstock.rollout_service.embedded_engine.model.transformer import Weights

ENGINE_VERSION = "penstock-embedded"


@dataclass(slots=True)
class ServerState:
    """The parts of one server."""

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
    """Return the server that a request was sent to."""
    return request.app.state.server


def model_name(server: ServerState) -> str:
    """Return the name of the served model."""
    return server.settings.served_model_name or str(server.settings.model_path)


def checksum_reply(server: ServerState) -> dict[str, Any]:
    """Return the checksum of the served weights in SGLang's form."""
    checksum = server.engine.weights_checksum
    rank = {"checksums": {}, "per_gpu_checksum": checksum, "parallelism_info": {"engine": "embedded"}}
    return {"ranks": [rank], "per_engine_checksum": checksum}
