"""Build weights, engine thread and HTTP server, and serve until stopped."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
import uvicorn

from penstock.protocol import errors as protocol_errors
from penstock.protocol.images import admission
from penstock.protocol.images.processor import read_processor
from penstock.protocol.transport import tls
from penstock.rollout_service.embedded_engine.engine_thread import EngineThread
from penstock.rollout_service.embedded_engine.errors import CheckpointRefused, UnsupportedModel
from penstock.rollout_service.embedded_engine.http.app import build_app
from penstock.rollout_service.embedded_engine.http.bodies import ImageReader
from penstock.rollout_service.embedded_engine.http.build_job import ServedModel, Text
from penstock.rollout_service.embedded_engine.http.server_state import AdapterRegistry, JobRunner, ServerState
from penstock.rollout_service.embedded_engine.model.kv_cache import KVCache
from penstock.rollout_service.embedded_engine.model.low_rank import Adapter, prepare_adapter, read_adapter
from penstock.rollout_service.embedded_engine.model.model_config import (
    ModelConfig,
    read_eos_token_ids,
    read_model_config,
)
from penstock.rollout_service.embedded_engine.model.transformer import Transformer
from penstock.rollout_service.embedded_engine.model.weights import Weights, prepare_weights, read_checkpoint
from penstock.rollout_service.embedded_engine.process import EngineSettings
from penstock.rollout_service.embedded_engine.runner import Runner
from penstock.rollout_service.embedded_engine.scheduler import Limits
from penstock.serving.web_server import LONG_BACKLOG, MANY_CONNECTIONS, config_of

_DEFAULT_KV_BYTES = 2 * 1024**3
_DEFAULT_KEPT_BYTES = 512 * 1024**2

log = structlog.get_logger("embedded_engine.run_engine")


def serve(settings: EngineSettings, listener: socket.socket, *, on_ready: Callable[[], None], key: str = "") -> int:
    """Serve on ``listener`` until a signal ends the process, or the engine thread fails (then return 1).

    Requests must have ``key`` as their bearer token, unless it is empty.

    Raises UnsupportedModel, and CheckpointRefused if the first weights are not complete and finite.
    """
    torch.set_num_threads(settings.threads)
    config = read_model_config(settings.model_path)
    reader = _FolderReader(
        config, torch.device(settings.device), getattr(torch, settings.dtype), settings.max_lora_rank
    )
    try:
        text, images = Text(settings.model_path), _image_reader(settings.model_path)
    except protocol_errors.UnsupportedModel as error:
        raise UnsupportedModel(str(error)) from None
    weights = reader.weights(settings.model_path)
    server: _Server | None = None

    def stop_serving() -> None:
        log.error("engine thread failed", exc_info=engine.failure)
        if server is not None:
            server.should_exit = True

    engine = _engine(settings, reader, weights, text, on_failure=stop_serving)
    server = _Server(_http_config(settings, reader, engine, text, images, key), on_ready, on_stop=engine.stop)
    log.info(
        "engine serves",
        model_path=str(settings.model_path),
        num_parameters=weights.num_parameters,
        weight_version=settings.weight_version,
        max_total_tokens=engine.limits.max_total_tokens,
    )
    engine.start()
    asyncio.run(server.serve(sockets=[listener]))
    return 0 if engine.failure is None else 1


@dataclass(frozen=True, slots=True)
class _FolderReader:
    """Reads folders of weights and adapters for one model; blocking, in any thread."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    max_lora_rank: int

    def weights(self, folder: Path) -> Weights:
        with torch.inference_mode():
            if (folder / "config.json").is_file() and (config := read_model_config(folder)) != self.config:
                raise CheckpointRefused(
                    f"{folder}: its config.json is of another model: {config}; expected {self.config}"
                )
            tensors = read_checkpoint(folder, self.config)
            return prepare_weights(self.config, tensors, device=self.device, dtype=self.dtype)

    def adapter(self, name: str, path: str) -> Adapter:
        with torch.inference_mode():
            factors = read_adapter(Path(path), self.config, max_rank=self.max_lora_rank)
            return prepare_adapter(name, path, factors, self.config, device=self.device, dtype=self.dtype)


def _engine(
    settings: EngineSettings, reader: _FolderReader, weights: Weights, text: Text, *, on_failure: Callable[[], None]
) -> EngineThread:
    config, device, dtype = reader.config, reader.device, reader.dtype
    limits = _limits(settings, config, dtype)
    with torch.inference_mode():
        runner = Runner(
            Transformer(config, device=device, dtype=dtype),
            weights,
            KVCache(config, max_tokens=limits.max_total_tokens, device=device, dtype=dtype),
            max_running=limits.max_running,
            find_stop_string=text.find_stop_string,
            max_kept_tokens=_max_kept_tokens(settings, config, dtype),
        )
    version, path = settings.weight_version, str(settings.model_path)
    return EngineThread(runner, limits, version=version, model_path=path, on_failure=on_failure)


def _http_config(
    settings: EngineSettings, reader: _FolderReader, engine: EngineThread, text: Text, images: ImageReader, key: str
) -> uvicorn.Config:
    async def drop_adapter(adapter: Adapter) -> None:
        await asyncio.wrap_future(engine.drop_adapter(adapter))

    config = reader.config
    adapters = AdapterRegistry(reader.adapter, drop_adapter, max_loaded=settings.max_loaded_loras)
    served = ServedModel(
        vocab_size=config.vocab_size,
        max_tokens=min(config.context_tokens, engine.limits.max_total_tokens),
        end_token_ids=tuple(dict.fromkeys((*read_eos_token_ids(settings.model_path), *text.eos_token_ids()))),
        text=text,
        adapters=adapters.listed,
        expert_layers=config.expert_layers,
        num_layers=config.num_layers,
        image_processor=images.processor,
    )
    jobs = JobRunner(engine, adapters)
    app = build_app(ServerState(engine, jobs, adapters, settings, config, served, text, images, reader.weights), key)
    options = tls.server_options(settings.host)
    return config_of(app, max_connections=MANY_CONNECTIONS, backlog=LONG_BACKLOG, lifespan="off", **options)


class _Server(uvicorn.Server):
    """Reports when it accepts connections; on shutdown stops the engine first, so that waiting clients get a reply."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._on_stop)
        await super().shutdown(sockets)


def _image_reader(folder: Path) -> ImageReader:
    processor = read_processor(folder)
    if processor is not None:
        admission.decoders()
    return ImageReader(processor)


def _max_kept_tokens(settings: EngineSettings, config: ModelConfig, dtype: torch.dtype) -> int:
    if settings.max_kept_tokens is not None:
        return settings.max_kept_tokens
    return _DEFAULT_KEPT_BYTES // (config.kv_floats_per_token * dtype.itemsize)


def _limits(settings: EngineSettings, config: ModelConfig, dtype: torch.dtype) -> Limits:
    bytes_per_token = config.kv_floats_per_token * dtype.itemsize
    default = min(_DEFAULT_KV_BYTES // bytes_per_token, settings.max_running * config.context_tokens)
    return Limits(
        max_running=settings.max_running,
        max_total_tokens=settings.max_total_tokens or default,
        max_prefill_tokens=settings.max_prefill_tokens,
    )
