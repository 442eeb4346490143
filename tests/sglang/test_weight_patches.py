"""Patches on a real SGLang: three hundred of them give the answers of a server that was started on the last folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines import managed_engine
from penstock.rollout_service.engines.completion import EngineChecksum
from penstock.rollout_service.engines.engine_process import group_members
from penstock.rollout_service.engines.managed_engine import ManagedEngine
from penstock.rollout_service.engines.sglang.client import SglangClient
from tests.contracts.real_sglang import START_S, cpu_settings, managed_sglang
from tests.contracts.tiny_model import MIXTURE, build_model, read_tensors, write_tensors
from tests.rollout_service.engines.test_weight_patch import changed, changes
from tests.sglang.test_worker_on_sglang import scheduler_among

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

PROMPTS = [[5, 17, 88, 250, 31, 9], [44, 45, 46], [7, 9, 7, 9, 1]]
GREEDY = Sampling(max_new_tokens=24, temperature=0.0, stop_token_ids=())
NUM_PATCHES = 300
_MOE = MIXTURE | {"mlp_only_layers": []}  # SGLang has experts in every layer, whatever the folder says


def build(folder: Path, kind: str, dtype: torch.dtype) -> Path:
    """A model whose vocabulary is no multiple of the padding, in one dtype."""
    scratch = folder.with_name("built")
    build_model(scratch, kind, vocab_size=321, tie_word_embeddings=False, **(_MOE if kind == "qwen3_moe" else {}))
    tensors = {name: tensor.to(dtype) for name, tensor in read_tensors(scratch).items()}
    write_tensors(scratch, folder, tensors)
    shutil.rmtree(scratch)
    return folder


class Run:
    """An engine and its newest version: folders are written to in turn, as a mirror does."""

    def __init__(self, engine: ManagedEngine, folder: Path) -> None:
        self.engine, self.folder, self.version = engine, folder, 0
        self.tensors = read_tensors(folder)

    async def start(self) -> None:
        await self.engine.load(self.folder, PolicyVersion(0))

    async def next(self, *, stages: bool = True, share: float = 0.001) -> None:
        """Change about two words of each tensor, and have the engine serve that."""
        before = self.tensors
        await self.load(changed(before, seed=self.version, share=share), stages=stages)

    async def load(self, after: dict[str, Tensor], *, stages: bool = True) -> None:
        found = changes(self.tensors, after)
        self.version += 1
        version = PolicyVersion(self.version)
        target = self.folder.with_name("b" if self.folder.name == "a" else "a")
        shutil.rmtree(target, ignore_errors=True)
        self.folder, self.tensors = write_tensors(self.folder, target, after), after
        if stages:
            found = type(found)(PolicyVersion(version - 1), version, found.num_words, found.tensors)
            await self.engine.stage(found)
            if await self.engine.patch(version, "retract"):
                assert await self.engine.keep(self.folder, version)
                return
        await self.engine.load(self.folder, version, "retract")

    @property
    def loads(self) -> dict[str, float]:
        client = self.engine.client
        assert isinstance(client, SglangClient)
        figures = client._patcher.figures()
        return {name.removeprefix("engine_loads_"): n for name, n in figures.items() if n and "loads" in name}


async def answers(engine: ManagedEngine) -> tuple[list[Any], EngineChecksum | None]:
    """Tokens and log-probabilities, exactly as they arrive; and the server's checksum of every parameter."""
    rows = [await engine.client.generate([prompt], GREEDY, 1) for prompt in PROMPTS]
    found = [(one.token_ids, one.logprobs) for [[one]] in rows]
    return found, await engine.weights_checksum()


def settings(kind: str, ranks: int, dtype: str) -> dict[str, Any]:
    environ = dict(cpu_settings().environ)
    if kind == "qwen3_moe":
        del environ["SGLANG_EXTERNAL_MODEL_PACKAGE"]  # it names the dense families alone
    if ranks > 1:
        environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    return {"dtype": dtype, "tp_size": ranks, "environ": environ}


@pytest.mark.parametrize(
    ("kind", "ranks", "dtype"),
    [
        ("qwen3", 1, "bfloat16"),
        ("qwen3", 2, "bfloat16"),
        ("qwen3_moe", 1, "bfloat16"),
        ("qwen3_moe", 2, "bfloat16"),
        ("qwen3", 1, "float32"),
    ],
)
async def test_three_hundred_patches_equal_a_fresh_start(tmp_path: Path, kind: str, ranks: int, dtype: str) -> None:
    options = settings(kind, ranks, dtype)
    run = Run(managed_sglang(tmp_path / "log", **options), build(tmp_path / "a", kind, torch.bfloat16))
    fresh = managed_sglang(tmp_path / "fresh.log", **options)
    try:
        await run.start()
        for _ in range(NUM_PATCHES):
            await run.next()
        assert run.loads == {"patch": NUM_PATCHES}
        patched = await answers(run.engine)
        await run.engine.stop()
        await fresh.load(run.folder, PolicyVersion(run.version))
        assert await answers(fresh) == patched
    finally:
        await run.engine.stop()
        await fresh.stop()


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    """Two ranks in bfloat16, supervised; a label that a test changes is not looked at before the test's patch."""
    monkeypatch.setattr(managed_engine, "CHECK_S", 3600.0)
    engine = managed_sglang(tmp_path / "log", **settings("qwen3", 2, "bfloat16"))
    run = Run(engine, build(tmp_path / "a", "qwen3", torch.bfloat16))
    await run.start()
    supervising = asyncio.create_task(engine.run())
    yield run
    supervising.cancel()
    await engine.stop()


async def check(run: Run) -> None:
    """The engine serves its newest folder: a load of it changes neither answers nor checksum."""
    assert run.engine.version == run.version
    before = await answers(run.engine)
    await run.engine.load(run.folder, PolicyVersion(run.version))
    assert await answers(run.engine) == before


async def test_every_doubt_ends_with_the_weights_of_the_folder(run: Run, tmp_path: Path) -> None:
    """Refusals leave the server as it was and become loads; a killed rank becomes a restart."""
    client = run.engine.client
    assert isinstance(client, SglangClient)
    await run.next()
    assert run.loads == {"patch": 1}
    await check(run)

    good, patcher = run.tensors, client._patcher
    stage = patcher.stage

    def stage_badly(found: Any, folder: Path) -> bool:
        """As ever, but a bit of the second rank's words is flipped."""
        assert stage(found, folder)
        [path] = (tmp_path / "patches").glob("*.1")
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        return path.write_bytes(data) > 0

    patcher.stage = stage_badly  # type: ignore[method-assign]
    await run.next()
    patcher.stage = stage  # type: ignore[method-assign]
    assert run.loads["refused"] == 1
    await check(run)

    other = write_tensors(run.folder, tmp_path / "other", changed(good, seed=99, share=0.5, to=0x3C00))
    served = PolicyVersion(run.version)
    await client._update(other, served, flush=True)  # somebody else's weights under the version that is served
    await run.next()
    assert run.loads["refused"] == 2
    await check(run)
    await client._update(run.folder, PolicyVersion(0), flush=True)  # the right weights under another label
    await run.next()
    assert run.loads["refused"] == 3
    await check(run)

    await run.next(stages=False)
    await run.next()
    assert run.loads["patch"] == 2
    assert await client.health() is None

    loading = asyncio.create_task(run.next())
    await asyncio.sleep(0.02)
    assert run.engine._process is not None
    os.kill(scheduler_among(group_members(run.engine._process.pid)), signal.SIGKILL)
    await asyncio.wait_for(loading, 3 * START_S)
    async with asyncio.timeout(START_S):
        await run.engine.ready.wait()
    assert run.engine.max_changed_share > 0.0
    await run.next()
    assert run.loads["patch"] == 1
    await check(run)
