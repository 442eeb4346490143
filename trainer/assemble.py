"""Builds one life of a run from its settings, runs it, and takes it down again."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
import torch

from penstock.protocol import streams
from penstock.protocol.activity import Activity, cpu_seconds
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import Sampling
from penstock.protocol.record.checkpoint_state import STATE_FILE, CheckpointState
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer import crash_points, loop
from penstock.trainer.algorithm.build_objective import build_objective
from penstock.trainer.algorithm.estimators.gae import gae
from penstock.trainer.algorithm.token_credit import TokenCredit
from penstock.trainer.commit import CHECKPOINTS
from penstock.trainer.connections import Connections
from penstock.trainer.data.chat_template import ChatTokenizer
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.evaluation.evaluate import Evaluator
from penstock.trainer.groups.accounting import Accounting
from penstock.trainer.groups.counters import Counters
from penstock.trainer.groups.group_source import Books, generated, stored
from penstock.trainer.groups.ledger import Ledger
from penstock.trainer.learner.adapter import Lora
from penstock.trainer.learner.critic import Critic, Regression, load_critic
from penstock.trainer.learner.load_model import load_policy, load_reference
from penstock.trainer.learner.rank_group import RankGroup
from penstock.trainer.learner.reference import WithoutAdapter
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.preflight import check_checkpoint_is_here, check_rewards, check_run_is_ours, open_doors
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.publish_coordinator import PublishChannels, PublishCoordinator, serve_requests
from penstock.trainer.publishing.rank_publisher import RankPublisher
from penstock.trainer.publishing.weight_gc import ORPHAN_AGE_S, Retention, WeightGc
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy
from penstock.trainer.ranks import Ranks
from penstock.trainer.recovery import checkpoint, lease
from penstock.trainer.recovery.group_gc import Expiry
from penstock.trainer.recovery.lease import FencedKey, HeldLease
from penstock.trainer.recovery.run_record_writer import RunRecordWriter
from penstock.trainer.settings import TrainerSettings
from penstock.trainer.telemetry.event_writer import Recorder
from penstock.trainer.telemetry.heartbeat import HeartbeatWriter
from penstock.trainer.training import Training

log = structlog.get_logger("trainer")

_EVENT_CLOCK = time.time  # events of several machines are compared by the time of day


def train(settings: TrainerSettings, config: bytes, ranks: Ranks, stop: threading.Event) -> None:
    """Run the trainer on this rank until the steps are done or ``stop`` is set; raises PenstockError.

    ``config`` is what the run's record keeps of the settings, as JSON.
    """
    if settings.trainer.num_ranks != ranks.num_ranks:
        raise ConfigError(
            f"trainer.num_ranks = {settings.trainer.num_ranks}, but {ranks.num_ranks} process(es) were started; "
            "`penstock train` starts the right number (torchrun --nproc-per-node N -m penstock.trainer train ...)"
        )
    crash_points.arm(settings.trainer.kill_at, rank=ranks.rank)
    if ranks.is_leader:
        _lead(settings, config, ranks, stop)
    else:
        _follow(settings, ranks)


def _follow(settings: TrainerSettings, ranks: Ranks) -> None:
    blobs = Blobs(settings.s3)
    rank_group = build_rank_group(settings, ranks, blobs)
    publisher = RankPublisher(blobs, settings.run.id, ParallelDims(ranks).buckets)
    serve_requests(publisher, PublishChannels(ranks.line(), ranks.line()))
    rank_group.follow(publisher)


def _lead(settings: TrainerSettings, config: bytes, ranks: Ranks, stop: threading.Event) -> None:
    data = _open_data(settings)
    connections = open_doors(settings)
    try:
        state = connections.bus.key_value(streams.state_bucket(connections.run_id).bucket).wait()
        with lease.acquire(state, connections.run_id, clock=_EVENT_CLOCK, ttl_s=settings.trainer.lease_s) as held:
            life = _Life(settings, config, data, connections, held, lease.fence(state, held.epoch), stop)
            _live(life, ranks)
    finally:
        connections.bus.close()


@dataclass(frozen=True, slots=True)
class _Life:
    """What a trainer that holds its run begins with."""

    settings: TrainerSettings
    config: bytes
    data: _Data
    connections: Connections
    lease: HeldLease
    pointer: FencedKey
    stop: threading.Event


def _live(life: _Life, ranks: Ranks) -> None:
    settings, connections = life.settings, life.connections
    found = checkpoint.newest(settings.run.folder / CHECKPOINTS, settings.run.id)
    check_run_is_ours(connections, resume=settings.trainer.resume, has_checkpoint=found is not None)
    check_checkpoint_is_here(life.pointer.value, settings.run.folder, has_checkpoint=found is not None)
    settings.run.folder.mkdir(parents=True, exist_ok=True)
    (settings.run.folder / "config.json").write_bytes(life.config)
    rank_group = build_rank_group(settings, ranks, connections.blobs)
    publisher = RankPublisher(connections.blobs, connections.run_id, ParallelDims(ranks).buckets)
    channels = PublishChannels(ranks.line(), ranks.line()) if ranks.num_ranks > 1 else None
    coordinator = PublishCoordinator(publisher, channels)
    if life.data.sets:
        check_rewards(connections, life.data.sets, define=settings.reward.define, clock=_EVENT_CLOCK)
    resumed = found[1] if found else None
    record_writer = RunRecordWriter(connections, life.pointer, epoch=life.lease.epoch, resumed=resumed)
    if found is not None:
        rank_group.load(found[0])
        log.info("resumed", checkpoint=str(found[0]), step=rank_group.policy.steps_done)
        record_writer.point(found[1], (found[0] / STATE_FILE).read_bytes())  # a crash may have come in between
    with _training(life, rank_group, coordinator, record_writer, resumed) as training:
        started = time.monotonic()
        try:
            loop.run(training)
        finally:
            if training.lease.is_held:
                _write_summary(training, wall_s=time.monotonic() - started)
    rank_group.dismiss()


@dataclass(frozen=True, slots=True)
class _Data:
    train: PromptSet | None  # None: groups come from a run that is stored
    eval: PromptSet | None
    stop_token_ids: tuple[int, ...]

    @property
    def sets(self) -> list[PromptSet]:
        return [prompts for prompts in (self.train, self.eval) if prompts is not None]


def _open_data(settings: TrainerSettings) -> _Data:
    if not (settings.model.path / "config.json").is_file():
        raise UnsupportedModel(
            f"model.path = {settings.model.path}: no config.json there; give a Hugging Face model folder"
        )
    tokenizer = ChatTokenizer.read(settings.model.path)
    if settings.data.from_run is not None:  # nobody generates: no prompts are needed, and none can be evaluated
        return _Data(None, None, tuple(tokenizer.eos_ids))

    def opened(files: Sequence[Path]) -> PromptSet:
        return PromptSet.open(files, data=settings.data, reward=settings.reward, tokenizer=tokenizer)

    evaluated = opened(settings.data.eval_files) if settings.data.eval_files else None
    return _Data(opened(settings.data.train_files), evaluated, tuple(tokenizer.eos_ids))


def build_rank_group(settings: TrainerSettings, ranks: Ranks, blobs: Blobs) -> RankGroup:
    """Load the networks that the settings name, and put them under DeepSpeed; the same call on every rank."""
    how = Optimisation(
        num_steps=settings.trainer.steps - settings.critic.head_start_steps,
        lr=settings.trainer.lr,
        betas=settings.trainer.betas,
        weight_decay=settings.trainer.weight_decay,
        warmup_steps=settings.trainer.warmup_steps,
        schedule=settings.trainer.schedule,
        min_lr_ratio=settings.trainer.min_lr_ratio,
        max_grad_norm=settings.trainer.max_grad_norm,
        zero_stage=settings.trainer.zero_stage,
        dtype=settings.model.dtype,
        gradient_checkpointing=settings.model.gradient_checkpointing,
        lora=_lora(settings),
    )
    dims = ParallelDims(ranks)
    policy = load_policy(settings.model.path, how, dims, temperature=settings.rollout.temperature)
    algorithm, reference = settings.algorithm, None
    if algorithm.needs_reference and how.lora is not None and algorithm.reference_path is None:
        reference = WithoutAdapter(policy)
    elif algorithm.needs_reference:
        device = torch.device("cpu") if algorithm.reference_device == "cpu" else policy.device
        folder = algorithm.reference_path or settings.model.path
        reference = load_reference(folder, how, device, temperature=settings.rollout.temperature)
    critic = _critic(settings, how, dims) if algorithm.has_critic else None
    return RankGroup(policy, dims, blobs, build_objective(algorithm), reference, critic)


def _lora(settings: TrainerSettings) -> Lora | None:
    chosen = settings.model.lora
    return Lora(chosen.rank, chosen.alpha, chosen.dropout, tuple(chosen.targets)) if chosen.rank else None


def _critic(settings: TrainerSettings, policy: Optimisation, dims: ParallelDims) -> Critic:
    chosen = settings.critic
    how = replace(
        policy,
        lora=None,
        num_steps=settings.trainer.steps * chosen.updates,
        lr=chosen.lr,
        warmup_steps=chosen.warmup_steps * chosen.updates,
        max_grad_norm=chosen.max_grad_norm,
    )
    return load_critic(
        chosen.path or settings.model.path,
        how,
        Regression(
            updates=chosen.updates,
            form=chosen.loss,
            coefficient=chosen.loss_coefficient,
            clip=chosen.value_clip,
            head_start_steps=chosen.head_start_steps,
        ),
        TokenCredit(
            gamma=chosen.gamma,
            lam=chosen.lam,
            whiten=settings.algorithm.whiten_advantages,
            clip=settings.algorithm.advantage_clip,
            kl_form=settings.algorithm.reward_kl_form,
            whiten_rewards=settings.algorithm.options_of(gae).whiten_rewards,
        ),
        dims,
    )


@contextlib.contextmanager
def _training(
    life: _Life,
    rank_group: RankGroup,
    coordinator: PublishCoordinator,
    record_writer: RunRecordWriter,
    resumed: CheckpointState | None,
) -> Iterator[Training]:
    """Make the parts, resume them, start their threads, and stop these at the end."""
    settings, connections, data = life.settings, life.connections, life.data
    books = Books(
        Ledger(resumed.ledger if resumed else ()),
        Counters.from_document(resumed.totals) if resumed else Counters(),
        Accounting(resumed.account if resumed else None),
    )
    recorder = Recorder(bus=connections.bus, run_id=connections.run_id, folder=settings.run.folder, clock=_EVENT_CLOCK)
    recorder.rewind(resumed.metrics_bytes if resumed else 0)
    activity = Activity()
    if data.train is None:
        group_source = stored(settings, connections, books, resumed)
    else:
        group_source = generated(
            settings, connections, books, resumed, prompts=data.train, stop_token_ids=data.stop_token_ids
        )
    training = Training(
        settings=settings,
        rank_group=rank_group,
        issuer=group_source.issuer,
        collector=group_source.collector,
        publisher=Publisher(
            connections,
            model_folder=settings.model.path,
            epoch=life.lease.epoch,
            policy=FullSnapshotPolicy(settings.trainer.anchor_ratio, settings.trainer.anchor_every),
            on_published=lambda publication: training.published(publication),  # noqa: PLW0108  bound below
            coordinator=coordinator,
        ),
        evaluator=None,
        recorder=recorder,
        heartbeat=HeartbeatWriter(
            bus=connections.bus, run_id=connections.run_id, activity=activity, clock=_EVENT_CLOCK
        ),
        activity=activity,
        ledger=books.ledger,
        counters=books.counters,
        lease=life.lease,
        record_writer=record_writer,
        config=life.config,
        clock=_EVENT_CLOCK,
        stop=life.stop,
        resumed=resumed,
    )
    with contextlib.ExitStack() as running:
        running.callback(recorder.close)
        if data.eval is not None:
            training.evaluator = running.enter_context(_evaluator(life, data.eval, training, books.account))
        weight_gc = WeightGc(
            connections,
            Retention(settings.trainer.keep_versions, settings.trainer.weights_grace_s, ORPHAN_AGE_S),
            pinned=training.publisher.pinned,
            holder=life.lease.holder,
        )
        expiry = Expiry(connections, settings.retention, holder=life.lease.holder, clock=lambda: datetime.now(UTC))
        for part in (training.heartbeat, *group_source.threads, weight_gc, expiry):
            running.enter_context(part)
        yield training


def _evaluator(life: _Life, prompts: PromptSet, training: Training, account: Accounting) -> Evaluator:
    settings = life.settings
    return Evaluator(
        life.connections,
        prompts=prompts,
        settings=settings.eval,
        sampling=Sampling(
            max_new_tokens=settings.eval.max_new_tokens or settings.rollout.max_new_tokens,
            temperature=settings.eval.temperature,
            stop_token_ids=life.data.stop_token_ids,
        ),
        publisher=training.publisher,
        deadline_s=settings.trainer.collect_deadline_s,
        on_end=training.on_evaluation,
        account=account,
    )


def _write_summary(training: Training, *, wall_s: float) -> None:
    """Write ``trainer.json``: what the run came to, as far as the trainer knows."""
    busy_s, idle_s = training.activity.totals()
    totals = training.issuer.totals()
    document: dict[str, Any] = {
        "run_id": training.settings.run.id,
        "finished": training.num_steps_done >= training.settings.trainer.steps,
        "steps": training.num_steps_done,
        "version": training.version,
        "groups": training.issuer.groups(),
        "dropped_tokens": totals["dropped_tokens"],
        "staleness_tokens": totals["staleness_tokens"],
        "tokens_trained": totals["tokens_trained"],
        "versions_published": training.publisher.num_published,
        "versions_skipped": training.publisher.num_skipped,
        "anchors_written": training.publisher.num_full_snapshots,
        "evaluations": [asdict(result) for result in training.evaluations],
        "idle_share": idle_s / max(busy_s + idle_s, 1e-9),
        "wall_s": wall_s,
        "cpu_s": cpu_seconds(),
    }
    path = training.settings.run.folder / "trainer.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
