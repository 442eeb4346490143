"""Publishing: complete, verified, announced in that order; slow or broken storage; another trainer; garbage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_tensors

from deploy.bootstrap import bootstrap
from deploy.quickstart_task import write_model
from deploy.servers import NatsServer, S3Server
from protocol import blob_keys, streams, subjects
from protocol.facts import Head, WeightsPublished, decode, encode
from protocol.transport.blobs import Blobs
from protocol.transport.bus import Bus
from protocol.versions import PolicyVersion
from protocol.weights import WeightsManifest
from tests.servers import wait_for
from trainer.doors import Doors
from trainer.errors import PublicationFailed
from trainer.publish import Publisher, Snapshot, read_head


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for config and tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture
def doors(bus: Bus, blobs: Blobs, ring_streams: str) -> Doors:
    """A bootstrapped run."""
    return Doors(ring_streams, bus, blobs)


def snapshot(version: int, *, must_publish: bool = False) -> Snapshot:
    tensors = {"a": torch.full((8, 8), float(version)), "b": torch.arange(10.0)}
    return Snapshot(PolicyVersion(version), version, tensors, 74, "float32", must_publish)


def test_a_version_is_complete_before_it_is_announced(doors: Doors, model_folder: Path) -> None:
    """When the announcement comes, the head points to a manifest whose every object is there and verifies."""
    seen: list[WeightsPublished] = []
    subject = subjects.weights_published(doors.run_id)
    doors.bus.tail(f"{doors.run_id}-weights", subject, WeightsPublished, seen.append).wait()
    told: list[int] = []
    publisher = Publisher(
        doors, model_folder=model_folder, keep_versions=4, on_published=told.append, max_shard_bytes=200
    )
    publisher.submit(snapshot(0))
    wait_for(lambda: seen, "the announcement")
    manifest = WeightsManifest.from_json(doors.blobs.get(seen[0].manifest))
    assert (manifest.version, manifest.num_parameters, manifest.dtype) == (0, 74, "float32")
    assert len(manifest.shards) == 2  # 256 bytes and 40 bytes, at most 200 each: the larger stands alone
    tensors = {k: t for shard in manifest.shards for k, t in load_tensors(doors.blobs.get(shard.blob)).items()}
    assert torch.equal(tensors["a"], torch.zeros(8, 8))
    names = {file.name for file in manifest.model_files}
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"} <= names
    for file in manifest.model_files:
        doors.blobs.get(file.blob)
    head = read_head(doors.bus.key_value(streams.state_bucket(doors.run_id).bucket).wait())
    assert head is not None
    assert head.manifest == seen[0].manifest
    publisher.submit(snapshot(1))
    publisher.close()
    assert told == [0, 1]
    second = Publisher(doors, model_folder=model_folder, keep_versions=4)  # a later life knows where the run stands
    assert second.head is not None
    assert second.head.version == 1
    assert second.is_published(PolicyVersion(1))
    second.close()


def test_garbage_goes_but_not_what_is_kept_or_pinned(doors: Doors, model_folder: Path) -> None:
    """Old versions are deleted, the newest few and a version under evaluation stay."""
    publisher = Publisher(doors, model_folder=model_folder, keep_versions=2)
    for version in range(12):
        publisher.submit(snapshot(version, must_publish=version == 1))
        publisher.wait_until_published(PolicyVersion(version), 20.0)
        if version != 1:
            publisher.unpin(PolicyVersion(version))
    publisher.close()
    prefix = blob_keys.all_weights_prefix(doors.run_id)
    left = {blob_keys.version_of_weights(doors.run_id, item.key) for item in doors.blobs.list(prefix)}
    assert {1, 10, 11} <= left
    assert 0 not in left
    assert 2 not in left


def test_a_version_overtaken_by_the_next_is_skipped(
    own_s3: Callable[[], S3Server], bus: Bus, ring_streams: str, model_folder: Path
) -> None:
    """While storage is away, waiting versions give way to newer ones, except one that somebody needs."""
    storage = own_s3()
    doors = Doors(ring_streams, bus, Blobs(storage.settings))
    publisher = Publisher(doors, model_folder=model_folder, keep_versions=8)
    publisher.submit(snapshot(0))
    publisher.wait_until_published(PolicyVersion(0), 20.0)
    storage.kill()
    publisher.submit(snapshot(1))
    wait_for(lambda: not publisher._waiting, "the upload to begin")
    for version in (2, 3, 4, 5):
        publisher.submit(snapshot(version, must_publish=version == 3))
    storage.restart()
    publisher.close()
    assert [v for v in range(6) if publisher.is_published(PolicyVersion(v))] == [0, 1, 3, 5]
    assert (publisher.num_published, publisher.num_skipped) == (4, 2)


def test_storage_that_stays_away_is_an_error(
    own_s3: Callable[[], S3Server], bus: Bus, ring_streams: str, model_folder: Path
) -> None:
    """When the object store does not come back within the deadline, the next submission says so."""
    storage = own_s3()
    doors = Doors(ring_streams, bus, Blobs(storage.settings, deadline_s=0.5))
    publisher = Publisher(doors, model_folder=model_folder, keep_versions=8)
    storage.kill()
    publisher.submit(snapshot(0))
    with pytest.raises(PublicationFailed, match="no usable answer"):
        publisher.wait_until_published(PolicyVersion(0), 20.0)
    with pytest.raises(PublicationFailed, match="could not be published"):
        publisher.submit(snapshot(1))


def test_two_trainers_of_one_run_are_told_apart(doors: Doors, model_folder: Path) -> None:
    """A trainer whose head was moved by somebody else refuses to publish over it."""
    publisher = Publisher(doors, model_folder=model_folder, keep_versions=8)
    publisher.submit(snapshot(0))
    publisher.wait_until_published(PolicyVersion(0), 20.0)
    state = doors.bus.key_value(streams.state_bucket(doors.run_id).bucket).wait()
    entry = state.get(streams.HEAD_KEY).wait()
    assert entry is not None
    head = decode(entry.value, Head)
    state.put(streams.HEAD_KEY, encode(Head(version=7, step=7, manifest=head.manifest))).wait()
    publisher.submit(snapshot(1))
    with pytest.raises(PublicationFailed, match="another trainer"):
        publisher.close()
    unchanged = state.get(streams.HEAD_KEY).wait()
    assert unchanged is not None
    assert decode(unchanged.value, Head).version == 7


def test_publishing_outlives_a_restart_of_nats(
    own_nats: Callable[[], NatsServer], blobs: Blobs, run_id: str, model_folder: Path
) -> None:
    """NATS is killed and comes back while versions are published: all are announced, none twice."""
    server = own_nats()
    with Bus.connect(server.settings, name="publisher") as bus:
        bootstrap(bus, blobs, run_id)
        seen: list[int] = []
        publisher = Publisher(Doors(run_id, bus, blobs), model_folder=model_folder, keep_versions=8)
        publisher.submit(snapshot(0, must_publish=True))
        publisher.wait_until_published(PolicyVersion(0), 20.0)
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
