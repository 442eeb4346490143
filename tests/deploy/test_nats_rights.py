"""The code that services use, with each role's own NATS user, on a server with the shipped `deploy/nats.conf`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import APIError
from tests.deploy.live_processes import processes_of
from tests.deploy.nats_roles import NatsRoles, RunOfRoles
from tests.groups import make_generated, make_groups, make_scored, make_task_issued
from tests.servers import require, wait_for
from tests.small_run import write_small_run

from penstock.console.tools.removal import find_holdings, remove_holdings
from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.health import has_heartbeat
from penstock.deploy.local_run import REWARD, TRAINER, worker_name
from penstock.deploy.nats_config import nats_config
from penstock.deploy.rights import ANY_KEY, Rights, rights
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import BusRefused, BusUnreachable
from penstock.protocol.facts import GroupGenerated, GroupScored, Heartbeat, RunEvent, TaskIssued, encode
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.rollout_service.weights.peers import Peers
from penstock.rollout_service.weights.weight_swap import SwapSemaphore

CONFIG = Path(__file__).parents[2] / "deploy" / "nats.conf"
WORKERS = [worker_name(0), worker_name(1)]


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsRoles]:
    require("nats-server")
    started = NatsRoles(tmp_path_factory.mktemp("roles"), CONFIG.read_text())
    started.start()
    yield started
    started.close()


@pytest.fixture
def secured_run(roles: NatsRoles, blobs: Blobs, run_id: str) -> Iterator[str]:
    bootstrap(roles.bus("admin"), blobs, run_id)
    yield run_id
    delete_run(roles.bus("admin"), run_id)


def beat(bus: Bus, run: str, role: Any, service: str) -> None:
    fact = Heartbeat(role=role, service_id=service, at=0.0, state="testing")
    live = bus.key_value(streams.live_bucket(run).bucket).wait()
    live.put(streams.heartbeat_key(role, service), encode(fact)).wait()


def test_the_trainer_sees_how_full_the_account_is(roles: NatsRoles) -> None:
    """The generated configuration limits the account, so that an alert can say that it fills."""
    state = roles.bus("trainer").store_state().wait()
    assert state.limit is not None
    assert 0 <= state.used < state.limit == 100 * 1024**3


def test_a_heartbeat_of_a_role_is_found_by_the_start_of_its_id(roles: NatsRoles, secured_run: str) -> None:
    for role in ("trainer", "rollout", "reward"):
        beat(roles.bus(role), secured_run, role, "x-1")
        assert has_heartbeat(roles.bus("viewer"), secured_run, role, "x-")
        assert not has_heartbeat(roles.bus("viewer"), secured_run, role, "y-")


def test_every_role_dead_letters_what_it_cannot_decode(roles: NatsRoles, secured_run: str) -> None:
    run = secured_run
    for user, subject, spec, fact in (
        ("rollout", subjects.tasks(run, "train"), streams.tasks_consumer(run, "train"), TaskIssued),
        ("reward", subjects.generated(run, "train"), streams.generated_consumer(run), GroupGenerated),
        ("trainer", subjects.scored(run, "train"), streams.scored_consumer(run, "train"), GroupScored),
    ):
        poison = RunEvent(run_id=run, source="x", kind="log", at=0.0)
        roles.bus("admin").publish(subject, poison, msg_id="poison").wait()
        assert roles.bus(user).inbox(spec, fact).wait().fetch(1, 0.5).wait() == []
        wait_for(
            lambda spec=spec: roles.bus("viewer").stream_state(spec.stream).wait().num_messages == 0, "an empty queue"
        )
    assert roles.bus("viewer").stream_state(f"{run}-dead").wait().num_messages == 3


def test_a_refused_request_raises_the_reason_of_the_server(roles: NatsRoles, secured_run: str) -> None:
    """What another role publishes, and deleting a stream, raises BusRefused with the server's text."""
    run = secured_run
    generated = make_generated(run, make_groups(1))
    event = RunEvent(run_id=run, source="trainer", kind="step", at=0.0)
    attempts = [
        roles.bus(user).publish(subject, fact, msg_id="x", deadline_s=1.0)
        for user, subject, fact in (
            ("rollout", subjects.scored(run, "train"), make_scored(generated)),
            ("rollout", subjects.weights_published(run), make_task_issued(run)),
            ("reward", subjects.generated(run, "train"), generated),
            ("trainer", subjects.scored(run, "train"), make_scored(generated)),
            ("viewer", subjects.tasks(run, "train"), make_task_issued(run)),
            ("rollout", subjects.events(run, "step"), event),
            ("reward", subjects.events(run, "step"), event),
        )
    ]
    deletion = roles.bus("trainer").delete_stream(f"{run}-dead")
    for attempt in attempts:
        with pytest.raises(BusRefused, match=r"(?i)permissions violation for publish"):
            attempt.wait()
    with pytest.raises(BusRefused, match=r"(?i)permissions violation for publish"):
        deletion.wait()
    assert roles.bus("admin").stream_state(f"{run}-tasks").wait().num_messages == 0


def test_secrets_of_endpoints_are_read_by_reward_services_alone(roles: NatsRoles, secured_run: str) -> None:
    name = streams.secrets_bucket().bucket
    key = f"endpoint.{secured_run}"
    secrets = roles.bus("reward").key_value(name).wait()
    secrets.put(key, b"confidential").wait()
    assert secrets.get(key).wait() is not None
    binding = [
        roles.bus(role).key_value(name) for role in ("trainer", "rollout", "viewer")
    ]  # concurrently: each times out
    for bound in binding:
        with pytest.raises(BusRefused, match=r"(?i)permissions violation for publish"):
            bound.wait()
    secrets.delete(key).wait()


@pytest.mark.parametrize("of_role", rights(), ids=lambda found: found.role)
def test_every_right_works_through_the_code_of_the_services(
    roles: NatsRoles, secured_run: str, of_role: Rights
) -> None:
    """Each listed key is written, read and deleted; each consumer bound, reset and queried; each stream read and tailed."""
    bus, run = roles.bus(of_role.role), secured_run
    granted = next(found for found in rights(run) if found.role == of_role.role)
    for right in granted.writes:
        key = right.key.replace("*", "7").replace(">", "some-id")
        bucket = bus.key_value(right.bucket.bucket).wait()
        revision = bucket.swap(key, b"1", None).wait()
        bucket.swap(key, b"2", revision).wait()
        entry = bucket.get(key).wait()
        assert entry is not None
        assert entry.value == b"2"
        bucket.delete(key).wait()
    for right in granted.reads:
        bucket = bus.key_value(right.bucket.bucket).wait()
        assert (
            bucket.entries().wait() == []
            if right.key == ANY_KEY
            else bucket.get(right.key.replace("*", "7")).wait() is None
        )
    for spec in granted.fetches:
        assert bus.inbox(spec, RunEvent).wait().fetch(1, 0.0).wait() == []
    for spec in granted.resets:
        bus.reset_consumer(spec).wait()
    for spec in granted.observes:
        assert bus.consumer_state(spec).wait().num_pending == 0
    for stream in granted.scans:
        assert bus.stream_state(stream).wait().num_messages == len(bus.read_stream(stream).wait()) == 0
    for right in granted.tails:
        seen: list[RunEvent] = []
        bus.tail(right.stream, right.subject, RunEvent, seen.append).wait()
        subject = right.subject.replace("*", "log")
        event = RunEvent(run_id=run, source="x", kind=subjects.kind_of_event(subject), at=0.0)
        roles.bus("admin").publish(subject, event, msg_id=subject).wait()
        wait_for(lambda seen=seen: seen, f"a message of {right.subject}")
    if granted.lists_streams:
        assert set(streams.stream_names(run)) <= set(bus.stream_names().wait())


@pytest.mark.slow
def test_a_whole_run_needs_no_other_right_though_a_worker_is_killed(
    roles: NatsRoles, s3_settings: S3Settings, tmp_path: Path, run_id: str
) -> None:
    """Each service as its own user: NATS refuses nothing, all groups are trained, the killed worker is restarted, and no process is left."""
    require("rclone")
    run_file = write_small_run(
        tmp_path, run_id, num_train=64, trainer={"steps": 4, "keep_versions": 6}, eval={"every": 2}
    )
    before = roles.violations()
    with RunOfRoles([str(run_file)], roles, s3_settings) as run:
        run.start()
        assert {view.name for view in run.processes()} == {REWARD, TRAINER, *WORKERS}
        wait_for(lambda: len(processes_of(tmp_path, word="embedded_engine")) == 2, "both engines")
        engines = processes_of(tmp_path, word="embedded_engine")
        pid = run.kill(WORKERS[0])
        assert run.wait(200.0) == 0, run.log_tail(TRAINER)
    for name in ("tasks", "generated", "scored"):
        assert roles.bus("admin").stream_state(f"{run_id}-{name}").wait().num_messages == 0
    assert [e.kind for e in run.events if e.name == WORKERS[0]] == ["started", "crashed", "restarted"]
    (first,) = [view for view in run.processes() if view.name == WORKERS[0]]
    assert not first.alive
    assert first.pid != pid
    assert not set(engines) & set(processes_of(tmp_path))
    assert processes_of(tmp_path) == []
    assert 0 < run.usage.cpu_s < 16 * run.usage.wall_s
    assert (run.folder / "model" / "config.json").exists()
    delete_run(roles.bus("admin"), run_id)
    assert roles.violations() == before


def test_a_login_that_may_not_delete_streams_removes_no_object(roles: NatsRoles, blobs: Blobs) -> None:
    """The object store's key is shared, so `penstock runs rm` asks NATS first, also when the streams are gone already."""
    admin, run = roles.bus("admin"), "kept"
    bootstrap(admin, blobs, run)
    blobs.put(f"runs/{run}/groups/x", b"group")
    delete_run(admin, run)
    holdings = find_holdings(run, admin, blobs)
    assert not holdings.streams
    with pytest.raises(BusRefused, match=rf"nothing of run {run} was removed .*user 'viewer'.* administrator"):
        remove_holdings(run, holdings, roles.bus("viewer"), blobs)
    assert find_holdings(run, admin, blobs) == holdings
    remove_holdings(run, holdings, admin, blobs)
    assert find_holdings(run, admin, blobs).is_empty


def test_only_the_administrator_makes_a_snapshot(roles: NatsRoles, blobs: Blobs) -> None:
    """A snapshot has every message of a stream, so those who may read one are no reason to allow it."""
    admin, run = roles.bus("admin"), "saved"
    bootstrap(admin, blobs, run)
    chunks: list[bytes] = []
    with pytest.raises(BusRefused, match=rf"snapshot of {run}-events was refused: .*user 'viewer'"):
        roles.bus("viewer").save_stream(f"{run}-events", chunks.append).wait()
    assert not chunks
    assert admin.save_stream(f"{run}-events", chunks.append).wait().extent == (0, 0, 0)
    assert chunks
    delete_run(admin, run)


def test_workers_offer_weights_and_a_service_without_a_right_to_them_cannot_read_the_offer(
    run_id: str, blobs: Blobs, tmp_path: Path
) -> None:
    """Where the logins are those of one run: of any run, each that reads a bucket reads all but those that runs share."""
    (tmp_path / "roles").mkdir()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(roles := NatsRoles(tmp_path / "roles", nats_config([run_id])))).start()
        bootstrap(roles.bus("admin"), blobs, run_id)
        stack.enter_context(contextlib.closing(shared := SharedSegments(run_id, tmp_path))).join()
        peer = stack.enter_context(contextlib.closing(Peers(roles.bus("rollout"), shared, run_id, 0)))
        wait_for(lambda: peer.host in peer._offers, "the offer of a rollout login")
        for role in ("reward", "environment"):
            with pytest.raises((BusRefused, BusUnreachable), match=f"user '{role}'|refused"):
                roles.bus(role).key_value(streams.lease_bucket(run_id).bucket).wait().entries("peer.").wait()


def test_a_key_that_never_expires_is_not_read_beyond_its_buckets_ttl(roles: NatsRoles, secured_run: str) -> None:
    """A rollout login gives a heartbeat and a permit `Nats-TTL: never`: readers age them by the server's clock, and the bootstrap removes them."""
    admin, rollout, run = roles.bus("admin"), roles.bus("rollout"), secured_run
    live, leased = streams.live_bucket(run).bucket, streams.lease_bucket(run).bucket
    permit = streams.swap_permit_key(0)

    def configure(bucket: str, *, key_ttls: bool) -> None:
        config = admin._connection.call(admin._connection.js.stream_info(f"KV_{bucket}"), "look").wait().config
        changed = config.evolve(max_age=2.0, duplicate_window=2.0, allow_msg_ttl=key_ttls)
        admin._connection.call(admin._connection.js.update_stream(changed), "edit").wait()

    def write(bus: Bus, bucket: str, key: str, value: bytes) -> None:
        ghost = bus._connection.js.publish(f"$KV.{bucket}.{key}", value, headers={"Nats-TTL": "never"})
        bus._connection.call(ghost, "write").wait()

    with pytest.raises(APIError, match="per-message TTL is disabled"):  # of a bucket that has no use for it
        write(rollout, leased, permit, b"ghost")
    configure(leased, key_ttls=True)  # as an older release made it
    configure(live, key_ttls=True)
    write(rollout, leased, permit, b"ghost")
    for number in range(4):
        beat = Heartbeat(role="rollout", service_id=f"w{number}", at=0.0, state="", needs_version=0)
        write(rollout, live, streams.heartbeat_key("rollout", f"w{number}"), encode(beat))
    beats, leases = (roles.bus("trainer").key_value(bucket).wait() for bucket in (live, leased))
    assert len(beats.entries().wait()) == 4
    wait_for(lambda: not beats.entries().wait(), "the beats of the ghosts to count as outlived")
    assert len(beats.entries(outlived=True).wait()) == 4, "they are still stored"
    assert [entry.key for entry in leases.entries(outlived=True).wait()] == [permit]

    async def swap() -> list[str]:
        semaphore = SwapSemaphore(rollout, run_id=run, worker_id="w9", max_share=0.5, deadline_s=0.0)
        semaphore._num_permits, semaphore._counted_at = 1, time.monotonic()
        async with semaphore.permit():
            return [entry.value.decode() for entry in await leases.entries(outlived=True)]

    assert asyncio.run(swap()) == ["w9"], "the permit of a ghost is taken over"
    admin.ensure_bucket(streams.live_bucket(run)).wait()
    assert not beats.entries(outlived=True).wait()
