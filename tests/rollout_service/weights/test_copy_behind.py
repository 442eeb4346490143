"""A version that is a change of the one before is served first, and recorded once its copy is what the manifest says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.groups import make_task
from tests.rollout_service.engines.test_patched_loads import PatchedEngine
from tests.rollout_service.engines.test_weight_patch import changed
from tests.rollout_service.trainer_side import TrainerSide, attached
from tests.servers import wait_for
from tests.system.rollout_and_reward import fill, small_disk
from torch import Tensor, nn

from penstock.deploy.processes.child import Child
from penstock.protocol.facts import WeightsPublished
from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import VersionManifest
from penstock.rollout_service.weights import weight_follower
from penstock.rollout_service.weights.servable_versions import VersionGate
from penstock.rollout_service.weights.weight_follower import WeightFollower
from penstock.rollout_service.weights.weight_swap import Patched


class Plain(nn.Module):
    """Holds the tensors of a folder as they are."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros_like(tensor), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name.replace(".", "_")).data.copy_(tensor)


class Setting:
    """A worker whose server takes patches, and that has followed versions 0 to 2 into the folders a, b, a."""

    def __init__(self, trainer: TrainerSide, start_worker: Callable[..., Child], cache: Path) -> None:
        self.trainer, self.tensors = trainer, trainer.tensors(0)
        self.engine = PatchedEngine(Plain(self.tensors))
        self.folder = cache / trainer.run_id / "w0"
        self.start = lambda: start_worker("w0", *attached(self.engine), f"worker.cache_dir={cache}")
        trainer.publish(0)
        self.worker = self.start()
        trainer.wait_applied("w0", 0)

    def follow(self) -> Setting:
        for version in (1, 2):
            self.publish(version)
            self.trainer.wait_applied("w0", version)
        return self

    def publish(self, version: int, *, corrupt: str = "", to: int | None = None) -> WeightsPublished:
        self.tensors = changed(self.tensors, seed=version, share=0.001, to=to)
        return self.trainer.source.publish(version, self.tensors, corrupt=(corrupt,) if corrupt else ())

    def is_served(self, tensors: dict[str, Tensor] | None = None) -> bool:
        parameters = dict(self.engine.model.named_parameters())
        return all(torch.equal(parameters[n.replace(".", "_")], t) for n, t in (tensors or self.tensors).items())

    def hold_copy(self) -> Callable[[], None]:
        """Have the next copy wait for its index, which is a pipe; return what gives it."""
        index = self.folder / "b" / "model.safetensors.index.json"
        data = index.read_bytes()
        index.unlink()
        os.mkfifo(index)

        def give() -> None:
            pipe = os.open(index, os.O_RDWR)  # a reader or not
            (new := index.with_name("new")).write_bytes(data)
            new.replace(index)
            os.write(pipe, data)
            os.close(pipe)

        return give

    def sample(self, pack_id: str) -> None:
        """Issue a pack, and wait until the engine has answered it."""
        num = len(self.engine.requests)
        self.trainer.issue(pack_id, [make_task(f"e0.{pack_id}.a0")])
        wait_for(lambda: len(self.engine.requests) > num and not self.engine.num_running, "the pack to be sampled")

    @property
    def applied(self) -> list[int]:
        return [fact.version for fact in self.trainer.applied]

    def sampled_by(self) -> set[int]:
        [group] = self.trainer.collect_groups(1)
        return {run.version for row in group.trajectories for run in row.version_runs}

    def loads_by(self, way: str) -> float:
        beat = self.trainer.heartbeat("w0")
        return 0.0 if beat is None else beat.figures.get(f"engine_loads_{way}", 0.0)


@pytest.fixture
def setting(trainer_side: TrainerSide, start_worker: Callable[..., Child], tmp_path: Path) -> Iterator[Setting]:
    setting = Setting(trainer_side, start_worker, tmp_path / "cache")
    yield setting
    setting.engine.close()


def test_a_version_is_served_before_its_copy_and_recorded_after(setting: Setting) -> None:
    """Meanwhile no other version begins and no pack is given that it has sampled; of those overtaken only the newest follows."""
    setting.follow()
    assert setting.engine.jobs == ["auto", "probe", "patch", "patch"]
    give = setting.hold_copy()
    served = setting.publish(3)
    wait_for(lambda: setting.engine.version == "3", "the patch")
    assert setting.is_served()
    setting.sample("p0")
    for version in (4, 5):
        setting.publish(version)
    with pytest.raises(pytest.fail.Exception):
        setting.trainer.collect(1, deadline_s=1.0)
    assert (setting.applied, setting.engine.version) == ([0, 1, 2], "3")
    give()
    assert setting.sampled_by() == {3}
    setting.trainer.wait_applied("w0", 5)
    assert setting.applied == [0, 1, 2, 3, 5]
    assert setting.is_served()
    assert setting.engine.jobs[-2:] == ["patch", "patch"]
    fact = setting.trainer.applied[3]
    assert (fact.checksum, fact.num_bytes, fact.previous_version) == (setting.trainer.root(served), served.num_bytes, 2)


def test_a_server_that_restarts_before_the_copy_gets_the_folder_before(setting: Setting) -> None:
    setting.follow()
    before, give = setting.tensors, setting.hold_copy()
    setting.publish(3)
    wait_for(lambda: setting.engine.version == "3", "the patch")
    setting.engine.version = "default"
    wait_for(lambda: setting.engine.version == "2", "the folder before to be loaded")
    assert setting.is_served(before)
    assert setting.engine.loads[-1] == ("2", str(setting.folder / "a"))
    give()
    setting.trainer.wait_applied("w0", 3)
    assert setting.is_served()


def test_a_worker_that_is_killed_before_the_copy_leaves_one_that_is_repaired(setting: Setting) -> None:
    setting.follow()
    give = setting.hold_copy()
    fact = setting.publish(3)
    wait_for(lambda: setting.engine.version == "3" and setting.loads_by("patch") == 3, "the patch")
    setting.worker.kill()
    give()
    setting.start()
    setting.trainer.wait_applied("w0", 3)
    assert setting.is_served()
    assert setting.engine.jobs[-2:] == ["auto", "probe"]
    assert setting.trainer.applied[-1].num_bytes == fact.num_bytes  # its folder was one version behind, and torn
    setting.publish(4)
    setting.trainer.wait_applied("w0", 4)
    assert (setting.engine.jobs[-1], setting.is_served()) == ("patch", True)


@pytest.mark.parametrize("problem", ["root", "rotten"])
def test_a_version_whose_copy_differs_is_withdrawn(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    """The manifest has another root, or the copy is right only because it was fetched whole: no pack of what was served is given."""
    setting.follow()
    before, give, write = setting.tensors, setting.hold_copy(), VersionManifest.to_json
    if problem == "root":
        monkeypatch.setattr(
            VersionManifest, "to_json", lambda manifest: write(manifest.model_copy(update={"state_root": "0" * 64}))
        )
    else:
        with next((setting.folder / "b").glob("*.safetensors")).open("r+b") as shard:
            shard.seek(-8, os.SEEK_END)
            shard.write(b"spoiled!")
    setting.publish(3)
    monkeypatch.undo()
    wait_for(lambda: setting.engine.version == "3", "the patch")
    setting.sample("p0")
    setting.engine.flow.clear()
    give()
    wait_for(lambda: "version withdrawn" in setting.worker.log_tail(), "the worker to log it")
    wait_for(lambda: ("2", str(setting.folder / "a")) in setting.engine.loads[1:], "the folder before to be loaded")
    setting.engine.flow.set()
    if problem == "root":
        wait_for(lambda: setting.trainer.refused, "the refusal")
        assert "its root is" in setting.trainer.refused[0].reason
        assert setting.sampled_by() == {2}
        assert setting.is_served(before)
        setting.trainer.source.answer()
    setting.trainer.wait_applied("w0", 3)
    assert setting.is_served()
    assert setting.engine.jobs[-2:] == ["auto", "auto"]
    wait_for(lambda: setting.loads_by("withdrawn") == 1, "the heartbeat to count it")
    setting.publish(4)
    setting.trainer.wait_applied("w0", 4)
    assert (setting.engine.jobs[-1], setting.is_served()) == ("patch", True)


def test_a_copy_that_finds_no_space_withdraws_the_version_until_there_is_some(
    trainer_side: TrainerSide, start_worker: Callable[..., Child], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        setting = Setting(trainer_side, start_worker, disk)
        ballast = fill(disk)
        os.truncate(ballast, ballast.stat().st_size - (128 << 10))
        setting.publish(1)
        wait_for(lambda: "has no space for version 1" in setting.worker.log_tail(), "the worker to log it")
        wait_for(lambda: setting.engine.version == "0", "the folder before to be loaded")
        assert setting.engine.jobs == ["auto", "probe", "patch", "auto"]
        ballast.unlink()
        trainer_side.wait_applied("w0", 1)
        assert setting.engine.jobs[4:] == ["auto"]
        assert setting.is_served()
        setting.engine.close()


@pytest.mark.parametrize("problem", ["object", "infinity", "words"])
def test_a_patch_that_is_not_verified_is_never_applied(setting: Setting, problem: str) -> None:
    """An object has another hash, a value is not finite: refused. The server has other words than the base: loaded from the folder."""
    setting.follow()
    before = setting.tensors
    if problem == "words":
        for parameter in setting.engine.model.parameters():
            parameter.data.fill_(0.5)
    setting.publish(3, corrupt=".pack" if problem == "object" else "", to=0x7F800000 if problem == "infinity" else None)
    if problem == "words":
        setting.trainer.wait_applied("w0", 3)
        assert setting.engine.jobs[4:] == ["patch", "auto"]
        assert setting.is_served()
        return
    wait_for(lambda: setting.trainer.refused, "the refusal")
    assert ("sha256" if problem == "object" else "not finite") in setting.trainer.refused[0].reason
    assert len(setting.engine.jobs) == 4
    assert setting.is_served(before)


async def test_a_copy_that_takes_too_long_withdraws_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not recorded when it ends after all."""
    monkeypatch.setattr(weight_follower, "COPY_DEADLINE_S", 0.01)
    written, withdrawn = asyncio.Event(), []

    async def fetch(*_: object, **__: object) -> Any:
        await written.wait()
        return SimpleNamespace(is_patched=True)

    async def withdraw(version: PolicyVersion, reason: str) -> None:
        withdrawn.append((version, reason))
        written.set()

    parts: dict[str, Any] = dict.fromkeys(("bus", "mirror", "engine", "announcements"))
    servable, swap = SimpleNamespace(on_unused=None), SimpleNamespace(withdraw=withdraw)
    follower = WeightFollower(
        **parts, servable=cast(Any, servable), gate=VersionGate(), swap=cast(Any, swap), run_id="r"
    )
    monkeypatch.setattr(follower, "_fetch", fetch)
    manifest = BlobRef(key="m", size_bytes=1, sha256="0" * 64)
    await follower._copy(Patched(PolicyVersion(1), PolicyVersion(2), manifest), 0.0, 0.0)
    [(version, reason)] = withdrawn
    assert (version, follower.num_withdrawn) == (2, 1)
    assert "its copy, which failed: not written and verified within 0 s" in reason
