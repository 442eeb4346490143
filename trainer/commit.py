"""Commits in the order that makes a group's effect exactly-once: chapter, checkpoint, its key in NATS, acknowledgements.

A chapter is what one checkpoint adds to the run record. The training thread stores the chapter and copies the state in memory;
everything after that is done by `CommitThread`, while training goes on. One checkpoint is under way at a time: the next one waits
for it, so that a rank holds one copy, and its chapter follows a chapter that counts.

```
state ──▶ chapter (S3) ──▶ copy ══▶ folder.partial ──fsync──▶ lease confirmed ──rename──▶ key ``checkpoint`` ──▶ acknowledgements
          counts once      in       does not count            no other trainer     │      a trainer that lost its lease
          it is named      memory   (thread from here on)     holds the run        ▼      fails here and acknowledges nothing
                                                                          copy (S3), if ``trainer.store_checkpoints``
```

Without ``trainer.local_checkpoints`` the files in the folder are removed between the key and the acknowledgements, and those of
the checkpoint that was resumed before the next one is written: every rank has read it, since the chapter's digest is of all ranks.

`WeightSubmitter` copies the weights of a version, and submits them to the publisher.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from penstock.protocol.errors import PenstockError
from penstock.protocol.facts import GroupScored
from penstock.protocol.record.checkpoint_state import CheckpointState, folder_name
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.versions import PolicyVersion, next_version
from penstock.trainer import crash_points
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import CheckpointError
from penstock.trainer.evaluation.evaluate import Evaluator
from penstock.trainer.groups.collect import Collector
from penstock.trainer.groups.group_source import StoredGroups
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.planning import Planner
from penstock.trainer.learner.shard_files import CheckpointWriter
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.weight_buckets import Snapshot, Weights
from penstock.trainer.recovery import checkpoint
from penstock.trainer.recovery.lease import HeldLease
from penstock.trainer.recovery.run_record_writer import RunRecordWriter
from penstock.trainer.recovery.stored_checkpoints import StoredCheckpoints
from penstock.trainer.settings import TrainerSettings
from penstock.trainer.telemetry.event_writer import EventWriter

log = structlog.get_logger("trainer.commit")

PUBLICATION_DEADLINE_S = 600.0

_DEADLINE_S = 1800.0  # for one checkpoint, from its copy in memory to the last acknowledgement
_CLOSE_S = 60.0  # a trainer that ends with an error waits no longer for the checkpoint that is being written
_MAX_TIME_SHARE = 0.05  # training stands still for checkpoints by time for at most this share of a run
_MAX_WRITE_SHARE = 0.5  # a thread writes checkpoints by time for at most this share of it


class WeightSubmitter:
    """Submits one version after another; for the training thread only."""

    def __init__(
        self, settings: TrainerSettings, learner: Learner, publisher: Publisher, record_writer: RunRecordWriter
    ) -> None:
        self._settings, self._learner, self._publisher = settings, learner, publisher
        self._record_writer = record_writer

    @property
    def dtype(self) -> str:
        chosen = self._settings.trainer.publish_dtype
        return self._learner.policy.dtype if chosen == "as-trained" else chosen

    def submit(self, version: PolicyVersion, *, must_publish: bool) -> None:
        self._submit(self._copy(), version, must_publish=must_publish)

    def submit_first(self, resumed: CheckpointState | None) -> tuple[PolicyVersion, bool]:
        """Publish the session's first weights; return their version, False if they were the head already.

        Version numbers never decrease: after a crash the checkpoint's weights get the number after the newest one that was ever
        published. Where a resumed run finds no base of its adapters, it is stored under a separate version number. Raises
        CheckpointError if the weights are not those of the checkpoint's state, and PublicationFailed.
        """
        version = PolicyVersion(resumed.version if resumed else 0)
        versions = self._publisher.versions
        head = versions.head.value
        weights = self._copy()
        self._check_resumed(resumed)
        parent = resumed.version if resumed else None
        if head is not None and head.version == parent and versions.resume(weights, self.dtype):
            return version, False
        version = next_version(PolicyVersion(head.version)) if head is not None else version
        if (base := versions.missing_base(weights)) is not None:
            base_version = version if head is None else next_version(version)
            versions.store_base(base, base_version, self._learner.policy.steps_done, self.dtype)
            version = next_version(base_version)
        self._submit(weights, version, must_publish=True)
        self._publisher.wait_until_published(version, PUBLICATION_DEADLINE_S)
        return version, True

    def _copy(self) -> Weights:
        chosen = self._settings.trainer.publish_dtype
        dtype = None if chosen == "as-trained" else chosen
        wanted = self._publisher.drop_overtaken()
        weights = self._learner.weights(dtype, as_adapter=self._settings.publishes_adapters, wanted=wanted)
        self._record_writer.set_weights(weights.root_later())
        return weights

    def _submit(self, weights: Weights, version: PolicyVersion, *, must_publish: bool) -> None:
        step = self._learner.policy.steps_done
        is_last = step == self._settings.trainer.steps
        self._publisher.submit(
            Snapshot(
                version=version, step=step, weights=weights, dtype=self.dtype, must_publish=must_publish or is_last
            )
        )

    def _check_resumed(self, resumed: CheckpointState | None) -> None:
        published_as = (self.dtype, "adapter" if self._settings.publishes_adapters else "model")
        if resumed is None or (resumed.weights_dtype, resumed.weights_are) != published_as:
            return  # the digests are not comparable
        digest = self._record_writer.digest()
        if digest != resumed.weights_digest:
            raise CheckpointError(
                f"checkpoint of step {resumed.step}: expected weights with digest {resumed.weights_digest[:16]}…, loaded "
                f"{digest[:16]}…; remove its folder to resume from the checkpoint before it"
            )


class CommitThread:
    def __init__(self, deadline_s: float = _DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._thread: threading.Thread | None = None
        self._step = 0
        self._failure: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, commit: Callable[[], None], *, step: int) -> None:
        self.wait()
        self._step = step
        self._thread = threading.Thread(target=self._guard, args=(commit,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until no commit is under way; raises its error, and CheckpointError after the deadline."""
        if self._thread is not None:
            self._thread.join(self._deadline_s)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"the checkpoint after step {self._step} is not committed after {self._deadline_s:.0f} s; the checkpoint before it "
                    "is unchanged. Look at the storage of run.dir and at every rank's log, then start the trainer again"
                )
        self.check()

    def check(self) -> None:
        if isinstance(self._failure, PenstockError):
            raise self._failure
        if self._failure is not None:
            raise RuntimeError("the checkpoint's thread ended with an unexpected error") from self._failure

    def close(self) -> None:
        """Let a commit that is under way end, for a minute at most; its error is not raised."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _guard(self, commit: Callable[[], None]) -> None:
        try:
            commit()
        except Exception as err:  # noqa: BLE001  the training thread raises it
            self._failure = err


class CheckpointSchedule:
    """Decides after each step whether a checkpoint is due.

    Besides every ``every_steps`` steps, and when messages must make room (`HeldBound`), one is due ``every_s`` seconds after the previous one, or later where writing takes
    long: a checkpoint for which training stood still for 60 s is followed by the next one by time after 20 minutes, one that a
    thread wrote for 60 s after 2 minutes.
    """

    def __init__(self, *, every_steps: int, every_s: float, now: float) -> None:
        """Start counting at ``now``, in seconds of a monotonic clock; ``every_s`` 0 means by steps only."""
        self._every_steps, self._every_s = every_steps, every_s
        self._previous_at = now
        self._previous_took_s = 0.0
        self._write_s = 0.0

    def is_due(self, step: int, now: float, *, is_writing: bool = False) -> bool:
        """Return True if a checkpoint is due after ``step`` steps; while one ``is_writing``, none is due by time."""
        if step % self._every_steps == 0:
            return True
        if is_writing:
            return False
        pause_s = max(self._every_s, self._previous_took_s / _MAX_TIME_SHARE, self._write_s / _MAX_WRITE_SHARE)
        return self._every_s > 0 and now - self._previous_at >= pause_s

    def written(self, *, started: float, now: float) -> None:
        self._previous_at, self._previous_took_s = now, now - started

    def committed(self, took_s: float) -> None:
        self._write_s = took_s


@dataclass(frozen=True, slots=True)
class Committer:
    settings: TrainerSettings
    learner: Learner
    writer: CheckpointWriter
    planner: Planner
    issuer: Issuer | StoredGroups
    collector: Collector | StoredGroups
    evaluator: Evaluator | None
    lease: HeldLease
    record_writer: RunRecordWriter
    stored: StoredCheckpoints | None  # None: checkpoints stay in the run's folder alone
    events: EventWriter
    on_committed: Callable[[float], None]  # called on the thread with the seconds since the copy in memory
    thread: CommitThread = field(default_factory=CommitThread)

    def commit(self, *, step: int, version: PolicyVersion, weights_dtype: str) -> None:
        """Begin to commit everything so far; what it covers is acknowledged only after the commit.

        Returns when the state is copied; `CommitThread.wait` waits for the commit, and raises its error. One that is under
        way is waited for first. Settled messages are read before the state, so that the checkpoint covers every message that
        is acknowledged. When another trainer holds the run the error is LeaseLost, and nothing was committed or acknowledged.
        """
        self.thread.wait()
        trained = self.collector.settled()
        evaluated = self.evaluator.settled() if self.evaluator else []
        issued = self.issuer.take_state()
        previous = self.record_writer.committed
        if self.record_writer.is_empty and previous is not None and issued.is_in(previous):
            # The previous checkpoint holds the present state, and so covers what was settled or retired since.
            self.lease.confirm()
            self._acknowledge(trained, evaluated)
            return
        record, chapter, digest = self.record_writer.write(issued.entries, step=step, version=version)
        crash_points.reach(CrashPoint.RECORDED)
        state = CheckpointState(
            run_id=self.settings.run.id,
            epoch=self.lease.epoch,
            step=step,
            version=version,
            weights_digest=digest,
            weights_dtype=weights_dtype,
            weights_are="adapter" if self.settings.publishes_adapters else "model",
            ledger=issued.ledger,
            dispatch=issued.dispatch,
            unsent=issued.unsent,
            letters_read=issued.letters_read,
            totals=issued.totals,
            account=issued.entries.account,
            algorithm=self.planner.document(),
            abandoned=tuple(self.collector.versions.branches),
            remade=tuple(self.collector.versions.remade),
            metrics_bytes=self.events.sync(),
            record=record,
            chapter=chapter,
        )
        if not checkpoint.has_weights_of(self.settings.run.folder / checkpoint.CHECKPOINTS, state):
            self.learner.capture()
        crash_points.reach(CrashPoint.CAPTURED)
        self.thread.start(lambda: self._finish(state, trained, evaluated), step=step)

    def _finish(
        self, state: CheckpointState, trained: list[Delivery[GroupScored]], evaluated: list[Delivery[GroupScored]]
    ) -> None:
        started = time.monotonic()
        root = self.settings.run.folder / checkpoint.CHECKPOINTS
        if self.stored is not None and not checkpoint.has_weights_of(root, state):
            self.stored.remove_local(self.lease.confirm)
        data = checkpoint.commit(
            root, state, self.writer.write, keep=self.settings.trainer.keep_checkpoints, confirm=self.lease.confirm
        )
        crash_points.reach(CrashPoint.COMMITTED)
        if self.stored is not None:
            self.stored.store(root / folder_name(state.step))
            crash_points.reach(CrashPoint.COPIED)
        self.record_writer.mark_committed(state, data)
        crash_points.reach(CrashPoint.POINTED)
        if self.stored is not None:
            self.stored.mark_named(root / folder_name(state.step), data)
            self.stored.remove_local(self.lease.confirm)
            self.stored.prune(self.lease.epoch)
        self._acknowledge(trained, evaluated)
        took_s = time.monotonic() - started
        self.on_committed(took_s)
        log.info("checkpoint committed", step=state.step, took_s=round(took_s, 3))

    def _acknowledge(self, trained: list[Delivery[GroupScored]], evaluated: list[Delivery[GroupScored]]) -> None:
        self.collector.acknowledge(trained)
        crash_points.reach(CrashPoint.ACKNOWLEDGING)
        if self.evaluator is not None:
            self.evaluator.acknowledge(evaluated)
        crash_points.reach(CrashPoint.ACKNOWLEDGED)
