"""The stages of the loop, on rank 0, one method each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import structlog

from penstock.protocol.errors import PenstockError
from penstock.protocol.heartbeats import Activity
from penstock.protocol.record import run_folder
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import STEP_DIGEST, group_digest, step_digest
from penstock.protocol.traces.traces import HeldGroups, Value
from penstock.protocol.transport.stream_admin import StreamState
from penstock.protocol.versions import Branch, PolicyVersion, next_version
from penstock.trainer import crash_points
from penstock.trainer.algorithm.mismatch import compare_fresh_tokens
from penstock.trainer.algorithm.stop_checks import CollapseCheck, EngineCheck, hardware_failed
from penstock.trainer.commit import PUBLICATION_DEADLINE_S, CheckpointSchedule, Committer, WeightSubmitter
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.device_turns import TrainerTurns
from penstock.trainer.errors import EngineMismatch, HardwareFailed, PolicyCollapsed, TrainerError, TrainingDiverged
from penstock.trainer.evaluation.evaluation_schedule import EarlyStop, EvaluationSchedule
from penstock.trainer.groups.batcher import sampling_versions, staleness_tokens
from penstock.trainer.groups.collect import Collector
from penstock.trainer.groups.group_source import StoredGroups
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.groups.rolled_back import RolledBackSteps
from penstock.trainer.learner.flops import peak_of_ranks
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.planning import Learned, Planner, learn
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.publishing.publication import Publication, UnchangedVersions
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.recovery.held_messages import HeldBound, sizes
from penstock.trainer.recovery.lease import HeldLease
from penstock.trainer.recovery.run_record_writer import RunRecordWriter, save_batch
from penstock.trainer.settings import TrainerSettings
from penstock.trainer.telemetry.event_writer import EventWriter, HeartbeatWriter, StepReporter
from penstock.trainer.telemetry.logprob_writer import LogprobWriter, StepNumbers
from penstock.trainer.telemetry.metrics import speed_fields, step_fields
from penstock.trainer.telemetry.trainer_metrics import TrainerMetrics

log = structlog.get_logger("trainer.training")

_STOP_PUBLISH_S = 20.0  # longest wait for the newest version where a run stops by itself


@dataclass(slots=True)
class Training:
    """One session of a run; `trainer/assemble.py` makes the parts, some of which have separate threads."""

    settings: TrainerSettings
    learner: Learner
    planner: Planner
    issuer: Issuer | StoredGroups
    collector: Collector | StoredGroups
    publisher: Publisher
    submitter: WeightSubmitter
    evaluations: EvaluationSchedule
    early_stop: EarlyStop
    events: EventWriter
    reporter: StepReporter
    logprobs: LogprobWriter
    heartbeat: HeartbeatWriter
    activity: Activity
    metrics: TrainerMetrics
    traced: HeldGroups
    lease: HeldLease
    record_writer: RunRecordWriter
    committer: Committer
    config: bytes  # the settings as JSON, for the record
    clock: Callable[[], float]
    stop: threading.Event  # set to end the session early
    resumed: CheckpointState | None
    scored_stream: StreamState
    rolled_back: RolledBackSteps
    turns: TrainerTurns | None = None  # on GPUs that engines use too
    version: PolicyVersion = field(init=False)
    engine_check: EngineCheck = field(init=False)
    collapse_check: CollapseCheck = field(init=False)
    schedule: CheckpointSchedule = field(init=False)
    unchanged: UnchangedVersions = field(default_factory=UnchangedVersions)
    held_bound: HeldBound = field(init=False)
    _fields: dict[str, object] | None = None  # of the newest step, until it is reported
    _wait_s: float = 0.0
    _step_s: float = 0.0  # of the newest step
    _record_s: float = 0.0
    _submit_s: float = 0.0
    _checkpoint_s: float = 0.0  # since the newest step
    _is_pausing: bool = False  # no new tasks; ends when what is under way is trained

    def __post_init__(self) -> None:
        trainer = self.settings.trainer
        self.engine_check = EngineCheck(limit=trainer.max_mismatch, max_violations=trainer.mismatch_patience)
        self.collapse_check = CollapseCheck(trainer.min_entropy)
        self.version = PolicyVersion(self.resumed.version if self.resumed else 0)
        rollout = self.settings.rollout
        self.held_bound = HeldBound.of_stream(
            self.scored_stream, groups_per_step=rollout.groups_per_step, groups_per_message=rollout.groups_per_message
        )
        if warning := self.held_bound.check():
            log.warning(warning)
        self.schedule = CheckpointSchedule(
            every_steps=trainer.checkpoint_every, every_s=trainer.checkpoint_every_s, now=time.monotonic()
        )

    @property
    def num_steps_done(self) -> int:
        return self.learner.policy.steps_done

    @property
    def should_continue(self) -> bool:
        return not self.is_done and not self.stop.is_set()

    @property
    def is_done(self) -> bool:
        return self.num_steps_done >= self.settings.trainer.steps or self.early_stop.ended is not None

    def begin(self) -> None:
        self._set_state("starting", total_steps=self.settings.trainer.steps, attention=self.learner.policy.attention)
        parent = self.resumed.version if self.resumed else None
        self.version, is_new = self.submitter.submit_first(self.resumed)
        steps = self.publisher.steps_before
        branch = Branch(PolicyVersion(parent or 0), self.version) if is_new and steps else None
        steps = {**steps, self.version: self.num_steps_done}
        self.collector.begin_session(self.version, steps, branch, self.rolled_back)
        self.record_writer.add_session(
            holder=self.lease.holder,
            at=self.clock(),
            step=self.num_steps_done,
            version=self.version,
            parent=parent,
            config=self.config,
            extensions={**self.settings.extension_digests, **self.learner.data_digests},
        )
        self.heartbeat.version = self.version
        at_start = self.evaluations.is_due_at_start(self.num_steps_done)
        evaluates = self._resume_evaluations() or at_start
        if evaluates:
            self.evaluations.start(self.version, self.num_steps_done)
        self._pause_if_requested()
        self.admit(self.version)
        if at_start:
            self._set_state("evaluating before the first step")
            self.evaluations.wait_for_newest(lambda: self._should_stop(awaits_engine=True) or self._is_crowded())
        elif is_new and not evaluates:
            self.publisher.unpin(self.version)
        self._set_state("training")
        self.activity.restart()

    def collect(self) -> list[ReadyGroup]:
        """Wait for the next batch; empty when ``stop`` is set, or a run that pauses has trained what was under way."""
        started = time.monotonic()
        self.activity.state = "waiting for groups"
        overtake_wait_s = self.settings.trainer.oldest_patience * self._step_s
        batch = self.collector.collect(
            self.version,
            self._should_stop,
            overtake_wait_s=overtake_wait_s,
            may_take=lambda turns=self.turns: turns is None or turns.is_held,
        )
        self._wait_s = time.monotonic() - started
        if self._is_pausing and not batch:
            self.stop.set()
        return batch

    def train(self, batch: list[ReadyGroup]) -> Learned:
        """Train on a batch; raises TrainingDiverged, HardwareFailed, EngineMismatch or PolicyCollapsed before publishing."""
        started = time.monotonic()
        algorithm = self.planner.document()
        try:
            with self.activity.working("training"):
                ages, keep_groups = self._ages(batch), self.settings.trainer.store_logprobs
                learned = learn(self.planner, self.learner, batch, self.version, ages=ages, keep_groups=keep_groups)
            crash_points.reach(CrashPoint.STEPPED)
            sums = learned.metrics.sums
            self.engine_check.check(compare_fresh_tokens(sums, learned.metrics.maxima), self.version)
            if sums["tokens"]:
                self.collapse_check.check(sums["surprise"] / sums["tokens"], self.num_steps_done)
            else:
                log.warning("filters left no completion of the batch to train on", skipped=dict(learned.skipped))
        except (EngineMismatch, PolicyCollapsed, TrainingDiverged, RuntimeError, MemoryError) as err:
            reason = err if isinstance(err, TrainerError) else hardware_failed(err, self.settings.trainer.num_ranks)
            saved = self._save_batch(batch, reason, algorithm)
            self.events.write("alarm", {"text": str(saved)})
            raise saved from err
        self._step_s = time.monotonic() - started
        ids = [group.group_id for group in batch]
        step: dict[str, Value] = {"step": self.num_steps_done, "version": self.version}
        self.traced.trained(ids, time.time() - self._step_s, step)
        return learned

    def record_step(self, batch: list[ReadyGroup], learned: Learned) -> None:
        started = time.monotonic()
        other_ages = self._ages(batch)
        ages = staleness_tokens(batch, self.version, least=self.settings.data.least_age, ages=other_ages)
        made = next_version(self.version)
        uses = self.issuer.mark_trained(batch, ages, version=self.version, made=made)
        skipped = dict(learned.skipped)
        if learned.metrics.moved_weights:
            self.unchanged.updated(made)
        self._fields = {
            **step_fields(self.num_steps_done, self.version, learned.metrics, batch, ages),
            "wait_s": self._wait_s,
            "step_s": self._step_s,
            **self.publisher.seconds,
            "mismatch_unseen_steps": self.engine_check.steps_since,
            "skipped": skipped,
            **({"updates_left_out": len(learned.left_out)} if learned.left_out else {}),
            **speed_fields(
                learned.metrics.work,
                num_tokens=sum(ages.values()),
                step_s=self._step_s,
                peak=peak_of_ranks(self.settings.trainer, self.learner.policy),
            ),
            **learned.reported,
            "reused_groups": sum(count > 1 for count in uses.values()),
            "logprobs_lost": self.logprobs.num_lost,
            **(self.turns.take_figures() if self.turns is not None else {}),
        }
        digests = [group_digest(group.scored, group.pack, uses[group.group_id]) for group in batch]
        digest = step_digest(self.lease.epoch, self.num_steps_done, self.version, made, digests)
        self._fields[STEP_DIGEST] = digest.model_dump()
        self.record_writer.add_step(
            self.num_steps_done,
            self.version,
            made,
            batch,
            skipped,
            uses,
            updates=learned.updates,
            left_out=learned.left_out,
            ages=other_ages,
        )
        self.logprobs.submit(StepNumbers(self.num_steps_done, self.version, made), batch, learned)
        self.version = made
        self._record_s = time.monotonic() - started

    def publish(self) -> None:
        started = time.monotonic()
        self.lease.check()
        with self.activity.working("publishing"):
            self.submitter.submit(self.version, must_publish=self.evaluations.is_due(self.num_steps_done))
        self.heartbeat.version = self.version
        self._submit_s = time.monotonic() - started

    def evaluate_if_due(self) -> None:
        if self.evaluations.is_due(self.num_steps_done):
            self.evaluations.start(self.version, self.num_steps_done)

    def report(self) -> None:
        if self._fields is not None:
            seconds = {"record_s": self._record_s, "submit_s": self._submit_s, "checkpoint_s": self._checkpoint_s}
            self.reporter.report(self.num_steps_done, {**self._fields, **seconds}, self.issuer.groups())
            self._fields, self._checkpoint_s = None, 0.0

    def checkpoint_if_due(self) -> None:
        """Begin a checkpoint when one is due; while one is written, one by steps waits, one by time is left out."""
        self.committer.thread.check()
        is_writing = self.committer.thread.is_busy
        if self.schedule.is_due(self.num_steps_done, time.monotonic(), is_writing=is_writing):
            self._checkpoint()
        else:
            self._make_room()

    def finish(self) -> None:
        self.issuer.stop()
        if (end := self.early_stop.ended) is not None:
            self.events.write("log", {"text": end.text, "early_stop": self.early_stop.document()})
            log.info(end.text, step=self.num_steps_done)
        if self.is_done:
            self.collector.close()
        self._checkpoint(waits=True)
        if not self.stop.is_set() and (self.turns is None or self.turns.take(self.stop.is_set)):
            folder = self.settings.run.folder / "model"
            verify = self.settings.trainer.verify_export
            self.learner.export(folder, like=self.settings.model.path, verify=verify)
            log.info("exported", folder=str(folder), policy_version=self.version)
            self.publisher.wait_until_published(self.version, PUBLICATION_DEADLINE_S)
            if self.evaluations.is_newest(self.version):
                self._set_state("evaluating after the last step")
                self.evaluations.wait_for_newest(lambda: self._should_stop(awaits_engine=True))
            if self.evaluations.is_enabled:
                self.evaluations.wait_for_all(lambda: self._should_stop(awaits_engine=True))
                self._checkpoint(waits=True)  # acknowledges the groups of evaluations too
        self.publisher.close()
        ended = "finished" if not self.stop.is_set() else "paused" if self._is_pausing else "stopped"
        self._set_state(ended, finished=not self.stop.is_set())

    def on_published(self, publication: Publication) -> None:
        """Admit tasks for an announced version, and write its event (called on the publisher's thread)."""
        self.admit(publication.version)
        if text := self.unchanged.published(publication):
            log.warning(text)
            self.events.write("alarm", {"text": text})
        self.events.write("weights", asdict(publication))

    def admit(self, published: PolicyVersion) -> None:
        """Let tasks be issued for a version that workers can fetch (called on the publisher's thread).

        Groups are issued only then: one issued earlier would be sampled by an older version, staler than the admission rule assumes.
        """
        steps_left = self.settings.trainer.steps - self.num_steps_done
        self.issuer.advance(published, steps_left * self.settings.rollout.groups_per_step)

    def on_committed(self, took_s: float) -> None:
        self.schedule.committed(took_s)
        self.metrics.checkpoint_written(took_s)

    def _resume_evaluations(self) -> bool:
        """Continue evaluations of an earlier session; return True if one of the current weights is unfinished."""
        if self.resumed is None:
            return False
        return self.evaluations.resume(PolicyVersion(self.resumed.version), now=self.version, step=self.num_steps_done)

    def _should_stop(self, *, awaits_engine: bool = False) -> bool:
        self.lease.check()
        self.publisher.check()
        self.issuer.check()
        self.committer.thread.check()
        self._pause_if_requested()
        self.reporter.report_drops(self.num_steps_done, self.issuer.groups())  # also before the first batch is complete
        self._make_room()
        if self.turns is not None:
            self.turns.follow(self.stop.is_set, self.collector.has_batch(self.version), awaits_engine=awaits_engine)
        return self.stop.is_set()

    def _make_room(self) -> None:
        """Begin a checkpoint when the messages that it would acknowledge must make room, also while a batch is waited for."""
        if self.committer.thread.is_busy:
            return
        num_settled, is_due = self._held_messages()
        if is_due:
            log.info("checkpoint: held messages must make room", step=self.num_steps_done, num_messages=num_settled)
            self._checkpoint()

    def _held_messages(self) -> tuple[int, bool]:
        readers = [self.collector, self.evaluations.evaluator] if self.evaluations.evaluator else [self.collector]
        settled = [size for reader in readers for size in sizes(reader.settled())]
        num_unsettled = sum(len(reader.held) for reader in readers) - len(settled)
        return len(settled), self.held_bound.is_due(settled, num_unsettled)

    def _is_crowded(self) -> bool:
        """Return True if groups to train leave no room for those of an evaluation; it then goes on while the run trains."""
        if is_crowded := self.held_bound.is_crowded(len(self.collector.held)):
            log.warning("the evaluation goes on during training: scored groups of training fill its stream")
        return is_crowded

    def _pause_if_requested(self) -> None:
        if not self._is_pausing and run_folder.is_pause_requested(self.settings.run.folder):
            self._is_pausing = True
            self.issuer.drain()
            self.collector.drain()
            self._set_state("pausing: training what is under way")

    def _checkpoint(self, *, waits: bool = False) -> None:
        started = time.monotonic()
        with self.activity.working("checkpointing"):
            self.committer.commit(step=self.num_steps_done, version=self.version, weights_dtype=self.submitter.dtype)
            if waits:
                self.committer.thread.wait()
        finished = time.monotonic()
        self.schedule.written(started=started, now=finished)
        self._checkpoint_s += finished - started

    def _save_batch(self, batch: list[ReadyGroup], err: TrainerError, algorithm: Mapping[str, object]) -> TrainerError:
        """Save the batch of a step that stops the run; return the error with where it is.

        The weights before it are on their way to the object store, from where a replay of the batch takes them.
        """
        step = self.num_steps_done + isinstance(err, TrainingDiverged | HardwareFailed)
        folder = self.settings.run.folder
        try:
            saved = save_batch(
                folder, batch, err, config=self.config, run_id=self.settings.run.id, step=step, version=self.version,
                epoch=self.lease.epoch, algorithm=dict(algorithm), ages=tuple(self._ages(batch).items()),
            )  # fmt: skip
        except OSError as problem:
            return type(err)(f"{err}. The batch of step {step} could not be saved below {folder}: {problem}")
        try:
            self.publisher.wait_until_published(self.version, _STOP_PUBLISH_S)
        except PenstockError as problem:  # the run stops for another reason
            log.warning("the version before the saved batch was not published", error=str(problem))
        return type(err)(
            f"{err}. The batch of step {step} is saved in {saved}: `penstock runs stopped {self.settings.run.id}` shows it, and "
            f"`penstock replay {self.settings.run.id} --batch {step}` trains on it again"
        )

    def _ages(self, batch: list[ReadyGroup]) -> dict[int, int]:
        return self.collector.versions.ages(self.version, sampling_versions(batch))

    def _set_state(self, text: str, **more: object) -> None:
        self.activity.state = text
        self.events.write("state", {"text": text, **more})
        log.info(text, step=self.num_steps_done, policy_version=self.version)
