"""Checks servers, run and rewards before anything starts, and opens the data. Every error names the fix."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import structlog

from penstock.protocol import streams
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardDefinition
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import Head, decode
from penstock.protocol.images.processor import read_processor
from penstock.protocol.record.checkpoint_state import STATE_FILE, CheckpointState, folder_name
from penstock.protocol.record.lineage import CheckpointCommitted
from penstock.protocol.rewards_offered import (
    RewardsOffered,
    current_offers,
    differently_defined,
    names_not_offered,
    nearest,
)
from penstock.protocol.traces.traces import NO_TRACES, HeldGroups, Traces
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.connections import Connections
from penstock.trainer.data.data_order import prompt_order
from penstock.trainer.data.dataset import AUTO_REWARD, PromptSet, training_prompts
from penstock.trainer.data.pairs import PairSet
from penstock.trainer.data.row_checks import read_tokenizer
from penstock.trainer.data_settings import DATA_EVAL
from penstock.trainer.errors import CheckpointError, UnknownReward, UnsupportedModel
from penstock.trainer.evaluation.eval_result import EvaluatedSource
from penstock.trainer.groups.task_packs import evaluation_sampling
from penstock.trainer.learner.model_folder_check import check_environments
from penstock.trainer.learner.pair_planner import open_mixed_pairs
from penstock.trainer.publishing.publication import read_head
from penstock.trainer.ranks import Ranks
from penstock.trainer.recovery import checkpoint
from penstock.trainer.recovery.stored_checkpoints import StoredCheckpoints
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer.preflight")
data_log = structlog.get_logger("trainer.assemble")

_REWARD_DEADLINE_S = 60.0  # reward services may start after the trainer
_POLL_S = 0.2
_TOLD_AFTER_S = 5.0
_SAMPLED_ROWS = 1000
_VISIBLE_S = 10.0  # a file that one node has made may be seen late on another, by a network file system


def connect(settings: TrainerSettings, *, deadline_s: float = 20.0, traces: Traces = NO_TRACES) -> Connections:
    """Connect to NATS and the object store; ``traces`` records what becomes of groups.

    Raises BusUnreachable after ``deadline_s``, BusRefused, BlobStoreUnreachable or BlobStoreRefused; ConfigError for a
    file that is not a key.
    """
    settings.trainer.signing_key()  # a wrong file is an error now, not after the model was loaded
    blobs = Blobs(settings.s3)
    blobs.check(settings.run.id)
    bus = Bus.connect(settings.nats, name="trainer", deadline_s=deadline_s)
    return Connections(settings.run.id, bus, blobs, HeldGroups(traces))


def newest_checkpoint(
    settings: TrainerSettings, connections: Connections, committed: bytes | None, stored: StoredCheckpoints
) -> tuple[tuple[Path, CheckpointState] | None, bytes]:
    """Return the checkpoint to resume, verified, and its ``state.json``; raises as `check_is_newest`."""
    root, older_step = settings.run.folder / checkpoint.CHECKPOINTS, settings.trainer.resume_older_step
    newest = checkpoint.newest(root, settings.run.id)
    if older_step is None and stored.fetch(committed, newest[1] if newest else None):
        newest = checkpoint.newest(root, settings.run.id)
    check_resume(connections, resume=settings.trainer.resume, has_checkpoint=newest is not None)
    state_json = (newest[0] / STATE_FILE).read_bytes() if newest else b""
    check_is_newest(committed, root, newest[1] if newest else None, state_json, older_step=older_step)
    if newest is not None:
        stored.complete(*newest)
        checkpoint.verify_files(*newest)
    return newest, state_json


def check_resume(connections: Connections, *, resume: bool, has_checkpoint: bool) -> Head | None:
    """Return the head of the run; raises ConfigError when the run has published weights and ``resume`` is off.

    Started over without resuming, such a run would mix the groups of two sessions. A run without a checkpoint may
    resume: it loses only the steps before its first checkpoint.
    """
    head = read_head(connections.bus.key_value(streams.state_bucket(connections.run_id).bucket).wait())
    if head is not None and not resume:
        kept = "a checkpoint and " if has_checkpoint else ""
        raise ConfigError(
            f"run {connections.run_id} has {kept}published version {head.version}, and trainer.resume = false; set it "
            "to true, choose another run.id, or delete its streams: "
            f"penstock bootstrap run.id={connections.run_id} --delete"
        )
    return head


def check_is_newest(
    committed: bytes | None, folder: Path, newest: CheckpointState | None, state_json: bytes, *, older_step: int | None
) -> None:
    """Raise CheckpointError when resuming from anything but the newest checkpoint that NATS knows the run committed.

    The groups of a committed checkpoint are acknowledged: started without it, their training would be lost without an
    error. A checkpoint that is newer than NATS knows is accepted: the trainer was killed before it wrote the key. An
    older one is accepted if ``trainer.resume_older_step`` names it.
    """
    known = decode(committed, CheckpointCommitted) if committed is not None else None
    if known is None or known.record is None or known.chapter is None:
        return
    expected = (
        f"run state in NATS: the newest committed checkpoint is of step {known.step}, version {known.version} (chapter "
        f"{known.chapter} of the record)"
    )
    if newest is None:
        raise CheckpointError(
            f"{expected}. {folder} has no checkpoint, and the object store no copy of it (trainer.store_checkpoints). "
            "The groups it was made of are acknowledged and would be lost: copy the run's folder to this machine "
            "(run.dir), or start over with another run.id"
        )
    place = folder / folder_name(newest.step)
    got = f"{place} is of step {newest.step}, version {newest.version} (chapter {newest.chapter})"
    if newest.chapter > known.chapter or newest.step == older_step:
        return
    if newest.chapter < known.chapter:
        raise CheckpointError(
            f"{expected}. The newest in {folder} is older: {got}. Restore the folder of step {known.step} (copy it to "
            f"run.dir), or set trainer.resume_older_step = {newest.step} "
            "to resume from there and make the later steps again"
        )
    if (newest.record, hashlib.sha256(state_json).hexdigest()) != (known.record, known.state_sha256):
        raise CheckpointError(
            f"{expected}, with sha256 {known.state_sha256} of its {STATE_FILE}. {got}, but its {STATE_FILE} has sha256 "
            f"{hashlib.sha256(state_json).hexdigest()}: it was altered, or is of another run with this run.id. Restore "
            f"it from a copy, or set trainer.resume_older_step = {newest.step} to resume from it as it is"
        )


def check_rewards(
    connections: Connections,
    prompt_sets: Iterable[PromptSet],
    *,
    define: Mapping[str, RewardDefinition] = MappingProxyType({}),
    success: Iterable[str] = (),
    deadline_s: float = _REWARD_DEADLINE_S,
    stop: threading.Event | None = None,
) -> list[RewardsOffered]:
    """Wait until reward services offer every reward that the data ask for; returns their offers.

    The services must compose the rewards of ``define`` the same way. A wait of more than five seconds is logged with
    its reason. Raises UnknownReward after ``deadline_s`` or when ``stop`` was set, ConfigError for a rule of success of
    an unknown reward.
    """
    stop = stop or threading.Event()
    wanted = _wanted(prompt_sets, define)
    bucket = connections.bus.key_value(streams.registry_bucket().bucket).wait()
    started, is_told = time.monotonic(), False
    while True:
        offers = current_offers(bucket.entries(aged=True).wait(), run_id=connections.run_id)
        problem = _problem(wanted, offers)
        if not problem:
            check_success(success, {*wanted.names, *wanted.sources, *wanted.digests}, offers)
            return offers
        waited_s = time.monotonic() - started
        if waited_s > deadline_s or stop.is_set():
            raise UnknownReward(f"{problem} (waited {waited_s:.0f} s)")
        if waited_s > _TOLD_AFTER_S and not is_told:
            is_told = True
            log.warning("waiting for a reward", problem=problem, deadline_s=deadline_s)
        stop.wait(_POLL_S)


class _Wanted(NamedTuple):
    names: set[str]  # rewards that a service must offer
    sources: set[str]  # data sets that must have a reward
    digests: dict[str, str]  # of the definitions among the names
    parts: dict[str, set[str]]  # the rewards that each of these is made of


def _wanted(prompt_sets: Iterable[PromptSet], define: Mapping[str, RewardDefinition]) -> _Wanted:
    wanted = _Wanted(set(), set(), {}, {})
    for prompts in prompt_sets:
        asked = set(prompts.rows_by_reward)
        defined = {name: define[name] for name in asked & define.keys()}
        auto = {name for name, reward in defined.items() if any(p.reward == AUTO_REWARD for p in reward.parts.values())}
        wanted.names.update(asked - {AUTO_REWARD})
        for name, definition in defined.items():  # the service itself makes a built-in reward with parameters
            wanted.parts[name] = {part.reward for part in definition.parts.values() if not part.parameters}
        wanted.digests.update({name: definition.digest for name, definition in defined.items()})
        wanted.sources.update(_sources(prompts, (auto | {AUTO_REWARD}) & asked))
    return wanted


def _sources(prompts: PromptSet, rewards: set[str]) -> set[str]:
    if not rewards:
        return set()
    stride = max(1, len(prompts) // _SAMPLED_ROWS)
    requests = [prompts[index].reward for index in range(0, len(prompts), stride)]
    return {request.data_source for request in requests if request.name in rewards}


def check_success(names: Iterable[str], known: Collection[str], offers: list[RewardsOffered]) -> None:
    """Raise ConfigError for a rule of success of a reward that no row asks for (``known``) and no service offers."""
    unknown = [name for name in names if name not in known and names_not_offered([name], offers)]
    if unknown:
        raise ConfigError(
            f"reward.success.{unknown[0]}: no row asks for a reward {unknown[0]}{_near(unknown[0], offers)}, and no "
            f"service offers one; the rows ask for {', '.join(sorted(known))}; correct the name or remove it"
        )


def _problem(wanted: _Wanted, offers: list[RewardsOffered]) -> str:
    if not offers:
        return "no reward service of this run is alive; start one: penstock reward service run.toml"
    offered = sorted({name for offer in offers for name in offer.names})
    not_offered = names_not_offered(wanted.names, offers)
    for name in not_offered & wanted.parts.keys():
        not_offered |= names_not_offered(wanted.parts[name], offers)
    if missing := sorted(not_offered, key=lambda name: (name in wanted.digests, name)):  # a part's lack is the cause
        near = _near(missing[0], offers)
        return (
            f"no reward service offers {', '.join(missing)}{near}; offered: {', '.join(offered)}; check reward.name, "
            "or serve it: --serve FILE.py, or penstock reward serve FILE.py --register URL"
        )
    if others := differently_defined(wanted.digests, offers):
        name, replicas = next(iter(others.items()))
        return (
            f"reward.define.{name} in this run file differs from that of {', '.join(replicas)}; start the reward "
            "service with the same run file and the same overrides of [reward]"
        )
    known = {source for offer in offers for source in offer.by_source} | set(offered)
    if unknown := sorted(wanted.sources - known):
        near = _near(unknown[0], offers)
        return (
            f"no built-in reward fits data_source {', '.join(unknown)}{near}; set reward.name or reward.by_source "
            f"to one of {', '.join(offered)}"
        )
    return ""


def _near(name: str, offers: list[RewardsOffered]) -> str:
    near = nearest(name, offers)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def check_shared(folder: Path, ranks: Ranks, *, deadline_s: float = _VISIBLE_S) -> None:
    """Make a file on rank 0 and look for it on every rank (all ranks); raises ConfigError on each if one sees none."""
    if ranks.num_ranks == 1:
        return
    name = ""
    if ranks.is_leader:
        name = f".seen-by-all-{secrets.token_hex(8)}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    mark = folder / ranks.broadcast(name or None)
    deadline = time.monotonic() + deadline_s
    while not (is_seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    (num_seeing,) = ranks.sum([float(is_seen)])
    if ranks.is_leader:
        mark.unlink()
    if num_seeing < ranks.num_ranks:
        raise ConfigError(
            f"run.dir: {folder.absolute()} of rank 0 is seen by {num_seeing:.0f} of {ranks.num_ranks} ranks; every "
            "rank writes its part of a checkpoint there: "
            "set run.dir to a folder on storage that all nodes share, at the same path"
        )


@dataclass(frozen=True, slots=True)
class RunData:
    train: PromptSet | None  # None: groups come from a stored run
    eval: tuple[EvaluatedSource, ...]
    tokenizer: ChatTokenizer
    pairs: PairSet | None = None  # that are trained on beside the groups

    @property
    def sets(self) -> list[PromptSet]:
        held_out = [source.prompts for source in self.eval]
        return held_out if self.train is None else [self.train, *held_out]


def open_data(settings: TrainerSettings) -> RunData:
    if not (settings.model.path / "config.json").is_file():
        raise UnsupportedModel(
            f"model.path = {settings.model.path}: it has no config.json; set it to a Hugging Face model folder"
        )
    tokenizer = read_tokenizer(settings, renders_chats=settings.data.from_run is None)
    if settings.data.from_run is not None:  # nothing is generated: no prompts are needed, and none can be evaluated
        return RunData(None, (), tokenizer)
    if settings.eval.map and not settings.evaluated:
        raise ConfigError("eval.map names columns of held-out prompts, and there are none; set data.eval, or remove it")
    evaluated = tuple(_open_source(settings, name, tokenizer) for name in settings.evaluated)
    train = training_prompts(settings, tokenizer)
    _log_what_was_read(train, settings.data.train_files)
    prompt_order(train, settings)  # raises MalformedData for weights of other sources
    held_out = {source.name: source.prompts.num_with_images for source in evaluated}
    check_environments(settings, {None: train.num_with_images, **held_out})
    return RunData(train, evaluated, tokenizer, open_mixed_pairs(settings))


def _open_source(settings: TrainerSettings, name: str, tokenizer: ChatTokenizer) -> EvaluatedSource:
    section = settings.eval.of(name)
    section = section.model_copy(update={"environment": section.environment or settings.rollout.environment})
    files, reward = settings.data.eval_files, None
    if name != DATA_EVAL:
        files, reward = settings.eval.source[name].files, settings.eval.source[name].reward
    prompts = PromptSet(
        files,
        data=settings.data_of(name).model_copy(update={"max_samples": None}),
        reward=settings.reward.model_copy(update={"name": reward, "by_source": {}}) if reward else settings.reward,
        tokenizer=tokenizer,
        max_new_tokens=section.max_new_tokens or settings.rollout.max_new_tokens,
        processor=read_processor(settings.model.path),
    )
    _log_what_was_read(prompts, files)
    return EvaluatedSource(name, prompts, section, evaluation_sampling(section, settings.rollout, tokenizer.eos_ids))


def _log_what_was_read(prompts: PromptSet, files: Sequence[Path]) -> None:
    for notes in prompts.notes:
        data_log.info("data read", file=str(notes.path), rows=notes.num_rows, notes=notes.describe())
    if prompts.dropped:
        data_log.warning("prompts left out", files=[str(path) for path in files], **prompts.dropped)
