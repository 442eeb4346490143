"""The engines under test: always the embedded one, and a real SGLang server if requested.

``make test-sglang`` starts a server for these tests with the worker's code. To use your own server, start
it on a small float32 model folder that is readable here, with --enable-lora --max-lora-rank 8 --lora-target-modules all,
and set PENSTOCK_TEST_SGLANG_URL to its URL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.contracts import real_sglang
from tests.contracts.engine_under_test import EngineUnderTest, embedded_engine
from tests.contracts.tiny_model import Dense, build_model

_SGLANG_URL = os.environ.get("PENSTOCK_TEST_SGLANG_URL", "")
_KINDS = ["embedded", "sglang"] if _SGLANG_URL or real_sglang.ASKED else ["embedded"]


@pytest.fixture(scope="session", params=_KINDS)
def running_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnderTest]:
    """One server of each kind for the whole session."""
    if request.param == "sglang" and _SGLANG_URL:
        model = Path(httpx.get(f"{_SGLANG_URL}/model_info", timeout=60).json()["model_path"])
        yield EngineUnderTest("sglang", _SGLANG_URL, model)
        return
    scratch = tmp_path_factory.mktemp("engine")
    build_model(scratch / "model")
    if request.param == "sglang":
        with real_sglang.running_sglang(scratch / "model", scratch) as url:
            yield EngineUnderTest("sglang", url, scratch / "model")
        return
    with embedded_engine(scratch / "model", scratch, "--weight-version", "0") as engine:
        yield engine


@pytest.fixture
def engine(running_engine: EngineUnderTest) -> EngineUnderTest:
    """A running engine that serves its first weights as version 0."""
    running_engine.post("/continue_generation")
    running_engine.post("/abort_request", {"rid": "", "abort_all": True})
    running_engine.update(running_engine.model, "0")
    return running_engine


@pytest.fixture
def engine_url(engine: EngineUnderTest) -> str:
    return engine.url


@pytest.fixture(scope="session")
def dense(running_engine: EngineUnderTest) -> Dense:
    """What the engine's first weights compute."""
    return Dense(running_engine.model)
