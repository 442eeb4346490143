"""Builds one session of a run from its settings, runs it, and closes it.

A session is the time from one start of the trainer on a run to its exit. The record and checkpoints store the sessions of
a run as ``lives`` (`RecordedSession`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog

from penstock.protocol import streams
from penstock.protocol.activity import Activity, cpu_seconds
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import KeptVersion
from penstock.protocol.images.processor import read_processor
from penstock.protocol.metrics.certificates import certificate_ends
from penstock.protocol.metrics.gpu import GpuSampler
from penstock.protocol.packs.task_promise import TaskSettings
from penstock.protocol.record import run_lock
from penstock.protocol.record.checkpoint_state import STATE_FILE, CheckpointState
from penstock.protocol.traces.traces import Traces, recording
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer import crash_points, loop, process_memory
from penstock.trainer.commit import CHECKPOINTS, Committer
from penstock.trainer.connections import Connections
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data.pairs import PairSet
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.eval_settings import DATA_EVAL
from penstock.trainer.evaluation.early_stop import EarlyStop, stored_scores
from penstock.trainer.evaluation.eval_result import EvalResult, LostEvaluation
from penstock.trainer.evaluation.evaluate import EvaluatedSource, Evaluator
from penstock.trainer.evaluation.evaluation_log import EvaluationLog
from penstock.trainer.evaluation.evaluation_schedule import EvaluationSchedule
from penstock.trainer.evaluation.success import SuccessRules
from penstock.trainer.groups.group_source import open_generated, open_reader, open_stored
from penstock.trainer.groups.mixture import Mixture
from penstock.trainer.groups.run_groups import RunGroups
from penstock.trainer.groups.task_packs import evaluation_sampling
from penstock.trainer.learner.build_learner import build_learner
from penstock.trainer.learner.captured_state import CheckpointWriter
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.pairs.mixed_pairs import open_mixed_pairs
from penstock.trainer.learner.planning import Planner
from penstock.trainer.learner.vision_check import check_environments, check_vision
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.preflight import check_is_newest, check_resume, check_rewards, connect
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.publish_coordinator import PublishCoordinator
from penstock.trainer.publishing.rank_publisher import RankPublisher
from penstock.trainer.publishing.weight_gc import ORPHAN_AGE_S, Retention, WeightGc
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy, KeepRule
from penstock.trainer.rank_watch import RankWatch, answer_watch, end_process
from penstock.trainer.ranks import Ranks
from penstock.trainer.recovery import checkpoint, lease
from penstock.trainer.recovery.checkpoint_files import verify_files
from penstock.trainer.recovery.finished_run import SUMMARY_FILE
from penstock.trainer.recovery.group_gc import GroupGc
from penstock.trainer.recovery.lease import FencedKey, HeldLease, Unchanged
from penstock.trainer.recovery.recorded_settings import changed_settings
from penstock.trainer.recovery.rolled_back import describe, read_rolled_back
from penstock.trainer.recovery.run_record_writer import RunRecordWriter
from penstock.trainer.recovery.shared_folder import check_shared
from penstock.trainer.recovery.stored_checkpoints import StoredCheckpoints
from penstock.trainer.settings import DataSettings, TrainerSettings
from penstock.trainer.submit_weights import WeightSubmitter
from penstock.trainer.telemetry import trainer_metrics
from penstock.trainer.telemetry.event_writer import METRICS_FILE, EventWriter
from penstock.trainer.telemetry.heartbeat import SERVICE_ID, HeartbeatWriter
from penstock.trainer.telemetry.logprob_writer import LogprobWriter
from penstock.trainer.telemetry.queue_reader import QueueReader
from penstock.trainer.telemetry.step_reporter import StepReporter
from penstock.trainer.telemetry.trainer_metrics import TrainerMetrics
from penstock.trainer.training import Training

log = structlog.get_logger("trainer.assemble")

_EVAL_MARK = "evaluations"  # folder of the mark of the evaluator's thread
_EVENT_CLOCK = time.time  # events of several machines are compared by the time of day


def train(
    settings: TrainerSettings,
    config: bytes,
    ranks: Ranks,
    stop: threading.Event,
    watched: Callable[[], Unchanged | None] = lambda: None,
    *,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run the trainer on this rank until the steps are done or ``stop`` is set; raises PenstockError.

    ``config`` is the settings as JSON, for the run record; ``watched`` returns what is known about the run's lease;
    ``environ`` may name a collector of traces.
    """
    if settings.trainer.num_ranks != ranks.num_ranks:
        raise ConfigError(
            f"trainer.num_ranks = {settings.trainer.num_ranks}, but {ranks.num_ranks} process(es) were started; start it "
            "with `penstock train`, which starts that many (torchrun --nproc-per-node N -m penstock.trainer train ...)"
        )
    check_vision(settings)
    check_shared(settings.run.folder, ranks)
    crash_points.arm(settings.trainer.kill_at, rank=ranks.rank)
    if ranks.is_leader:
        with recording(environ, "trainer", service_id=SERVICE_ID, run_id=settings.run.id) as traces:
            _hold_lease(settings, config, ranks, stop, watched, traces)
    else:
        _follow(settings, ranks)


def _follow(settings: TrainerSettings, ranks: Ranks) -> None:
    blobs = Blobs(settings.s3)
    learner, publisher, _, _ = _on_every_rank(settings, ranks, blobs, open_mixed_pairs(settings))
    answer_watch(ranks.channel(), learner.activity, settings.trainer.rank_deadline_s, end_process)
    process_memory.end_start()
    learner.follow(publisher)


def _on_every_rank(
    settings: TrainerSettings, ranks: Ranks, blobs: Blobs, pairs: PairSet | None
) -> tuple[Learner, RankPublisher, PublishCoordinator, CheckpointWriter]:
    dims = ParallelDims(ranks, settings.trainer.layout)
    learner = build_learner(settings, dims, blobs, pairs)
    publisher = RankPublisher(blobs, settings.run.id, dims.buckets, settings.trainer.trusted_keys())
    return learner, publisher, PublishCoordinator(publisher, ranks), CheckpointWriter(learner.captured, ranks)


def _hold_lease(
    settings: TrainerSettings,
    config: bytes,
    ranks: Ranks,
    stop: threading.Event,
    watched: Callable[[], Unchanged | None],
    traces: Traces,
) -> None:
    folders = {"run.dir": settings.run.folder}
    data = _open_data(settings)
    connections = connect(settings, traces=traces)
    try:
        state = connections.bus.key_value(streams.state_bucket(connections.run_id).bucket).wait()
        with (
            lease.acquire(
                state, connections.run_id, clock=_EVENT_CLOCK, ttl_s=settings.trainer.lease_s, watched=watched()
            ) as held,
            # after the lease: a second trainer is refused as one, not for the port of the first
            trainer_metrics.serving(
                settings.metrics,
                settings.run.id,
                _EVENT_CLOCK,
                traces.counts,
                folders,
                certificate_ends(settings.nats, settings.s3),
            ) as metrics,
        ):
            session = _Session(settings, config, data, connections, held, lease.fence(state, held.epoch), stop, metrics)
            with run_lock.hold(settings.run.folder):
                _run(session, ranks)
    finally:
        connections.bus.close()


@dataclass(frozen=True, slots=True)
class _Session:
    """What a trainer has once it holds the lease."""

    settings: TrainerSettings
    config: bytes
    data: _Data
    connections: Connections
    lease: HeldLease
    pointer: FencedKey
    stop: threading.Event
    metrics: TrainerMetrics


def _newest_checkpoint(
    session: _Session, stored: StoredCheckpoints
) -> tuple[tuple[Path, CheckpointState] | None, bytes]:
    """Return the checkpoint to resume, verified, and its ``state.json``; fetched if only the object store has it."""
    settings, root = session.settings, session.settings.run.folder / CHECKPOINTS
    found = checkpoint.newest(root, settings.run.id)
    older_step = settings.trainer.resume_older_step
    if older_step is None and stored.fetch(session.pointer.value, found[1] if found else None):
        found = checkpoint.newest(root, settings.run.id)
    check_resume(session.connections, resume=settings.trainer.resume, has_checkpoint=found is not None)
    state_json = (found[0] / STATE_FILE).read_bytes() if found else b""
    check_is_newest(session.pointer.value, root, found[1] if found else None, state_json, older_step=older_step)
    if found is not None:
        stored.complete(*found)
        verify_files(*found)
    return found, state_json


def _run(session: _Session, ranks: Ranks) -> None:
    settings, connections = session.settings, session.connections
    stored = StoredCheckpoints(
        connections.blobs,
        connections.run_id,
        root=settings.run.folder / CHECKPOINTS,
        metrics=settings.run.folder / METRICS_FILE,
        keeps_local=settings.trainer.local_checkpoints,
    )
    found, state_json = _newest_checkpoint(session, stored)
    settings.run.folder.mkdir(parents=True, exist_ok=True)
    config_file = settings.run.folder / "config.json"
    if found is not None and (changed := changed_settings(config_file, session.config)):
        log.warning("settings changed since the last session", changed=changed)
    config_file.write_bytes(session.config)
    learner, _, coordinator, writer = _on_every_rank(settings, ranks, connections.blobs, session.data.pairs)
    watch: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if ranks.num_ranks > 1:
        watch = RankWatch(ranks.channel(), learner.activity, settings.trainer.rank_deadline_s, end_process)
    success = SuccessRules()
    if session.data.sets:
        given = settings.reward.success
        offers = check_rewards(
            connections,
            session.data.sets,
            define=settings.reward.define,
            success=given,
            clock=_EVENT_CLOCK,
            stop=session.stop,
        )
        success = SuccessRules.make(given, offers)
    resumed = found[1] if found else None
    record_writer = RunRecordWriter(connections, session.pointer, epoch=session.lease.epoch, resumed=resumed)
    if found is not None:
        learner.load(found[0])
        log.info("resumed", checkpoint=str(found[0]), step=learner.policy.steps_done)
        if settings.trainer.store_checkpoints:
            stored.store(found[0])
        # The trainer may have been killed between the rename that commits a checkpoint and its key in NATS.
        record_writer.mark_committed(found[1], state_json)
        stored.mark_named(found[0], state_json)
    copies = stored if settings.trainer.store_checkpoints else None
    parts = _training(session, learner, writer, coordinator, record_writer, resumed, success, copies)
    with watch, parts as (training, evaluation_log):
        started, is_complete = time.monotonic(), False
        process_memory.end_start()
        try:
            loop.run(training)
            is_complete = not session.stop.is_set()
        finally:
            if training.lease.is_held:
                wall_s = time.monotonic() - started
                _write_summary(training, evaluation_log, is_complete=is_complete, wall_s=wall_s)
    learner.dismiss()


@dataclass(frozen=True, slots=True)
class _Data:
    train: PromptSet | None  # None: groups come from a stored run
    eval: tuple[EvaluatedSource, ...]
    tokenizer: ChatTokenizer
    pairs: PairSet | None = None  # that are trained on beside the groups

    @property
    def sets(self) -> list[PromptSet]:
        held_out = [source.prompts for source in self.eval]
        return held_out if self.train is None else [self.train, *held_out]


def _open_data(settings: TrainerSettings) -> _Data:
    if not (settings.model.path / "config.json").is_file():
        raise UnsupportedModel(
            f"model.path = {settings.model.path}: it has no config.json; set it to a Hugging Face model folder"
        )
    tokenizer = ChatTokenizer.read(
        settings.model.path,
        arguments=settings.data.template_arguments,
        needs_template=settings.data.text_prompts == "chat" and settings.data.from_run is None,
    )
    if settings.data.from_run is not None:  # nothing is generated: no prompts are needed, and none can be evaluated
        return _Data(None, (), tokenizer)

    processor = read_processor(settings.model.path)

    def opened(
        files: Sequence[Path],
        data: DataSettings,
        max_new_tokens: int,
        reward: RewardSettings = settings.reward,
        *,
        skips_pairs: bool = False,
    ) -> PromptSet:
        prompts = PromptSet.open(
            files,
            data=data,
            reward=reward,
            tokenizer=tokenizer,
            max_new_tokens=max_new_tokens,
            skips_pairs=skips_pairs,
            processor=processor,
        )
        for notes in prompts.notes:
            log.info("data read", file=str(notes.path), rows=notes.num_rows, notes=notes.describe())
        if prompts.dropped:
            log.warning("prompts left out", files=[str(path) for path in files], **prompts.dropped)
        return prompts

    def source(name: str) -> EvaluatedSource:
        own = settings.eval.of(name)
        own = own.model_copy(update={"environment": own.environment or settings.rollout.environment})
        files = settings.data.eval_files if name == DATA_EVAL else settings.eval.source[name].files
        reward = None if name == DATA_EVAL else settings.eval.source[name].reward
        scored_by = settings.reward.model_copy(update={"name": reward, "by_source": {}}) if reward else settings.reward
        prompts = opened(files, all_rows, own.max_new_tokens or settings.rollout.max_new_tokens, scored_by)
        return EvaluatedSource(name, prompts, own, evaluation_sampling(own, settings.rollout, tokenizer.eos_ids))

    all_rows = settings.data.model_copy(update={"max_samples": None})
    evaluated = tuple(source(name) for name in settings.evaluated)
    train = opened(
        settings.data.train_files,
        settings.data,
        settings.rollout.max_new_tokens,
        skips_pairs=settings.algorithm.dpo_coefficient > 0.0,
    )
    held_out = {source.name: source.prompts.num_with_images for source in evaluated}
    check_environments(settings, {None: train.num_with_images, **held_out})
    return _Data(train, evaluated, tokenizer, open_mixed_pairs(settings))


@contextlib.contextmanager
def _training(
    session: _Session,
    learner: Learner,
    writer: CheckpointWriter,
    coordinator: PublishCoordinator,
    record_writer: RunRecordWriter,
    resumed: CheckpointState | None,
    success: SuccessRules,
    stored: StoredCheckpoints | None,
) -> Iterator[tuple[Training, EvaluationLog]]:
    """Build the parts, resume them, start their threads, and stop these at the end."""
    settings, connections, data = session.settings, session.connections, session.data
    events = EventWriter(
        bus=connections.bus,
        run_id=connections.run_id,
        folder=settings.run.folder,
        clock=_EVENT_CLOCK,
        observe=session.metrics.observe,
    )
    _report_rolled_back(events, resumed)
    activity = Activity()
    gpus = GpuSampler()
    heartbeat = HeartbeatWriter(
        bus=connections.bus, run_id=connections.run_id, activity=activity, gpus=gpus, clock=_EVENT_CLOCK
    )
    heartbeat.metrics_url, session.metrics.heartbeat = session.metrics.url, lambda: heartbeat.newest
    groups = RunGroups.of(
        resumed,
        max_staleness=settings.rollout.max_staleness,
        max_trained_count=settings.algorithm.max_trained_count,
    )
    publisher = Publisher(
        connections,
        model_folder=settings.model.path,
        epoch=session.lease.epoch,
        policy=FullSnapshotPolicy(settings.trainer.anchor_ratio, settings.trainer.anchor_every),
        on_published=lambda publication: training.on_published(publication),  # noqa: PLW0108  bound below
        coordinator=coordinator,
        signing_key=settings.trainer.signing_key(),
    )
    if data.train is None:
        source = open_stored(settings, connections, groups, resumed)
    else:
        source = open_generated(
            settings,
            connections,
            groups,
            resumed,
            prompts=data.train,
            tokenizer=data.tokenizer,
            never_published=publisher.never_published,
        )
    weight_gc = _weight_gc(session, publisher)
    best = settings.eval.best(has_data_eval=bool(settings.data.eval_files))
    evaluation_log = EvaluationLog(events, best.source if best is not None else DATA_EVAL)
    metrics = settings.run.folder / METRICS_FILE
    early_stop = EarlyStop(settings.eval.early_stop, [] if best is None else stored_scores(metrics, best))

    def on_end(result: EvalResult | LostEvaluation) -> None:
        if isinstance(result, EvalResult) and best is not None and result.split == best.source:
            if (scored := result.score_by(best.metric)) is None:
                log.warning("version not compared: the metric is not measured", metric=settings.eval.best_by)
            else:  # before the evaluator unpins the version
                measure, score = scored
                kept = KeptVersion(version=result.version, step=result.step, measure=measure, score=score)
                weight_gc.kept.add_result(kept)
                early_stop.add(result.step, measure, score)
        evaluation_log.add(result)

    evaluator = None
    if data.eval:
        before = tuple(dict.fromkeys(each.evaluation for each in source.issued_before.all_settings()))
        evaluator = _evaluator(session, publisher, on_end, groups, success, before)
    planner = Planner(settings, learner, resumed.algorithm if resumed else {})
    logprobs = LogprobWriter(
        connections.blobs,
        connections.run_id,
        epoch=session.lease.epoch,
        on_first_loss=lambda text: events.write("log", {"text": text}),
    )
    training = Training(
        settings=settings,
        learner=learner,
        planner=planner,
        issuer=source.issuer,
        collector=source.collector,
        publisher=publisher,
        submitter=WeightSubmitter(settings, learner, publisher, record_writer),
        evaluations=EvaluationSchedule(evaluator, settings.eval, settings.evaluated, num_steps=settings.trainer.steps),
        early_stop=early_stop,
        events=events,
        reporter=StepReporter(events, heartbeat, source.issuer.groups()["dropped"]),
        logprobs=logprobs,
        heartbeat=heartbeat,
        activity=activity,
        metrics=session.metrics,
        traced=connections.traced,
        lease=session.lease,
        record_writer=record_writer,
        committer=Committer(
            settings=settings,
            learner=learner,
            writer=writer,
            on_committed=lambda took_s: training.on_committed(took_s),  # noqa: PLW0108  bound below
            planner=planner,
            issuer=source.issuer,
            collector=source.collector,
            evaluator=evaluator,
            lease=session.lease,
            record_writer=record_writer,
            stored=stored,
            events=events,
        ),
        config=session.config,
        clock=_EVENT_CLOCK,
        stop=session.stop,
        resumed=resumed,
    )
    holder = session.lease.holder
    group_gc = GroupGc(connections, settings.retention, holder=holder, clock=lambda: datetime.now(UTC))
    threads = [gpus, heartbeat, *source.threads, weight_gc, group_gc, logprobs]
    if session.metrics.url is not None:
        threads.append(QueueReader(connections.bus, connections.run_id, session.metrics))
    with contextlib.ExitStack() as running:
        running.callback(events.close)
        for part in [evaluator, *threads] if evaluator is not None else threads:
            running.enter_context(part)
        running.callback(training.committer.thread.close)
        yield training, evaluation_log
        if training.is_done and not session.stop.is_set():
            weight_gc.run_is_finished()


def _weight_gc(session: _Session, publisher: Publisher) -> WeightGc:
    trainer = session.settings.trainer
    keep = KeepRule(trainer.keep_best, trainer.milestone_every, trainer.keep_milestones)
    retention = Retention(trainer.keep_versions, trainer.weights_grace_s, ORPHAN_AGE_S, keep)
    return WeightGc(session.connections, retention, pinned=publisher.pinned, holder=session.lease.holder)


def _evaluator(
    session: _Session,
    publisher: Publisher,
    on_end: Callable[[EvalResult | LostEvaluation], None],
    groups: RunGroups,
    success: SuccessRules,
    settings_before: Sequence[TaskSettings],
) -> Evaluator:
    settings = session.settings
    return Evaluator(
        session.connections,
        sources=session.data.eval,
        publisher=publisher,
        deadline_s=settings.trainer.collect_deadline_s,
        on_end=on_end,
        groups=groups,
        success=success,
        reader=open_reader(
            settings,
            session.connections,
            session.data.tokenizer,
            settings.run.folder / _EVAL_MARK,
            publisher.never_published,
        ),
        settings_before=settings_before,
        seed=settings.run.seed,
        mixture=Mixture.of(settings.environment, settings.run.seed),
    )


def _report_rolled_back(events: EventWriter, resumed: CheckpointState | None) -> None:
    """Cut metrics.jsonl back to the checkpoint, and report what is made again."""
    found = read_rolled_back(events.rewind(resumed.metrics_bytes if resumed else 0))
    if text := describe(found, resumed_step=resumed.step if resumed else None):
        events.write("log", {"text": text, "rolled_back": asdict(found)})
        log.warning(text)


def _write_summary(training: Training, results: EvaluationLog, *, is_complete: bool, wall_s: float) -> None:
    """Write ``trainer.json``: the outcome of the run as far as the trainer measures it.

    ``complete`` is True once nothing is left to do: all steps, the export of the model and the last evaluation.
    """
    busy_s, idle_s = training.activity.totals()
    totals = training.issuer.totals()
    document: dict[str, Any] = {
        "run_id": training.settings.run.id,
        "finished": training.is_done,
        "early_stop": training.early_stop.document(),
        "complete": is_complete,
        "steps": training.num_steps_done,
        "version": training.version,
        "groups": training.issuer.groups(),
        "dropped_tokens": totals["dropped_tokens"],
        "staleness_tokens": totals["staleness_tokens"],
        "tokens_trained": totals["tokens_trained"],
        "versions_published": training.publisher.num_published,
        "versions_skipped": training.publisher.num_skipped,
        "anchors_written": training.publisher.num_full_snapshots,
        "evaluations": [asdict(result) for result in results.results],
        "idle_share": idle_s / max(busy_s + idle_s, 1e-9),
        "wall_s": wall_s,
        "cpu_s": cpu_seconds(),
    }
    path = training.settings.run.folder / SUMMARY_FILE
    path.write_text(json.dumps(document, indent=1) + "\n")
