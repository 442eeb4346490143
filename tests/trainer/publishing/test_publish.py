"""Publishing: versions are stored, verified, announced in that order; slow storage, refusals, two trainers."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tests.servers import wait_for
from tests.trainer.learner.forks import Fork
from tests.weights_source import NEVER, read_version
from torch import Tensor

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.protocol import blob_keys, streams, subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import Head, WeightsPublished, WeightsRefused, decode
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.protocol.weights.version_reader import WeightReader
from penstock.trainer import crash_points
from penstock.trainer.connections import Connections
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.publication import Publication, read_head
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.weight_buckets import ModelWeights, Snapshot, copy_to_buckets
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy


def tensors(version: int) -> dict[str, Tensor]:
    table = torch.arange(2048.0).reshape(32, 64)
    table[version % 32, :8] = -float(version)
    return {"a": table, "b": torch.arange(10.0)}


def weights(version: int) -> ModelWeights:
    return ModelWeights(copy_to_buckets(tensors(version), copy_id=version, bucket_bytes=4096))


def snapshot(version: int, *, must_publish: bool = False) -> Snapshot[ModelWeights]:
    return Snapshot(PolicyVersion(version), version, weights(version), "float32", must_publish)


def head_of(connections: Connections) -> Head:
    head = read_head(connections.bus.key_value(streams.state_bucket(connections.run_id).bucket).wait())
    assert head is not None
    return head


def manifest_of(connections: Connections, reference: BlobRef) -> VersionManifest:
    return VersionManifest.from_json(connections.blobs.get(reference))


def publish(publisher: Publisher, version: int) -> None:
    publisher.submit(snapshot(version, must_publish=True))
    publisher.wait_until_published(PolicyVersion(version), 180.0)
    publisher.unpin(PolicyVersion(version))


def assert_head_is(connections: Connections, version: int, shared: SharedSegments | None = None) -> None:
    head = head_of(connections)
    assert head.version == version
    found = read_version(connections.blobs, connections.run_id, version, head.manifest, shared)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(version).items())


def test_a_version_is_complete_before_it_is_announced(connections: Connections, model_folder: Path) -> None:
    seen: list[WeightsPublished] = []
    subject = subjects.weights_published(connections.run_id)
    connections.bus.tail(f"{connections.run_id}-weights", subject, WeightsPublished, seen.append).wait()
    published: list[Publication] = []
    publisher = Publisher(connections, model_folder=model_folder, on_published=published.append)
    publisher.submit(snapshot(0))
    wait_for(lambda: seen, "the announcement")
    manifest = manifest_of(connections, seen[0].manifest)
    assert (manifest.version, manifest.kind, manifest.num_words) == (0, "anchor", 2058)
    assert len(manifest.objects) == 2  # 8192 bytes and 40 bytes, at most 4096 each: the larger has its own
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= {file.name for file in manifest.model_files}
    for reference in manifest.references():
        connections.blobs.get(reference)
    assert head_of(connections).manifest == seen[0].manifest
    assert_head_is(connections, 0)
    publisher.submit(snapshot(1))
    publisher.close()
    assert_head_is(connections, 1)
    patch = manifest_of(connections, seen[1].manifest)
    assert (patch.kind, patch.num_changed, patch.parent) == ("patch", 16, manifest_ancestor(manifest, seen[0].manifest))
    assert [(p.version, p.kind, p.density) for p in published] == [(0, "anchor", 1.0), (1, "patch", 16 / 2058)]
    assert published[1].sent_bytes < 0.5 * published[1].raw_bytes


def manifest_ancestor(manifest: VersionManifest, reference: BlobRef) -> object:
    from penstock.trainer.publishing.version_writer import Written

    return Written(manifest, reference).as_ancestor


def numbered(*numbers: int) -> list[PolicyVersion]:
    return [PolicyVersion(number) for number in numbers]


def test_versions_that_no_session_published_are_named(connections: Connections, model_folder: Path) -> None:
    """A skipped number, one beyond the head, and one that only waits to be published; the next session knows it too."""
    first = Publisher(connections, model_folder=model_folder)
    assert first.never_published(numbered(0)) == numbered(0)
    for version in (0, 2):
        publish(first, version)
    assert first.never_published(numbered(2, 0)) == []
    assert first.never_published(numbered(3, 1, 0, 2)) == numbered(1, 3)
    first.close()
    second = Publisher(connections, model_folder=model_folder, epoch=1)
    assert second.never_published(numbered(0, 1, 2, 3)) == numbered(1, 3)
    second.submit(snapshot(4, must_publish=True))
    second.close()
    assert second.never_published(numbered(0, 1, 2, 3, 4, 5)) == numbered(1, 3, 5)


def test_a_session_that_resumes_the_head_itself_reads_no_weights(connections: Connections, model_folder: Path) -> None:
    """Weights that equal the head's bit for bit are recognised by their root; others are not."""
    first = Publisher(connections, model_folder=model_folder)
    publish(first, 0)
    publish(first, 1)
    first.close()
    second = Publisher(connections, model_folder=model_folder, epoch=1)
    assert not second.versions.resume(weights(0), "float32")
    assert second.versions.resume(weights(1), "float32")
    for reference in manifest_of(connections, head_of(connections).manifest).objects:
        connections.blobs.delete([reference.key])  # never read
    publish(second, 2)
    second.close()
    assert manifest_of(connections, head_of(connections).manifest).kind == "patch"


@pytest.mark.parametrize("gone", ["objects", "manifest"])
def test_an_unreadable_head_is_followed_by_a_full_snapshot(
    connections: Connections, model_folder: Path, gone: str
) -> None:
    """Without the head's bytes nothing can be patched: the next version is a full snapshot, under the next number."""
    first = Publisher(connections, model_folder=model_folder)
    publish(first, 0)
    first.close()
    head = head_of(connections).manifest
    keys = [head.key] if gone == "manifest" else [ref.key for ref in manifest_of(connections, head).objects]
    connections.blobs.delete(keys)
    second = Publisher(connections, model_folder=model_folder, epoch=1)
    publish(second, 1)
    second.close()
    assert manifest_of(connections, head_of(connections).manifest).kind == "anchor"
    assert_head_is(connections, 1)


def test_another_layout_starts_with_a_full_snapshot(connections: Connections, model_folder: Path) -> None:
    publisher = Publisher(connections, model_folder=model_folder)
    publish(publisher, 0)
    halves = {name: tensor.bfloat16() for name, tensor in tensors(1).items()}
    publisher.submit(Snapshot(PolicyVersion(1), 1, ModelWeights(copy_to_buckets(halves, copy_id=1)), "bfloat16"))
    publisher.close()
    manifest = manifest_of(connections, head_of(connections).manifest)
    assert (manifest.kind, manifest.parent is None) == ("anchor", False)
    found = read_version(connections.blobs, connections.run_id, 1, head_of(connections).manifest)
    assert torch.equal(found["a"], halves["a"])


def test_full_snapshots_are_written_in_the_background(connections: Connections, model_folder: Path) -> None:
    """Every third version gets a full snapshot of the same weights; versions remain patches, and later ones name it."""
    publisher = Publisher(
        connections, model_folder=model_folder, policy=FullSnapshotPolicy(max_ratio=1e9, max_versions=3)
    )
    for version in range(8):
        publish(publisher, version)
        publisher.versions.models.full_snapshots.close(20.0)  # a slow full snapshot would only be later
    publisher.close()
    assert publisher.versions.models.full_snapshots.num_written == 2
    head = head_of(connections).manifest
    manifest = manifest_of(connections, head)
    assert manifest.kind == "patch"
    assert manifest.anchor is not None
    assert manifest.anchor.version == 6
    plan = WeightReader(connections.blobs, connections.run_id).plan(manifest, None)
    assert [m.version for m in plan.manifests] == [6, 7]
    assert_head_is(connections, 7)


def test_a_dense_version_is_a_full_snapshot_when_one_is_due(connections: Connections, model_folder: Path) -> None:
    """When most bits change, a patch and a full snapshot of it would cost more than the full snapshot alone."""
    published: list[Publication] = []
    policy = FullSnapshotPolicy(max_ratio=2.0, max_versions=100)
    publisher = Publisher(connections, model_folder=model_folder, policy=policy, on_published=published.append)
    random = torch.Generator().manual_seed(0)
    for version in range(8):
        shorter = (torch.randn(128, 64, generator=random).view(torch.int32) & ~0xFF).view(torch.float32)
        dense = {"a": shorter, "b": torch.arange(10.0)}
        changed = ModelWeights(copy_to_buckets(dense, copy_id=version))
        publisher.submit(Snapshot(PolicyVersion(version), version, changed, "float32", must_publish=True))
    publisher.close()
    patches = ["patch"] * 3  # of two thirds of a full snapshot
    assert [p.kind for p in published] == ["anchor", *patches, "anchor", *patches]
    assert publisher.versions.models.full_snapshots.num_written == 0
    assert sum(p.sent_bytes for p in published) < 1.4 * sum(p.raw_bytes for p in published)  # the rest is manifests
    found = read_version(connections.blobs, connections.run_id, 7, head_of(connections).manifest)
    assert torch.equal(found["a"], dense["a"])


def test_a_patch_that_is_hardly_smaller_is_not_published(connections: Connections, model_folder: Path) -> None:
    """When all bits of float32 values change, every version is a full snapshot: workers would decode a patch twice."""
    published: list[Publication] = []
    publisher = Publisher(
        connections, model_folder=model_folder, policy=FullSnapshotPolicy(100.0), on_published=published.append
    )
    random = torch.Generator().manual_seed(0)
    for version in range(3):
        dense = copy_to_buckets({"a": torch.randn(128, 64, generator=random)}, copy_id=version)
        publisher.submit(Snapshot(PolicyVersion(version), version, ModelWeights(dense), "float32", must_publish=True))
    publisher.close()
    assert [p.kind for p in published] == ["anchor"] * 3
    assert [p.parent for p in published] == [None, 0, 1]


def refuse(connections: Connections, worker: str) -> None:
    head = head_of(connections)
    fact = WeightsRefused(
        run_id=connections.run_id,
        worker_id=worker,
        version=head.version,
        manifest=head.manifest,
        serving=None,
        reason="why",
    )
    connections.bus.publish(
        subjects.weights_refused(connections.run_id), fact, msg_id=f"{worker}:{head.manifest.sha256}"
    ).wait()


def test_a_refused_patch_is_answered_with_a_full_snapshot(connections: Connections, model_folder: Path) -> None:
    """The same version is published again immediately, as a full snapshot; to refuse that takes two workers."""
    publisher = Publisher(connections, model_folder=model_folder, policy=NEVER)
    publish(publisher, 0)
    publish(publisher, 1)
    refused = head_of(connections).manifest
    refuse(connections, "w0")
    wait_for(lambda: head_of(connections).manifest != refused, "the answer")
    answer = head_of(connections).manifest
    assert (manifest_of(connections, answer).kind, manifest_of(connections, answer).version) == ("anchor", 1)
    assert_head_is(connections, 1)
    refuse(connections, "w0")
    publish(publisher, 2)
    assert manifest_of(connections, head_of(connections).manifest).kind == "patch"
    publish(publisher, 3)
    publisher.close()
    assert_head_is(connections, 3)


def test_an_announcement_whose_id_a_worker_took_is_made(
    connections: Connections, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the object store knows the id before the announcement; the stream has it all the same, once."""
    stream = f"{connections.run_id}-weights"

    def take(point: CrashPoint) -> None:
        if point is CrashPoint.HEAD_MOVED:
            head = head_of(connections)
            fact = WeightsRefused(
                run_id=connections.run_id, worker_id="w0", version=99, manifest=head.manifest, serving=None, reason=""
            )
            msg_id = f"w:{head.version}:{head.manifest.sha256[:16]}"
            connections.bus.publish(subjects.weights_refused(connections.run_id), fact, msg_id=msg_id).wait()

    monkeypatch.setattr(crash_points, "reach", take)
    publisher = Publisher(connections, model_folder=model_folder)
    publish(publisher, 0)
    publisher.close()
    found = connections.bus.read_stream(stream, subjects.weights_published(connections.run_id)).wait()
    assert [decode(message.data, WeightsPublished).version for message in found] == [0]


def test_forged_refusals_do_not_make_every_version_a_full_snapshot(
    connections: Connections, model_folder: Path
) -> None:
    """Invented workers refuse each version: six are published again, then patches follow on patches."""
    publisher = Publisher(connections, model_folder=model_folder, policy=NEVER)
    publish(publisher, 0)
    for version in range(1, 9):
        publish(publisher, version)
        refused = head_of(connections).manifest
        for worker in ("forged-0", "forged-1"):
            refuse(connections, worker)
        if version <= 6:
            wait_for(lambda refused=refused: head_of(connections).manifest != refused, "the answer")
    publisher.close()
    keys = [stat.key for stat in connections.blobs.list(blob_keys.all_weights_prefix(connections.run_id))]
    assert sum(key.endswith("manifest.json") for key in keys) == 9 + 6
    assert manifest_of(connections, head_of(connections).manifest).kind == "patch"
    assert_head_is(connections, 8)


def test_a_version_overtaken_by_the_next_is_skipped(
    own_s3: Callable[[], S3Server], bus: Bus, run_streams: str, model_folder: Path
) -> None:
    """While storage is unreachable, waiting versions are replaced by newer ones, and the next patch covers them all."""
    storage = own_s3()
    connections = Connections(run_streams, bus, Blobs(storage.settings))
    publisher = Publisher(connections, model_folder=model_folder)
    publisher.submit(snapshot(0))
    publisher.wait_until_published(PolicyVersion(0), 180.0)
    storage.kill()
    publisher.submit(snapshot(1))
    wait_for(lambda: not publisher._waiting, "the upload to begin")
    for version in (2, 3, 4, 5):
        publisher.submit(snapshot(version, must_publish=version == 3))
    storage.restart()
    publisher.close()
    assert [v for v in range(6) if publisher.is_published(PolicyVersion(v))] == [0, 1, 3, 5]
    assert (publisher.num_published, publisher.num_skipped) == (4, 2)
    manifest = manifest_of(connections, head_of(connections).manifest)
    assert manifest.parent is not None
    assert manifest.parent.version == 3
    assert_head_is(connections, 5)


def test_storage_that_stays_unreachable_is_an_error(
    own_s3: Callable[[], S3Server], bus: Bus, run_streams: str, model_folder: Path
) -> None:
    """When the object store does not answer within the deadline, the next submission raises."""
    storage = own_s3()
    connections = Connections(run_streams, bus, Blobs(storage.settings, deadline_s=0.5))
    publisher = Publisher(connections, model_folder=model_folder)
    storage.kill()
    publisher.submit(snapshot(0))
    with pytest.raises(PublicationFailed, match="no valid answer"):
        publisher.wait_until_published(PolicyVersion(0), 20.0)
    with pytest.raises(PublicationFailed, match="could not be published"):
        publisher.submit(snapshot(1))


CRASHES = {
    CrashPoint.SHARDS_STORED: 0,
    CrashPoint.MANIFEST_STORED: 0,
    CrashPoint.HEAD_MOVED: 1,
    CrashPoint.ANNOUNCED: 1,
    CrashPoint.ANCHOR_STORED: 1,
}


def main(arguments: Sequence[str]) -> None:
    """Publish versions 0 and 1, and be killed at a crash point of the second; given the point, and the rest as JSON."""
    point, given = arguments
    setup = json.loads(given)
    bus = Bus.connect(NatsSettings.model_validate(setup["nats"]), name="killed")
    connections = Connections(setup["run_id"], bus, Blobs(S3Settings.model_validate(setup["s3"])))
    always = FullSnapshotPolicy(max_ratio=1e9, max_versions=1)
    publisher = Publisher(connections, model_folder=Path(setup["model"]), epoch=1, policy=always)
    publisher.submit(snapshot(0, must_publish=True))
    publisher.wait_until_published(PolicyVersion(0), 180.0)
    crash_points.arm(point)
    publisher.submit(snapshot(1, must_publish=True))
    publisher.close()


@pytest.mark.parametrize(("point", "committed"), CRASHES.items())
def test_a_publisher_killed_at_any_step_leaves_a_complete_head(
    connections: Connections,
    model_folder: Path,
    nats_settings: NatsSettings,
    s3_settings: S3Settings,
    point: CrashPoint,
    committed: int,
    tmp_path: Path,
) -> None:
    """SIGKILL between any two steps: the head is the old version or the whole new one; the next session continues.

    A worker of the same host reads it without S3; what the killed session stored for no head has no name there.
    """
    worker = SharedSegments(connections.run_id)
    worker.join()
    setup = {
        "nats": {**nats_settings.model_dump(mode="json"), "password": nats_settings.password},
        "s3": {**s3_settings.model_dump(mode="json"), "secret_key": s3_settings.secret_key},
        "run_id": connections.run_id,
        "model": str(model_folder),
    }
    Fork(tmp_path, __name__, point, json.dumps(setup)).wait(-signal.SIGKILL)
    assert_head_is(connections, committed, worker)
    seen: list[int] = []
    subject = subjects.weights_published(connections.run_id)
    connections.bus.tail(
        f"{connections.run_id}-weights", subject, WeightsPublished, lambda f: seen.append(f.version), from_start=True
    ).wait()
    later = Publisher(connections, model_folder=model_folder, epoch=2)
    assert later.versions.resume(weights(committed), "float32")  # as from a checkpoint of this version
    publish(later, committed + 1)
    later.close()
    assert_head_is(connections, committed + 1, worker)
    assert worker.figures()["weights_bytes_s3"] == 0.0 < worker.figures()["weights_bytes_shared_memory"]
    worker.close()
    assert manifest_of(connections, head_of(connections).manifest).kind == "patch"
    wait_for(lambda: len(seen) > committed + 1, "the announcements")
    assert seen == list(range(committed + 2))  # an unannounced version is announced now, and none twice


def test_a_session_after_a_kill_may_resume_older_weights(connections: Connections, model_folder: Path) -> None:
    """A checkpoint older than the head, which is read from its chain, is published as a patch back to its weights.

    The head that was not announced is, also for later sessions: what it sampled is as old as its step says.
    """
    first = Publisher(connections, model_folder=model_folder, epoch=1)
    for version in range(4):
        first.versions._announce = first.versions._announce if version < 3 else lambda _: None
        publish(first, version)
    first.close()
    later = Publisher(connections, model_folder=model_folder, epoch=2)
    assert later.is_published(PolicyVersion(3))
    assert not later.versions.resume(weights(1), "float32")
    later.submit(Snapshot(PolicyVersion(4), 1, weights(1), "float32", must_publish=True))
    later.close()
    head = head_of(connections)
    manifest = manifest_of(connections, head.manifest)
    assert (manifest.kind, manifest.num_changed, manifest.epoch) == ("patch", 16, 2)
    third = Publisher(connections, model_folder=model_folder, epoch=3)
    third.close()
    assert third.steps_before == {0: 0, 1: 1, 2: 2, 3: 3, 4: 1}
    found = read_version(connections.blobs, connections.run_id, 4, head.manifest)
    assert torch.equal(found["a"], tensors(1)["a"])


def test_publishing_survives_a_restart_of_nats(
    own_nats: Callable[[], NatsServer], blobs: Blobs, run_id: str, model_folder: Path
) -> None:
    server = own_nats()
    with Bus.connect(server.settings, name="publisher") as bus:
        bootstrap(bus, blobs, run_id)
        seen: list[int] = []
        publisher = Publisher(Connections(run_id, bus, blobs), model_folder=model_folder)
        publisher.submit(snapshot(0, must_publish=True))
        publisher.wait_until_published(PolicyVersion(0), 180.0)
        server.kill()
        back = threading.Timer(0.5, server.restart)
        back.start()
        publisher.submit(snapshot(1, must_publish=True))
        publisher.close()
        back.join()
        subject = subjects.weights_published(run_id)
        bus.tail(
            f"{run_id}-weights", subject, WeightsPublished, lambda f: seen.append(f.version), from_start=True
        ).wait()
        wait_for(lambda: len(seen) >= 2, "both announcements")
        assert seen == [0, 1]
