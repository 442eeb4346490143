"""The worker with its embedded engine as a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.deploy.processes.child import Child
from penstock.protocol.packs import group_pack
from penstock.protocol.packs.task_promise import TaskPromise
from tests.groups import make_task
from tests.rollout_service.trainer_side import TrainerSide, WorkerRun
from tests.servers import wait_for


def engine_of(worker: Child) -> int:
    [engine] = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    return int(engine)


def is_running(pid: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def issue(run: TrainerSide, pack_id: str) -> None:
    run.issue(pack_id, [make_task(f"{pack_id}.p{i}", prompt_ids=[5, 6, 7 + i], group_size=4) for i in range(3)])


def check_redundant_groups(run: TrainerSide) -> None:
    """Of those that are started four are stored, with a baseline where one is wanted; the rest is counted."""
    plain = make_task("redundant.p0", prompt_ids=[5, 6, 7], group_size=4, max_new_tokens=100)
    tasks = [
        plain.model_copy(update={"redundant_completions": 2}),
        plain.model_copy(update={"group_id": "redundant.p1", "redundant_completions": 3, "with_baseline": True}),
        plain.model_copy(
            update={"group_id": "redundant.p2", "redundant_completions": 3, "redundant_wait": 1000.0}
        ),  # all are waited for
    ]
    run.issue("redundant", tasks)
    [delivery] = run.collect(1)
    announced = delivery.fact.groups
    stored = group_pack.decode(run.blobs.get(delivery.fact.pack), described=announced)
    for task, group in zip(tasks, announced, strict=True):
        TaskPromise.of(task).check_lengths(
            group.group_id, group.completion_tokens, group.has_baseline, len(group.abandoned)
        )
    assert [len(group.trajectories) for group in stored] == [4, 5, 7]
    assert [len(group.abandoned) for group in announced] == [2, 3, 0]
    num_tokens = sum(one.num_tokens for group in announced for one in group.abandoned)

    def is_counted() -> bool:
        beat = run.heartbeat("w0")
        counted = ("completions_abandoned", "tokens_abandoned")
        return beat is not None and [beat.figures[name] for name in counted] == [5, num_tokens]

    wait_for(is_counted, "the heartbeat to count the abandoned completions")


@pytest.mark.slow
def test_an_embedded_engine_is_started_updated_restarted_and_stopped(run: WorkerRun):
    """Its samples have the newest version, also after a restart by SIGKILL; it exits when its worker is killed."""
    run.publish(0)
    worker = run.start("w0")
    issue(run, "first")
    [*groups] = run.collect_groups(1)
    assert [len(group.trajectories) for group in groups] == [4, 4, 4]
    assert {row.oldest_version for group in groups for row in group.trajectories} == {0}
    run.publish(1)
    run.wait_applied("w0", 1)

    first = engine_of(worker)
    os.kill(first, signal.SIGKILL)
    issue(run, "second")
    groups = run.collect_groups(1)
    assert {row.oldest_version for group in groups for row in group.trajectories} == {1}
    second = engine_of(worker)
    assert second != first
    check_redundant_groups(run)

    worker.kill()
    wait_for(lambda: not is_running(second), "the engine to exit with its worker")


@pytest.mark.slow
def test_an_embedded_engine_exits_when_its_worker_is_stopped(run: WorkerRun):
    worker = run.start("w0")
    wait_for(lambda: Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text(), "a prepared engine")
    engine = engine_of(worker)
    run.publish(0)
    run.wait_applied("w0", 0)
    assert engine_of(worker) == engine
    worker.ask_to_stop()
    assert worker.wait(60) == 0
    assert not is_running(engine)


def test_a_prepared_engine_exits_with_its_worker():
    command = [sys.executable, "-m", "penstock.rollout_service.embedded_engine", "--prepare"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=300, check=False).returncode == 0
