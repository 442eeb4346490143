"""Publishing to a store that refuses, or while another trainer takes over: no incomplete version, none overwritten."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.refusing_s3 import RefusingS3
from tests.servers import wait_for
from tests.trainer.publishing.test_publish import assert_head_is, head_of, manifest_of, publish, snapshot
from tests.weights_source import NEVER

from penstock.protocol import blob_keys, streams, subjects
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.facts import WeightsPublished
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.weights.mirror import Mirror
from penstock.trainer.connections import Connections
from penstock.trainer.errors import LeaseLost, PublicationFailed
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy
from penstock.trainer.recovery.lease import acquire, fence

FULL = (507, "InsufficientStorage")


@pytest.fixture
def proxy(s3_settings: S3Settings) -> Iterator[RefusingS3]:
    """The session's S3 server, behind a proxy that can refuse writes or hold them up."""
    with RefusingS3(s3_settings) as proxy:
        yield proxy
        proxy.gate.set()


@pytest.fixture
def connections(bus: Bus, proxy: RefusingS3, run_streams: str) -> Connections:
    """A bootstrapped run, whose trainer writes through the proxy."""
    return Connections(run_streams, bus, Blobs(proxy.settings, deadline_s=30.0))


@pytest.fixture
def state(bus: Bus, run_streams: str) -> KeyValue:
    return bus.key_value(streams.state_bucket(run_streams).bucket).wait()


def announced(connections: Connections) -> list[WeightsPublished]:
    seen: list[WeightsPublished] = []
    subject = subjects.weights_published(connections.run_id)
    connections.bus.tail(
        f"{connections.run_id}-weights", subject, WeightsPublished, seen.append, from_start=True
    ).wait()
    return seen


@pytest.mark.parametrize("held", [".pack", "manifest.json"])
def test_a_trainer_whose_lease_expired_during_a_publication_changes_nothing(
    connections: Connections, blobs: Blobs, state: KeyValue, proxy: RefusingS3, model_folder: Path, held: str
) -> None:
    """Another holder publishes the same number in between: the first one neither moves the head nor announces."""
    seen = announced(connections)
    first = acquire(state, connections.run_id, clock=time.time, ttl_s=1.0)  # never renewed, as by a suspended process
    fence(state, first.epoch)
    older = Publisher(connections, model_folder=model_folder, epoch=first.epoch, policy=NEVER)
    publish(older, 0)
    proxy.only = held
    proxy.gate.clear()
    older.submit(snapshot(1))
    wait_for(lambda: proxy.num_held, "the first trainer to be uploading")
    with acquire(state, connections.run_id, clock=time.time, ttl_s=1.0) as second:
        assert second.epoch == first.epoch + 1
        fence(state, second.epoch)
        newer = Publisher(
            Connections(connections.run_id, connections.bus, blobs),
            model_folder=model_folder,
            epoch=second.epoch,
            policy=NEVER,
        )
        publish(newer, 1)
        head = head_of(connections)
        proxy.gate.set()
        with pytest.raises(PublicationFailed, match="another trainer"):
            older.close()
        with pytest.raises(LeaseLost, match=second.holder):
            first.confirm()
        assert head_of(connections) == head
        assert head.epoch == manifest_of(connections, head.manifest).epoch == second.epoch
        publish(newer, 2)
        newer.close()
    assert_head_is(connections, 2)
    parent = manifest_of(connections, head_of(connections).manifest).parent
    assert parent is not None
    assert parent.manifest == head.manifest
    wait_for(lambda: len(seen) >= 3, "three announcements")
    assert [fact.manifest for fact in seen[1:]] == [head.manifest, head_of(connections).manifest]
    stored = [stat.key for stat in blobs.list(blob_keys.weights_prefix(connections.run_id, PolicyVersion(1)))]
    assert (
        sum(key.endswith(".pack") for key in stored) == 2
    )  # the first one's exists, and no manifest in the chain names it


def test_one_of_two_simultaneous_publishers_wins(
    connections: Connections, proxy: RefusingS3, model_folder: Path
) -> None:
    """Both store the same number under their own keys; the head is one complete version, the other raises."""
    publishers = [Publisher(connections, model_folder=model_folder, policy=NEVER)]
    publish(publishers[0], 0)
    publishers.append(Publisher(connections, model_folder=model_folder, policy=NEVER))
    proxy.only = "manifest.json"
    proxy.gate.clear()
    for publisher in publishers:
        publisher.submit(snapshot(1, must_publish=True))
    wait_for(lambda: proxy.num_held == 2, "both to be about to store their manifests")
    proxy.gate.set()
    lost = []
    for publisher in publishers:
        try:
            publisher.close()
        except PublicationFailed as err:
            lost.append(str(err))
    assert len(lost) == 1
    assert "another trainer" in lost[0]
    assert_head_is(connections, 1)


@pytest.mark.parametrize("refused", [".pack", "manifest.json"])
def test_a_full_store_delays_a_version_and_the_one_before_stays_available(
    connections: Connections, proxy: RefusingS3, model_folder: Path, tmp_path: Path, refused: str
) -> None:
    """While the store refuses, the head is unchanged and the old version can be fetched; then publishing continues."""
    seen = announced(connections)
    publisher = Publisher(connections, model_folder=model_folder, policy=NEVER)
    publish(publisher, 0)
    proxy.only, proxy.refusal = refused, FULL
    publisher.submit(snapshot(1, must_publish=True))
    wait_for(lambda: proxy.num_refused >= 2, "two refusals")
    assert_head_is(connections, 0)
    mirror = Mirror(connections.blobs, tmp_path / "w0", connections.run_id)
    mirror.fetch(PolicyVersion(0), head_of(connections).manifest, newest=True)
    mirror.close()
    proxy.refusal = None
    publisher.close()
    assert_head_is(connections, 1)
    wait_for(lambda: len(seen) >= 2, "both announcements")
    assert [fact.version for fact in seen] == [0, 1]


def test_a_store_that_stays_full_stops_the_publisher_and_the_next_session_continues(
    connections: Connections, proxy: RefusingS3, model_folder: Path
) -> None:
    """The error names store, object and answer; a later session publishes the same number as a patch."""
    short_deadline = Connections(connections.run_id, connections.bus, Blobs(proxy.settings, deadline_s=0.5))
    publisher = Publisher(short_deadline, model_folder=model_folder, policy=NEVER)
    publish(publisher, 0)
    proxy.refusal = FULL
    publisher.submit(snapshot(1))
    with pytest.raises(PublicationFailed, match=rf"v00000001/.*{proxy.settings.endpoint}.*InsufficientStorage"):
        publisher.close()
    assert_head_is(connections, 0)
    proxy.refusal = None
    later = Publisher(connections, model_folder=model_folder, epoch=1, policy=NEVER)
    publish(later, 1)
    later.close()
    assert_head_is(connections, 1)
    assert manifest_of(connections, head_of(connections).manifest).kind == "patch"


def test_a_refused_full_snapshot_delays_no_version_and_is_tried_again(
    connections: Connections, proxy: RefusingS3, model_folder: Path
) -> None:
    """Versions remain patches on the older full snapshot; the next due one is written, and later patches name it."""
    short_deadline = Connections(connections.run_id, connections.bus, Blobs(proxy.settings, deadline_s=0.5))
    publisher = Publisher(
        short_deadline, model_folder=model_folder, policy=FullSnapshotPolicy(max_ratio=1e9, max_versions=1)
    )
    publish(publisher, 0)
    proxy.only, proxy.refusal = ".safetensors", FULL
    for version in (1, 2):
        publish(publisher, version)
        publisher.versions.models.full_snapshots.close(20.0)
    assert proxy.num_refused
    assert publisher.versions.models.full_snapshots.num_written == 0
    proxy.refusal = None
    publish(publisher, 3)
    publisher.versions.models.full_snapshots.close(20.0)
    publish(publisher, 4)
    publisher.close()
    manifest = manifest_of(connections, head_of(connections).manifest)
    assert (manifest.kind, manifest.anchor and manifest.anchor.version) == ("patch", 3)
    assert_head_is(connections, 4)
