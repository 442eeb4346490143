"""Collects scored groups: fetches, verifies and decodes them while a step runs, and acknowledges them after a checkpoint.

A separate thread pulls `GroupScored`, asks the `Batcher` which groups are wanted, and reads their pack; the training
thread takes whole batches. Whatever changes a group is done under `RunGroups.lock`. A message is acknowledged only after a checkpoint that holds the effect of all its
groups: until then the broker delivers it again.

| waits for                           | until                             | then                                         |
|-------------------------------------|-----------------------------------|----------------------------------------------|
| a full fresh batch                  | `collect_deadline_s`              | CollectTimeout: queue depths, services alive |
| groups that do not arrive           | all queues empty for 5 s          | dropped as `lost`, issued again              |
| a group of a rolled-back step       | 5 s without one, 60 s at most     | further steps are made of other groups       |
| one group that is not dead-lettered | `max_dead` were, consecutively,   | TooManyDeadLetters with the last reason      |
|                                     | and all queues are empty for 5 s  | (`batcher.py`)                               |
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import structlog

from penstock.protocol import streams, subjects
from penstock.protocol.errors import BlobCorrupt, BlobMissing, BusUnreachable, PackError, PenstockError, ReaderKilled
from penstock.protocol.facts import DeadLetter, GroupScored
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.inbox import Inbox
from penstock.protocol.versions import Branch, PolicyVersion, VersionTree
from penstock.trainer.connections import Connections
from penstock.trainer.errors import CollectTimeout, TooManyDeadLetters
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.groups.group_states import State
from penstock.trainer.groups.group_totals import DropReason, describe_drops
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.groups.pack_reader import PackReader
from penstock.trainer.groups.queue_depths import describe_queues, read_pipe
from penstock.trainer.groups.rolled_back import RolledBackSteps
from penstock.trainer.learner.step_plan import ReadyGroup

log = structlog.get_logger("trainer.groups.collect")

_FETCH_MESSAGES = 16
_FETCH_WAIT_S = 0.5
_DRAIN_S = 300.0  # a run that pauses waits no longer for the next group; the rest stays in the queues
_SILENT_S = 5.0  # all queues empty for so long: outstanding groups are lost
_REPEAT_S = 60.0  # longest wait for the groups of a step that a crash rolled back; less where nothing arrives


class OvertakeBackoff:
    """Halves the wait after every batch that overtook groups, and restores it after one that overtook none.

    Where a group is late now and then, a batch waits for it. Where one is late in every step, the waits halve towards
    zero: together they cost less than two full ones, until a batch overtakes none again.
    """

    def __init__(self) -> None:
        self._share = 1.0
        self._full_since: float | None = None  # when the batch that is to be taken became full

    def rest_s(self, full_s: float, *, overtakes: bool, now: float) -> float:
        if not overtakes or full_s <= 0.0:
            return 0.0
        if self._full_since is None:
            self._full_since = now
        return self._full_since + self.scale(full_s) - now

    def scale(self, full_s: float) -> float:
        return full_s * self._share

    def record(self, *, overtook: bool) -> None:
        self._share = self._share / 2 if overtook else 1.0
        self._full_since = None


class Collector:
    def __init__(
        self,
        connections: Connections,
        *,
        groups: RunGroups,
        batcher: Batcher,
        issuer: Issuer,
        deadline_s: float,
        silent_s: float = _SILENT_S,
        reader: PackReader | None = None,
    ) -> None:
        """Bind to the trainer's consumer and request redelivery of everything unacknowledged; raises MissingStream.

        Only this collector may use ``batcher`` from now on. Outstanding groups count as lost after all queues were empty for ``silent_s``.
        """
        self._run_id, self._bus, self._traced = connections.run_id, connections.bus, connections.traced
        self._groups, self._batcher, self._issuer = groups, batcher, issuer
        self._backoff = OvertakeBackoff()
        self._rolled_back = RolledBackSteps()
        self._deadline_s = deadline_s
        self._all_dead = False
        self._draining_since: float | None = None
        self._silent_s = silent_s
        self._reader = reader or PackReader(connections.blobs.get)
        self.held: dict[int, Delivery[GroupScored]] = {}  # until a checkpoint covers them
        self._dropped_at_last_batch: Counter[str] = Counter()
        self._changed = threading.Condition(groups.lock)
        self._failure: BaseException | None = None
        self._closing = False
        self._last_arrival = time.monotonic()
        self._spec = streams.scored_consumer(connections.run_id, "train")
        connections.bus.reset_consumer(self._spec).wait()
        self._inbox: Inbox[GroupScored] = connections.bus.inbox(self._spec, GroupScored).wait()
        self._thread = threading.Thread(target=self._guard, name="collector", daemon=True)

    def __enter__(self) -> Collector:
        self._bus.follow(
            f"{self._run_id}-dead",
            subjects.dead(self._run_id),
            DeadLetter,
            self._on_dead_letter,
            after=self._groups.train.letters_read,
        ).wait()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._thread.join(_FETCH_WAIT_S + 30.0)
        if not self._thread.is_alive():
            self._reader.close()

    def collect(
        self,
        version: PolicyVersion,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        overtake_wait_s: float = 0.0,
        may_take: Callable[[], bool] = lambda: True,
    ) -> list[ReadyGroup]:
        """Return the batch to train at ``version``; empty when ``should_stop`` returns True while it waits, or all is drained.

        A full batch waits ``overtake_wait_s`` for groups under way that would be too old for the next one, and less
        after waits without result (`OvertakeBackoff`): otherwise they would be dropped on arrival, and sampled again by
        workers that are late already. None is taken before ``may_take`` returns True.

        Raises CollectTimeout after the deadline, TooManyDeadLetters when all groups are dead-lettered and nothing is in the
        queues, and the exception that ended the collecting thread.
        """
        started = time.monotonic()
        while not should_stop():
            with self._changed:
                self._raise_failure()
                overtakes = overtake_wait_s > 0.0 and self._batcher.overtakes(version)
                rest_s = self._backoff.rest_s(overtake_wait_s, overtakes=overtakes, now=time.monotonic())
                if rest_s <= 0.0 and may_take() and (batch := self._batcher.take(version)):
                    self._backoff.record(overtook=overtakes)
                    self._dropped_at_last_batch = self._batcher.dropped.copy()
                    return batch
                if rest_s <= 0.0 and self._is_drained():
                    return []
                self._stop_repeating_late(started)
                num_ready, num_outstanding = self._batcher.num_ready, self._groups.train.num_outstanding
                self._changed.wait(min(_FETCH_WAIT_S, rest_s) if rest_s > 0.0 else _FETCH_WAIT_S)
            if self._all_dead:
                raise TooManyDeadLetters(
                    f"{self._batcher.dead_in_a_row} groups in a row were dead-lettered, none arrived scored, and all queues are empty; "
                    f"the last one: {self._batcher.last_letter}. Fix that service, then start the trainer again; "
                    "`penstock dead-letters list` shows them"
                )
            if time.monotonic() - started > self._deadline_s:
                raise CollectTimeout(
                    f"no full batch within trainer.collect_deadline_s = {self._deadline_s:.0f} s: {num_ready} groups "
                    f"ready, {num_outstanding} outstanding. {describe_queues(self._bus, self._run_id)}"
                    f"{self._dead_lettered()}{self._dropped_since_last_batch()}"
                )
        return []

    def has_batch(self, version: PolicyVersion) -> bool:
        """Return True if `collect` would return a batch to train at ``version`` without waiting for groups."""
        with self._changed:
            return self._batcher.is_full(version)

    @property
    def versions(self) -> VersionTree:
        return self._groups.train.versions

    def begin_session(
        self,
        version: PolicyVersion,
        steps: Mapping[PolicyVersion, int],
        branch: Branch | None,
        rolled_back: RolledBackSteps,
    ) -> None:
        """Know the ``steps`` of the versions of all sessions; make those of ``rolled_back`` again from ``version`` on."""
        with self._changed:
            self.versions.begin_session(steps, branch)
            self._rolled_back = rolled_back
            self._batcher.repeat(rolled_back, version)

    def drain(self) -> None:
        with self._changed:
            self._draining_since = time.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._batcher.end()

    def settled(self) -> list[Delivery[GroupScored]]:
        with self._changed:
            return [self.held[sequence] for sequence in self._groups.train.settled()]

    def acknowledge(self, deliveries: Sequence[Delivery[GroupScored]]) -> None:
        Delivery.ack_all(deliveries)
        with self._changed:
            self._groups.train.forget_messages(delivery.sequence for delivery in deliveries)
            for delivery in deliveries:
                self.held.pop(delivery.sequence, None)

    # ── on the collector's thread ─────────────────────────────────────────────────────────────

    def _guard(self) -> None:
        try:
            self._work()
        except Exception as err:  # noqa: BLE001  the training thread raises it
            with self._changed:
                self._failure = err
                self._changed.notify_all()

    def _work(self) -> None:
        silent_since: float | None = None
        while not self._closing:
            deliveries = self._inbox.fetch(_FETCH_MESSAGES, _FETCH_WAIT_S).wait()
            for delivery in deliveries:
                self._receive(delivery)
            if deliveries or not self._pipe_is_empty():
                silent_since = None
            elif silent_since is None:
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since > self._silent_s:
                self._settle_silence()
                silent_since = None

    def _receive(self, delivery: Delivery[GroupScored]) -> None:
        message = delivery.fact
        with self._changed:
            self.held[delivery.sequence] = delivery
            self._last_arrival = time.monotonic()
            wanted = self._batcher.receive(delivery.sequence, message.groups, message.pack)
            self._traced.arrived(delivery.traceparent, [scored.generated.group_id for scored in wanted])
        if not wanted:
            return
        try:
            promises = [self._issuer.promise(scored.generated.group_id) for scored in wanted]
            groups = self._reader.read(message.pack, wanted, promises)
        except (BlobMissing, BlobCorrupt, PackError, ReaderKilled) as err:
            log.warning(
                "pack is unreadable: dead-lettered, its groups are issued again",
                pack_id=message.pack_id,
                error=str(err),
            )
            reason = DropReason.QUARANTINED if isinstance(err, ReaderKilled) else DropReason.UNREADABLE
            with self._changed:
                del self.held[delivery.sequence]
                self._batcher.drop_unreadable(delivery.sequence, wanted, reason)
            delivery.dead_letter(type(err).__name__, str(err)).wait()
        else:
            with self._changed:
                self._batcher.offer(ReadyGroup(s, message.pack, group) for s, group in zip(wanted, groups, strict=True))
                self._all_dead = False
                self._issuer.pause(self._batcher.stops_issue)
                if self._batcher.may_be_full or self._draining_since is not None:
                    self._changed.notify_all()  # else `collect` would look at every group, and wait on

    def _pipe_is_empty(self) -> bool:
        has_question = self._batcher.stops_issue or self._missing()
        if time.monotonic() - self._last_arrival < self._silent_s or not has_question:
            return False
        try:
            return read_pipe(self._bus, self._run_id).is_empty(self._inbox.num_held)
        except BusUnreachable:
            return False

    def _missing(self) -> list[str]:
        with self._changed:
            return self._batcher.missing()

    def _settle_silence(self) -> None:
        with self._changed:
            self._all_dead = self._batcher.letters_were_true()
            missing = [] if self._all_dead else self._batcher.drop_missing()
            self._issuer.pause(self._batcher.stops_issue)
            self._changed.notify_all()
        if missing:
            log.warning(
                "all queues are empty: missing groups are issued again", num_groups=len(missing), first=missing[:3]
            )

    def _dead_lettered(self) -> str:
        num_dead = self._batcher.dead_in_a_row
        return (
            f" {num_dead} groups were dead-lettered since the last one arrived; the last one: {self._batcher.last_letter}"
            if num_dead
            else ""
        )

    def _dropped_since_last_batch(self) -> str:
        with self._changed:
            dropped = describe_drops(self._batcher.dropped - self._dropped_at_last_batch)
        return f". Groups dropped since the last batch: {dropped}" if dropped else ""

    # ── on the bus's thread ───────────────────────────────────────────────────────────────────

    def _on_dead_letter(self, letter: DeadLetter, sequence: int, subject: str) -> None:
        if subject != subjects.dead(self._run_id, letter.stage) or letter.run_id != self._run_id:
            log.warning(
                "dead letter of another stage or run than its subject: ignored", subject=subject, stage=letter.stage
            )
            letter = letter.model_copy(update={"group_ids": ()})
        with self._changed:
            try:
                if self._batcher.dead_letter(letter, sequence):
                    self._issuer.pause(self._batcher.stops_issue)
            except Exception as err:  # noqa: BLE001  no later letter would be read; the training thread raises it
                self._failure = err
                self._changed.notify_all()

    # ── with the lock held ────────────────────────────────────────────────────────────────────

    def _stop_repeating_late(self, started: float) -> None:
        """Make no rolled-back step again once a group of the next one does not come: all are delivered at the start."""
        if not self._batcher.num_to_repeat or self._groups.train.num(State.ARRIVED):
            return
        now = time.monotonic()
        if now - started > _REPEAT_S or now - max(started, self._last_arrival) > _SILENT_S:
            log.warning(
                "a group of a rolled-back step is not delivered again: further steps are made of other groups",
                num_steps=self._batcher.num_to_repeat,
            )
            self._batcher.stop_repeating()
            self._rolled_back.forget()

    def _is_drained(self) -> bool:
        if self._draining_since is None:
            return False
        if self._batcher.is_drained:
            return True
        waited_s = time.monotonic() - max(self._draining_since, self._last_arrival)
        if waited_s > _DRAIN_S:
            missing = self._batcher.missing()
            log.warning(
                "pausing without groups that did not arrive: they stay in the queues",
                num_groups=len(missing),
                first=missing[:3],
                waited_s=round(waited_s),
            )
        return waited_s > _DRAIN_S

    def _raise_failure(self) -> None:
        if isinstance(self._failure, PenstockError):
            raise self._failure
        if self._failure is not None:
            raise RuntimeError("the collecting thread ended with an unexpected error") from self._failure
