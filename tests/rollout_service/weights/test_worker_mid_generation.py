"""A worker whose engine loads new weights while it generates: long generations neither wait nor are lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.contracts.tiny_model import Dense, build_endless_model, check_groups
from tests.groups import make_task
from tests.rollout_service.trainer_side import WorkerRun, num_running
from tests.servers import wait_for

from penstock.deploy.processes.child import Child
from penstock.protocol.trajectory import Group

PROMPT = [5, 17, 88, 250, 31, 9]
LONG = 2000  # tokens: seconds of generation


@pytest.fixture
def models(run: WorkerRun) -> Callable[[int], Dense]:
    """Three versions of a model that never samples an end token; `TrainerSide.publish` publishes them."""
    for version in range(3):
        build_endless_model(run.folder / f"model-{version}", seed=version)
    return lambda version: Dense(run.folder / f"model-{version}")


def issue_long(run: WorkerRun, worker: Child) -> None:
    """Issue one pack of two long groups and wait until a worker's engine generates."""
    long = {"prompt_ids": PROMPT, "group_size": 2, "max_new_tokens": LONG, "stop_token_ids": ()}
    run.issue("long", [make_task(f"e0.p{number}.a0", **long) for number in (0, 1)])
    wait_for(lambda: num_running(worker) == 4, "the engine to generate")


def check(groups: list[Group], models: Callable[[int], Dense]) -> set[int]:
    assert {group.num_prompt_tokens + LONG for group in groups} == {
        len(r.token_ids) for g in groups for r in g.trajectories
    }
    return check_groups(groups, models)


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_versions_are_applied_while_a_pack_generates(run: WorkerRun, models: Callable[[int], Dense], mode: str):
    run.publish(0)
    worker = run.start("w0", f"worker.update_mode={mode}")
    run.wait_applied("w0", 0)
    issue_long(run, worker)
    for version in (1, 2):
        run.publish(version)
        run.wait_applied("w0", version)
    groups = run.collect_groups(1)
    assert check(groups, models) == {0, 1, 2}
    assert "pack requeued" not in worker.log_tail(100)


def test_a_worker_killed_with_a_resumed_pack_loses_no_task(run: WorkerRun, models: Callable[[int], Dense]):
    """Its partial completions are lost; the pack is redelivered to another worker and generated whole, once."""
    run.publish(0)
    first = run.start("w0", "worker.update_mode=abort")
    run.wait_applied("w0", 0)
    issue_long(run, first)
    run.publish(1)
    run.wait_applied("w0", 1)
    first.kill()
    run.start("w1", "worker.update_mode=abort")
    groups = run.collect_groups(1)
    assert check(groups, models) == {1}
    wait_for(lambda: run.num_tasks() == 0, "the pack to be acknowledged")
