"""One trainer at a time: the second is refused, a killed one's lease expires, a suspended one can change nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import structlog
from tests.servers import wait_for

from penstock.deploy.processes.servers import NatsServer
from penstock.protocol import streams
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.errors import BusUnreachable
from penstock.protocol.facts import Head, decode, encode
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.lineage import CheckpointCommitted
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.trainer.errors import LeaseLost, RunIsHeld
from penstock.trainer.recovery.lease import HeldLease, LeaseWatch, Unchanged, acquire, fence

BLOB = BlobRef(key="k", size_bytes=1, sha256="0" * 64)


@pytest.fixture
def state(bus: Bus, run_streams: str) -> KeyValue:
    return bus.key_value(streams.state_bucket(run_streams).bucket).wait()


@pytest.fixture
def running() -> Iterator[ExitStack]:
    """Leases that are released at the end of a test."""
    with ExitStack() as stack:
        yield stack


def take(state: KeyValue, ttl_s: float = 1.0, deadline_s: float = 30.0) -> HeldLease:
    return acquire(state, "r", clock=time.time, ttl_s=ttl_s, deadline_s=deadline_s)


def test_a_second_trainer_is_refused_while_the_first_is_alive(state: KeyValue, running: ExitStack) -> None:
    """The error names the holder, since when it holds the run, and how to stop it."""
    running.enter_context(take(state, ttl_s=6.0))
    with pytest.raises(RunIsHeld, match=rf"trainer-\w+ \(host .*, pid {os.getpid()}, epoch 1, since 20.*kill -TERM"):
        take(state)


def test_a_lease_that_was_released_is_free_at_once(state: KeyValue) -> None:
    """After a release the next holder need not wait; every holder has another epoch."""
    for epoch in (1, 2, 3):
        with take(state, ttl_s=30.0) as lease:
            assert lease.epoch == epoch


@pytest.mark.parametrize("ttl_s", [1.0, 1e9])
def test_the_lease_of_a_killed_trainer_expires(state: KeyValue, ttl_s: float) -> None:
    """The lease of a holder that never renews is taken, however long it says, and that holder's error names the new one."""
    killed = take(state, ttl_s)  # not entered: it is not renewed
    with take(state, deadline_s=2.0) as lease:
        assert lease.epoch == 2
        with pytest.raises(LeaseLost, match=rf"now held by {lease.holder}"):
            killed.confirm()
        assert not killed.is_held
        lease.confirm()


def watched_for(server: NatsSettings, run: str, seconds: float) -> Unchanged | None:
    with LeaseWatch(lambda: Bus.connect(server, name="watch"), run) as watch:
        time.sleep(seconds)
        return watch.end()


def test_a_lease_expires_while_it_is_watched(
    state: KeyValue, run_streams: str, nats_settings: NatsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that watched a killed one's lease during its imports does not wait for it again."""
    monkeypatch.setattr("penstock.trainer.recovery.lease._WATCH_END_S", 60.0)
    take(state, ttl_s=60.0)  # killed: it is not renewed
    with LeaseWatch(lambda: Bus.connect(nats_settings, name="watch"), run_streams) as watch:
        wait_for(lambda: watch._unchanged is not None, "the first look")
        first = watch._unchanged
        time.sleep(0.5)  # it looks again meanwhile
        watched = watch.end()
    assert watched is not None
    assert watched == first
    began = time.monotonic()
    a_minute_ago = replace(watched, since=watched.since - 60.0)
    with acquire(state, "r", clock=time.time, ttl_s=1.0, watched=a_minute_ago) as lease:
        assert lease.epoch == 2
    assert time.monotonic() - began < 50.0


def test_a_watched_lease_that_is_renewed_is_refused(
    state: KeyValue, running: ExitStack, run_streams: str, nats_settings: NatsSettings
) -> None:
    running.enter_context(take(state, ttl_s=6.0))
    watched = watched_for(nats_settings, run_streams, 1.0)
    with pytest.raises(RunIsHeld):
        acquire(state, "r", clock=time.time, ttl_s=6.0, watched=watched)


def test_an_outage_during_the_watch_starts_it_again(own_nats: Callable[[], NatsServer]) -> None:
    """The holder could not renew while NATS was unreachable, so that time does not count."""
    server = own_nats()
    with Bus.connect(server.settings, name="test") as bus:
        bus.ensure_bucket(streams.state_bucket("r")).wait()
        take(bus.key_value(streams.state_bucket("r").bucket).wait())
        with LeaseWatch(lambda: Bus.connect(server.settings, name="watch"), "r") as watch:
            wait_for(lambda: watch._unchanged is not None, "the first look")
            server.kill()
            killed = time.monotonic()  # the watch may look again before `restart` returns
            server.restart()
            wait_for(lambda: watch._unchanged is None or watch._unchanged.since > killed, "a new beginning")
            wait_for(lambda: watch._unchanged is not None, "another look")
            assert watch.end() is not None


def test_a_short_outage_while_a_lease_is_awaited_is_logged_and_does_not_count(
    own_nats: Callable[[], NatsServer],
) -> None:
    """Reads are retried, so nothing fails; the log names the outage, and the holder gets its whole time after it."""
    server = own_nats()
    with Bus.connect(server.settings, name="test") as bus:
        bus.ensure_bucket(streams.state_bucket("r")).wait()
        state = bus.key_value(streams.state_bucket("r").bucket).wait()
        take(state, ttl_s=1.2)  # killed: it is not renewed
        with structlog.testing.capture_logs() as logs, ThreadPoolExecutor(1) as other:
            acquired = other.submit(take, state)
            wait_for(lambda: any("held by another" in line["event"] for line in logs), "the first look at the lease")
            server.kill()
            time.sleep(1.0)
            server.restart()
            began = time.monotonic()
            assert acquired.result(60.0).epoch == 2
        assert time.monotonic() - began > 1.0
        assert [line["log_level"] for line in logs if "NATS was unreachable while the lease" in line["event"]] == [
            "warning"
        ]


def test_a_watch_of_an_unreachable_server_knows_nothing(nats_settings: NatsSettings) -> None:
    """Nor does one of a run that is not bootstrapped; neither is an error, the trainer reports it itself."""
    nowhere = nats_settings.model_copy(update={"url": "nats://127.0.0.1:1"})
    assert watched_for(nowhere, "r", 0.1) is None
    assert watched_for(nats_settings, "not-there", 0.3) is None


def test_a_renewal_whose_answer_was_lost_is_accepted(state: KeyValue) -> None:
    lease = take(state)
    entry = state.get(streams.LEASE_KEY).wait()
    assert entry is not None
    state.swap(streams.LEASE_KEY, entry.value, entry.revision).wait()  # a renewal without an answer
    lease.confirm()
    lease.check()


def test_an_older_holder_can_move_neither_head_nor_checkpoint(state: KeyValue) -> None:
    """A new holder rewrites both under its epoch: the older one's compare-and-swap fails from then on."""
    state.put(streams.HEAD_KEY, encode(Head(version=4, step=4, manifest=BLOB, epoch=1))).wait()
    old_revision = state.get(streams.HEAD_KEY).wait()
    assert old_revision is not None
    old = fence(state, 1)
    new = fence(state, 2)
    head = state.get(streams.HEAD_KEY).wait()
    assert head is not None
    assert decode(head.value, Head) == Head(version=4, step=4, manifest=BLOB, epoch=2)
    with pytest.raises(LeaseLost, match="moved by another trainer"):
        old.move(encode(CheckpointCommitted(epoch=1, step=5)))
    new.move(encode(CheckpointCommitted(epoch=2, step=5)))
    with pytest.raises(LeaseLost, match="epoch 2 has started"):
        fence(state, 1)


def test_a_lease_survives_an_outage_of_nats(own_nats: Callable[[], NatsServer]) -> None:
    server = own_nats()
    with Bus.connect(server.settings, name="test") as bus:
        bus.ensure_bucket(streams.state_bucket("r")).wait()
        with take(bus.key_value(streams.state_bucket("r").bucket).wait()) as lease:
            server.kill()
            with pytest.raises(BusUnreachable):
                lease.confirm(deadline_s=0.5)
            assert lease.is_held
            server.restart()
            lease.confirm()
