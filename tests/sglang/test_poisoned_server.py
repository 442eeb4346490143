"""The behaviour of SGLang 0.5.23 with faulty weights; a worker's engine recovers from them.

The worker never passes such a folder on (`rollout_service/checks/check_weights.py`); these tests bypass the check, to
show what it prevents, and that the engine recovers without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.checks.check_weights import WeightsCheck
from penstock.rollout_service.engines.managed_engine import ManagedEngine
from penstock.rollout_service.errors import EngineError, TaskRefused, WeightsUnusable, WeightsUnverified
from tests.contracts.real_sglang import START_S, managed_sglang
from tests.contracts.tiny_model import Dense, build_model, read_tensors, write_changed_copy, write_tensors

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]

V0, V1, V2 = map(PolicyVersion, range(3))
PROMPT = [5, 17, 88, 250, 31, 9]
GREEDY = Sampling(max_new_tokens=10, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Supervised:
    """A server that is watched as in a worker, and the folder of its version 0."""

    engine: ManagedEngine
    model: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervised(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Supervised]:
    """One engine for all tests: it restarts its server after a kill, which the tests check."""
    scratch = tmp_path_factory.mktemp("supervised")
    build_model(scratch / "model")
    engine = managed_sglang(scratch / "sglang.log")
    await engine.load(scratch / "model", V0)
    watching = asyncio.create_task(engine.run())
    yield Supervised(engine, scratch / "model")
    watching.cancel()
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(supervised: Supervised) -> ManagedEngine:
    await asyncio.wait_for(supervised.engine.load(supervised.model, V0), 2 * START_S)
    return supervised.engine


@pytest.fixture
def model(supervised: Supervised) -> Path:
    return supervised.model


async def greedy(engine: ManagedEngine) -> list[int]:
    """The most likely tokens, by the served weights."""
    [[completion]] = await engine.client.generate([PROMPT], GREEDY, 1)
    return completion.token_ids


async def test_weights_that_sglang_accepts_silently_are_refused_by_the_check(
    engine: ManagedEngine, model: Path, tmp_path: Path
):
    """A missing tensor and a NaN are a success to SGLang, under the new version's number; the check names both."""
    name = "model.layers.1.mlp.up_proj.weight"
    lacking = read_tensors(model)
    del lacking[name]
    missing = write_tensors(model, tmp_path / "v1", lacking)
    spoilt = read_tensors(model)
    spoilt[name][3, 4] = torch.nan
    nan = write_tensors(model, tmp_path / "v2", spoilt)
    check = WeightsCheck()
    check.check(model, V0)
    for folder, version, words in ((missing, V1, "missing"), (nan, V2, "not finite")):
        await engine.load(folder, version)
        assert engine.version == version
        with pytest.raises(WeightsUnusable, match=words):
            check.check(folder, version)


async def test_a_server_whose_weights_another_client_changed_is_replaced(
    engine: ManagedEngine, model: Path, tmp_path: Path
):
    """Within seconds the failure is detected, the server is killed, and another serves the requested version."""
    other = write_changed_copy(model, tmp_path / "other", seed=1)
    first = engine.client
    await first.load_weights(other, V2)  # not through the engine: as an outsider would
    async with asyncio.timeout(START_S):
        while engine.client is first or not engine.ready.is_set():  # noqa: ASYNC110  (the watch's turn)
            await asyncio.sleep(0.1)
    assert await engine.client.served_version() == V0
    with pytest.raises(WeightsUnverified):
        await first.generate([PROMPT], GREEDY, 1)
    with pytest.raises(TaskRefused):
        await engine.client.generate([[5, 100_000]], GREEDY, 1)
    assert await greedy(engine) == Dense(model).greedy(PROMPT, 10)


async def test_a_server_that_crashes_at_an_update_restarts_with_the_version_before(
    engine: ManagedEngine, model: Path, tmp_path: Path
):
    """A truncated file kills the server, and it cannot start from it: it serves the old version, the new one is refused.

    Requests in progress are refused; the next version is loaded as usual.
    """
    bad = write_changed_copy(model, tmp_path / "v1", seed=1)
    file = bad / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    good = write_changed_copy(model, tmp_path / "v2", seed=2)
    check = WeightsCheck()
    check.check(model, V0)
    with pytest.raises(WeightsUnusable):
        check.check(bad, V1)
    before = await greedy(engine)
    assert before == Dense(model).greedy(PROMPT, 10)
    first = engine.client
    with pytest.raises(WeightsUnusable, match="neither loaded version 1 nor started with it"):
        await asyncio.wait_for(engine.load(bad, V1), 3 * START_S)
    with pytest.raises(EngineError):
        await first.generate([PROMPT], GREEDY, 1)
    assert (engine.version, await greedy(engine)) == (V0, before)
    await engine.load(good, V2)
    assert (engine.version, await greedy(engine)) == (V2, Dense(good).greedy(PROMPT, 10))
