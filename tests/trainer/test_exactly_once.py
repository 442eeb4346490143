"""Whatever the broker does and wherever the trainer dies: every group counts once, and the account closes."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.trainer.ring_machine import RingMachine
from trainer.account import Account
from trainer.ledger import Ledger
from trainer.tally import Tally

NUM_EXAMPLES = int(os.environ.get("PENSTOCK_TEST_RING_EXAMPLES", "120"))
HUNT = settings(
    max_examples=300, stateful_step_count=30, deadline=None, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck), derandomize=True,
)  # fmt: skip

TestRing = RingMachine.TestCase
TestRing.settings = settings(
    max_examples=NUM_EXAMPLES, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class LedgerForgotten(RingMachine):
    """A checkpoint without the ids of what was trained."""

    def restore(self, document):
        super().restore(document | {"ledger": ()})


class PositionForgotten(RingMachine):
    """A checkpoint whose dispatch begins anew."""

    def restore(self, document):
        account = Account(self.saved.account)
        totals = Tally.from_document(document["totals"])
        dispatch = document["dispatch"] | {"position": 0, "outstanding": [], "again": [], "ahead": []}
        self.start(Ledger(document["ledger"]), account, totals, document | {"dispatch": dispatch})


class AcknowledgedTooEarly(RingMachine):
    """A checkpoint acknowledges all messages that are here, not those alone whose groups it covers."""

    def covered(self):
        return list(self.scored.held)


@pytest.mark.parametrize("broken", [LedgerForgotten, PositionForgotten, AcknowledgedTooEarly])
def test_the_machine_finds_a_planted_bug(broken: type[RingMachine]) -> None:
    """A trainer that forgets what its checkpoint should hold, or acknowledges before it, is caught."""
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(broken, settings=HUNT)


def test_a_group_for_another_use_whose_pack_is_gone_stays_trained() -> None:
    """After a crash it comes back and cannot be read: it is not used again, and not dropped, for it was trained."""
    machine = RingMachine()
    machine.begin(groups_per_step=1, max_staleness=2, groups_per_message=1, max_attempts=2, uses=2)
    machine.flow()
    machine.checkpoint()
    machine.crash()
    machine.receive(0)
    machine.fetched(0, readable=False)
    totals = machine.issuer.take_state().entries.account.totals["train"]
    assert (totals.used, totals.dropped) == (1, {})


def test_a_group_for_another_use_that_arrives_as_the_run_ends_is_settled() -> None:
    """It is being fetched when the last batch is done: its message waits for the checkpoint alone."""
    machine = RingMachine()
    machine.begin(groups_per_step=1, max_staleness=2, groups_per_message=1, max_attempts=2, uses=2)
    machine.flow()
    machine.checkpoint()
    machine.crash()
    machine.receive(0)
    machine.intake.close()
    machine.fetched(0, readable=True)
    assert len(machine.intake.settled()) == 1
