"""Whatever ends the issuing thread is told to the training thread."""

from __future__ import annotations

import pytest
from tests.trainer.recovery.ring_machine import CLOSED, prompts

from penstock.protocol.versions import PolicyVersion
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.groups.accounting import Accounting
from penstock.trainer.groups.counters import Counters
from penstock.trainer.groups.dispatch import Dispatch
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.settings import RolloutSettings


def test_an_error_that_nobody_foresaw_does_not_end_the_issuing_in_silence() -> None:
    """Tasks go nowhere, here because there is no bus at all: the next look at the issuer raises just that."""
    rollout = RolloutSettings(group_size=1, groups_per_step=1, max_staleness=0, max_new_tokens=4)
    dispatch = Dispatch(prompts(), order=DataOrder(6, seed=1), rollout=rollout, stop_token_ids=(2,))
    issuer = Issuer(CLOSED, dispatch, Counters(), Accounting())
    issuer.check()
    with issuer:
        issuer.advance(PolicyVersion(0), 10)
        issuer._thread.join(20.0)
    with pytest.raises(AttributeError, match="publish"):
        issuer.check()
