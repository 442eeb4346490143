"""The servers that the worker's clients are tested against: each kind of engine, as a worker uses it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.engine_client import EngineClient
from penstock.rollout_service.engines.engine_kind import ENGINES
from tests.contracts import real_sglang
from tests.contracts.engine_under_test import DEADLINE_S, embedded_engine
from tests.contracts.fake_vllm import FakeVllm
from tests.contracts.tiny_model import build_model
from tests.servers import wait_for

_SGLANG_URL = os.environ.get("PENSTOCK_TEST_SGLANG_URL", "")
_VLLM_URL = os.environ.get("PENSTOCK_TEST_VLLM_URL", "")

KINDS = [
    "embedded",
    "fake-vllm",
    "simulated",
    *(["sglang"] if _SGLANG_URL or real_sglang.ASKED else []),
    *(["vllm"] if _VLLM_URL else []),
]
_SIMULATED = "tests.rigs.simulated_engine:SIMULATED"
_CLIENTS = {
    "embedded": "embedded",
    "fake-vllm": "vllm-url",
    "sglang": "sglang-url",
    "simulated": _SIMULATED,
    "vllm": "vllm-url",
}
_SIMULATION = {
    "step_s_alone": 0.0005,
    "step_s_full": 0.001,
    "slots": 64,
    "median_tokens": 400,
    "load_s": 0.02,
    "prompt_s": 0.001,
}


@dataclass(frozen=True)
class ServerUnderTest:
    kind: str  # one of KINDS
    url: str
    model: Path  # its first weights

    def connect(self) -> EngineClient:
        kind = ENGINES.find(_CLIENTS[self.kind]).value
        return kind.connect(self.url, api_key="", request_deadline_s=DEADLINE_S)

    @property
    def computes(self) -> bool:
        """Whether its tokens and log-probabilities are those of a model; the simulated engine's are arbitrary."""
        return self.kind != "simulated"

    @property
    def speaks_sglang(self) -> bool:
        return self.kind in ("embedded", "sglang", "simulated")


@contextlib.contextmanager
def running_server(kind: str, scratch: Path) -> Iterator[ServerUnderTest]:
    """Run a server of one kind, or use the one whose URL the environment names."""
    if kind == "vllm":
        card = httpx.get(f"{_VLLM_URL}/v1/models", timeout=60).json()["data"][0]
        yield ServerUnderTest(kind, _VLLM_URL, Path(card["root"]))
    elif kind == "sglang" and _SGLANG_URL:
        info = httpx.get(f"{_SGLANG_URL}/model_info", timeout=60).json()
        yield ServerUnderTest(kind, _SGLANG_URL, Path(info["model_path"]))
    else:
        model = scratch / "model"
        build_model(model)
        if kind == "sglang":
            with real_sglang.running_sglang(model, scratch, **real_sglang.WITH_ADAPTERS) as url:
                yield ServerUnderTest(kind, url, model)
            return
        if kind == "simulated":
            with _simulated_engine(model, scratch) as url:
                yield ServerUnderTest(kind, url, model)
            return
        with embedded_engine(model, scratch, "--weight-version", "0") as engine:
            if kind == "embedded":
                yield ServerUnderTest(kind, engine.url, model)
            else:
                with FakeVllm(engine.url, model) as fake:
                    yield ServerUnderTest(kind, fake.url, model)


@contextlib.contextmanager
def _simulated_engine(model: Path, scratch: Path) -> Iterator[str]:
    """Run a simulated engine, started by the command of its kind as a worker starts it."""
    kind = ENGINES.find(_SIMULATED).value
    assert kind.launches is not None
    [launch] = kind.launches(kind.options.model_validate(_SIMULATION), os.environ)
    port_file, log = scratch / "port", scratch / "engine.log"
    with log.open("wb") as output:
        process = subprocess.Popen(launch.command(model, PolicyVersion(0), port_file), stdout=output, stderr=output)
    try:
        wait_for(lambda: port_file.exists() or process.poll() is not None, "the simulated engine to listen")
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait()
