"""A cluster of three real nats-servers: replicas, servers that are killed, replicas that lag, what a single server refuses."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from nats.js import api
from tests.protocol.transport.test_bus import issuing
from tests.servers import NatsCluster, wait_for

from penstock.deploy.bootstrap import bootstrap
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.errors import BusRefused, BusUnreachable, CompareAndSwapFailed
from penstock.protocol.facts import Head, RunEvent, TaskIssued
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport import tail
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.fact_publisher import Receipt
from penstock.protocol.transport.key_value import KeyValue
from penstock.protocol.transport.loop_thread import Pending
from penstock.protocol.transport.nats_connection import ATTEMPT_S, REQUEST_S
from penstock.trainer.publishing.publication import HeadKey


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    """Three servers; a test that kills some starts them again."""
    started = NatsCluster(tmp_path_factory.mktemp("cluster"))
    yield started
    started.stop()


@pytest.fixture
def clustered(cluster: NatsCluster) -> Iterator[Bus]:
    with Bus.connect(cluster.settings, name="test") as bus:
        yield bus


def stream_info(bus: Bus, stream: str) -> api.StreamInfo:
    asked = bus._connection.retry(lambda: bus._connection.js.stream_info(stream), what=stream, deadline_s=30.0)
    return bus._connection.call(asked, stream, 30.0).wait()


def leader_of(bus: Bus, stream: str) -> str:
    found: list[str] = []

    def ask() -> bool:
        info = stream_info(bus, stream)
        if info.cluster is not None and info.cluster.leader:
            found.append(info.cluster.leader)
        return bool(found)

    wait_for(ask, f"a leader of {stream}")
    return found[0]


def write(state: KeyValue, value: bytes) -> int:
    """Write a key until a server takes it, as the trainer does: its bucket may be without a leader."""
    found: list[int] = []

    def is_written() -> bool:
        with contextlib.suppress(BusUnreachable):
            found.append(state.put("head", value).wait())
        return bool(found)

    wait_for(is_written, f"a leader of {state.bucket}")
    return found[0]


def issue(bus: Bus, run: str, number: int, *, deadline_s: float = 120.0) -> int:
    """Publish task pack ``number``; returns its sequence number."""
    return issuing(bus, run, number, deadline_s=deadline_s).wait().sequence


# ── replicas ──────────────────────────────────────────────────────────────────────────────────────


def test_a_run_has_as_many_replicas_as_set(cluster: NatsCluster, clustered: Bus, blobs: Blobs, run_id: str) -> None:
    """Bootstrap makes all streams and buckets with three, keeps them when repeated, and changes the number both ways."""
    names = [*streams.stream_names(run_id), *(f"KV_{spec.bucket}" for spec in streams.buckets(run_id))]
    bootstrap(clustered, blobs, run_id)
    first = {name: stream_info(clustered, name) for name in names}
    assert {info.config.num_replicas for info in first.values()} == {3}
    assert all(len(info.cluster.replicas or ()) == 2 for info in first.values() if info.cluster)
    bootstrap(clustered, blobs, run_id)
    assert [stream_info(clustered, name).created for name in names] == [info.created for info in first.values()]
    with Bus.connect(cluster.settings.model_copy(update={"replicas": 1}), name="test") as single:
        bootstrap(single, blobs, run_id)
    assert {stream_info(clustered, name).config.num_replicas for name in names} == {1}
    live = f"KV_{streams.live_bucket(run_id).bucket}"
    assert stream_info(clustered, live).config.persist_mode == api.PersistMode.ASYNC
    bootstrap(clustered, blobs, run_id)
    assert {stream_info(clustered, name).config.num_replicas for name in names} == {3}


def test_a_single_server_refuses_replicas(nats_settings: NatsSettings, run_id: str) -> None:
    with Bus.connect(nats_settings.model_copy(update={"replicas": 3}), name="test") as bus:
        with pytest.raises(BusRefused, match=r"this server is not a cluster: set nats\.replicas = 1"):
            bus.ensure_stream(streams.streams(run_id)[0]).wait()
        with pytest.raises(BusRefused, match=r"bucket .*-state.*not a cluster"):
            bus.ensure_bucket(streams.state_bucket(run_id)).wait()


def test_more_replicas_than_servers_are_refused(cluster: NatsCluster, run_id: str) -> None:
    settings = cluster.settings.model_copy(update={"replicas": 5})
    with (
        Bus.connect(settings, name="test") as bus,
        pytest.raises(BusRefused, match=r"fewer servers with JetStream answer than nats\.replicas"),
    ):
        bus.ensure_stream(streams.streams(run_id)[0]).wait()


@pytest.mark.parametrize("wrong", [0, 2, 4, 7])
def test_a_number_of_replicas_that_protects_no_better_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="1, 3 or 5"):
        NatsSettings(replicas=wrong)  # type: ignore[arg-type]


def test_a_backup_of_one_server_is_restored_with_replicas(
    clustered: Bus, bus: Bus, run_id: str, cluster: NatsCluster
) -> None:
    """Messages with their numbers, keys with their revisions, the heartbeat bucket with a mode that the cluster takes; and back."""
    tasks, state, live = streams.streams(run_id)[0], streams.state_bucket(run_id), streams.live_bucket(run_id)
    for source, target, replicas in ((bus, clustered, 3), (clustered, bus, 1)):
        if source is bus:
            bus.ensure_stream(tasks).wait()
            bus.ensure_bucket(state).wait()
            bus.ensure_bucket(live).wait()
            issue(bus, run_id, 0)
            bus.key_value(state.bucket).wait().put("head", b"value").wait()
        for name in (tasks.name, f"KV_{state.bucket}", f"KV_{live.bucket}"):
            saved = io.BytesIO()
            snapshot = source.save_stream(name, saved.write).wait()
            source.delete_stream(name).wait()
            target.delete_stream(name).wait()
            target.restore_stream(name, snapshot, [saved.getvalue()]).wait()
            assert stream_info(target, name).config.num_replicas == replicas
        entry = target.key_value(state.bucket).wait().get("head").wait()
        assert entry is not None
        assert (entry.value, entry.revision) == (b"value", 1)
        assert [message.sequence for message in target.read_stream(tasks.name).wait()] == [1]


# ── replicas that lag ─────────────────────────────────────────────────────────────────────────────


def test_a_listing_has_what_a_lagging_replica_lacks(
    clustered: Bus, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A direct get that ends early is continued by the leader: collecting garbage from half a queue would delete the packs of the rest."""
    clustered.ensure_stream(streams.streams(run_id)[0]).wait()
    for number in range(5):
        issue(clustered, run_id, number)

    async def lagging(*arguments: Any) -> list[Any]:
        return [msg for msg in await whole(*arguments) if int((msg.headers or {})["Nats-Sequence"]) <= 2]

    whole = tail.direct_get
    monkeypatch.setattr(tail, "direct_get", lagging)
    stream = streams.stream_name(run_id, "tasks")
    assert [message.sequence for message in clustered.read_stream(stream).wait()] == [1, 2, 3, 4, 5]
    assert [message.sequence for message in clustered.read_stream(stream, after=1, most=3).wait()] == [2, 3, 4]
    assert clustered.read_stream(stream, subjects.tasks(run_id, "eval")).wait() == []


def test_a_tail_asks_a_lagging_replica_again(clustered: Bus, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The announcement comes from the leader; the first answers come from a server that does not have the message yet."""
    events = next(spec for spec in streams.streams(run_id) if spec.name.endswith("-events"))
    clustered.ensure_stream(events).wait()
    num_asked = 0

    async def lagging(*arguments: Any) -> list[Any]:
        nonlocal num_asked
        num_asked += 1
        return [] if num_asked <= 4 else await whole(*arguments)

    whole = tail.direct_get
    monkeypatch.setattr(tail, "_POLL_CLUSTER_S", 600.0)
    seen: list[RunEvent] = []
    clustered.tail(events.name, subjects.events(run_id), RunEvent, seen.append).wait()
    monkeypatch.setattr(tail, "direct_get", lagging)
    event = RunEvent(run_id=run_id, source="test", kind="log", at=1.0, data={"text": "x"})
    clustered.publish(subjects.events(run_id, "log"), event, msg_id="1").wait()
    wait_for(lambda: seen, "the event")
    assert seen == [event]


def test_a_tail_waits_once_for_a_message_that_was_removed(
    clustered: Bus, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was announced and is gone, by a limit or by hand, is not asked for again and again by every later read."""
    num_asked = 0

    async def empty(*_: Any) -> list[Any]:
        nonlocal num_asked
        num_asked += 1
        return []

    monkeypatch.setattr(tail, "direct_get", empty)
    monkeypatch.setattr(tail, "_LAG_S", 0.3)
    watching = tail.Tail(clustered._connection, "any", "any", RunEvent, lambda *_: None)
    watching._announced = 7

    def read() -> int:
        before = num_asked
        assert clustered._connection.call(watching._read(), "read").wait()
        return num_asked - before

    assert read() > 1
    assert read() == 1


def test_a_key_is_read_from_its_leader_unless_it_may_lag(
    clustered: Bus, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that decides something is answered by the leader; one that may lag takes a direct get."""
    clustered.ensure_bucket(streams.state_bucket(run_id)).wait()
    state = clustered.key_value(streams.state_bucket(run_id).bucket).wait()
    assert state.get("head").wait() is None
    revision = state.put("head", b"one").wait()
    asked: list[str] = []
    request = clustered._connection.client.request

    async def noted(subject: str, *arguments: Any, **more: Any) -> Any:
        asked.append(subject)
        return await request(subject, *arguments, **more)

    monkeypatch.setattr(clustered._connection.client, "request", noted)
    entry = state.get("head").wait()
    assert entry is not None
    assert (entry.value, entry.revision) == (b"one", revision)
    assert asked == [f"$JS.API.STREAM.MSG.GET.KV_{state.bucket}"]
    assert state.get("head", may_lag=True).wait() == entry
    assert asked[-1] == f"$JS.API.DIRECT.GET.KV_{state.bucket}.$KV.{state.bucket}.head"
    state.delete("head").wait()
    assert state.get("head").wait() is None
    with pytest.raises(CompareAndSwapFailed):
        state.swap("head", b"two", revision).wait()


# ── servers that are killed ───────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_killed_servers_lose_and_double_nothing(cluster: NatsCluster, clustered: Bus, run_id: str) -> None:
    """A follower, the leader, then two of three are killed and come back, while packs are published, read and acknowledged."""
    clustered.ensure_stream(streams.streams(run_id)[0]).wait()
    clustered.ensure_bucket(streams.state_bucket(run_id)).wait()
    spec = streams.tasks_consumer(run_id, "train")
    clustered.ensure_consumer(spec).wait()
    inbox = clustered.inbox(spec, TaskIssued).wait()
    state = clustered.key_value(streams.state_bucket(run_id).bucket).wait()
    done: list[tuple[str, int]] = []
    publishing: list[Pending[Receipt]] = []

    def publish_more() -> None:
        publishing.extend([issuing(clustered, run_id, len(publishing) + number) for number in range(30)])

    def wait_for_publications(what: str) -> None:
        wait_for(lambda: all(publication.done() for publication in publishing), f"publications {what}")

    def consume(most: int) -> None:
        found = inbox.fetch(most, 1.0).wait()
        for ack in [delivery.ack() for delivery in found]:
            ack.wait()
        done.extend((delivery.fact.pack_id, delivery.sequence) for delivery in found)

    publish_more()
    wait_for_publications("at the start")
    for victim in ("a follower", "the leader"):
        leader = leader_of(clustered, spec.stream)
        name = leader if victim == "the leader" else next(n for n in cluster.nodes if n != leader)
        publish_more()  # under way when the server is killed
        cluster.nodes[name].kill()
        publish_more()
        wait_for_publications(f"without {victim}")
        consume(5)
        revision = write(state, victim.encode())
        entry = state.get("head").wait()
        assert entry is not None
        assert (entry.value, entry.revision) == (victim.encode(), revision)
        cluster.start(name)
    leader = leader_of(clustered, spec.stream)
    victims = [leader, next(n for n in cluster.nodes if n != leader)]
    publish_more()
    for name in victims:
        cluster.nodes[name].kill()
    publish_more()
    try:
        with pytest.raises(
            BusUnreachable, match=rf"no answer to publication to penstock\.{run_id}\.tasks\.train within 3 s"
        ):
            issue(clustered, run_id, 1_000_000, deadline_s=3.0)
        with pytest.raises(BusUnreachable, match=f"write {run_id}-state/head"):
            state.put("head", b"never").wait()
        for delivery in inbox.fetch(1, 0.5).wait():  # what had arrived before; nothing is raised
            delivery.give_back(0.0).wait()
    finally:
        cluster.start(*victims)
    wait_for_publications("after two servers came back")
    sequences = {publication.wait().sequence for publication in publishing}
    published = [f"p{number}" for number in range(len(publishing))]
    assert len(sequences) == len(published)
    wait_for(lambda: [consume(100), clustered.stream_state(spec.stream).wait().num_messages == 0][1], "an empty queue")
    # The pack whose publication had no answer may be stored; a delivery whose acknowledgement was lost with a leader comes again.
    stored = {one for one in done if one[0] != "p1000000"}
    assert sorted(pack_id for pack_id, _ in stored) == sorted(published)


def test_a_bucket_without_leader_is_no_missing_bucket(cluster: NatsCluster, clustered: Bus, run_id: str) -> None:
    """A swap that no server takes is `BusUnreachable`, which callers retry, and a run that was never made says what to do."""
    clustered.ensure_bucket(streams.state_bucket(run_id)).wait()
    state = clustered.key_value(streams.state_bucket(run_id).bucket).wait()
    clustered.delete_stream(f"KV_{state.bucket}").wait()
    with pytest.raises(BusUnreachable, match="does not exist, or more than half"):
        state.swap("head", b"x", None).wait()


@contextlib.contextmanager
def stopped_followers(cluster: NatsCluster, bus: Bus, stream: str) -> Iterator[None]:
    """The leader of a stream answers alone: it takes a message, and can neither store nor refuse it."""
    leader = leader_of(bus, stream)
    followers = [node for name, node in cluster.nodes.items() if name != leader]
    for node in followers:
        os.kill(node.child.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for node in followers:
            os.kill(node.child.pid, signal.SIGCONT)


def test_a_publication_that_is_under_way_is_no_refusal(cluster: NatsCluster, clustered: Bus, run_id: str) -> None:
    """A leader without followers has the first try in its hands when the second comes: it says so, and the caller waits."""
    clustered.ensure_stream(streams.streams(run_id)[0]).wait()
    issue(clustered, run_id, 0)
    with stopped_followers(cluster, clustered, streams.stream_name(run_id, "tasks")):
        published = issuing(clustered, run_id, 1)
        time.sleep(ATTEMPT_S + 2.0)
        assert not published.done(), "no majority has the message, so it cannot be stored"
    assert published.wait().sequence == 2


def test_the_head_is_moved_once_by_a_swap_that_is_under_way(cluster: NatsCluster, clustered: Bus, run_id: str) -> None:
    """A swap without an answer, tried again: the trainer that sent both is not told that another one moved the head."""
    clustered.ensure_bucket(streams.state_bucket(run_id)).wait()
    head = HeadKey(clustered, run_id)
    head.move(_head(0))
    moved = threading.Thread(target=head.move, args=(_head(1),))
    with stopped_followers(cluster, clustered, f"KV_{streams.state_bucket(run_id).bucket}"):
        moved.start()
        moved.join(REQUEST_S + 2.0)
        assert moved.is_alive(), "no majority has the head, so it cannot have been moved"
    moved.join(120.0)
    assert head.value == _head(1)


def _head(version: int) -> Head:
    manifest = BlobRef(key=f"runs/r/weights/{version}", size_bytes=1, sha256="0" * 64)
    return Head(version=version, step=version, manifest=manifest)
