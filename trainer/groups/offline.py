"""Trains on a run's groups that were scored again: no task is issued, nothing is generated, no engine is needed.

Two parts stand where collector and issuer stand otherwise (``data.from_run``). Every group is used once, in the order
in which the source run used it; which comes next is part of the checkpoint. No version of this run sampled anything:
every token counts as at least one version old, so that what the loss does about stale samples is in force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import BlobRef, GroupScored
from penstock.protocol.record.lineage import RecordedGroup
from penstock.protocol.record.rescored import RescoredInput, find_input, pieces
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.algorithm.group_rules import rewards_differ
from penstock.trainer.errors import CheckpointError
from penstock.trainer.groups.accounting import Accounting
from penstock.trainer.groups.batcher import Drop
from penstock.trainer.groups.counters import Counters
from penstock.trainer.groups.drops import DropReason
from penstock.trainer.groups.issue import IssuerState
from penstock.trainer.groups.stored_groups import ready_groups
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.settings import TrainerSettings

_STATE_TAG = "stored_groups.v1"

Place = tuple[RecordedGroup, BlobRef]


class StoredGroups:
    """The groups of a rescored input, and how far a run has come in them."""

    def __init__(self, settings: TrainerSettings, blobs: Blobs) -> None:
        """Read which groups there are, without their tokens.

        Raises RecordBroken, BlobMissing or BlobCorrupt for the input, ConfigError where the settings do not fit it.
        """
        assert settings.data.from_run is not None
        self._of, self._sha256 = find_input(settings.data.from_run, blobs)
        self._places: list[Place] = [
            (group, piece.packs[group.pack]) for piece in pieces(self._of, blobs) for group in piece.groups
        ]
        self._algorithm = settings.algorithm
        self.position = 0
        _check(settings, self._of, sum(self._reason(group) is None for group, _ in self._places))

    @property
    def input_name(self) -> str:
        """Id of the input."""
        return self._of.run_id

    def resume(self, document: Mapping[str, Any]) -> None:
        """Go on where a checkpoint ended; raises CheckpointError when it is of another input."""
        if document.get("schema_tag") != _STATE_TAG or document.get("input") != self._sha256:
            raise CheckpointError(
                f"the checkpoint was not made from the input {self._of.run_id} as it is; restore data.from_run, or start "
                "over with another run.id"
            )
        self.position = int(document["position"])

    def to_document(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"schema_tag": _STATE_TAG, "input": self._sha256, "position": self.position}

    def take(self, count: int) -> tuple[list[Place], list[Drop]]:
        """Return the next groups to train on, and what is passed over on the way, with the reason."""
        taken: list[Place] = []
        drops: list[Drop] = []
        while len(taken) < count and self.position < len(self._places):
            group, pack = self._places[self.position]
            self.position += 1
            reason = self._reason(group)
            if reason is None:
                taken.append((group, pack))
            else:
                drops.append(Drop(group.group_id, reason, group.num_tokens))
        return taken, drops

    def _reason(self, group: RecordedGroup) -> DropReason | None:
        if self._algorithm.dynamic_sampling and not rewards_differ(group.scored.rewards):
            return DropReason.NO_SIGNAL
        if self._algorithm.needs_baseline and not group.scored.generated.has_baseline:
            return DropReason.NO_BASELINE
        return None


def _check(settings: TrainerSettings, of: RescoredInput, num_usable: int) -> None:
    name, rollout, needed = of.run_id, settings.rollout, settings.trainer.steps * settings.rollout.groups_per_step
    if settings.algorithm.max_trained_count > 1:
        raise ConfigError(
            f"algorithm.max_trained_count = {settings.algorithm.max_trained_count}: a run on data.from_run uses every "
            "group once; set it to 1"
        )
    if rollout.temperature != of.temperature:
        raise ConfigError(
            f"rollout.temperature = {rollout.temperature}, and {name} was sampled at {of.temperature}: its log-probabilities "
            "mean nothing at another one; set it to the same"
        )
    if needed > num_usable:
        raise ConfigError(
            f"trainer.steps = {settings.trainer.steps} of rollout.groups_per_step = {rollout.groups_per_step} need {needed} "
            f"groups, and {name} has {num_usable} that can be used (of {of.num_groups}); lower one of them"
        )


class StoredIssuer:
    """Stands where the issuer stands: keeps the account of groups that nobody has to generate."""

    def __init__(self, groups: StoredGroups, counters: Counters, account: Accounting) -> None:
        """Own the tally and the train book of the account."""
        self._groups, self._counters, self._account = groups, counters, account
        self._in_use = 0

    def took(self, batch: Sequence[Place], drops: Sequence[Drop]) -> None:
        """Enter groups that were taken from the input, and those that were passed over."""
        self._account.issue("train", [*(group.group_id for group, _ in batch), *(drop.group_id for drop in drops)])
        for drop in drops:
            self._counters.count_drop(drop)
            self._account.drop("train", drop)
        self._counters.groups_scored += len(batch) + len(drops)
        self._in_use = len(batch)

    def trained(
        self,
        tokens: Mapping[str, int],
        staleness_tokens: dict[int, int],
        *,
        made: PolicyVersion,
        num_reused: int = 0,
    ) -> None:
        """Close the groups of a batch; ``made`` matters to nobody here."""
        self._account.use("train", tokens)
        self._counters.count_batch(len(tokens), staleness_tokens, num_reused=num_reused)
        self._in_use = 0

    def take_state(self) -> IssuerState:
        """Return everything as a checkpoint and its chapter hold it."""
        return IssuerState(
            dispatch=self._groups.to_document(),
            totals=self._counters.to_document(),
            unsent=(),
            letters_read=0,
            entries=self._account.take_entries(),
        )

    def totals(self) -> dict[str, Any]:
        """Return the counters of the run so far."""
        return self._counters.to_document()

    def groups(self) -> dict[str, Any]:
        """Return what became of the groups so far, as the step events show it."""
        return {
            "issued": self._groups.position,
            "issued_again": 0,
            "given_up": 0,
            "outstanding": self._in_use,
            "scored": self._counters.groups_scored,
            "trained": self._counters.groups_trained,
            "reused": self._counters.groups_reused,
            "dropped": {str(reason): count for reason, count in self._counters.dropped_groups.items()},
        }

    def advance(self, version: PolicyVersion, groups_wanted: int) -> None:
        """Hear of a published version: there is nothing to issue for it."""

    def check(self) -> None:
        """Raise what went wrong beside the training: nothing runs there."""

    def stop(self) -> None:
        """Issue nothing more."""


class StoredCollector:
    """Stands where the collector stands: reads the next groups from the object store, and has nothing to acknowledge."""

    def __init__(self, groups: StoredGroups, issuer: StoredIssuer, blobs: Blobs, groups_per_step: int) -> None:
        """Begin where ``groups`` stand."""
        self._groups, self._issuer, self._blobs, self._count = groups, issuer, blobs, groups_per_step

    def collect(
        self, version: PolicyVersion, should_stop: Callable[[], bool] = lambda: False, *, patience_s: float = 0.0
    ) -> list[ReadyGroup]:
        """Return the next batch; empty when ``should_stop`` says so. Nothing is under way that could be waited for.

        Raises BlobMissing, BlobCorrupt or PackError for a group that cannot be read: no other takes its place.
        """
        if should_stop():
            return []
        batch, drops = self._groups.take(self._count)
        packs = list(dict.fromkeys(pack for _, pack in batch))
        groups = [group.model_copy(update={"pack": packs.index(pack)}) for group, pack in batch]
        ready = ready_groups(packs, groups, self._blobs.get)
        self._issuer.took(batch, drops)
        return ready

    def trained(self, group_ids: Sequence[str]) -> None:
        """Hear that a batch was trained."""

    def settled(self) -> list[Delivery[GroupScored]]:
        """Return the messages that a checkpoint covers: none came."""
        return []

    def acknowledge(self, deliveries: Sequence[Delivery[GroupScored]]) -> None:
        """Acknowledge nothing."""

    def close(self) -> None:
        """Read nothing more."""
