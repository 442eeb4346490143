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

from protocol import streams
from protocol.activity import Activity, cpu_seconds
from protocol.checkpoint_state import STATE_FILE, CheckpointState
from protocol.errors import ConfigError
from protocol.facts import Sampling
from protocol.transport.blobs import Blobs
from protocol.weight_retention import AnchorPolicy
from trainer import checkpoint, crash_points, lease, loop
from trainer.account import Account
from trainer.adapter import Lora
from trainer.algorithms import objective
from trainer.all_shares import Lines, Shares, serve
from trainer.chat_template import ChatTokenizer
from trainer.chronicle import Chronicle
from trainer.committing import CHECKPOINTS
from trainer.crew import Crew
from trainer.critic import Critic, Regression, load_critic
from trainer.dataset import PromptSet
from trainer.doors import Doors
from trainer.errors import UnsupportedModel
from trainer.evaluate import Evaluator
from trainer.expiry import Expiry
from trainer.lease import FencedKey, HeldLease
from trainer.ledger import Ledger
from trainer.policy import load_policy, load_reference
from trainer.preflight import check_checkpoint_is_here, check_rewards, check_run_is_ours, open_doors
from trainer.publish import Publisher
from trainer.pulse import Pulse
from trainer.rank_share import Share
from trainer.ranks import Ranks
from trainer.record import Recorder
from trainer.reference import WithoutAdapter
from trainer.retire import ORPHAN_AGE_S, Retention, Retirement
from trainer.settings import TrainerSettings
from trainer.supply import Books, generated, stored
from trainer.tally import Tally
from trainer.token_credit import TokenCredit
from trainer.trainable import Optimisation
from trainer.training import Training

log = structlog.get_logger("trainer")

_EVENT_CLOCK = time.time  # events of several machines are compared by the time of day


def train(settings: TrainerSettings, config: bytes, ranks: Ranks, stop: threading.Event) -> None:
    """Run the trainer on this rank until the steps are done or ``stop`` is set; raises PenstockError.

    ``config`` is what the run's record keeps of the settings, as JSON.
    """
    if settings.trainer.num_ranks != ranks.num_ranks:
        raise ConfigError(
            f"trainer.num_ranks = {settings.trainer.num_ranks}, but {ranks.num_ranks} process(es) were started; "
            "`penstock train` starts the right number (torchrun --nproc-per-node N -m trainer train ...)"
        )
    crash_points.arm(settings.trainer.kill_at, rank=ranks.rank)
    if ranks.is_leader:
        _lead(settings, config, ranks, stop)
    else:
        _follow(settings, ranks)


def _follow(settings: TrainerSettings, ranks: Ranks) -> None:
    blobs = Blobs(settings.s3)
    crew = build_crew(settings, ranks, blobs)
    share = Share(blobs, settings.run.id, rank=ranks.rank, num_ranks=ranks.num_ranks)
    serve(share, Lines(ranks.line(), ranks.line()))
    crew.follow(share)


def _lead(settings: TrainerSettings, config: bytes, ranks: Ranks, stop: threading.Event) -> None:
    data = _open_data(settings)
    doors = open_doors(settings)
    try:
        state = doors.bus.key_value(streams.state_bucket(doors.run_id).bucket).wait()
        with lease.acquire(state, doors.run_id, clock=_EVENT_CLOCK, ttl_s=settings.trainer.lease_s) as held:
            life = _Life(settings, config, data, doors, held, lease.fence(state, held.epoch), stop)
            _live(life, ranks)
    finally:
        doors.bus.close()


@dataclass(frozen=True, slots=True)
class _Life:
    """What a trainer that holds its run begins with."""

    settings: TrainerSettings
    config: bytes
    data: _Data
    doors: Doors
    lease: HeldLease
    pointer: FencedKey
    stop: threading.Event


def _live(life: _Life, ranks: Ranks) -> None:
    settings, doors = life.settings, life.doors
    found = checkpoint.newest(settings.run.folder / CHECKPOINTS, settings.run.id)
    check_run_is_ours(doors, resume=settings.trainer.resume, has_checkpoint=found is not None)
    check_checkpoint_is_here(life.pointer.value, settings.run.folder, has_checkpoint=found is not None)
    settings.run.folder.mkdir(parents=True, exist_ok=True)
    (settings.run.folder / "config.json").write_bytes(life.config)
    crew = build_crew(settings, ranks, doors.blobs)
    share = Share(doors.blobs, doors.run_id, num_ranks=ranks.num_ranks)
    shares = Shares(share, Lines(ranks.line(), ranks.line()) if ranks.num_ranks > 1 else None)
    if life.data.sets:
        check_rewards(doors, life.data.sets, define=settings.reward.define, clock=_EVENT_CLOCK)
    resumed = found[1] if found else None
    chronicle = Chronicle(doors, life.pointer, epoch=life.lease.epoch, resumed=resumed)
    if found is not None:
        crew.load(found[0])
        log.info("resumed", checkpoint=str(found[0]), step=crew.policy.steps_done)
        chronicle.point(found[1], (found[0] / STATE_FILE).read_bytes())  # a crash may have come in between
    with _training(life, crew, shares, chronicle, resumed) as training:
        started = time.monotonic()
        try:
            loop.run(training)
        finally:
            if training.lease.is_held:
                _write_summary(training, wall_s=time.monotonic() - started)
    crew.dismiss()


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


def build_crew(settings: TrainerSettings, ranks: Ranks, blobs: Blobs) -> Crew:
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
    policy = load_policy(settings.model.path, how, ranks, temperature=settings.rollout.temperature)
    algorithm, reference = settings.algorithm, None
    if algorithm.needs_reference and how.lora is not None and algorithm.reference_path is None:
        reference = WithoutAdapter(policy)
    elif algorithm.needs_reference:
        device = torch.device("cpu") if algorithm.reference_device == "cpu" else policy.device
        folder = algorithm.reference_path or settings.model.path
        reference = load_reference(folder, how, device, temperature=settings.rollout.temperature)
    critic = _critic(settings, how, ranks) if algorithm.has_critic else None
    return Crew(policy, ranks, blobs, objective(algorithm), reference, critic)


def _lora(settings: TrainerSettings) -> Lora | None:
    chosen = settings.model.lora
    return Lora(chosen.rank, chosen.alpha, chosen.dropout, tuple(chosen.targets)) if chosen.rank else None


def _critic(settings: TrainerSettings, policy: Optimisation, ranks: Ranks) -> Critic:
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
            whiten_rewards=settings.algorithm.whiten_rewards,
        ),
        ranks,
    )


@contextlib.contextmanager
def _training(
    life: _Life, crew: Crew, shares: Shares, chronicle: Chronicle, resumed: CheckpointState | None
) -> Iterator[Training]:
    """Make the parts, resume them, start their threads, and stop these at the end."""
    settings, doors, data = life.settings, life.doors, life.data
    books = Books(
        Ledger(resumed.ledger if resumed else ()),
        Tally.from_document(resumed.totals) if resumed else Tally(),
        Account(resumed.account if resumed else None),
    )
    recorder = Recorder(bus=doors.bus, run_id=doors.run_id, folder=settings.run.folder, clock=_EVENT_CLOCK)
    recorder.rewind(resumed.metrics_bytes if resumed else 0)
    activity = Activity()
    if data.train is None:
        supply = stored(settings, doors, books, resumed)
    else:
        supply = generated(settings, doors, books, resumed, prompts=data.train, stop_token_ids=data.stop_token_ids)
    training = Training(
        settings=settings,
        crew=crew,
        issuer=supply.issuer,
        collector=supply.collector,
        publisher=Publisher(
            doors,
            model_folder=settings.model.path,
            epoch=life.lease.epoch,
            policy=AnchorPolicy(settings.trainer.anchor_ratio, settings.trainer.anchor_every),
            on_published=lambda publication: training.published(publication),  # noqa: PLW0108  bound below
            shares=shares,
        ),
        evaluator=None,
        recorder=recorder,
        pulse=Pulse(bus=doors.bus, run_id=doors.run_id, activity=activity, clock=_EVENT_CLOCK),
        activity=activity,
        ledger=books.ledger,
        tally=books.tally,
        lease=life.lease,
        chronicle=chronicle,
        config=life.config,
        clock=_EVENT_CLOCK,
        stop=life.stop,
        resumed=resumed,
    )
    with contextlib.ExitStack() as running:
        running.callback(recorder.close)
        if data.eval is not None:
            training.evaluator = running.enter_context(_evaluator(life, data.eval, training, books.account))
        retirement = Retirement(
            doors,
            Retention(settings.trainer.keep_versions, settings.trainer.weights_grace_s, ORPHAN_AGE_S),
            pinned=training.publisher.pinned,
            holder=life.lease.holder,
        )
        expiry = Expiry(doors, settings.retention, holder=life.lease.holder, clock=lambda: datetime.now(UTC))
        for part in (training.pulse, *supply.threads, retirement, expiry):
            running.enter_context(part)
        yield training


def _evaluator(life: _Life, prompts: PromptSet, training: Training, account: Account) -> Evaluator:
    settings = life.settings
    return Evaluator(
        life.doors,
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
        "anchors_written": training.publisher.num_anchors,
        "evaluations": [asdict(result) for result in training.evaluations],
        "idle_share": idle_s / max(busy_s + idle_s, 1e-9),
        "wall_s": wall_s,
        "cpu_s": cpu_seconds(),
    }
    path = training.settings.run.folder / "trainer.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
