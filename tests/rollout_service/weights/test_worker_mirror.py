"""The local copies of models: bit for bit what the trainer published, or refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import forked
from tests.rollout_service.weights.mirror_kill import POINTS
from tests.weights_source import WeightsSource
from torch import Tensor

from penstock.deploy import certificates
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import WeightsPublished
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.protocol.weights.signature import SigningKey, TrustedKeys
from penstock.rollout_service.engines.weight_changes import WeightChanges
from penstock.rollout_service.errors import WeightsUnusable
from penstock.rollout_service.weights.mirror import Mirror, MirroredVersion

OpenMirror = Callable[..., Mirror]
BUCKET_BYTES = 4096


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    write_model(folder, seed=0)
    return folder


class Run:
    """A run whose versions each change a hundredth of 8240 bfloat16 values, in five buckets."""

    def __init__(self, bus: Bus, blobs: Blobs, run_id: str, model_folder: Path, **options: object) -> None:
        self.bus, self.blobs, self.run_id, self.model_folder = bus, blobs, run_id, model_folder
        self.options: dict = {"bucket_bytes": BUCKET_BYTES, **options}
        self.source = WeightsSource(bus, blobs, run_id, model_folder, **self.options)
        self.states: dict[int, dict[str, Tensor]] = {}
        self.facts: dict[int, WeightsPublished] = {}

    def publish(self, version: int, *, corrupt: tuple[str, ...] = ()) -> WeightsPublished:
        random = torch.Generator().manual_seed(version)
        state = {
            name: tensor.clone()
            for name, tensor in (
                self.states[max(self.states)]
                if self.states
                else {f"layers.{n}": torch.randn(2048, generator=random).bfloat16() for n in range(4)}
                | {"norm": torch.ones(48, dtype=torch.bfloat16)}
            ).items()
        }
        for tensor in state.values():
            hit = torch.rand(tensor.shape, generator=random) < 0.01
            tensor[hit] = torch.randn(int(hit.sum()), generator=random).bfloat16()
        self.states[version] = state
        self.facts[version] = self.source.publish(version, state, corrupt=corrupt)
        return self.facts[version]

    def manifest(self, version: int) -> VersionManifest:
        return VersionManifest.from_json(self.blobs.get(self.facts[version].manifest))

    def fetch(self, mirror: Mirror, version: int, *, keep: tuple[int, ...] = ()) -> MirroredVersion:
        """Fetch a version as the newest, to be served; raises WeightsUnusable."""
        used = [PolicyVersion(v) for v in keep]
        return mirror.fetch(PolicyVersion(version), self.facts[version].manifest, keep=used, newest=True)

    def assert_is(self, mirrored: MirroredVersion, version: int) -> None:
        """The folder holds exactly the tensors that the trainer published, and loads as a model folder."""
        index = json.loads((mirrored.folder / "model.safetensors.index.json").read_text())
        found: dict[str, Tensor] = {}
        for name in set(index["weight_map"].values()):
            found |= load_file(mirrored.folder / name)
        expected = self.states[version]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert mirrored.checksum == self.manifest(version).state_root
        assert (mirrored.folder / "config.json").exists()


@pytest.fixture
def run(bus: Bus, blobs: Blobs, run_streams: str, model_folder: Path) -> Run:
    return Run(bus, blobs, run_streams, model_folder)


@pytest.fixture
def open_mirror(blobs: Blobs, run_streams: str, tmp_path: Path) -> Iterator[OpenMirror]:
    """Mirrors of the run by worker id, closed after the test."""
    opened: list[Mirror] = []

    def open_one(
        worker_id: str = "w0", trusted_keys: TrustedKeys | None = None, shared: SharedSegments | None = None
    ) -> Mirror:
        if shared is not None:
            shared.join()
        opened.append(Mirror(blobs, tmp_path / worker_id, run_streams, trusted_keys, shared=shared))
        return opened[-1]

    yield open_one
    for mirror in opened:
        mirror.close()


def test_versions_are_what_the_trainer_published(run: Run, open_mirror: OpenMirror) -> None:
    """Ten versions, each written to the folder that is not served, are bit for bit the trainer's; patches are small."""
    mirror = open_mirror()
    run.publish(0)
    whole = run.fetch(mirror, 0)
    run.assert_is(whole, 0)
    folders = [whole.folder]
    for version in range(1, 10):
        run.publish(version)
        mirrored = run.fetch(mirror, version, keep=(version - 1,))
        run.assert_is(mirrored, version)
        before = run.manifest(version - 1)
        run.assert_is(MirroredVersion(before.version, folders[-1], 0, 0.0, before.state_root), version - 1)
        assert mirrored.num_bytes == run.facts[version].num_bytes < 0.1 * whole.num_bytes  # each patch is fetched once
        folders.append(mirrored.folder)
    assert folders == [folders[0], folders[1]] * 5
    assert (folders[0] / "config.json").samefile(folders[1] / "config.json")
    again = run.fetch(mirror, 9)  # it is here
    assert (again.folder, again.num_bytes) == (folders[-1], 0)
    mirror._epoch += 1
    with pytest.raises(WeightsUnusable, match="published under lease"):
        run.fetch(mirror, 9)


def test_workers_of_a_host_download_what_the_trainer_has_not_stored_there_and_that_once(
    run: Run, open_mirror: OpenMirror, run_streams: str
) -> None:
    """At first everything is in S3; then nothing is downloaded, also of a version that was published again."""
    run.publish(0)
    shared = [SharedSegments(run_streams) for _ in range(2)]
    first, second = (open_mirror(f"w{number}", None, segments) for number, segments in enumerate(shared))

    def downloaded() -> list[float]:
        return [segments.figures()["weights_bytes_s3"] for segments in shared]

    for mirror in (first, second):
        run.assert_is(run.fetch(mirror, 0), 0)
    before = downloaded()
    assert before == [run.facts[0].num_bytes, 0.0]
    for version in range(1, 4):
        run.publish(version)
        for mirror in (first, second):
            run.assert_is(run.fetch(mirror, version, keep=(version - 1,)), version)
    run.source.answer()
    run.facts[4], run.states[4] = run.source.publish(4, run.states[1]), run.states[1]  # rolled back
    for mirror in (first, second):
        run.assert_is(mirrored := run.fetch(mirror, 4, keep=(3,)), 4)
    assert downloaded() == before
    first.close()
    assert shared[0].folder.exists()
    second.close()
    assert not [folder for folder in (mirrored.folder, shared[0].folder) if folder.exists()]


def test_changes_are_those_from_a_version_that_is_held(run: Run, open_mirror: OpenMirror) -> None:
    """Applied to one version they give the next, tensor by tensor, before that is fetched; and several at once."""
    mirror = open_mirror()
    for version in range(6):
        run.publish(version)
        if version in (0, 3):
            continue
        base, target = PolicyVersion(max(mirror.held(), default=0)), PolicyVersion(version)
        if not mirror.held():
            run.fetch(mirror, 0)
        found = mirror.changes(base, target, run.facts[version].manifest, 0.5)
        assert isinstance(found, WeightChanges)
        assert (found.base, found.version, found.num_words) == (base, target, 8240)
        state = {name: tensor.clone().view(torch.int16) for name, tensor in run.states[base].items()}
        for change in found.tensors:
            at = torch.from_numpy(change.positions)
            assert state[change.name][at].tolist() == change.old.view(np.int16).tolist()
            state[change.name][at] = torch.from_numpy(change.new.view(np.int16))
        assert all(torch.equal(state[name].view(torch.bfloat16), t) for name, t in run.states[version].items())
        assert 0 < found.num_changed < 0.03 * found.num_words
        run.fetch(mirror, version, keep=(base,))
    run.publish(6)
    assert mirror.changes(PolicyVersion(5), PolicyVersion(6), run.facts[6].manifest, 0.001) == "dense"
    assert mirror.changes(PolicyVersion(3), PolicyVersion(6), run.facts[6].manifest, 0.5) == "chain"
    run.publish(7, corrupt=(".pack",))
    assert mirror.changes(PolicyVersion(5), PolicyVersion(7), run.facts[7].manifest, 0.5) == "chain"
    other = open_mirror("w1")
    run.fetch(other, 5)  # from a full snapshot, which does not tell whether patches lead there
    run.fetch(other, 4, keep=(5,))
    assert other.changes(PolicyVersion(4), PolicyVersion(5), run.facts[5].manifest, 0.5) == "chain"


def test_a_late_joiner_applies_snapshot_and_patches_in_one_pass(run: Run, open_mirror: OpenMirror) -> None:
    """40 versions behind, it reads one full snapshot and 40 patches, each once."""
    for version in range(41):
        run.publish(version)
    mirrored = run.fetch(open_mirror(), 40)
    run.assert_is(mirrored, 40)
    manifests = [run.manifest(version) for version in range(41)]
    small = sum(file.blob.size_bytes for file in manifests[40].model_files)
    assert mirrored.num_bytes == sum(manifest.num_bytes for manifest in manifests) + small


def test_an_older_version_is_written_to_a_third_folder(run: Run, open_mirror: OpenMirror) -> None:
    mirror = open_mirror()
    for version in range(6):
        run.publish(version)
        mirrored = run.fetch(mirror, version, keep=(version - 1,))
    pinned = mirror.fetch(PolicyVersion(2), run.facts[2].manifest, keep=[PolicyVersion(v) for v in (2, 4, 5)])
    run.assert_is(pinned, 2)
    run.assert_is(mirrored, 5)
    assert mirror.held() == [2, 4, 5]
    mirror.trim([PolicyVersion(5)])
    assert mirror.held() == [4, 5]
    assert not pinned.folder.exists()


@pytest.mark.parametrize("what", [".pack", "manifest.json"])
def test_a_corrupt_object_is_refused_and_the_answer_is_accepted(run: Run, open_mirror: OpenMirror, what: str) -> None:
    mirror = open_mirror()
    run.publish(0)
    run.publish(1)
    served = run.fetch(mirror, 1)
    run.publish(2, corrupt=(what,))
    with pytest.raises(WeightsUnusable, match=r"version 2: .*sha256"):
        run.fetch(mirror, 2, keep=(1,))
    run.assert_is(served, 1)
    assert PolicyVersion(2) not in mirror.held()
    run.facts[2] = run.source.answer()
    run.assert_is(run.fetch(mirror, 2, keep=(1,)), 2)
    run.publish(3)
    following = run.fetch(mirror, 3, keep=(2,))
    run.assert_is(following, 3)
    assert following.num_bytes == run.facts[3].num_bytes  # the full snapshot is on the disk, in the other folder


def test_a_corrupt_full_snapshot_is_refused(run: Run, open_mirror: OpenMirror) -> None:
    """A worker without weights still has none, not wrong ones."""
    run.publish(0, corrupt=("00002-of-00005.safetensors",))
    mirror = open_mirror()
    with pytest.raises(WeightsUnusable, match=r"version 0: .*sha256"):
        run.fetch(mirror, 0)
    assert mirror.held() == []
    run.facts[0] = run.source.answer()
    run.assert_is(run.fetch(mirror, 0), 0)


def test_after_a_missing_object_the_newest_full_snapshot_is_fetched(run: Run, open_mirror: OpenMirror) -> None:
    """Patches that were garbage-collected in between are not needed: the worker starts from the full snapshot."""
    mirror = open_mirror()
    for version in range(4):
        run.publish(version)
        run.fetch(mirror, version, keep=(version - 1,))
    for version in range(4, 8):
        run.publish(version)
    run.facts[7] = run.source.answer()
    run.publish(8)
    for version in (4, 5, 6):
        run.blobs.delete([run.facts[version].manifest.key, *(ref.key for ref in run.manifest(version).objects)])
    run.assert_is(run.fetch(mirror, 8, keep=(3,)), 8)


def test_a_corrupt_copy_is_repaired(run: Run, open_mirror: OpenMirror) -> None:
    """Bytes that changed on the disk are found when the next patch is applied; the bucket is fetched again."""
    mirror = open_mirror()
    for version in range(3):
        run.publish(version)
        mirrored = run.fetch(mirror, version, keep=(version - 1,))
    path = mirrored.folder / "model-00001-of-00005.safetensors"
    data = bytearray(path.read_bytes())
    data[-100:] = bytes(100)
    path.write_bytes(data)
    run.publish(3)
    run.fetch(mirror, 3, keep=(2,))
    run.publish(4)
    repaired = run.fetch(mirror, 4, keep=(3,))
    assert repaired.folder == mirrored.folder
    run.assert_is(repaired, 4)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_fetch_is_repaired(run: Run, tmp_path: Path, open_mirror: OpenMirror, point: str, fresh: bool) -> None:
    """After SIGKILL at any point of a snapshot or a patch, the next process serves the head, bit for bit."""
    for version in range(1 if fresh else 3):
        run.publish(version)
    last = max(run.facts)
    arguments = {
        "s3": run.blobs._settings.model_dump(mode="json"),
        "folder": str(tmp_path / "w0"),
        "run_id": run.run_id,
        "versions": [(v, run.facts[v].manifest.model_dump(mode="json")) for v in range(last + 1)],
    }
    command = forked.call("tests.rollout_service.weights.mirror_kill", point, json.dumps(arguments))
    ended = forked.run(command, cwd=forked.ROOT, environ=os.environ, deadline_s=180.0)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    mirror = open_mirror()
    run.assert_is(run.fetch(mirror, last), last)
    run.publish(last + 1)
    repaired = run.fetch(mirror, last + 1, keep=(last,))
    run.assert_is(repaired, last + 1)
    assert repaired.num_bytes < 0.5 * run.manifest(0).num_bytes  # repaired by the patches, not by a full snapshot


def test_copies_of_workers_that_no_longer_run_are_removed(run: Run, tmp_path: Path, open_mirror: OpenMirror) -> None:
    run.publish(0)
    killed, running = (open_mirror(name) for name in ("killed", "running"))
    folders = [run.fetch(mirror, 0).folder for mirror in (killed, running)]
    (tmp_path / "something-else" / "a").mkdir(parents=True)
    killed._cache.unlock()  # as the kernel does when its process ends
    open_mirror("new")
    assert [folder.exists() for folder in folders] == [False, True]
    assert (tmp_path / "something-else" / "a").exists()


def test_two_workers_of_one_id_do_not_share_a_folder(open_mirror: OpenMirror) -> None:
    first = open_mirror("w0")
    with pytest.raises(ConfigError, match=r"another worker with the same worker\.id is running"):
        open_mirror("w0")
    assert first.held() == []


def test_only_signed_versions_are_loaded(
    bus: Bus, blobs: Blobs, run_streams: str, model_folder: Path, open_mirror: OpenMirror, tmp_path: Path
) -> None:
    """With trusted keys: no unsigned version, none that builds on one, and none that was here before."""
    private, public = certificates.signing_key(tmp_path / "keys")
    stranger, _ = certificates.signing_key(tmp_path / "stranger")
    trusted = TrustedKeys.from_file(public, "worker.trusted_keys_file")
    unsigned = Run(bus, blobs, run_streams, model_folder)
    unsigned.publish(0)
    before = open_mirror("w1")
    unsigned.fetch(before, 0)
    before.close()
    with pytest.raises(WeightsUnusable, match=r"version 0: .*it has no signature; set trainer\.signing_key_file"):
        unsigned.fetch(open_mirror("w1", trusted), 0)  # its folder has the version already

    run = Run(bus, blobs, run_streams, model_folder, signing_key=SigningKey.from_file(private, "x"))
    run.states[0] = unsigned.states[0]
    for version in (1, 2):
        run.publish(version)
    mirror = open_mirror("w2", trusted)
    run.assert_is(run.fetch(mirror, 1), 1)
    run.assert_is(run.fetch(mirror, 2, keep=(1,)), 2)
    assert run.manifest(2).kind == "patch"  # the manifest of a signed version is read without keys too
    run.assert_is(run.fetch(open_mirror("w3"), 2), 2)

    forged = Run(bus, blobs, run_streams, model_folder, signing_key=SigningKey.from_file(stranger, "x"), epoch=9)
    forged.states[2] = run.states[2]
    forged.publish(3)
    with pytest.raises(WeightsUnusable, match=r"version 3: .*signed by key [0-9a-f]{16}, trusted are [0-9a-f]{16}"):
        forged.fetch(mirror, 3, keep=(2,))
    own = {"signing_key": SigningKey.from_file(private, "x"), "epoch": 1}
    following = Run(bus, blobs, run_streams, model_folder, **own)
    following.states[3] = forged.states[3]
    following.publish(4)
    assert following.manifest(4).parent is None  # it does not build on what it has not signed
    following.assert_is(following.fetch(mirror, 4, keep=(2,)), 4)  # the forger's lease, 9, is not one that was seen
