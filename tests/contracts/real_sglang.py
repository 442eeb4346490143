"""A real SGLang server on the CPU, launched by the worker's own code (`ManagedEngine`), for tests that do not await."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from penstock.deploy import sglang_cpu
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.engine_process import Inherited
from penstock.rollout_service.engines.managed_engine import ManagedEngine
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.kind import SglangSettings, sglang_command, sglang_environ

T = TypeVar("T")
START_S = 180.0
WITH_ADAPTERS = {"max_lora_rank": 8, "max_loras_per_batch": 4, "lora_backend": "torch_native"}
ASKED = os.environ.get("PENSTOCK_TEST_SGLANG") == "1"


def cpu_settings(**changes: Any) -> SglangSettings:
    """Return the worker's settings for a machine without a GPU."""
    settings = sglang_cpu.section()
    settings |= {"python": Path(settings["python"]), "extra_args": tuple(settings["extra_args"])}
    return SglangSettings(**{**settings, **changes})


def managed_sglang(log_file: Path, **changes: Any) -> ManagedEngine:
    """An engine as the worker makes it; nothing runs before it is given weights."""
    settings = cpu_settings(**changes)
    return ManagedEngine(
        sglang_command(settings),
        functools.partial(SglangClient, request_deadline_s=120.0),
        log_file=log_file,
        start_deadline_s=START_S,
        inherited=Inherited(sglang_environ(settings, os.environ)),
        context_length=settings.context_length,
    )


class Loop:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], deadline_s: float = START_S) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(deadline_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def running_sglang(model: Path, scratch: Path, **changes: Any) -> Iterator[str]:
    """Run a server on a model folder as version 0, without supervision; yields its URL."""
    loop = Loop()
    engine = managed_sglang(scratch / "sglang.log", **changes)
    try:
        loop.run(engine.load(model, PolicyVersion(0)))
        yield engine.client.url
    finally:
        loop.run(engine.stop())
        loop.close()
