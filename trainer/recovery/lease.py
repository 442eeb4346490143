"""One trainer at a time: a lease in NATS KV, and fencing of the keys that an older holder could still write.

The holder renews the lease six times within ``ttl_s``, by compare-and-swap on its revision, from a separate thread: a
step of thirty seconds cannot lose it. A second trainer watches the revision. If it changes, the holder is alive and the
second trainer is refused; if it stays the same for ``ttl_s`` by the second trainer's clock, the lease has expired and
the second trainer takes it under the next epoch. No two clocks are compared.

A trainer that was suspended or disconnected may resume after that, while its state still says that it holds the lease:

| it tries to              | and fails because                                                                        |
|--------------------------|------------------------------------------------------------------------------------------|
| continue                 | its next renewal is refused: `LeaseLost` at the loop's next stage                         |
| move the head            | the new holder rewrote the head under its epoch: the revision has changed (`fence`)       |
| commit a checkpoint      | `confirm` renews immediately before the rename                                            |
| acknowledge              | before that it must move the ``checkpoint`` key, which is fenced like the head            |

One case remains: a trainer is suspended between `confirm` and the rename, which a file system cannot make conditional.
The folder it then leaves carries the older epoch; nothing was acknowledged for it, and it never counts once the new
holder has committed (`protocol/record/checkpoint_state.py`). Until then it is as valid as the checkpoint before it.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from penstock.protocol import streams
from penstock.protocol.errors import BusUnreachable, CompareAndSwapFailed, PenstockError
from penstock.protocol.facts import Head, Lease, decode, encode
from penstock.protocol.record.lineage import CheckpointCommitted
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry, KeyValue
from penstock.trainer.errors import LeaseLost, RunIsHeld

log = structlog.get_logger("trainer.recovery.lease")

_RENEWALS = 6  # within ``ttl_s``
_POLL_S = 0.2
_WATCH_END_S = 1.0  # the thread of a watch is not waited for longer: it changes nothing
_NATS_DEADLINE_S = 120.0  # longest time for which a commit waits for NATS


@dataclass(frozen=True, slots=True)
class Unchanged:
    """A revision of the lease and since when it was seen, by this process's monotonic clock."""

    revision: int
    since: float


class LeaseWatch:
    """Observes the lease in a thread, without taking it; use as a context manager.

    A trainer starts it before its slow imports, so that the lease of a killed one expires during them and not after
    them.
    """

    def __init__(self, connect: Callable[[], Bus], run_id: str) -> None:
        """``connect`` is called in the thread; nothing is observed if NATS is unreachable, or the run not bootstrapped."""
        self._connect, self._run_id = connect, run_id
        self._unchanged: Unchanged | None = None
        self._num_transitions = 0  # of the connection, when it was last looked at
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="lease-watch", daemon=True)

    def __enter__(self) -> LeaseWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> Unchanged | None:
        """Stop observing, and return since when the lease has not changed; None if that is not known."""
        self._stop.set()
        self._thread.join(_WATCH_END_S)
        return None if self._thread.is_alive() else self._unchanged

    def _work(self) -> None:
        try:
            with self._connect() as bus:
                state = bus.key_value(streams.state_bucket(self._run_id).bucket).wait()
                while not self._stop.is_set():
                    self._look(state, bus)
                    self._stop.wait(_POLL_S)
        except PenstockError as err:
            self._unchanged = None
            log.debug("lease not observed", error=str(err))

    def _look(self, state: KeyValue, bus: Bus) -> None:
        entry = state.get(streams.LEASE_KEY).wait()
        is_known = self._num_transitions == bus.num_transitions  # else the holder may not have been able to renew
        self._num_transitions = bus.num_transitions
        if entry is None:
            self._unchanged = None
        elif not is_known or self._unchanged is None or self._unchanged.revision != entry.revision:
            self._unchanged = Unchanged(entry.revision, time.monotonic())


class HeldLease:
    """A lease that this process holds, renewed by a thread; use as a context manager, whose exit releases it."""

    def __init__(self, state: KeyValue, lease: Lease, revision: int) -> None:
        self._state, self._lease = state, lease
        self._value = encode(lease)
        self._revision = revision
        self._renewed = time.monotonic()
        self._lost = ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="lease", daemon=True)

    @property
    def epoch(self) -> int:
        return self._lease.epoch

    @property
    def holder(self) -> str:
        return self._lease.holder

    @property
    def is_held(self) -> bool:
        return not self._lost

    def __enter__(self) -> HeldLease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_NATS_DEADLINE_S)
        released = encode(self._lease.model_copy(update={"released": True}))
        with self._lock:
            if not self._lost:
                try:
                    self._state.swap(streams.LEASE_KEY, released, self._revision).wait()
                except (BusUnreachable, CompareAndSwapFailed) as err:
                    log.warning("lease not released; it expires by itself", error=str(err), ttl_s=self._lease.ttl_s)

    def check(self) -> None:
        """Raise LeaseLost when another trainer is known to have taken the lease; sends no request."""
        if self._lost:
            raise LeaseLost(self._lost)

    def confirm(self, deadline_s: float = _NATS_DEADLINE_S) -> None:
        """Renew now, waiting for NATS if necessary; afterwards this is the run's only trainer for up to ``ttl_s``.

        Raises LeaseLost, or BusUnreachable after ``deadline_s``.
        """
        _retried(self._renew, deadline_s=deadline_s)

    def _work(self) -> None:
        while not self._stop.wait(self._lease.ttl_s / _RENEWALS):
            try:
                self._renew()
            except BusUnreachable as err:
                unrenewed_s = round(time.monotonic() - self._renewed)
                log.warning("lease not renewed: NATS unreachable", unrenewed_s=unrenewed_s, error=str(err))
            except PenstockError as err:
                self._lost = self._lost or str(err)
                log.error("lease lost: this trainer stops", reason=self._lost)  # noqa: TRY400
                return

    def _renew(self) -> None:
        with self._lock:
            self.check()
            try:
                self._revision = self._state.swap(streams.LEASE_KEY, self._value, self._revision).wait()
            except CompareAndSwapFailed:
                self._adopt_own_swap(self._state.get(streams.LEASE_KEY).wait())
            self._renewed = time.monotonic()

    def _adopt_own_swap(self, entry: Entry | None) -> None:
        """Accept a swap of this holder whose answer was lost; raise LeaseLost for any other."""
        if entry is not None and entry.value == self._value:
            self._revision = entry.revision
            return
        taker = "no trainer: its key is deleted" if entry is None else _describe(decode(entry.value, Lease))
        self._lost = (
            f"this trainer (epoch {self.epoch}) was suspended or disconnected for "
            f"{time.monotonic() - self._renewed:.0f} s and lost its lease of the run, which is now held by {taker}. "
            "Nothing was committed or published since; this trainer exits"
        )
        raise LeaseLost(self._lost)


def acquire(
    state: KeyValue,
    run_id: str,
    *,
    clock: Callable[[], float],
    ttl_s: float,
    deadline_s: float = 120.0,
    watched: Unchanged | None = None,
) -> HeldLease:
    """Take the lease of a run; if another trainer's is not released, wait until it expires.

    ``clock`` returns seconds since 1970; ``watched`` is what a `LeaseWatch` saw. Raises RunIsHeld if another trainer is
    alive, BusUnreachable if NATS was unreachable for ``deadline_s``.
    """
    deadline = time.monotonic() + deadline_s
    holder, host = f"trainer-{secrets.token_hex(4)}", socket.gethostname()
    mine = Lease(holder=holder, epoch=1, host=host, pid=os.getpid(), since=clock(), ttl_s=ttl_s)
    num_transitions = state.num_transitions
    while True:
        try:
            entry = state.get(streams.LEASE_KEY).wait()
            if state.num_transitions != num_transitions:  # the read was retried until NATS answered again
                num_transitions = state.num_transitions
                log.warning("NATS was unreachable while the lease was awaited; its time starts over", run_id=run_id)
                watched = None  # the holder could not renew either
            lease = None if entry is None else decode(entry.value, Lease)
            if entry is None or lease is None or _is_free(entry, lease, mine, watched, deadline_s):
                return _take(state, entry, lease, mine)
        except (BusUnreachable, CompareAndSwapFailed) as err:
            if time.monotonic() > deadline:
                raise
            log.info("lease not acquired yet", run_id=run_id, reason=str(err))
            watched = None  # the holder could not renew while NATS was unreachable
        else:
            watched = _watch_on(entry, lease, watched, run_id)
        time.sleep(_POLL_S)


def _is_free(entry: Entry, lease: Lease, mine: Lease, watched: Unchanged | None, longest_s: float) -> bool:
    """Return True if a stored lease is free: released, of an own swap whose answer was lost, or expired, at ``longest_s`` at the latest."""
    unchanged_s = (
        time.monotonic() - watched.since if watched is not None and entry.revision == watched.revision else 0.0
    )
    return lease.released or lease.holder == mine.holder or unchanged_s > min(lease.ttl_s, longest_s)


def _take(state: KeyValue, entry: Entry | None, lease: Lease | None, mine: Lease) -> HeldLease:
    if entry is not None and lease is not None and lease.holder == mine.holder:
        mine, revision = lease, entry.revision
    else:
        mine = mine.model_copy(update={"epoch": 1 if lease is None else lease.epoch + 1})
        revision = state.swap(streams.LEASE_KEY, encode(mine), entry.revision if entry else None).wait()
    log.info("lease acquired", holder=mine.holder, epoch=mine.epoch)
    return HeldLease(state, mine, revision)


def _watch_on(entry: Entry, lease: Lease, watched: Unchanged | None, run_id: str) -> Unchanged:
    """Return since when another trainer's lease has not changed; raises RunIsHeld if it was renewed meanwhile."""
    if watched is None:
        holder = _describe(lease)
        log.info("lease held by another trainer; checking whether it is alive", ttl_s=lease.ttl_s, holder=holder)
        return Unchanged(entry.revision, time.monotonic())
    if entry.revision != watched.revision:
        raise RunIsHeld(
            f"the lease of run {run_id} is held by {_describe(lease)}, which is alive; stop that trainer (kill "
            f"-TERM {lease.pid} on {lease.host}), or set another run.id"
        )
    return watched


def _retried(
    attempt: Callable[[], None],
    errors: tuple[type[PenstockError], ...] = (BusUnreachable,),
    *,
    deadline_s: float = _NATS_DEADLINE_S,
) -> None:
    """Make an attempt until it raises none of ``errors``; raises the last one after ``deadline_s``."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            return attempt()
        except errors:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


class FencedKey:
    """A key that only the holder of the newest epoch can write: each first rewrites it, which moves its revision."""

    def __init__(self, state: KeyValue, key: str, rewrite: Callable[[bytes | None], bytes | None]) -> None:
        """Rewrite the key with the result of ``rewrite`` (None: leave it absent); raises LeaseLost, BusUnreachable."""
        self._state, self._key = state, key
        self.value: bytes | None = None  # as rewritten here
        self._revision: int | None = None

        def take() -> None:
            entry = state.get(key).wait()
            self.value = rewrite(entry.value if entry else None)
            self._revision = entry.revision if entry else None
            if self.value is not None:
                self._revision = state.swap(key, self.value, self._revision).wait()

        _retried(take, (BusUnreachable, CompareAndSwapFailed))

    def move(self, value: bytes) -> None:
        """Write the key; raises LeaseLost when a newer holder has written it, BusUnreachable after two minutes."""

        def swap() -> None:
            try:
                self._revision = self._state.swap(self._key, value, self._revision).wait()
            except CompareAndSwapFailed:
                entry = self._state.get(self._key).wait()
                if entry is None or entry.value != value:  # otherwise the answer to this holder's swap was lost
                    raise LeaseLost(
                        f"{self._state.bucket}/{self._key} was moved by another trainer; this one exits, and has "
                        "acknowledged nothing more"
                    ) from None
                self._revision = entry.revision

        _retried(swap)


def fence(state: KeyValue, epoch: int) -> FencedKey:
    """Rewrite head and checkpoint under a new holder's epoch, so that no older one can move them; raises LeaseLost."""

    def rewrite_head(value: bytes | None) -> bytes | None:
        if value is None:
            return None
        head = decode(value, Head)
        _refuse_older(head.epoch, epoch)
        return encode(head.model_copy(update={"epoch": epoch}))

    def rewrite_checkpoint(value: bytes | None) -> bytes:
        if value is None:
            return encode(CheckpointCommitted(epoch=epoch))
        known = decode(value, CheckpointCommitted)
        _refuse_older(known.epoch, epoch)
        return encode(known.model_copy(update={"epoch": epoch}))

    FencedKey(state, streams.HEAD_KEY, rewrite_head)
    return FencedKey(state, streams.CHECKPOINT_KEY, rewrite_checkpoint)


def _refuse_older(stored_epoch: int, epoch: int) -> None:
    if stored_epoch > epoch:
        raise LeaseLost(f"a trainer of epoch {stored_epoch} has started since this one (epoch {epoch}) got its lease")


def _describe(lease: Lease) -> str:
    since = datetime.fromtimestamp(lease.since, UTC).isoformat(timespec="seconds")
    return f"{lease.holder} (host {lease.host}, pid {lease.pid}, epoch {lease.epoch}, since {since})"
