"""A version that is a change of the one before is served first, and recorded once its copy is verified."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.groups import make_task
from tests.power import small_disk
from tests.rollout_service.engines.test_patched_loads import PatchedEngine
from tests.rollout_service.engines.test_weight_patch import changed
from tests.rollout_service.trainer_side import TrainerSide, attached
from tests.servers import wait_for
from tests.system.rollout_and_reward import fill
from torch import Tensor, nn

from penstock.deploy.processes.child import Child
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import WeightsPublished
from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import VersionManifest
from penstock.rollout_service.device_turns import EngineTurns
from penstock.rollout_service.engines.weight_changes import TensorChange, WeightChanges
from penstock.rollout_service.errors import WeightsUnusable
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.weights import weight_follower
from penstock.rollout_service.weights.mirror import MirroredVersion
from penstock.rollout_service.weights.servable_versions import ServableVersions, VersionGate
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
    """Meanwhile no other version begins and no pack is given that it sampled; then only the newest follows."""
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


@pytest.mark.slow
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
    """The manifest has another root, or the copy was fetched whole: no pack of what was served is given."""
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
        setting.sample("p0")
        assert setting.sampled_by() == {0}
        ballast.unlink()
        trainer_side.wait_applied("w0", 1)
        assert setting.engine.jobs[4:] == ["auto"]
        assert setting.is_served()
        setting.engine.close()


@pytest.mark.parametrize("problem", ["object", "infinity"])
def test_a_patch_that_is_not_verified_is_never_applied(setting: Setting, problem: str) -> None:
    """An object has another hash, or a value is not finite: refused."""
    setting.follow()
    before = setting.tensors
    setting.publish(3, corrupt=".pack" if problem == "object" else "", to=0x7F800000 if problem == "infinity" else None)
    wait_for(lambda: setting.trainer.refused, "the refusal")
    assert ("sha256" if problem == "object" else "not finite") in setting.trainer.refused[0].reason
    assert len(setting.engine.jobs) == 4
    assert setting.is_served(before)


def test_an_evaluation_that_loads_the_version_which_waits_to_be_patched_in(setting: Setting) -> None:
    """It waited for another one's end, the patch for both: the patch is not tried, and nothing waits for its copy."""
    setting.follow()

    def evaluate(version: int) -> None:
        task = make_task(f"eval.v{version}.p0.s0", split="eval", pinned_version=version, temperature=0.0)
        setting.trainer.issue(f"eval-{version}", [task])

    setting.engine.flow.clear()
    evaluate(1)
    wait_for(lambda: setting.engine.version == "1" and setting.engine.num_running, "the first evaluation")
    wait_for(lambda: list((setting.folder / "patches").glob("*-2.0")), "the patch to be staged")
    evaluate(2)
    wait_for(lambda: (b := setting.trainer.heartbeat("w0")) and b.figures["packs_held"] == 2, "both packs to be taken")
    setting.engine.flow.set()
    setting.trainer.collect(2)
    setting.publish(3)
    setting.trainer.wait_applied("w0", 3)
    assert setting.applied == [0, 1, 2, 1, 2, 3]
    assert (setting.engine.jobs[4:6], setting.is_served()) == (["auto", "auto"], True)


V1, V2 = PolicyVersion(1), PolicyVersion(2)
MANIFEST = BlobRef(key="m", size_bytes=1, sha256="0" * 64)


class Calls:
    def __init__(self, answer: object = None) -> None:
        self.said, self.answer = [], answer

    async def __call__(self, *said: object, **_: object) -> object:
        self.said.append(said)
        return self.answer


def follower_of(**parts: Any) -> WeightFollower:
    """Return one whose engine serves version 1, of published versions 1 and 2."""
    engine = SimpleNamespace(version=V1, max_changed_share=0.05, stage=parts.pop("stage", None))
    swap = SimpleNamespace(metrics=WorkerMetrics(), turns=EngineTurns(), **parts)
    servable = ServableVersions(cast(Any, engine))
    servable.set_model(V1)
    nothing: Any = None
    follower = WeightFollower(
        bus=nothing, mirror=cast(Any, SimpleNamespace(changes=lambda *_: changes_to_2())), engine=cast(Any, engine),
        servable=servable, gate=VersionGate(linger_s=0.0), announcements=nothing, swap=cast(Any, swap), run_id="r",
    )  # fmt: skip
    for version in (V1, V2):
        follower._published.add(version, MANIFEST)
    return follower


def changes_to_2() -> WeightChanges:
    words = np.zeros(8, np.uint32)
    return WeightChanges(V1, V2, 8, (TensorChange("t", "float32", np.arange(8), words, words),))


async def test_changes_are_let_go_of_and_training_waits_on_where_a_patch_is_not_taken() -> None:
    """An evaluation of an older version has ended, and its version is still served."""
    staged: list[Any] = []

    async def stage(changes: WeightChanges) -> bool:
        staged.append(weakref.ref(changes.tensors[0].new))
        return True

    async def patch(*_: object) -> None:
        await asyncio.to_thread(wait_for, lambda: staged[0]() is None, "the changes to be freed")

    follower = follower_of(stage=stage, patch=patch)
    follower.gate._serves_older = True
    assert (await follower._patch_newest(), len(staged), follower.gate.serves_older) == (False, 1, True)


async def test_an_evaluation_of_the_model_that_is_served_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    follower = follower_of()
    monkeypatch.setattr(follower, "_fetch", Calls(MirroredVersion(V1, Path(), 0, 0.0, "")))
    async with follower.pinned(V1):
        assert follower.gate.pin == V1


async def test_an_evaluation_that_loads_another_model_meanwhile_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter of the model that was served waits for the gate, also a pinned one, and is not loaded without it."""
    follower = follower_of()
    base = MirroredVersion(V1, Path(), 0, 0.0, "")
    adapter = MirroredVersion(V2, Path(), 0, 0.0, "", base)
    loaded: list[tuple[str, bool]] = []

    async def load(mirrored: MirroredVersion, *, keeps_model: bool = False) -> None:
        follower.servable.set_model(PolicyVersion(0))  # by an evaluation that held the engine's lock
        loaded.append(("without the gate" if keeps_model else "by way of the gate", follower.gate.pin == V2))

    follower.swap.load = load  # type: ignore[method-assign, assignment]
    assert not await follower._apply_or_refuse(adapter, keeps_model=True)
    assert (follower._newest, follower._changed.is_set()) == (None, True)
    follower.servable.set_model(V1)
    monkeypatch.setattr(follower, "_fetch", Calls(adapter))
    async with follower.pinned(V2):
        assert follower.gate.pin == V2
    assert loaded == [("without the gate", False)] * 2 + [("by way of the gate", True)]


@pytest.mark.parametrize("problem", ["late", "hangs", "unusable"])
async def test_a_copy_that_fails_withdraws_the_version(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    """One that is late is not recorded; one that hangs ends the worker; a version published again is not refused."""
    monkeypatch.setattr(weight_follower, "COPY_DEADLINE_S", 0.01)
    answer, written, withdrawn, refused = (MANIFEST.model_copy(update={"key": "answer"}), asyncio.Event(), [], Calls())

    async def fetch(*_: object, **__: object) -> Any:
        if problem == "unusable":
            follower._published.add(V2, answer)
            raise WeightsUnusable("its root is another one")
        await written.wait()
        return SimpleNamespace(is_patched=True)

    async def withdraw(version: PolicyVersion, reason: str) -> None:
        withdrawn.append((version, reason))
        if problem == "late":
            written.set()

    follower = follower_of(withdraw=withdraw)
    monkeypatch.setattr(follower, "_fetch", fetch)
    follower.announcements = cast(Any, SimpleNamespace(announce_refused=refused))
    follower.gate._serves_older, follower._check.passed = True, V2
    with pytest.raises(ConfigError, match="version 2 was not") if problem == "hangs" else contextlib.nullcontext():
        await follower._copy(Patched(V1, V2, MANIFEST), 0.0, 0.0)
    [(version, reason)] = withdrawn
    assert (version, follower.gate.serves_older, follower._check.passed) == (2, True, None)
    assert ("its root" if problem == "unusable" else "failed: not written and verified within 0 s") in reason
    assert [said[:2] for said in refused.said] == ([(V2, MANIFEST)] if problem == "unusable" else [])
    assert follower._published.newest() == V2


def test_a_worker_whose_copy_never_ends_ends_when_it_is_asked_to(setting: Setting) -> None:
    """The disk does not answer: no thread that waits for it keeps the process."""
    setting.follow()
    setting.hold_copy()
    setting.publish(3)
    wait_for(lambda: setting.engine.version == "3", "the patch")
    setting.worker.ask_to_stop()
    assert setting.worker.wait(120.0) == 0, "all that it held is settled"
    assert "left half written" in setting.worker.log_tail()
