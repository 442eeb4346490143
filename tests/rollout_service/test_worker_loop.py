"""The worker's loop, as a process, against real NATS, real S3 and an engine over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.deploy.bootstrap import bootstrap
from penstock.protocol.facts import TaskList, encode_unbounded
from penstock.protocol.heartbeats import Activity
from penstock.protocol.packs import group_pack
from penstock.protocol.streams import StreamLimits
from penstock.rollout_service import loop
from tests.groups import make_task
from tests.rollout_service.trainer_side import WorkerRun
from tests.servers import wait_for


def test_a_pack_is_generated_stored_announced_and_acknowledged(run: WorkerRun):
    """One request for what samples alike, one object with the engine's own values, one announcement, an empty queue.

    A task with a baseline has one more completion, greedy, which is the last of its group and is marked.
    """
    run.publish(3)
    with_baseline = make_task("d", group_size=2, prompt_ids=[9]).model_copy(update={"with_baseline": True})
    tasks = [make_task("a", group_size=2), make_task("b", group_size=3), make_task("c", group_size=2, max_new_tokens=9)]
    tasks.append(with_baseline)
    run.issue("pack-0", tasks)
    run.attach()
    [delivery] = run.collect(1)
    fact = delivery.fact
    assert (fact.pack_id, fact.worker_id) == ("pack-0", "w0")
    wait_for(lambda: run.num_tasks() == 0, "the acknowledgement")
    groups = group_pack.decode(run.blobs.get(fact.pack))
    assert [group.group_id for group in fact.groups] == [group.group_id for group in groups] == list("abcd")
    assert [group.has_baseline for group in fact.groups] == [False, False, False, True]
    baselines = [[row.is_baseline for row in group.trajectories] for group in groups]
    assert baselines == [[False] * 2, [False] * 3, [False] * 2, [False, False, True]]
    asked = [(len(body["input_ids"]), body["sampling_params"]["n"]) for body in run.engine.requests]
    assert sorted(asked) == [(1, 1), (1, 2), (1, 3), (2, 2)]
    for task, group in zip(tasks, groups, strict=True):
        sampling = task.sampling.model_dump(include={"max_new_tokens", "stop_token_ids"})
        body = {"rid": [""], "input_ids": [task.prompt_ids], "sampling_params": {"n": task.group_size, **sampling}}
        rows = run.engine.rows(body, "3")
        start, greedy = len(task.prompt_ids), rows[:1] if task.with_baseline else []
        for one, said in zip(group.trajectories, rows + greedy, strict=True):
            assert one.token_ids.tolist() == [*task.prompt_ids, *said["output_ids"]]
            assert one.completion_text == said["text"]
            assert one.finish_reason == said["meta_info"]["finish_reason"]["type"]
            logprobs = [0] * start + [logprob for logprob, _, _ in said["meta_info"]["output_token_logprobs"]]
            np.testing.assert_array_equal(one.behaviour_logprobs, np.array(logprobs, np.float32))
            assert one.version_runs == ((3, start, len(one.token_ids)),)


def test_tasks_too_large_for_a_message_are_read_from_s3(run: WorkerRun):
    """A pack whose prompts are an object in S3 is generated like any other."""
    run.publish(0)
    tasks = TaskList(tasks=(make_task("a", group_size=2), make_task("b", group_size=2)))
    blob = run.blobs.put(f"runs/{run.run_id}/tasks/pack-0.msgpack", encode_unbounded(tasks))
    run.issue("pack-0", tasks_blob=blob)
    run.attach()
    assert [group.group_id for group in run.collect_groups(1)] == ["a", "b"]


def test_evaluation_goes_before_training(run: WorkerRun):
    """An evaluation pack that was issued last is generated before waiting training packs."""
    run.publish(0)
    run.engine.flow.clear()
    for i in range(6):
        run.issue(f"train-{i}", [make_task(f"e0.p{i}.a0")])
    run.attach("w0", "worker.packs_in_flight=1")
    run.engine.wait_for_requests(1)
    run.issue("eval-0", [make_task("eval.v0.p0.s0", split="eval", temperature=0.0, group_size=1)])
    run.engine.flow.set()
    order = [delivery.fact.pack_id for delivery in run.collect(7)]
    assert order.index("eval-0") <= 2


def test_a_worker_takes_only_the_tasks_of_its_roles(run: WorkerRun):
    run.publish(0)
    run.issue("train-0", [make_task("e0.p0.a0")])
    run.issue("eval-0", [make_task("eval.v0.p0.s0", split="eval")])
    run.attach("w0", 'worker.roles=["eval"]')
    [delivery] = run.collect(1)
    assert delivery.fact.pack_id == "eval-0"
    wait_for(lambda: run.num_tasks() == 1, "the evaluation task to be acknowledged")


def test_a_stopping_worker_finishes_packs_in_flight(run: WorkerRun):
    """After SIGTERM the worker takes no new pack, announces the one in flight, and exits with status 0."""
    run.publish(0)
    run.engine.flow.clear()
    for i in range(3):
        run.issue(f"pack-{i}", [make_task(f"e0.p{i}.a0")])
    worker = run.attach("w0", "worker.packs_in_flight=1")
    run.engine.wait_for_requests(1)
    worker.ask_to_stop()
    wait_for(lambda: "stopping" in worker.log_tail(), "the worker to notice")
    run.engine.flow.set()
    assert worker.wait(60) == 0
    [delivery] = run.collect(1)
    assert delivery.fact.pack_id == "pack-0"
    assert len(run.engine.requests) == 1
    assert run.num_tasks() == 2


@pytest.mark.slow
def test_a_stopping_worker_requeues_what_takes_too_long(run: WorkerRun):
    """After ``finish_s`` the packs in flight are requeued at once, not after their ack wait, which is an hour here."""
    bootstrap(run.bus, run.blobs, run.run_id, StreamLimits(ack_wait_s=3600.0))
    run.publish(0)
    run.engine.flow.clear()
    run.issue("pack-0", [make_task("e0.p0.a0")])
    worker = run.attach("w0", "worker.finish_s=0.1")
    run.engine.wait_for_requests(1)
    worker.ask_to_stop()
    assert worker.wait(60) == 0
    run.engine.flow.set()
    run.attach("w1")
    assert run.collect(1)[0].fact.worker_id == "w1"


@pytest.mark.slow
def test_an_idle_worker_exits_on_sigterm(run: WorkerRun):
    """A worker that waits for tasks, or for the first weights, exits with status 0."""
    waiting = run.attach()
    wait_for(lambda: "waiting for the trainer" in waiting.log_tail(), "the worker to wait for weights")
    waiting.ask_to_stop()
    assert waiting.wait(60) == 0
    run.publish(0)
    idle = run.attach("w1")
    run.wait_applied("w1", 0)
    idle.ask_to_stop()
    assert idle.wait(60) == 0


def test_a_heartbeat_reports_the_workers_metrics(run: WorkerRun):
    """The live bucket holds version, busy time, CPU time and the number of tokens."""
    run.publish(7)
    run.attach()
    run.issue("pack-0", [make_task("e0.p0.a0", group_size=3)])
    [delivery] = run.collect(1)
    wait_for(
        lambda: (beat := run.heartbeat("w0")) is not None and beat.figures["groups_generated"] == 1,
        "a heartbeat after the pack",
    )
    beat = run.heartbeat("w0")
    assert beat is not None
    assert (beat.role, beat.version, beat.figures["packs_held"]) == ("rollout", 7, 0)
    assert beat.figures["tokens_generated"] == sum(delivery.fact.groups[0].completion_tokens)
    assert beat.busy_s > 0
    assert beat.cpu_s > 0


async def test_environments_that_take_long_to_prepare_stop_no_heartbeat():
    """The event loop goes on while a corpus is read; the state says what is waited for."""
    activity, went_on, states = Activity(), threading.Event(), []

    def use_model(folder: Path) -> None:
        states.append(activity.state)
        assert went_on.wait(60.0), "the event loop was stopped"

    async def start() -> Any:
        asyncio.get_running_loop().call_later(0.01, went_on.set)
        return SimpleNamespace(model_folder=Path("model"), version=0)

    async def check_teacher(folder: Path, *, start_deadline_s: float) -> None:
        raise LookupError("the teacher is asked next")

    worker: Any = SimpleNamespace(
        weights=SimpleNamespace(start=start), activity=activity, start_deadline_s=1.0,
        packs=SimpleNamespace(use_model=use_model, check_teacher=check_teacher),
    )  # fmt: skip
    with pytest.raises(LookupError, match="asked next"):
        await loop._start_and_work(worker)
    assert states == ["preparing the environments"]


def test_a_worker_imports_no_torch():
    code = "import sys, penstock.rollout_service.__main__; "
    code += "assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
