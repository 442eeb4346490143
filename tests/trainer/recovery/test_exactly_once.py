"""For any behaviour of the broker and any kill of the trainer, every group counts once, and the accounting closes."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.examples import FACTOR, examples
from tests.trainer.recovery.machine_commit import RunRecordWriter
from tests.trainer.recovery.trainer_machine import TrainerMachine

from penstock.trainer.groups.issue import Issuer, IssuerState
from penstock.trainer.groups.issue_log import IssuedBefore

# Many examples: which of them come first depends on all modules that are loaded, and a search ends when the bug is found.
HUNT = settings(
    max_examples=3000, stateful_step_count=30, deadline=None, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck), derandomize=True,
)  # fmt: skip

TestTrainerMachine = TrainerMachine.TestCase
TestTrainerMachine.settings = examples(25, stateful_step_count=50)


class LedgerForgotten(TrainerMachine):
    """A checkpoint without the ids of trained groups."""

    def restore(self, document):
        super().restore(document | {"ledger": ()})


class PositionForgotten(TrainerMachine):
    """A checkpoint whose dispatch starts over."""

    def restore(self, document):
        dispatch = document["dispatch"] | {"position": 0, "again": [], "ahead": []}
        super().restore(document | {"dispatch": dispatch})


class AcknowledgedTooEarly(TrainerMachine):
    """A checkpoint acknowledges all messages held, not only those whose groups it covers."""

    def covered(self):
        return list(self.scored.held)


class AcknowledgedAtTheCopy(TrainerMachine):
    """A checkpoint acknowledges when the state is copied in memory, before it is committed."""

    def begin_checkpoint(self):
        super().begin_checkpoint()
        self.acks.unsent = self.covered()


class EntriesOnly(IssuerState):
    """A state that compares equal to a checkpoint as long as there are no entries."""

    def is_in(self, state):
        return self.entries.is_empty


class RefusalsForgotten(TrainerMachine):
    """A checkpoint is skipped when there are no entries, although the state has changed."""

    class SkipsCheckpoints(Issuer):
        def take_state(self):
            state = super().take_state()
            return EntriesOnly(*(getattr(state, name.name) for name in fields(state)))

    issuing = SkipsCheckpoints


class StepPassedOver(TrainerMachine):
    """A checkpoint after a single step is skipped when nothing was issued since the one before."""

    class SkipsCheckpoints(RunRecordWriter):
        @property
        def is_empty(self) -> bool:
            return not (self._sessions or self._steps)

    record_writer = SkipsCheckpoints
    issuing = RefusalsForgotten.SkipsCheckpoints


class BranchesForgotten(TrainerMachine):
    """A trainer that counts the age of what a rolled-back session sampled by the numbers of the versions."""

    def branch_off(self, steps, branch):
        pass


class Anything(frozenset[str]):
    def __contains__(self, _: object) -> bool:
        return True


class NeverIssuedAccepted(TrainerMachine):
    """A trainer that takes any group that it does not know for one that an earlier session issued."""

    def start(self, state):
        super().start(state)
        self.dispatch.cursor.before = IssuedBefore(10**9, Anything())


@pytest.mark.parametrize(
    "broken",
    [
        LedgerForgotten,
        PositionForgotten,
        RefusalsForgotten,
        NeverIssuedAccepted,
        *((AcknowledgedTooEarly, StepPassedOver, BranchesForgotten) if FACTOR > 1 else ()),  # longer searches
    ],
)
def test_the_machine_finds_a_planted_bug(broken: type[TrainerMachine]) -> None:
    """A trainer that omits state from its checkpoint, or acknowledges before the commit, fails the machine."""
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(broken, settings=HUNT)


@pytest.mark.parametrize("kind", [TrainerMachine, AcknowledgedAtTheCopy])
def test_a_kill_between_copy_and_commit_loses_no_group(kind: type[TrainerMachine]) -> None:
    """Its message was not acknowledged: it is delivered again and trained. Acknowledged at the copy, it would be in no queue."""
    machine = kind()
    machine.begin(groups_per_step=1, max_staleness=0, groups_per_message=1, max_attempts=2, uses=1)
    machine.issue(sends=True)
    machine.checkpoint()
    machine.answer(0, 0, acknowledges=True)
    machine.receive(0)
    machine.fetched(0, readable=True)
    machine.train()
    machine.begin_checkpoint()
    if machine.acks.unsent:
        machine.acknowledge(1)
    machine.crash()
    if kind is AcknowledgedAtTheCopy:
        with pytest.raises(AssertionError, match="outstanding, but in no place"):
            machine.every_outstanding_group_is_somewhere()
        return
    machine.every_outstanding_group_is_somewhere()
    machine.receive(0)
    machine.fetched(0, readable=True)
    machine.teardown()
    assert machine.effect


def test_a_group_for_another_use_whose_pack_is_unreadable_stays_trained() -> None:
    """After a crash it is delivered and cannot be read: it is not used again, and not dropped, since it was trained."""
    machine = TrainerMachine()
    machine.begin(groups_per_step=1, max_staleness=2, groups_per_message=1, max_attempts=2, uses=2)
    machine.flow()
    machine.checkpoint()
    machine.crash()
    machine.receive(0)
    machine.fetched(0, readable=False)
    totals = machine.issuer.take_state().entries.account.totals["train"]
    assert (totals.used, totals.dropped) == (1, {})


def test_a_group_for_another_use_that_arrives_as_the_run_ends_is_settled() -> None:
    """It is being fetched when the last batch is done: its message only waits for the checkpoint."""
    machine = TrainerMachine()
    machine.begin(groups_per_step=1, max_staleness=2, groups_per_message=1, max_attempts=2, uses=2)
    machine.flow()
    machine.checkpoint()
    machine.crash()
    machine.receive(0)
    machine.tracker.end()
    machine.fetched(0, readable=True)
    assert len(machine.groups.settled()) == 1
