"""One trainer at a time: the second is refused, a dead one's lease lapses, a suspended one can do no harm."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from penstock.deploy.servers import NatsServer
from penstock.protocol import streams
from penstock.protocol.errors import BusUnreachable
from penstock.protocol.facts import BlobRef, Head, decode, encode
from penstock.protocol.record.lineage import CheckpointCommitted
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.trainer.errors import LeaseLost, RunIsHeld
from penstock.trainer.recovery.lease import HeldLease, acquire, fence

BLOB = BlobRef(key="k", size_bytes=1, sha256="0" * 64)


@pytest.fixture
def state(bus: Bus, ring_streams: str) -> KeyValue:
    """The state bucket of a bootstrapped run."""
    return bus.key_value(streams.state_bucket(ring_streams).bucket).wait()


@pytest.fixture
def running() -> Iterator[ExitStack]:
    """Leases to be ended."""
    with ExitStack() as stack:
        yield stack


def take(state: KeyValue, ttl_s: float = 1.0) -> HeldLease:
    return acquire(state, "r", clock=time.time, ttl_s=ttl_s, deadline_s=30.0)


def test_a_second_trainer_is_refused_while_the_first_is_alive(state: KeyValue, running: ExitStack) -> None:
    """The refusal says who holds the run, since when, and how to stop it."""
    running.enter_context(take(state))
    with pytest.raises(RunIsHeld, match=rf"trainer-\w+ \(host .*, pid {os.getpid()}, epoch 1, since 20.*kill -TERM"):
        take(state)


def test_a_lease_that_was_released_is_free_at_once(state: KeyValue) -> None:
    """An orderly end makes way without a wait; every holder has an epoch of its own."""
    for epoch in (1, 2, 3):
        with take(state, ttl_s=30.0) as lease:
            assert lease.epoch == epoch


def test_a_dead_trainers_lease_lapses(state: KeyValue) -> None:
    """A holder that never renews is taken over, and is told who did it."""
    dead = take(state)  # not entered: nobody renews it
    with take(state) as lease:
        assert lease.epoch == 2
        with pytest.raises(LeaseLost, match=rf"now held by {lease.holder}"):
            dead.confirm()
        assert not dead.is_held
        lease.confirm()


def test_an_answer_that_was_lost_is_no_loss(state: KeyValue) -> None:
    """A renewal of our own whose answer never came is recognised by its content."""
    lease = take(state)
    entry = state.get(streams.LEASE_KEY).wait()
    assert entry is not None
    state.swap(streams.LEASE_KEY, entry.value, entry.revision).wait()  # as if it had been ours
    lease.confirm()
    lease.check()


def test_an_older_holder_can_move_neither_head_nor_checkpoint(state: KeyValue) -> None:
    """A new holder writes both again under its epoch: the older one's compare-and-swap fails for ever."""
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


def test_a_lease_outlives_an_absence_of_nats(own_nats: Callable[[], NatsServer]) -> None:
    """While NATS is away nobody can take over; when it is back the holder still holds."""
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
