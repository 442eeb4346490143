"""Whatever ends the issuing thread is told to the training thread."""

from __future__ import annotations

import pytest

from protocol.versions import PolicyVersion
from tests.trainer.ring_machine import CLOSED, prompts
from trainer.account import Account
from trainer.data_order import DataOrder
from trainer.dispatch import Dispatch
from trainer.issue import Issuer
from trainer.settings import RolloutSettings
from trainer.tally import Tally


def test_an_error_that_nobody_foresaw_does_not_end_the_issuing_in_silence() -> None:
    """Tasks go nowhere, here because there is no bus at all: the next look at the issuer raises just that."""
    rollout = RolloutSettings(group_size=1, groups_per_step=1, max_staleness=0, max_new_tokens=4)
    dispatch = Dispatch(prompts(), order=DataOrder(6, seed=1), rollout=rollout, stop_token_ids=(2,))
    issuer = Issuer(CLOSED, dispatch, Tally(), Account())
    issuer.check()
    with issuer:
        issuer.advance(PolicyVersion(0), 10)
        issuer._thread.join(20.0)
    with pytest.raises(AttributeError, match="publish"):
        issuer.check()
