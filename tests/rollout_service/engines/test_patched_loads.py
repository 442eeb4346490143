"""A client applies a staged version as a patch; where the server or the patch leaves a doubt, its folder is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.engines.fused_model import FusedModel, random_tensors
from tests.rollout_service.engines.test_weight_patch import changed, changes, same
from torch import Tensor

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.attached_engine import AttachedEngine
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.plugin import penstock_weight_patch as plugin
from penstock.rollout_service.errors import EngineError

V3, V4 = PolicyVersion(3), PolicyVersion(4)
OFFER = {"internal_states": [{"penstock_weight_patch": {"protocol": 1, "tp_size": 1, "device": "cpu"}}]}


class PatchedEngine(FaultyEngine):
    """Holds a model, and does the plugin's jobs on it."""

    def __init__(self, model: Any = None) -> None:
        self.model: Any = model or FusedModel(torch.bfloat16)
        self.jobs: list[str] = []  # every load format, without its path
        self.fault = ""
        super().__init__(version="3")
        self.info = OFFER

    def _get(self, path: str) -> tuple[int, Any]:
        return (200, {}) if path == "/metrics" else super()._get(path)

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        name, _, rest = body["load_format"].partition(":")
        job, _, prefix = rest.partition(":")
        self.jobs.append(job or name)
        if self.fault == f"{job}: disconnects":
            raise ConnectionResetError
        tensors = list(plugin.folder_tensors(body["model_path"]))
        try:
            if self.fault == f"{job}: refuses":
                raise plugin.Refused("no")
            if not job:
                self.model.load_weights(tensors)
            elif job == "probe":
                found = plugin.build_map(self.model, tensors)
                plugin.check_map(self.model, found, tensors)
                plugin.write_map(self.model, found, f"{prefix}.0.json")
            else:
                figures = plugin.apply_patch(self.model, f"{prefix}.0", self.version, int)
                if self.fault == "patch: not flushed":
                    return 400, {"success": False, "message": f"penstock: {figures}. The cache was not flushed."}
                self.says = {"message": f"penstock: {figures}."}
        except plugin.Refused as refused:
            return 400, {"success": False, "message": f"penstock: {refused}", "num_paused_requests": 0}
        return super()._update(body)


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


class Versions:
    """Folders of versions 3 and 4, and what changes between them."""

    def __init__(self, folder: Path) -> None:
        before = random_tensors(torch.bfloat16, tied=True)
        self.after = changed(before, seed=1, share=0.0001)
        self.changes = changes(before, self.after)
        self.folder_3, self.folder_4 = write(folder / "a", before), write(folder / "b", self.after)
        self.patches = folder / "patches"

    def are_served(self, engine: PatchedEngine) -> bool:
        expected = FusedModel(torch.bfloat16)
        expected.load_weights(self.after.items())
        return same([engine.model], [expected])


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


@pytest.fixture
def engine(versions: Versions) -> Iterator[PatchedEngine]:
    """One that was started with version 3."""
    with PatchedEngine() as engine:
        engine.model.load_weights(plugin.folder_tensors(str(versions.folder_3)))
        yield engine


@pytest.fixture
async def client(engine: PatchedEngine) -> AsyncIterator[SglangClient]:
    client = SglangClient(engine.url)
    yield client
    await client.close()


def ways(client: SglangClient) -> set[str]:
    return {name for name, count in client._patcher.figures().items() if name.startswith("engine_loads") and count}


async def test_a_staged_version_is_patched(engine: PatchedEngine, client: SglangClient, versions: Versions) -> None:
    """The server reads no folder; the files of the patch are gone afterwards, and the bytes it touched are counted."""
    await client.started_with(versions.folder_3, V3)
    assert client.max_changed_share == 0.005
    await client.stage(versions.changes)
    assert await client.patch(V4, "retract")
    assert engine.jobs == ["probe", "patch"]
    assert engine.pauses == ["retract", "continue"]
    assert versions.are_served(engine)
    assert list(versions.patches.iterdir()) == []
    assert ways(client) == {"engine_loads_patch"}
    assert client._patcher.figures()["engine_patch_bytes"] > 0
    assert not await client.patch(V4)  # nothing is staged any more
    await client.load_weights(versions.folder_3, V3)
    assert engine.jobs == ["probe", "patch", "auto"]
    assert ways(client) == {"engine_loads_patch", "engine_loads_chain"}


@pytest.mark.parametrize("doubt", ["refuses", "other version", "other words", "no file"])
async def test_a_refused_patch_changes_nothing_and_is_a_load_later(
    engine: PatchedEngine, client: SglangClient, versions: Versions, doubt: str
) -> None:
    """It refuses, another has loaded other weights, or the file is gone: it samples on until the folder is there."""
    await client.started_with(versions.folder_3, V3)
    await client.stage(versions.changes)
    if doubt == "refuses":
        engine.fault = "patch: refuses"
    elif doubt == "other version":
        engine.version = "2"
    elif doubt == "other words":
        engine.model.qkv.data.zero_()
    else:
        for path in versions.patches.iterdir():
            path.unlink()
    assert not await client.patch(V4, "retract")
    assert engine.pauses == ["retract", "continue"]
    assert engine.version == ("2" if doubt == "other version" else "3")
    await client.load_weights(versions.folder_4, V4, "retract")
    assert engine.jobs == ["probe", "patch", "auto"]
    assert versions.are_served(engine)
    assert ways(client) == {"engine_loads_refused"}


@pytest.mark.parametrize("fault", ["patch: disconnects", "patch: not flushed"])
async def test_after_a_doubt_nothing_continues_before_a_folder_is_loaded(
    engine: PatchedEngine, client: SglangClient, versions: Versions, fault: str
) -> None:
    """A broken connection, or an error after the words were written: what it would sample is unknown."""
    await client.started_with(versions.folder_3, V3)
    await client.stage(versions.changes)
    engine.fault = fault
    with pytest.raises(EngineError):
        await client.patch(V4, "retract")
    assert engine.pauses == ["retract"]
    await client.load_weights(versions.folder_4, V4, "retract")
    assert engine.jobs[-1] == "auto"
    assert engine.pauses == ["retract", "retract", "continue"]
    assert versions.are_served(engine)


@pytest.mark.parametrize(("fault", "jobs"), [("probe: refuses", ["probe", "auto"]), ("no plugin", [])])
async def test_a_server_that_cannot_be_mapped_reads_folders(
    engine: PatchedEngine, client: SglangClient, versions: Versions, fault: str, jobs: list[str]
) -> None:
    """The folder is loaded once more after the attempt; without the plugin it never sees its load formats."""
    engine.fault = fault
    engine.info = {"internal_states": [{}]} if fault == "no plugin" else OFFER
    await client.started_with(versions.folder_3, V3)
    assert engine.jobs == jobs
    assert client.max_changed_share == 0.0
    await client.stage(versions.changes)
    await client.load_weights(versions.folder_4, V4)
    assert engine.jobs == [*jobs, "auto"]
    assert versions.are_served(engine)
    assert ways(client) == {"engine_loads_unsupported"}


async def test_a_patched_version_is_kept_by_an_engine_that_is_not_ready(versions: Versions) -> None:
    """Without its memory it loads the folder later; a restart, which is waited for, may serve the version before."""
    (versions.folder_3 / "config.json").write_text("{}")
    with PatchedEngine() as server:
        engine = AttachedEngine(SglangClient(server.url), start_deadline_s=10)
        await engine.load(versions.folder_3, V3)
        assert await engine.stage(versions.changes)
        assert await engine.patch(V4, "retract")
        engine.ready.clear()
        keeping = asyncio.create_task(engine.keep(versions.folder_4, V4))
        await asyncio.sleep(0)
        engine.is_released = True
        assert await asyncio.wait_for(engine.keep(versions.folder_4, V4), 30)
        engine._serving.confirm(V3)
        engine.ready.set()
        assert not await keeping
        await engine.stop()


async def test_an_attached_server_is_mapped_in_its_first_load(
    engine: PatchedEngine, client: SglangClient, versions: Versions
) -> None:
    """Before the pause ends: nothing runs while its parameters are compared."""
    await client.load_weights(versions.folder_3, V3)
    await client.stage(versions.changes)
    assert await client.patch(V4, "in_place")
    assert engine.jobs == ["auto", "probe", "patch"]
    assert engine.flushes[-1][2] is False
    assert versions.are_served(engine)
