"""Builds the source of a run's groups: issuer and collector, or the groups of a stored run."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.facts import RouterShape
from penstock.protocol.packs.task_promise import TaskSettings
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.rescored import mark_use
from penstock.trainer.algorithm.group_rules import Reuse, group_rules
from penstock.trainer.connections import Connections
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.collect import Collector
from penstock.trainer.groups.completion_texts import CompletionTexts
from penstock.trainer.groups.dispatch import Dispatch
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.groups.issue_log import IssuedBefore, IssueLog, SessionSettings
from penstock.trainer.groups.mixture import Mixture
from penstock.trainer.groups.offline import StoredCollector, StoredGroups, StoredIssuer
from penstock.trainer.groups.pack_reader import NeverPublished, PackReader
from penstock.trainer.groups.reading_mark import ReadingMark
from penstock.trainer.groups.run_groups import RunGroups
from penstock.trainer.learner.image_reader import image_reader
from penstock.trainer.learner.model_folder_check import check_routers
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer.groups.group_source")


@dataclass(frozen=True, slots=True)
class GroupSource:
    issuer: Issuer | StoredIssuer
    collector: Collector | StoredCollector
    threads: tuple[AbstractContextManager[Any], ...]
    issued_before: IssuedBefore  # by earlier sessions


def open_stored(
    settings: TrainerSettings, connections: Connections, groups: RunGroups, resumed: CheckpointState | None
) -> GroupSource:
    stored = StoredGroups(settings, connections.blobs)
    mark_use(stored.input_name, connections.run_id, connections.blobs)
    if resumed is not None:
        stored.resume(resumed.dispatch)
    issuer = StoredIssuer(stored, groups)
    collector = StoredCollector(stored, issuer, connections.blobs, settings.rollout.groups_per_step)
    return GroupSource(issuer, collector, (), IssuedBefore())


def open_generated(
    settings: TrainerSettings,
    connections: Connections,
    groups: RunGroups,
    resumed: CheckpointState | None,
    *,
    prompts: PromptSet,
    tokenizer: ChatTokenizer,
    never_published: NeverPublished,
) -> GroupSource:
    """Return the group source of a run whose groups are generated while it trains; raises CheckpointError, MissingStream."""
    rollout, algorithm = settings.rollout, settings.algorithm
    routers = _routers(settings)
    dispatch = Dispatch(
        prompts,
        order=DataOrder(len(prompts), settings.run.seed, settings.data.shuffle),
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
    batcher = Batcher(
        groups.train,
        issuer,
        groups_per_step=rollout.groups_per_step,
        max_staleness=rollout.max_staleness,
        rules=group_rules(algorithm),
        needs_baseline=algorithm.needs_baseline,
        reuse=Reuse(algorithm.max_trained_count, algorithm.retrained_interval),
        max_dead=rollout.max_outstanding,
    )
    collector = Collector(
        connections,
        groups=groups,
        batcher=batcher,
        issuer=issuer,
        deadline_s=settings.trainer.collect_deadline_s,
        reader=open_reader(settings, connections, tokenizer, settings.run.folder, never_published),
    )
    return GroupSource(issuer, collector, (collector, issuer), before)


def _routers(settings: TrainerSettings) -> RouterShape | None:
    found = check_routers(settings.model.path, router_replay=settings.trainer.router_replay)
    return found.shape if found is not None else None


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
