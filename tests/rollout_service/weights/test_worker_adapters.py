"""Adapters as versions: confirmed, recorded for every token, refused when unknown, loaded again after a restart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.tiny_model import Adapter, build_model
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.servers import wait_for

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.checks.check_weights import check_adapter
from penstock.rollout_service.engines.attached_engine import AttachedEngine
from penstock.rollout_service.engines.embedded import embedded_command
from penstock.rollout_service.engines.engine_pool import EnginePool
from penstock.rollout_service.engines.managed_engine import ManagedEngine
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.errors import EngineRefused, ReplyRefused, WeightsNotApplied
from penstock.rollout_service.settings import WorkerSettings

V0, V1, V2, V3 = map(PolicyVersion, range(4))
PROMPT = [5, 17, 101, 44]
SAMPLING = Sampling(max_new_tokens=9, stop_token_ids=(2,))
GREEDY = Sampling(max_new_tokens=9, temperature=0.0)
EXACT = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    build_model(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[PolicyVersion, Adapter]:
    return {version: Adapter.random(model, model.parent / str(version), seed=version).write() for version in (V1, V2)}


@pytest.fixture
def server() -> Iterator[FaultyEngine]:
    with FaultyEngine(version="0") as engine:
        yield engine


@pytest.fixture
async def client(server: FaultyEngine) -> AsyncIterator[SglangClient]:
    client = SglangClient(server.url, request_deadline_s=10)
    yield client
    await client.close()


def attached(server: FaultyEngine) -> AttachedEngine:
    return AttachedEngine(SglangClient(server.url, request_deadline_s=10), start_deadline_s=10)


@pytest.fixture
async def engine(server: FaultyEngine) -> AsyncIterator[AttachedEngine]:
    """An engine at the server, which it has loaded no weights into."""
    engine = attached(server)
    yield engine
    await engine.stop()


async def test_an_adapter_that_is_not_listed_is_not_loaded(server: FaultyEngine, client: SglangClient, tmp_path: Path):
    server.lose_adapters = True
    with pytest.raises(WeightsNotApplied, match="did not load policy@3"):
        await client.load_adapter(tmp_path, V3)
    server.adapters["policy@3"] = "/of/another/worker"
    with pytest.raises(WeightsNotApplied, match="no, policy@3"):
        await client.load_adapter(tmp_path, V3)
    server.version = "default"
    with pytest.raises(WeightsNotApplied, match="without a policy version"):
        await client.load_adapter(tmp_path, V2)
    server.version = "0"
    server.refuse_adapters = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
    with pytest.raises(WeightsNotApplied, match=r"set sglang\.max_lora_rank"):
        await client.load_adapter(tmp_path, V2)


async def test_tokens_of_an_adapter_on_another_base_are_refused(
    server: FaultyEngine, client: SglangClient, tmp_path: Path
):
    await client.load_adapter(tmp_path, V3)
    server.version = "1"
    with pytest.raises(ReplyRefused, match="computed with base weights of version 1, expected version 0"):
        await client.generate([PROMPT], SAMPLING, 1, V3)


async def test_an_unload_waits_for_our_own_requests(server: FaultyEngine, client: SglangClient, tmp_path: Path):
    """It is sent when no request uses the adapter; new ones are not: a server may load a changed folder."""
    with pytest.raises(EngineRefused, match="version 3 is not loaded"):
        await client.generate([PROMPT], SAMPLING, 1, V3)
    assert not server.requests
    await client.load_adapter(tmp_path, V3)
    server.flow.clear()
    asking = asyncio.create_task(client.generate([PROMPT], SAMPLING, 1, V3))
    await asyncio.to_thread(server.wait_for_requests, 1)
    unloading = asyncio.create_task(client.unload_adapter(V3))
    await asyncio.sleep(0)
    with pytest.raises(EngineRefused, match="not loaded"):
        await client.generate([PROMPT], SAMPLING, 1, V3)
    await client.load_adapter(tmp_path, V2)  # another version does not wait for it
    assert "policy@3" in server.adapters
    server.flow.set()
    [[completion]] = await asking
    assert completion.version_runs[0].version == V3
    await unloading
    assert set(server.adapters) == {"policy@2"}
    assert [request["lora_path"] for request in server.requests] == ["policy@3"]


async def test_new_weights_remove_the_adapters_of_the_old(
    server: FaultyEngine, engine: AttachedEngine, model: Path, adapters: dict[PolicyVersion, Adapter]
):
    """An attached server that loads other weights drops the adapters; a load without weights is refused."""
    with pytest.raises(WeightsNotApplied, match="has loaded no weights yet"):
        await engine.load_adapter(adapters[V1].folder, V1)
    await engine.load(model, V0)
    await engine.load_adapter(adapters[V2].folder, V2)
    await engine.load_adapter(adapters[V1].folder, V1)
    assert engine.version == V2
    assert {V0, V1, V2} <= engine.applied
    await engine.load(model, V1)
    assert engine.version == V1
    assert not server.adapters


async def test_adapters_of_an_earlier_worker_are_unloaded(server: FaultyEngine, engine: AttachedEngine, model: Path):
    server.info = {"enable_lora": True}
    server.adapters = {"policy@7": "/gone", "other": "/else"}
    await engine.load(model, V0)
    assert set(server.adapters) == {"other"}


async def test_a_restarted_server_is_given_its_adapters_again(
    server: FaultyEngine, engine: AttachedEngine, model: Path, adapters: dict[PolicyVersion, Adapter]
):
    await engine.load(model, V0)
    for version in (V1, V2):
        await engine.load_adapter(adapters[version].folder, version)
    wanted = dict(server.adapters)
    for label in ("0", "default"):
        server.adapters.clear()
        server.version = label
        with pytest.raises(EngineRefused):
            await engine.client.generate([PROMPT], SAMPLING, 1, V2)
        await engine.check_health()
        assert server.adapters == wanted
        assert server.version == "0"


async def test_all_engines_of_a_pool_get_an_adapter(model: Path, adapters: dict[PolicyVersion, Adapter]):
    with FaultyEngine() as one, FaultyEngine() as other:
        pool = EnginePool([attached(server) for server in (one, other)])
        await pool.load(model, V0)
        await pool.load_adapter(adapters[V1].folder, V1)
        assert pool.version == V1
        groups = await pool.client.generate([[5, 6], [7], [8], [9]], SAMPLING, 3, V1)
        assert {run.version for group in groups for reply in group for run in reply.version_runs} == {V1}
        assert [[request["lora_path"] for request in server.requests] for server in (one, other)] == [["policy@1"]] * 2
        await pool.unload_adapter(V1)
        assert not one.adapters
        assert not other.adapters
        await pool.stop()


@pytest.mark.slow
async def test_a_restarted_engine_has_its_adapters(model: Path, adapters: dict[PolicyVersion, Adapter], tmp_path: Path):
    engine = ManagedEngine(
        embedded_command(WorkerSettings()),  # pyright: ignore[reportCallIssue]
        SglangClient,
        log_file=tmp_path / "engine.log",
        start_deadline_s=60,
    )
    await engine.load(model, V0)
    supervision = asyncio.create_task(engine.run())
    try:
        for version in (V1, V2):
            await engine.load_adapter(adapters[version].folder, version)
        assert engine.version == V2
        first = {version: await engine.client.generate([PROMPT], GREEDY, 1, version) for version in (V1, V2)}
        assert first[V1][0][0].logprobs != first[V2][0][0].logprobs
        process = engine._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.to_thread(
            wait_for, lambda: engine._process is not process and engine.ready.is_set(), "the engine's restart", 60
        )
        for version in (V1, V2):
            [[again]] = await engine.client.generate([PROMPT], GREEDY, 1, version)
            assert again == first[version][0][0]
            assert again.version_runs == (VersionRun(version, 0, 9),)
        bad = Adapter.random(
            model, tmp_path / "bad", seed=9, targets=("q_proj",)
        )  # without the second one its config names
        bad.config["target_modules"] = ["q_proj", "v_proj"]
        with pytest.raises(WeightsNotApplied, match="missing"):
            await engine.load_adapter(bad.write().folder, V3)
        assert engine.version == V2
        assert V3 not in engine.applied
    finally:
        supervision.cancel()
        await engine.stop()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"peft_type": "IA3"}, "LoRA"),
        ({"r": 0}, "r: Input should be greater than 0"),
        ({"lora_alpha": "many"}, "lora_alpha"),
        ({"target_modules": ["self_attn.q_proj"]}, "last words"),
        ({"target_modules": ["q_proj", "v_proj"]}, "unknown"),
        ({"target_modules": ["k_proj", "v_proj"]}, "k_proj without q_proj"),
        ({"target_modules": ["up_proj"]}, "up_proj without gate_proj"),
        ({"r": 3}, "shape"),
    ],
)
def test_an_adapter_that_some_engine_would_compute_wrongly_is_not_sent(
    model: Path, tmp_path: Path, change: dict[str, Any], says: str
):
    """The worker checks the configuration and every shape against the base model before a server gets them."""
    one = Adapter.random(model, tmp_path / "adapter", seed=1)
    one.config.update(change)
    one.write()
    with pytest.raises(WeightsNotApplied, match=says):
        check_adapter(one.folder, V1, model)


def test_an_adapter_of_all_linear_layers_fits(model: Path, tmp_path: Path):
    one = Adapter.random(model, tmp_path / "adapter", seed=1)
    one.config["target_modules"] = "all-linear"
    check_adapter(one.write().folder, V1, model)
