"""The verbs of the loop, on rank 0: each is one stage, and nothing else happens between them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import structlog
import torch

from penstock.protocol.activity import Activity
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.versions import PolicyVersion, next_version
from penstock.trainer import crash_points
from penstock.trainer.algorithm.engine_check import EngineCheck
from penstock.trainer.algorithm.mismatch import compare_fresh_tokens
from penstock.trainer.commit import commit_everything
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import CheckpointError, EngineMismatch
from penstock.trainer.evaluation.eval_result import EvalResult, LostEvaluation
from penstock.trainer.evaluation.evaluate import Evaluator
from penstock.trainer.groups.batcher import staleness_tokens
from penstock.trainer.groups.collect import Collector
from penstock.trainer.groups.counters import Counters
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.groups.ledger import Ledger
from penstock.trainer.groups.offline import StoredCollector, StoredIssuer
from penstock.trainer.learner.planning import Planner, learn
from penstock.trainer.learner.policy import StepFigures
from penstock.trainer.learner.rank_group import RankGroup
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.publishing.model_folder import write_model_folder
from penstock.trainer.publishing.publication import Publication
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.snapshot import Snapshot, Weights
from penstock.trainer.recovery.lease import HeldLease
from penstock.trainer.recovery.run_record_writer import RunRecordWriter
from penstock.trainer.settings import TrainerSettings
from penstock.trainer.telemetry.event_writer import Recorder
from penstock.trainer.telemetry.heartbeat import HeartbeatWriter
from penstock.trainer.telemetry.metrics import StepTiming, step_fields

log = structlog.get_logger("trainer")

_PUBLICATION_DEADLINE_S = 600.0


@dataclass(slots=True)
class Training:
    """One life of a run on rank 0; `trainer/assemble.py` makes the parts, which have threads of their own."""

    settings: TrainerSettings
    rank_group: RankGroup
    issuer: Issuer | StoredIssuer
    collector: Collector | StoredCollector
    publisher: Publisher
    evaluator: Evaluator | None
    recorder: Recorder
    heartbeat: HeartbeatWriter
    activity: Activity
    ledger: Ledger
    counters: Counters
    lease: HeldLease
    record_writer: RunRecordWriter
    config: bytes  # the settings as JSON, for the record
    clock: Callable[[], float]
    stop: threading.Event  # set by whoever asks the run to end early
    resumed: CheckpointState | None
    version: PolicyVersion = field(init=False)
    planner: Planner = field(init=False)
    evaluations: list[EvalResult] = field(default_factory=list)
    engine_check: EngineCheck = field(init=False)
    _evaluated: PolicyVersion | None = None
    _fields: dict[str, object] | None = None  # of the step that was just made, until it is reported
    _wait_s: float = 0.0
    _step_s: float = 0.0  # of the step that was made last
    _dropped: Counter[str] = field(default_factory=Counter)  # as last reported, by reason

    def __post_init__(self) -> None:
        trainer = self.settings.trainer
        self.engine_check = EngineCheck(limit=trainer.max_mismatch, max_violations=trainer.mismatch_patience)
        self.version = PolicyVersion(self.resumed.version if self.resumed else 0)
        self._dropped = Counter(self.counters.dropped_groups)
        self.planner = Planner(self.settings, self.rank_group, self.resumed.algorithm if self.resumed else {})

    @property
    def num_steps_done(self) -> int:
        """Optimizer steps of the run so far, earlier lives included."""
        return self.rank_group.policy.steps_done

    @property
    def goes_on(self) -> bool:
        """Whether there is a step left and nobody asked to stop."""
        return self.num_steps_done < self.settings.trainer.steps and not self.stop.is_set()

    def begin(self) -> None:
        """Publish the weights the run starts from, evaluate them, and let the workers start.

        A version number never goes back: after a crash the checkpoint's weights get the number after
        the newest one that was ever published. A policy that has made no step is published as a model, upon which
        adapters then sit; where a resumed one finds no such model, it is stored beside, under a number of its own.
        """
        self._say("starting", total_steps=self.settings.trainer.steps)
        head = self.publisher.head
        parent = self.resumed.version if self.resumed else None
        weights = self._weights()
        self._check_weights()
        is_published = (
            head is not None and head.version == parent and self.publisher.resume(weights, self.published_dtype)
        )
        if not is_published:
            self.version = next_version(PolicyVersion(head.version)) if head is not None else self.version
            if weights.base is not None and not self.publisher.has_base(weights.base):
                beside = next_version(self.version)
                self.publisher.lay_base(weights.base, beside, self.num_steps_done, self.published_dtype)
                self.version = next_version(beside)
            self._submit(weights, must_publish=True)
            self.publisher.wait_until_published(self.version, _PUBLICATION_DEADLINE_S)
        self.record_writer.life(
            holder=self.lease.holder,
            at=self.clock(),
            step=self.num_steps_done,
            version=self.version,
            parent=parent,
            config=self.config,
            extensions=self.settings.algorithm.extension_digests,
        )
        self.heartbeat.version = self.version
        at_start = self.evaluator is not None and self.settings.eval.at_start and self.num_steps_done == 0
        evaluates = self._resume_evaluation() or at_start
        if evaluates:
            self._evaluate()
        self.admit(self.version)
        if at_start:
            self._say("evaluating the start")
            self._await_evaluation()
        elif not is_published and not evaluates:
            self.publisher.unpin(self.version)
        self._say("training")
        self.activity.restart()

    def collect(self) -> list[ReadyGroup]:
        """Wait for the next batch; empty when asked to stop."""
        started = time.monotonic()
        self.activity.state = "waiting for groups"
        patience_s = self.settings.trainer.oldest_patience * self._step_s
        batch = self.collector.collect(self.version, self._should_stop, patience_s=patience_s)
        self._wait_s = time.monotonic() - started
        return batch

    def step(self, batch: list[ReadyGroup]) -> None:
        """Make one optimizer step and close its groups; the weights now are the next version."""
        started = time.monotonic()
        with self.activity.working("training"):
            learned = learn(self.planner, self.rank_group, batch, self.version)
        crash_points.reach(CrashPoint.STEPPED)
        self._compare_engine(learned.figures)
        self._step_s = time.monotonic() - started
        timing = StepTiming(self._wait_s, self._step_s, self.publisher.publish_s)
        ages = staleness_tokens(batch, self.version, least=self.settings.data.least_age)
        ids = [group.group_id for group in batch]
        self._fields = step_fields(self.num_steps_done, self.version, learned.figures, batch, ages, timing)
        self._fields["mismatch_unseen_steps"] = self.engine_check.steps_since
        self._fields["skipped"] = skipped = dict(learned.plan.skipped)
        self._fields |= learned.reported
        new = [group_id for group_id in ids if group_id not in self.ledger]
        self._fields["reused_groups"] = len(ids) - len(new)
        self.ledger.record(self.version, ids, max_staleness=self.settings.rollout.max_staleness)
        tokens = {group.group_id: group.num_tokens for group in batch}
        made = next_version(self.version)
        first_uses = {group_id: tokens[group_id] for group_id in new}
        self.issuer.trained(first_uses, ages, made=made, num_reused=len(ids) - len(new))
        self.collector.trained(ids)
        uses = {group_id: self.ledger.uses(group_id) for group_id in ids}
        self.record_writer.step(self.num_steps_done, self.version, made, batch, skipped, uses)
        self.version = made

    def _compare_engine(self, figures: StepFigures) -> None:
        """Stop before the update is published when engine and trainer have parted; the panel says why."""
        try:
            self.engine_check.check(compare_fresh_tokens(figures.sums, figures.maxima), self.version)
        except EngineMismatch as err:
            self.recorder.event("alarm", {"text": str(err)})
            raise

    def publish(self) -> None:
        """Hand the new weights to the publisher; raises LeaseLost when another trainer has the run."""
        self.lease.check()
        with self.activity.working("publishing"):
            self._submit(self._weights(), must_publish=self._evaluation_is_due())
        self.heartbeat.version = self.version

    def evaluate_if_due(self) -> None:
        """Start an evaluation of the new version; its result comes by itself."""
        if self._evaluation_is_due():
            self._evaluate()

    def report(self) -> None:
        """Write down the step that was just made, and what was dropped since the one before."""
        if self._fields is not None:
            groups = self.issuer.groups()
            dropped = Counter(groups["dropped"])
            if dropped != self._dropped:
                self.recorder.event("drop", {"step": self.num_steps_done, "groups": dict(dropped - self._dropped)})
                self._dropped = dropped
            self.recorder.event("step", {**self._fields, "groups": groups})
            self.heartbeat.figures = {
                "step": float(self.num_steps_done),
                "groups_trained": float(groups["trained"]),
                "groups_outstanding": float(groups["outstanding"]),
            }
            self._fields = None

    def checkpoint_if_due(self) -> None:
        """Commit a checkpoint every so many steps."""
        if self.num_steps_done % self.settings.trainer.checkpoint_every == 0:
            self._checkpoint()

    def finish(self) -> None:
        """End the run, or this life of it: checkpoint, and when all steps are done export and evaluate."""
        self.issuer.stop()
        if self.num_steps_done >= self.settings.trainer.steps:
            self.collector.close()
        self._checkpoint()
        if not self.stop.is_set():
            tensors = self.rank_group.snapshot()
            folder = self.settings.run.folder / "model"
            write_model_folder(folder, tensors, like=self.settings.model.path, dtype=self.rank_group.policy.dtype)
            log.info("exported", folder=str(folder), policy_version=self.version)
            self.publisher.wait_until_published(self.version, _PUBLICATION_DEADLINE_S)
            if self.evaluator is not None:
                if self._evaluated == self.version:
                    self._say("evaluating the end")
                    self._await_evaluation()
                self.evaluator.wait_for_all(self._should_stop)
                self._checkpoint()  # their groups are acknowledged too
        self.publisher.close()
        self._say("stopped" if self.stop.is_set() else "finished", finished=not self.stop.is_set())

    def published(self, publication: Publication) -> None:
        """Let tasks be issued for a version that was announced, and write its figures down (publisher's thread)."""
        self.admit(publication.version)
        self.recorder.event("weights", asdict(publication))

    def admit(self, published: PolicyVersion) -> None:
        """Let tasks be issued for a version that the workers can have now (called on the publisher's thread).

        Room for new groups is used only then: a group issued before its version can be fetched would be
        sampled by an older one, and be one version staler than the admission rule counts on.
        """
        steps_left = self.settings.trainer.steps - self.num_steps_done
        self.issuer.advance(published, steps_left * self.settings.rollout.groups_per_step)

    def on_evaluation(self, result: EvalResult | LostEvaluation) -> None:
        """Write down what an evaluation came to (called on the evaluator's thread, or as the run begins)."""
        if isinstance(result, LostEvaluation):
            at = "" if result.step is None else f" (step {result.step})"
            text = f"evaluation lost: version {result.version}{at}: {result.reason}"
            self.recorder.event("evaluation_lost", {"text": text, **asdict(result)})
            log.warning("evaluation lost", policy_version=result.version, step=result.step, reason=result.reason)
            return
        self.evaluations.append(result)
        fields = asdict(result)
        fields["pass_at"] = {str(k): share for k, share in result.pass_at.items()}
        self.recorder.event("eval", {"split": "eval", **fields})
        log.info("evaluated", policy_version=result.version, accuracy=result.accuracy, reward=result.reward_mean)

    def _evaluation_is_due(self) -> bool:
        if self.evaluator is None:
            return False
        is_last = self.num_steps_done == self.settings.trainer.steps
        every = self.settings.eval.every
        return (is_last and self.settings.eval.at_end) or (every > 0 and self.num_steps_done % every == 0)

    def _evaluate(self) -> None:
        assert self.evaluator is not None
        self.evaluator.start(self.version, self.num_steps_done)
        self._evaluated = self.version

    def _await_evaluation(self) -> None:
        assert self.evaluator is not None
        assert self._evaluated is not None
        self.evaluator.wait(self._evaluated, self._should_stop)

    def _resume_evaluation(self) -> bool:
        """Go on with the evaluations of an earlier life; say whether one of these very weights was not over."""
        if self.evaluator is None or self.resumed is None:
            return False
        return self.evaluator.resume(PolicyVersion(self.resumed.version), now=self.version, step=self.num_steps_done)

    def _check_weights(self) -> None:
        """Refuse a checkpoint whose weights are not those that its state tells of."""
        now = (self.published_dtype, "adapter" if self.settings.publishes_adapters else "model")
        if self.resumed is None or (self.resumed.weights_dtype, self.resumed.weights_are) != now:
            return  # nothing to compare with
        if self.record_writer.digest() != self.resumed.weights_digest:
            raise CheckpointError(
                f"the checkpoint of step {self.resumed.step} says its weights are {self.resumed.weights_digest[:16]}…, "
                f"but loaded they are {self.record_writer.digest()[:16]}…; remove its folder to go on from the one before it"
            )

    def _should_stop(self) -> bool:
        self.lease.check()
        self.publisher.check()
        self.issuer.check()
        return self.stop.is_set()

    @property
    def published_dtype(self) -> str:
        """Name of the dtype that weights are published in."""
        chosen = self.settings.trainer.publish_dtype
        return self.rank_group.policy.dtype if chosen == "as-trained" else chosen

    def _weights(self) -> Weights:
        """Copy the weights as they are published, each rank its part; threads begin to hash them."""
        chosen = self.settings.trainer.publish_dtype
        dtype = None if chosen == "as-trained" else getattr(torch, chosen)
        wanted = self.publisher.make_room()
        weights = self.rank_group.weights(dtype, as_adapter=self.settings.publishes_adapters, wanted=wanted)
        self.record_writer.weights(weights.root_later())
        return weights

    def _submit(self, weights: Weights, *, must_publish: bool) -> None:
        is_last = self.num_steps_done == self.settings.trainer.steps
        self.publisher.submit(
            Snapshot(
                version=self.version,
                step=self.num_steps_done,
                part=weights.part,
                dtype=self.published_dtype,
                must_publish=must_publish or is_last,
                base=weights.base,
            )
        )

    def _checkpoint(self) -> None:
        with self.activity.working("checkpointing"):
            commit_everything(self)

    def _say(self, text: str, **more: object) -> None:
        self.activity.state = text
        self.recorder.event("state", {"text": text, **more})
        log.info(text, step=self.num_steps_done, policy_version=self.version)
