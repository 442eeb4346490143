"""An exception that ends the issuing thread is raised in the training thread."""

from __future__ import annotations

import pytest
from tests.trainer.recovery.trainer_machine import CLOSED, prompts

from penstock.protocol.versions import PolicyVersion
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.groups.dispatch import Dispatch, RunGroups
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.settings import RolloutSettings


def test_an_unexpected_error_of_the_issuing_thread_is_raised_by_check() -> None:
    """Without a bus the thread ends with AttributeError, and the next `check` raises it."""
    rollout = RolloutSettings(group_size=1, groups_per_step=1, max_staleness=0, max_new_tokens=4)
    dispatch = Dispatch(prompts(), order=DataOrder(6, seed=1), rollout=rollout, stop_token_ids=(2,))
    issuer = Issuer(CLOSED, dispatch, RunGroups(dispatch.groups))
    issuer.check()
    with issuer:
        issuer.advance(PolicyVersion(0), 10)
        issuer._thread.join(20.0)
    with pytest.raises(AttributeError, match="publish"):
        issuer.check()


def test_tasks_name_the_environment_of_the_run_file() -> None:
    """`rollout.environment` is in every task, so that workers choose the environment by it."""
    rollout = RolloutSettings(group_size=1, groups_per_step=3, max_staleness=0, max_new_tokens=4, environment="maze")
    dispatch = Dispatch(prompts(), order=DataOrder(6, seed=1), rollout=rollout, stop_token_ids=(2,))
    tasks = [task for pack in dispatch.next_packs(PolicyVersion(0)) for task in pack.tasks]
    assert [task.environment for task in tasks] == ["maze"] * 3
