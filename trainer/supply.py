"""Where a life's groups come from: workers and rewards, through issuer and collector, or what a run has stored."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from protocol.checkpoint_state import CheckpointState
from protocol.rescored import mark_use
from trainer.account import Account
from trainer.batcher import Batcher
from trainer.collect import Collector
from trainer.data_order import DataOrder
from trainer.dataset import PromptSet
from trainer.dispatch import Dispatch
from trainer.doors import Doors
from trainer.filters import Reuse
from trainer.issue import Issuer
from trainer.ledger import Ledger
from trainer.offline import StoredCollector, StoredGroups, StoredIssuer
from trainer.settings import TrainerSettings
from trainer.tally import Tally


@dataclass(frozen=True, slots=True)
class Supply:
    """Who hands out batches, who keeps the account of them, and what of both has a thread to start."""

    issuer: Issuer | StoredIssuer
    collector: Collector | StoredCollector
    threads: tuple[AbstractContextManager[Any], ...]


@dataclass(frozen=True, slots=True)
class Books:
    """What a run remembers of its groups."""

    ledger: Ledger
    tally: Tally
    account: Account


def stored(settings: TrainerSettings, doors: Doors, books: Books, resumed: CheckpointState | None) -> Supply:
    """Make the supply of a run on ``data.from_run``; raises as `StoredGroups`."""
    groups = StoredGroups(settings, doors.blobs)
    mark_use(groups.input_name, doors.run_id, doors.blobs)
    if resumed is not None:
        groups.resume(resumed.dispatch)
    issuer = StoredIssuer(groups, books.tally, books.account)
    return Supply(issuer, StoredCollector(groups, issuer, doors.blobs, settings.rollout.groups_per_step), ())


def generated(
    settings: TrainerSettings,
    doors: Doors,
    books: Books,
    resumed: CheckpointState | None,
    *,
    prompts: PromptSet,
    stop_token_ids: Sequence[int],
) -> Supply:
    """Make the supply of a run whose groups are generated while it trains; raises CheckpointError, MissingStream."""
    rollout, algorithm = settings.rollout, settings.algorithm
    dispatch = Dispatch(
        prompts,
        order=DataOrder(len(prompts), settings.run.seed, settings.data.shuffle),
        rollout=rollout,
        stop_token_ids=stop_token_ids,
        with_baseline=algorithm.needs_baseline,
    )
    if resumed is not None:
        dispatch.resume(resumed.dispatch)
    unsent, letters_read = (resumed.unsent, resumed.letters_read) if resumed else ((), 0)
    issuer = Issuer(doors, dispatch, books.tally, books.account, unsent, letters_read)
    batcher = Batcher(
        groups_per_step=rollout.groups_per_step,
        max_staleness=rollout.max_staleness,
        ledger=books.ledger,
        needs_signal=algorithm.dynamic_sampling,
        needs_baseline=algorithm.needs_baseline,
        reuse=Reuse(algorithm.max_trained_count, algorithm.retrained_interval),
    )
    collector = Collector(
        doors,
        batcher=batcher,
        issued=issuer,
        deadline_s=settings.trainer.collect_deadline_s,
        max_dead=rollout.max_outstanding,
        letters_read=letters_read,
    )
    return Supply(issuer, collector, (collector, issuer))
