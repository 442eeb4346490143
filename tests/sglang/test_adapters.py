"""Adapters on a real SGLang of the worker's own: exact, stamped with their version, and there again after SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion, VersionRun
from tests.contracts.real_sglang import START_S, WITH_ADAPTERS, managed_sglang
from tests.contracts.tiny_model import Adapter, Dense, build_model
from tests.servers import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

PROMPT = [5, 17, 101, 44]
SAMPLING = Sampling(max_new_tokens=24)
EXACT = 1e-5


async def test_a_killed_server_restarts_with_its_adapters(tmp_path: Path):
    """Two versions side by side have the log-probabilities of their merged models, before a SIGKILL and after it."""
    model = tmp_path / "model"
    build_model(model)
    adapters = {
        PolicyVersion(number): Adapter.random(model, tmp_path / str(number), seed=number).write() for number in (1, 2)
    }
    merged = {version: Dense(one.merged_into(model, tmp_path / f"m{version}")) for version, one in adapters.items()}
    engine = managed_sglang(tmp_path / "sglang.log", **WITH_ADAPTERS)
    await engine.load(model, PolicyVersion(0))
    supervision = asyncio.create_task(engine.run())

    async def assert_served(version: PolicyVersion) -> None:
        for [reply] in await engine.client.generate([PROMPT, PROMPT[::-1]], SAMPLING, 1, version):
            assert reply.version_runs == (VersionRun(version, 0, len(reply.token_ids)),)
        [replies] = await engine.client.generate([PROMPT], SAMPLING, 4, version)
        for reply in replies:
            wanted = merged[version].of_completion(PROMPT, reply.token_ids)
            assert reply.logprobs == pytest.approx(wanted, abs=EXACT)

    try:
        for version, one in adapters.items():
            await engine.load_adapter(one.folder, version)
        await asyncio.gather(*map(assert_served, adapters))
        first = engine._process
        assert first is not None
        os.killpg(first.pid, signal.SIGKILL)
        await asyncio.to_thread(
            wait_for, lambda: engine._process is not first and engine.ready.is_set(), "the next server", START_S
        )
        assert engine.version == PolicyVersion(2)
        await asyncio.gather(*map(assert_served, adapters))
    finally:
        supervision.cancel()
        await engine.stop()
