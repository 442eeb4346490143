"""One trainer at a time: a lease in NATS KV, and the fence that a new holder puts up before it begins.

The holder writes the lease again six times within ``ttl_s``, by compare-and-swap on its revision, from a thread of its
own: a step of thirty seconds cannot lose it. Whoever wants the run watches the revision. If it moves, the run
is held and the newcomer is refused; if it stands still for ``ttl_s`` by the newcomer's own clock, the holder
is dead and the newcomer takes over under the next epoch. No two clocks are compared.

A trainer that was suspended, or cut off, may wake up after that and believe it still holds the run. What stops it:

| it tries to              | and fails because                                                                        |
|--------------------------|------------------------------------------------------------------------------------------|
| go on                    | its next renewal is refused: `LeaseLost` at the loop's next verb                          |
| move the head            | the new holder wrote the head again under its epoch: the revision is another (`fence`)    |
| commit a checkpoint      | `confirm` renews immediately before the rename                                            |
| acknowledge              | before that it must move the ``checkpoint`` key, which is fenced like the head            |

One window cannot be closed from here: suspended between `confirm` and the rename, which a file system
cannot make conditional. The folder it then leaves carries the older epoch; nothing was acknowledged for it,
and it never counts once the new holder has committed (`protocol/record/checkpoint_state.py`). Until then it is as
good a truth as the checkpoint before it.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from penstock.protocol import streams
from penstock.protocol.errors import BusUnreachable, CompareAndSwapFailed, PenstockError
from penstock.protocol.facts import Head, Lease, decode, encode
from penstock.protocol.record.lineage import CheckpointCommitted
from penstock.protocol.transport.key_value import Entry, KeyValue
from penstock.trainer.errors import LeaseLost, RunIsHeld

log = structlog.get_logger("trainer.lease")

_RENEWALS = 6  # within ``ttl_s``
_POLL_S = 0.2
_PATIENCE_S = 120.0  # so long may NATS be away when a commit waits for it


class HeldLease:
    """A lease that this process holds, renewed by a thread; use as a context manager, its end releases it."""

    def __init__(self, state: KeyValue, lease: Lease, revision: int) -> None:
        """Use `acquire` instead."""
        self._state = state
        self._lease = lease
        self._value = encode(lease)
        self._revision = revision
        self._renewed = time.monotonic()
        self._lost = ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_for_ever, name="lease", daemon=True)

    @property
    def epoch(self) -> int:
        """The number of this holder; what it writes is fenced by it."""
        return self._lease.epoch

    @property
    def holder(self) -> str:
        """Name of this holder."""
        return self._lease.holder

    @property
    def is_held(self) -> bool:
        """Whether nobody is known to have taken over."""
        return not self._lost

    def __enter__(self) -> HeldLease:
        """Begin to renew."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop renewing and say that the run is free; when NATS is away, the lease lapses by itself."""
        self._stop.set()
        self._thread.join(_PATIENCE_S)
        released = encode(self._lease.model_copy(update={"released": True}))
        with self._lock:
            if not self._lost:
                try:
                    self._state.swap(streams.LEASE_KEY, released, self._revision).wait()
                except (BusUnreachable, CompareAndSwapFailed) as err:
                    log.warning(
                        "the lease was not released; it lapses by itself", error=str(err), ttl_s=self._lease.ttl_s
                    )

    def check(self) -> None:
        """Raise LeaseLost when another trainer is known to have taken over; asks nobody."""
        if self._lost:
            raise LeaseLost(self._lost)

    def confirm(self, patience_s: float = _PATIENCE_S) -> None:
        """Renew now, waiting for NATS if it must be; what follows at once is done as the run's only trainer.

        Raises LeaseLost, or BusUnreachable after ``patience_s``.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._renew()
            except BusUnreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
            else:
                return

    def _renew_for_ever(self) -> None:
        while not self._stop.wait(self._lease.ttl_s / _RENEWALS):
            try:
                self._renew()
            except BusUnreachable as err:
                away_s = time.monotonic() - self._renewed
                log.warning("the lease cannot be renewed: waiting for NATS", away_s=round(away_s), error=str(err))
            except PenstockError as err:
                self._lost = self._lost or str(err)
                log.error("the lease is lost: this trainer stops", reason=self._lost)  # noqa: TRY400
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
        """Recognise a swap of our own whose answer was lost; anybody else's ends this trainer."""
        if entry is not None and entry.value == self._value:
            self._revision = entry.revision
            return
        taker = "nobody: its key is gone" if entry is None else _describe(decode(entry.value, Lease))
        self._lost = (
            f"this trainer (epoch {self.epoch}) was away for {time.monotonic() - self._renewed:.0f} s and lost its "
            f"lease of the run; it is now held by {taker}. Nothing was committed or published since; this one ends"
        )
        raise LeaseLost(self._lost)


def acquire(
    state: KeyValue, run_id: str, *, clock: Callable[[], float], ttl_s: float, deadline_s: float = 120.0
) -> HeldLease:
    """Take the lease of a run, after having watched a dead holder's lapse, and fence off what that one may still do.

    Args:
        state: The run's state bucket.
        run_id: For messages.
        clock: Seconds since the epoch.
        ttl_s: So long must the revision stand still until a next holder may take over.
        deadline_s: Longest wait altogether.

    Raises:
        RunIsHeld: Another trainer is alive.
        BusUnreachable: NATS was away until the deadline.
    """
    deadline = time.monotonic() + deadline_s
    mine = Lease(
        holder=f"trainer-{secrets.token_hex(4)}",
        epoch=1,
        host=socket.gethostname(),
        pid=os.getpid(),
        since=clock(),
        ttl_s=ttl_s,
    )
    watched: tuple[int, float] | None = None  # revision, and since when we have seen it stand still
    while True:
        try:
            entry = state.get(streams.LEASE_KEY).wait()
            found = None if entry is None else decode(entry.value, Lease)
            if entry is not None and found is not None and found.holder == mine.holder:  # our swap, its answer lost
                return _begin(state, found, entry.revision)
            if entry is None or found is None or found.released or _stood_still(watched, entry, found.ttl_s):
                mine = mine.model_copy(update={"epoch": 1 if found is None else found.epoch + 1})
                revision = state.swap(streams.LEASE_KEY, encode(mine), entry.revision if entry else None).wait()
                return _begin(state, mine, revision)
        except (BusUnreachable, CompareAndSwapFailed) as err:
            if time.monotonic() > deadline:
                raise
            log.info("the lease is not mine yet", run_id=run_id, reason=str(err))
            watched = None  # nobody could renew while NATS was away
        else:
            if watched is None:
                watched = (entry.revision, time.monotonic())
                log.info(
                    "waiting: is the trainer that holds the run alive?", ttl_s=found.ttl_s, holder=_describe(found)
                )
            elif entry.revision != watched[0]:
                raise RunIsHeld(
                    f"run {run_id} is held by {_describe(found)}, and it is alive. Only one trainer may run: "
                    f"stop it (kill -TERM {found.pid} on {found.host}), or give this run another run.id"
                )
        time.sleep(_POLL_S)


class FencedKey:
    """A key that only the holder of the newest epoch can move: every holder's first act is to move its revision."""

    def __init__(self, state: KeyValue, key: str, rewrite: Callable[[bytes | None], bytes | None]) -> None:
        """Write the key again as ``rewrite`` says (None: leave it absent); raises LeaseLost, BusUnreachable."""
        self._state = state
        self._key = key
        self.value: bytes | None = None  # as it was written by its holder's first act
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                entry = state.get(key).wait()
                self.value = rewrite(entry.value if entry else None)
                self._revision = entry.revision if entry else None
                if self.value is not None:
                    self._revision = state.swap(key, self.value, self._revision).wait()
            except (BusUnreachable, CompareAndSwapFailed):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
            else:
                return

    def move(self, value: bytes) -> None:
        """Write the key; raises LeaseLost when a newer holder has, BusUnreachable after two minutes."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._revision = self._state.swap(self._key, value, self._revision).wait()
            except BusUnreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
            except CompareAndSwapFailed:
                entry = self._state.get(self._key).wait()
                if entry is None or entry.value != value:  # else our own swap, its answer lost
                    raise LeaseLost(
                        f"{self._state.bucket}/{self._key} was moved by another trainer; this one ends, nothing more "
                        "was acknowledged"
                    ) from None
                self._revision = entry.revision
            else:
                return


def fence(state: KeyValue, epoch: int) -> FencedKey:
    """Write head and checkpoint again under a new holder's epoch; returns the key of the checkpoint.

    From here on an older holder cannot move either of them. Raises LeaseLost when a newer one was here.
    """

    def head_again(value: bytes | None) -> bytes | None:
        if value is None:
            return None
        head = decode(value, Head)
        _refuse_older(head.epoch, epoch)
        return encode(head.model_copy(update={"epoch": epoch}))

    def checkpoint_again(value: bytes | None) -> bytes:
        if value is None:
            return encode(CheckpointCommitted(epoch=epoch))
        known = decode(value, CheckpointCommitted)
        _refuse_older(known.epoch, epoch)
        return encode(known.model_copy(update={"epoch": epoch}))

    FencedKey(state, streams.HEAD_KEY, head_again)
    return FencedKey(state, streams.CHECKPOINT_KEY, checkpoint_again)


def _refuse_older(found: int, epoch: int) -> None:
    if found > epoch:
        raise LeaseLost(f"a trainer of epoch {found} has begun since this one (epoch {epoch}) got its lease")


def _begin(state: KeyValue, lease: Lease, revision: int) -> HeldLease:
    log.info("this trainer holds the run", holder=lease.holder, epoch=lease.epoch)
    return HeldLease(state, lease, revision)


def _stood_still(watched: tuple[int, float] | None, entry: Entry, ttl_s: float) -> bool:
    return watched is not None and entry.revision == watched[0] and time.monotonic() - watched[1] > ttl_s


def _describe(lease: Lease) -> str:
    since = datetime.fromtimestamp(lease.since, UTC).isoformat(timespec="seconds")
    return f"{lease.holder} (host {lease.host}, pid {lease.pid}, epoch {lease.epoch}, since {since})"
