"""Build weights, engine thread and HTTP server, and serve until stopped."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import structlog
import torch
import uvicorn

from penstock.protocol import errors as protocol_errors
from penstock.protocol.images import admission
from penstock.protocol.images.processor import read_processor
from penstock.protocol.transport import http_tls
from penstock.rollout_service.embedded_engine.engine_thread import EngineThread
from penstock.rollout_service.embedded_engine.errors import CheckpointRefused, UnsupportedModel
from penstock.rollout_service.embedded_engine.http.adapter_registry import AdapterRegistry
from penstock.rollout_service.embedded_engine.http.app import build_app
from penstock.rollout_service.embedded_engine.http.build_job import ServedModel
from penstock.rollout_service.embedded_engine.http.images import ImageReader
from penstock.rollout_service.embedded_engine.http.run_job import JobRunner
from penstock.rollout_service.embedded_engine.http.server_state import ServerState
from penstock.rollout_service.embedded_engine.http.text import Text
from penstock.rollout_service.embedded_engine.model.adapter_file import read_adapter
from penstock.rollout_service.embedded_engine.model.kv_cache import KVCache
from penstock.rollout_service.embedded_engine.model.low_rank import Adapter, prepare_adapter
from penstock.rollout_service.embedded_engine.model.model_config import (
    ModelConfig,
    read_eos_token_ids,
    read_model_config,
)
from penstock.rollout_service.embedded_engine.model.model_folder import read_checkpoint
from penstock.rollout_service.embedded_engine.model.transformer import Transformer, Weights, prepare_weights
from penstock.rollout_service.embedded_engine.runner import Runner
from penstock.rollout_service.embedded_engine.scheduler import Limits
from penstock.rollout_service.embedded_engine.settings import EngineSettings

_DEFAULT_KV_BYTES = 2 * 1024**3
_DEFAULT_KEPT_BYTES = 512 * 1024**2

log = structlog.get_logger("embedded_engine.run_engine")


def serve(settings: EngineSettings, listener: socket.socket, *, on_ready: Callable[[], None]) -> int:
    """Serve on ``listener`` until a signal ends the process, or the engine thread fails (then return 1).

    Raises:
        UnsupportedModel: the model folder's architecture or features are not served here.
        CheckpointRefused: the first weights are not complete and finite.
    """
    torch.set_num_threads(settings.threads)
    config = read_model_config(settings.model_path)
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    text, images = Text(settings.model_path), _image_reader(settings.model_path)

    def read_weights(folder: Path) -> Weights:
        with torch.inference_mode():
            if (folder / "config.json").is_file() and (found := read_model_config(folder)) != config:
                raise CheckpointRefused(f"{folder}: its config.json is of another model: {found}; expected {config}")
            return prepare_weights(config, read_checkpoint(folder, config), device=device, dtype=dtype)

    def read_adapter_folder(name: str, path: str) -> Adapter:
        with torch.inference_mode():
            factors = read_adapter(Path(path), config, max_rank=settings.max_lora_rank)
            return prepare_adapter(name, path, factors, config, device=device, dtype=dtype)

    async def drop_adapter(adapter: Adapter) -> None:
        await asyncio.wrap_future(engine.drop_adapter(adapter))

    limits = _limits(settings, config, dtype)
    weights = read_weights(settings.model_path)
    server: _Server | None = None

    def stop_serving() -> None:
        log.error("engine thread failed", exc_info=engine.failure)
        if server is not None:
            server.should_exit = True

    with torch.inference_mode():
        cache = KVCache(config, max_tokens=limits.max_total_tokens, device=device, dtype=dtype)
        model = Transformer(config, device=device, dtype=dtype)
        runner = Runner(
            model,
            weights,
            cache,
            max_running=limits.max_running,
            find_stop_string=text.find_stop_string,
            max_kept_tokens=_max_kept_tokens(settings, config, dtype),
        )
    engine = EngineThread(
        runner,
        limits,
        version=settings.weight_version,
        model_path=str(settings.model_path),
        on_failure=stop_serving,
    )
    adapters = AdapterRegistry(read_adapter_folder, drop_adapter, max_loaded=settings.max_loaded_loras)
    ends = tuple(dict.fromkeys((*read_eos_token_ids(settings.model_path), *text.eos_token_ids())))
    served = ServedModel(
        vocab_size=config.vocab_size,
        max_tokens=min(config.context_tokens, limits.max_total_tokens),
        end_token_ids=ends,
        text=text,
        adapters=adapters.listed,
        expert_layers=config.expert_layers,
        num_layers=config.num_layers,
        image_processor=images.processor,
    )
    jobs = JobRunner(engine, adapters)
    app = build_app(ServerState(engine, jobs, adapters, settings, config, served, text, images, read_weights))
    http = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
        **http_tls.server_options(settings.host),
    )
    server = _Server(http, on_ready, on_stop=engine.stop)
    log.info(
        "engine serves",
        model_path=str(settings.model_path),
        num_parameters=weights.num_parameters,
        weight_version=settings.weight_version,
        max_total_tokens=limits.max_total_tokens,
    )
    engine.start()
    asyncio.run(server.serve(sockets=[listener]))
    return 0 if engine.failure is None else 1


class _Server(uvicorn.Server):
    """Reports when it accepts connections; on shutdown stops the engine first, so that waiting clients get a reply."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the listeners, then report that the server is ready."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Fail unfinished requests, then close the connections."""
        await asyncio.to_thread(self._on_stop)
        await super().shutdown(sockets)


def _image_reader(folder: Path) -> ImageReader:
    """Return the reader of a model's images; raises UnsupportedModel, and ConfigError without Pillow."""
    try:
        processor = read_processor(folder)
    except protocol_errors.UnsupportedModel as error:
        raise UnsupportedModel(str(error)) from None
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
