"""Builds one session of a run from its settings, runs it, and closes it.

A session is the time from one start of the trainer on a run to its exit. The record and checkpoints store the sessions of
a run as ``lives`` (`RecordedSession`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType

import structlog

from penstock.protocol import seals, streams
from penstock.protocol.errors import ConfigError
from penstock.protocol.heartbeats import Activity
from penstock.protocol.metrics.exporter import certificate_ends
from penstock.protocol.metrics.gpu import GpuSampler
from penstock.protocol.packs.task_promise import TaskSettings
from penstock.protocol.record import run_folder
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.traces.traces import Traces, recording
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.trainer import crash_points, loop, process_memory
from penstock.trainer.commit import Committer, WeightSubmitter
from penstock.trainer.connections import Connections
from penstock.trainer.data.pairs import PairSet
from penstock.trainer.device_turns import TrainerTurns
from penstock.trainer.evaluation.eval_result import EvalResult, LostEvaluation, SuccessRules
from penstock.trainer.evaluation.evaluate import Evaluator
from penstock.trainer.evaluation.evaluation_schedule import EarlyStop, EvaluationLog, EvaluationSchedule, stored_scores
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.groups.group_source import StoredGroups, open_reader, open_source
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.groups.queue_depths import num_to_sample
from penstock.trainer.groups.rolled_back import take_rolled_back
from penstock.trainer.groups.task_packs import Mixture
from penstock.trainer.learner.learner import Learner, build_learner
from penstock.trainer.learner.model_folder_check import check_adapters, check_vision
from penstock.trainer.learner.pair_planner import open_mixed_pairs
from penstock.trainer.learner.planning import Planner
from penstock.trainer.learner.shard_files import CheckpointWriter
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.preflight import RunData, check_rewards, check_shared, connect, newest_checkpoint, open_data
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.rank_publisher import PublishCoordinator, RankPublisher
from penstock.trainer.publishing.weight_gc import ORPHAN_AGE_S, Retention, WeightGc
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy, KeepRule
from penstock.trainer.rank_device import RankDevice
from penstock.trainer.rank_orders import RankWatch, answer_watch, end_process
from penstock.trainer.ranks import Ranks
from penstock.trainer.recovery import checkpoint, lease
from penstock.trainer.recovery.group_gc import GroupGc
from penstock.trainer.recovery.lease import FencedKey, HeldLease, Unchanged
from penstock.trainer.recovery.resume_checks import (
    changed_settings,
    describe_rolled_back,
    makes_same_steps,
    read_rolled_back,
    write_summary,
)
from penstock.trainer.recovery.run_record_writer import RunRecordWriter
from penstock.trainer.recovery.stored_checkpoints import StoredCheckpoints
from penstock.trainer.settings import TrainerSettings
from penstock.trainer.telemetry import trainer_metrics
from penstock.trainer.telemetry.event_writer import METRICS_FILE, SERVICE_ID, EventWriter, HeartbeatWriter, StepReporter
from penstock.trainer.telemetry.logprob_writer import LogprobWriter
from penstock.trainer.telemetry.trainer_metrics import QueueReader, TrainerMetrics
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

    ``watched`` returns what is known about the run's lease.
    """
    if settings.trainer.num_ranks != ranks.num_ranks:
        raise ConfigError(
            f"trainer.num_ranks = {settings.trainer.num_ranks}, but {ranks.num_ranks} process(es) were started; start it "
            "with `penstock train`, which starts that many (torchrun --nproc-per-node N -m penstock.trainer train ...)"
        )
    check_vision(settings)
    check_adapters(settings, "train")
    check_shared(settings.run.folder, ranks)
    crash_points.arm(settings.trainer.kill_at, rank=ranks.rank)
    if ranks.is_leader:
        with recording(environ, "trainer", service_id=SERVICE_ID, run_id=settings.run.id) as traces:
            _hold_lease(settings, config, ranks, stop, watched, traces)
    else:
        blobs = Blobs(settings.s3, run_id=settings.run.id)
        learner, publisher, _, _ = _on_every_rank(settings, ranks, blobs, open_mixed_pairs(settings))
        answer_watch(ranks.channel(), learner.activity, settings.trainer.rank_deadline_s, end_process)
        process_memory.end_start()
        learner.follow(publisher)


def _on_every_rank(
    settings: TrainerSettings, ranks: Ranks, blobs: Blobs, pairs: PairSet | None
) -> tuple[Learner, RankPublisher, PublishCoordinator, CheckpointWriter]:
    dims = ParallelDims(ranks, settings.trainer.layout)
    device = RankDevice.of(settings.placement, settings.run.id, ranks)
    if device is not None:
        device.wait()  # before anything is allocated there
    learner = build_learner(settings, dims, blobs, pairs)
    learner.device = device
    learner.policy.weights.check_adapters(settings.model.lora.targets)
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
    data = open_data(settings)
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
                {"run.dir": settings.run.folder},
                certificate_ends(settings.nats, settings.s3),
            ) as metrics,
        ):
            session = _Session(settings, config, data, connections, held, lease.fence(state, held.epoch), stop, metrics)
            with run_folder.hold_lock(settings.run.folder):
                _run(session, ranks)
    finally:
        connections.bus.close()


@dataclass(frozen=True, slots=True)
class _Session:
    settings: TrainerSettings
    config: bytes
    data: RunData
    connections: Connections
    lease: HeldLease
    pointer: FencedKey
    stop: threading.Event
    metrics: TrainerMetrics
    repeats_steps: bool = False  # rolled-back steps are made again of their groups


def _run(session: _Session, ranks: Ranks) -> None:
    settings, connections = session.settings, session.connections
    stored = StoredCheckpoints(
        connections.blobs,
        connections.run_id,
        root=settings.run.folder / checkpoint.CHECKPOINTS,
        metrics=settings.run.folder / METRICS_FILE,
        keeps_local=settings.trainer.local_checkpoints,
    )
    newest, state_json = newest_checkpoint(settings, connections, session.pointer.value, stored)
    settings.run.folder.mkdir(parents=True, exist_ok=True)
    config_file = settings.run.folder / "config.json"
    repeats = settings.trainer.resume_older_step is None and makes_same_steps(config_file, session.config)
    session = replace(session, repeats_steps=repeats)
    if newest is not None and (changed := changed_settings(config_file, session.config)):
        log.warning("settings changed since the last session", changed=changed)
    seals.write(config_file, session.config, optional=True)
    learner, _, coordinator, writer = _on_every_rank(settings, ranks, connections.blobs, session.data.pairs)
    watch: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if ranks.num_ranks > 1:
        watch = RankWatch(ranks.channel(), learner.activity, settings.trainer.rank_deadline_s, end_process)
    success = _success_rules(session)
    resumed = newest[1] if newest else None
    record_writer = RunRecordWriter(connections, session.pointer, epoch=session.lease.epoch, resumed=resumed)
    if newest is not None:
        learner.load(newest[0])
        log.info("resumed", checkpoint=str(newest[0]), step=learner.policy.steps_done)
        if settings.trainer.store_checkpoints:
            stored.store(newest[0])
        # The trainer may have been killed between the rename that commits a checkpoint and its key in NATS.
        record_writer.mark_committed(newest[1], state_json)
        stored.mark_named(newest[0], state_json)
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
                write_summary(training, evaluation_log, is_complete=is_complete, wall_s=wall_s)
    learner.dismiss()


def _success_rules(session: _Session) -> SuccessRules:
    reward, data = session.settings.reward, session.data
    if not data.sets:
        return SuccessRules()
    offers = check_rewards(
        session.connections, data.sets, define=reward.define, success=reward.success, stop=session.stop
    )
    return SuccessRules.make(reward.success, offers)


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
    settings, connections, epoch = session.settings, session.connections, session.lease.epoch
    bus, run_id = connections.bus, connections.run_id
    events = EventWriter(
        bus=bus, run_id=run_id, folder=settings.run.folder, clock=_EVENT_CLOCK, observe=session.metrics.observe
    )
    removed = events.rewind(resumed.metrics_bytes if resumed else 0)
    rolled_back = read_rolled_back(removed)
    repeated = take_rolled_back(settings.run.folder, removed if session.repeats_steps else b"", resumed)
    resumed_step, num_again = (resumed.step if resumed else None), len(repeated.batches)
    if text := describe_rolled_back(rolled_back, resumed_step=resumed_step, num_again=num_again):
        events.write("log", {"text": text, "rolled_back": asdict(rolled_back)})
        log.warning(text)
    activity, gpus = Activity(), GpuSampler()
    heartbeat = HeartbeatWriter(bus=bus, run_id=run_id, activity=activity, gpus=gpus, clock=_EVENT_CLOCK)
    heartbeat.metrics_url, session.metrics.heartbeat = session.metrics.url, lambda: heartbeat.newest
    groups = RunGroups.of(
        resumed, max_staleness=settings.rollout.max_staleness, max_trained_count=settings.algorithm.max_trained_count
    )
    publisher = Publisher(
        connections,
        model_folder=settings.model.path,
        epoch=epoch,
        policy=FullSnapshotPolicy(settings.trainer.anchor_ratio, settings.trainer.anchor_every),
        on_published=lambda publication: training.on_published(publication),  # noqa: PLW0108  bound below
        coordinator=coordinator,
        signing_key=settings.trainer.signing_key(),
    )
    source = open_source(
        settings,
        connections,
        groups,
        resumed,
        prompts=session.data.train,
        tokenizer=session.data.tokenizer,
        never_published=publisher.never_published,
    )
    weight_gc = _weight_gc(session, publisher, groups)
    best = settings.eval.best(has_data_eval=bool(settings.data.eval_files))
    early_stop = EarlyStop(settings.eval.early_stop, stored_scores(settings.run.folder / METRICS_FILE, best))
    evaluation_log = EvaluationLog(events, best, early_stop, weight_gc.kept)
    evaluator = None
    if session.data.eval:
        before = tuple(dict.fromkeys(each.evaluation for each in source.issued_before.all_settings()))
        evaluator = _evaluator(session, publisher, evaluation_log.add, groups, success, before)
    planner = Planner(settings, learner, resumed.algorithm if resumed else {})
    logprobs = LogprobWriter(
        connections.blobs, run_id, epoch=epoch, on_first_loss=lambda text: events.write("log", {"text": text})
    )
    committer = Committer(
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
        committer=committer,
        config=session.config,
        clock=_EVENT_CLOCK,
        stop=session.stop,
        resumed=resumed,
        scored_stream=bus.stream_state(streams.stream_name(run_id, "scored")).wait(),
        rolled_back=repeated,
        turns=_turns(session, learner, source.issuer, activity),
    )
    group_gc = GroupGc(connections, settings.retention, holder=session.lease.holder, clock=lambda: datetime.now(UTC))
    threads = [gpus, heartbeat, *source.threads, weight_gc, group_gc, logprobs]
    if session.metrics.url is not None:
        threads.append(QueueReader(bus, run_id, session.metrics))
    with contextlib.ExitStack() as running:
        running.callback(events.close)
        for part in [evaluator, *threads] if evaluator is not None else threads:
            running.enter_context(part)
        running.callback(committer.thread.close)
        yield training, evaluation_log
        if training.is_done and not session.stop.is_set():
            weight_gc.run_is_finished()


def _turns(
    session: _Session, learner: Learner, issuer: Issuer | StoredGroups, activity: Activity
) -> TrainerTurns | None:
    if learner.device is None or not isinstance(issuer, Issuer):  # stored groups need no engine
        return None
    bus, run_id, per_step = session.connections.bus, session.settings.run.id, session.settings.rollout.groups_per_step
    return TrainerTurns(
        learner, learner.device, lambda: num_to_sample(bus, run_id, issuer.groups_per_message), per_step, activity
    )


def _weight_gc(session: _Session, publisher: Publisher, groups: RunGroups) -> WeightGc:
    trainer = session.settings.trainer
    keep = KeepRule(trainer.keep_best, trainer.milestone_every, trainer.keep_milestones)
    retention = Retention(trainer.keep_versions, trainer.weights_grace_s, ORPHAN_AGE_S, keep)

    def pinned() -> set[PolicyVersion]:
        return publisher.pinned() | groups.sampled_by_abandoned()

    return WeightGc(session.connections, retention, pinned=pinned, holder=session.lease.holder)


def _evaluator(
    session: _Session,
    publisher: Publisher,
    on_end: Callable[[EvalResult | LostEvaluation], None],
    groups: RunGroups,
    success: SuccessRules,
    settings_before: Sequence[TaskSettings],
) -> Evaluator:
    settings, connections = session.settings, session.connections
    mark = settings.run.folder / _EVAL_MARK
    return Evaluator(
        connections,
        sources=session.data.eval,
        publisher=publisher,
        deadline_s=settings.trainer.collect_deadline_s,
        on_end=on_end,
        groups=groups,
        success=success,
        reader=open_reader(settings, connections, session.data.tokenizer, mark, publisher.never_published),
        settings_before=settings_before,
        seed=settings.run.seed,
        mixture=Mixture.of(settings.environment, settings.run.seed),
    )
