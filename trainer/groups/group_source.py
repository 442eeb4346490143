"""Builds the source of a run's groups: issuer and collector, or the groups of a stored run.

Stored groups were scored again: no task is issued, nothing is generated, no engine is needed.
With ``data.from_run`` `StoredGroups` replaces collector and issuer. Every group is used once, in the order in which the
source run used it; the position is part of the checkpoint. No version of this run sampled anything: every token counts
as at least one version old, so that the loss treats it as stale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import GroupScored
from penstock.protocol.groups import BlobRef, RouterShape
from penstock.protocol.packs.task_promise import TaskSettings
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import RecordedGroup
from penstock.protocol.record.stored_record import RescoredInput, find_input, mark_use_of_input, pieces_of_input
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.versions import PolicyVersion, VersionTree
from penstock.trainer.algorithm.group_filters.interface import drop_reason
from penstock.trainer.connections import Connections
from penstock.trainer.data.data_order import prompt_order
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.errors import CheckpointError
from penstock.trainer.groups.batcher import Batcher, group_rules
from penstock.trainer.groups.collect import Collector
from penstock.trainer.groups.dispatch import Dispatch, RunGroups
from penstock.trainer.groups.group_totals import Drop, DropReason
from penstock.trainer.groups.issue import Issuer, IssuerState, outcomes
from penstock.trainer.groups.issue_log import IssuedBefore, IssueLog, SessionSettings
from penstock.trainer.groups.pack_reader import CompletionTexts, NeverPublished, PackReader, ReadingMark, ready_groups
from penstock.trainer.groups.task_packs import Mixture
from penstock.trainer.learner.model_folder_check import check_routers
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.learner.vision import image_reader
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer.groups.group_source")

_STATE_TAG = "stored_groups.v1"

StoredGroup = tuple[RecordedGroup, BlobRef]  # and the pack that holds it


class StoredGroups:
    """Issuer and collector of a run on stored groups: no task is issued, and no message is received."""

    def __init__(self, settings: TrainerSettings, blobs: Blobs, groups: RunGroups) -> None:
        """Read the list of groups, without their tokens; raises RecordBroken, BlobError or ConfigError."""
        assert settings.data.from_run is not None
        self.input, self._sha256 = find_input(settings.data.from_run, blobs)
        self._stored: list[StoredGroup] = [
            (group, piece.packs[group.pack]) for piece in pieces_of_input(self.input, blobs) for group in piece.groups
        ]
        self._blobs, self._groups, self._count = blobs, groups, settings.rollout.groups_per_step
        self._algorithm, self._rules = settings.algorithm, group_rules(settings.algorithm)
        self._position = 0
        self._draining = False
        self.versions = VersionTree()
        self.held: dict[int, Delivery[GroupScored]] = {}
        _check(settings, self.input, sum(self._reason(group) is None for group, _ in self._stored))

    def resume(self, document: Mapping[str, Any]) -> None:
        if document.get("schema_tag") != _STATE_TAG or document.get("input") != self._sha256:
            raise CheckpointError(
                f"the checkpoint was made from another input than {self.input.run_id} with sha256 {self._sha256[:16]}…: expected "
                f"{_STATE_TAG}, got {document.get('schema_tag')!r} of {str(document.get('input'))[:16]}…; restore data.from_run, "
                "or start over with another run.id"
            )
        self._position = int(document["position"])

    def collect(
        self,
        version: PolicyVersion,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        overtake_wait_s: float = 0.0,
        may_take: Callable[[], bool] = lambda: True,
    ) -> list[ReadyGroup]:
        """Return the next batch, [] to stop; raises BlobMissing, BlobCorrupt or PackError."""
        if should_stop() or self._draining:
            return []
        taken, drops = self._take()
        packs = list(dict.fromkeys(pack for _, pack in taken))
        groups = [group.model_copy(update={"pack": packs.index(pack)}) for group, pack in taken]
        batch = ready_groups(packs, groups, self._blobs.get)
        with self._groups.lock:
            train, ids = self._groups.train, [group.group_id for group in batch]
            train.issue([*ids, *(drop.group_id for drop in drops)])
            train.totals.num_scored += len(drops)
            for drop in drops:
                train.drop(drop)
            for group in batch:
                train.arrive(group.group_id, 0)
                train.offer(group)
            train.take(ids)
        return batch

    def mark_trained(
        self,
        batch: Sequence[ReadyGroup],
        staleness_tokens: Mapping[int, int],
        *,
        version: PolicyVersion,
        made: PolicyVersion,
    ) -> dict[str, int]:
        with self._groups.lock:
            return self._groups.train.train(version, batch, staleness_tokens)

    def take_state(self) -> IssuerState:
        document = {"schema_tag": _STATE_TAG, "input": self._sha256, "position": self._position}
        with self._groups.lock:
            return IssuerState.of(self._groups, document)

    def totals(self) -> dict[str, Any]:
        with self._groups.lock:
            return self._groups.train.totals.counts_document()

    def groups(self) -> dict[str, Any]:
        with self._groups.lock:
            return outcomes(self._groups.train)

    def has_batch(self, version: PolicyVersion) -> bool:
        return True

    def drain(self) -> None:
        self._draining = True

    def settled(self) -> list[Delivery[GroupScored]]:
        return []

    def _nothing(self, *_: object) -> None:
        """Do nothing: no thread runs, no task is issued, no message is received, and no version of this run sampled."""

    advance = check = stop = begin_session = acknowledge = close = _nothing

    def _take(self) -> tuple[list[StoredGroup], list[Drop]]:
        """Return the next groups to train on, and the drops of those skipped before them."""
        taken: list[StoredGroup] = []
        drops: list[Drop] = []
        while len(taken) < self._count and self._position < len(self._stored):
            group, pack = self._stored[self._position]
            self._position += 1
            if (reason := self._reason(group)) is None:
                taken.append((group, pack))
            else:
                drops.append(Drop(group.group_id, reason, group.num_tokens, pack))
        return taken, drops

    def _reason(self, group: RecordedGroup) -> str | None:
        if (reason := drop_reason(group.scored, None, self._rules)) is not None:
            return reason
        if self._algorithm.needs_baseline and not group.scored.generated.has_baseline:
            return DropReason.NO_BASELINE
        return None


def _check(settings: TrainerSettings, of: RescoredInput, num_usable: int) -> None:
    name, rollout, needed = of.run_id, settings.rollout, settings.trainer.steps * settings.rollout.groups_per_step
    if settings.algorithm.max_trained_count > 1:
        raise ConfigError(
            f"algorithm.max_trained_count = {settings.algorithm.max_trained_count}, and a run on data.from_run uses every "
            "group once; set it to 1"
        )
    if rollout.temperature != of.temperature:
        raise ConfigError(
            f"rollout.temperature = {rollout.temperature}, and {name} was sampled at {of.temperature}: its log-probabilities "
            "are valid at that temperature only; set rollout.temperature to it"
        )
    if needed > num_usable:
        raise ConfigError(
            f"trainer.steps = {settings.trainer.steps} of rollout.groups_per_step = {rollout.groups_per_step} need {needed} "
            f"groups, and {name} has {num_usable} that can be used (of {of.num_groups}); set trainer.steps to at most "
            f"{num_usable // rollout.groups_per_step}, or lower rollout.groups_per_step"
        )


@dataclass(frozen=True, slots=True)
class GroupSource:
    issuer: Issuer | StoredGroups
    collector: Collector | StoredGroups
    threads: tuple[AbstractContextManager[Any], ...]
    issued_before: IssuedBefore  # by earlier sessions


def open_source(
    settings: TrainerSettings,
    connections: Connections,
    groups: RunGroups,
    resumed: CheckpointState | None,
    *,
    prompts: PromptSet | None,
    tokenizer: ChatTokenizer,
    never_published: NeverPublished,
) -> GroupSource:
    """Open the source of a run's groups: those of a stored run where there are no prompts; raises CheckpointError, MissingStream."""
    if prompts is None:
        stored = StoredGroups(settings, connections.blobs, groups)
        mark_use_of_input(stored.input.run_id, connections.run_id, connections.blobs)
        if resumed is not None:
            stored.resume(resumed.dispatch)
        return GroupSource(stored, stored, (), IssuedBefore())
    rollout, algorithm = settings.rollout, settings.algorithm
    routers = _routers(settings)
    dispatch = Dispatch(
        prompts,
        order=prompt_order(prompts, settings),
        rollout=rollout,
        stop_token_ids=tokenizer.eos_ids,
        groups=groups.train,
        with_baseline=algorithm.needs_baseline,
        teacher_top_k=settings.teacher_top_k,
        routers=routers,
        mixture=Mixture.of(settings.environment, settings.run.seed),
    )
    if resumed is not None:
        dispatch.cursor.resume(resumed.dispatch)
    issuer = Issuer(connections, dispatch, groups, resumed.unsent if resumed is not None else ())
    issue_log = IssueLog(
        settings.run.folder,
        dispatch.cursor.order_id,
        may_arrive=dispatch.cursor.may_arrive,
        settings=_session_settings(settings, routers),
        first=dispatch.cursor.position,
    )
    issuer.keep_log(issue_log)
    if (before := issue_log.before).position and not before.all_settings():
        log.warning(
            "issued.log does not say under which settings an earlier session issued groups: their size and length are not checked"
        )
    collector = Collector(
        connections,
        groups=groups,
        batcher=Batcher(groups.train, issuer, rollout, algorithm),
        issuer=issuer,
        deadline_s=settings.trainer.collect_deadline_s,
        reader=open_reader(settings, connections, tokenizer, settings.run.folder, never_published),
    )
    return GroupSource(issuer, collector, (collector, issuer), before)


def _routers(settings: TrainerSettings) -> RouterShape | None:
    routers = check_routers(settings.model.path, router_replay=settings.trainer.router_replay)
    return routers.shape if routers is not None else None


def _session_settings(settings: TrainerSettings, routers: RouterShape | None) -> SessionSettings:
    rollout, held_out = settings.rollout, settings.eval
    return SessionSettings(
        TaskSettings(
            rollout.group_size,
            rollout.max_new_tokens,
            rollout.environment,
            settings.algorithm.needs_baseline,
            settings.teacher_top_k,
            rollout.redundant_completions,
            rollout.redundant_wait > 0.0,
            str(routers or ""),
        ),
        TaskSettings(
            held_out.samples,
            held_out.max_new_tokens or rollout.max_new_tokens,
            held_out.environment or rollout.environment,
        ),
    )


def open_reader(
    settings: TrainerSettings,
    connections: Connections,
    tokenizer: ChatTokenizer,
    folder: Path,
    never_published: NeverPublished,
) -> PackReader:
    return PackReader(
        connections.blobs.get,
        vocab_size=_vocab_size(settings.model.path),
        mark=ReadingMark(folder),
        texts=CompletionTexts.of(settings.trainer.check_texts, tokenizer.decode_many),
        never_published=never_published,
        images=image_reader(connections.blobs.get, settings.model.path),
    )


def _vocab_size(folder: Path) -> int | None:
    """Return the number of tokens in a model's embedding; None where its config does not say."""
    config = json.loads((folder / "config.json").read_bytes())
    return config.get("text_config", config).get("vocab_size")
