"""All groups of a run: those that are trained on, those of evaluations, and the lock of both."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from penstock.protocol.facts import Split
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import AccountState
from penstock.trainer.errors import CheckpointError
from penstock.trainer.groups.group_states import GroupStates
from penstock.trainer.groups.group_totals import Entries, GroupTotals


@dataclass(frozen=True, slots=True)
class RunGroups:
    """Changed by the threads of issuer, collector and evaluator and by the training thread, each with ``lock`` held."""

    train: GroupStates = field(default_factory=GroupStates)
    held_out: GroupStates = field(default_factory=GroupStates)
    lock: threading.RLock = field(default_factory=threading.RLock, compare=False)

    @classmethod
    def of(cls, state: CheckpointState | None, *, max_staleness: int, max_trained_count: int = 1) -> RunGroups:
        """Return the groups of a checkpoint; raises CheckpointError when its parts contradict one another."""
        if state is None:
            return cls(GroupStates(max_staleness=max_staleness, max_trained_count=max_trained_count))
        totals, in_flight = state.account.totals, state.account.in_flight
        outstanding = in_flight.get("train", ())
        listed = state.dispatch.get("outstanding", outstanding)  # a run on stored groups lists none there
        trained = {group_id for _, ids in state.ledger for group_id in ids}
        if contradiction := (set(outstanding) ^ set(listed)) | (set(outstanding) & trained):
            raise CheckpointError(
                f"checkpoint of step {state.step}: group {min(contradiction)} is outstanding by one of its parts and closed by "
                "another; restore its state.json, or remove its folder to resume the checkpoint before it"
            )
        train = GroupStates(
            max_staleness=max_staleness,
            max_trained_count=max_trained_count,
            totals=GroupTotals(totals.get("train"), state.totals),
            outstanding=outstanding,
            dead=state.dispatch.get("dead", ()),
            ledger=state.ledger,
        )
        train.letters_read = state.letters_read
        return cls(train, GroupStates(totals=GroupTotals(totals.get("eval")), outstanding=in_flight.get("eval", ())))

    def take_entries(self) -> Entries:
        splits: dict[Split, GroupStates] = {"train": self.train, "eval": self.held_out}
        account = AccountState(
            totals={
                split: states.totals.sums.model_copy(update={"in_flight": states.num_outstanding})
                for split, states in splits.items()
            },
            in_flight={split: tuple(sorted(states.outstanding())) for split, states in splits.items()},
        )
        return Entries.of({split: states.totals.take_new() for split, states in splits.items()}, account)
