"""The worker's loop, as a process, against real NATS, real S3 and an engine over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.processes.child import Child
from penstock.protocol import streams, subjects
from penstock.protocol.facts import RunEvent, TaskList, encode_unbounded
from penstock.protocol.heartbeats import Activity
from penstock.protocol.packs import group_pack
from penstock.protocol.streams import StreamLimits
from penstock.rollout_service import loop
from tests.groups import make_task
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.trainer_side import TrainerSide, attached
from tests.servers import wait_for

StartWorker = Callable[..., Child]


def test_a_pack_is_generated_stored_announced_and_acknowledged(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A pack of tasks makes one engine request, one object and one announcement, and is removed from the queue."""
    trainer_side.publish(0)
    tasks = [make_task(f"e0.p{i}.a0", prompt_ids=[5, 6, 7 + i], group_size=4) for i in range(3)]
    trainer_side.issue("pack-0", tasks)
    start_worker("w0", *attached(faulty_engine))
    [delivery] = trainer_side.collect(1)
    fact = delivery.fact
    assert (fact.pack_id, fact.worker_id) == ("pack-0", "w0")
    assert [group.group_id for group in fact.groups] == [task.group_id for task in tasks]
    wait_for(lambda: trainer_side.num_tasks() == 0, "the acknowledgement")
    [body] = faulty_engine.requests
    assert body["input_ids"] == [list(task.prompt_ids) for task in tasks]
    assert body["sampling_params"]["n"] == 4


def test_stored_groups_hold_what_the_engine_returned(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """Token ids, log-probabilities, texts, finish reasons and versions in S3 are the engine's own."""
    trainer_side.publish(3)
    trainer_side.issue("pack-0", [make_task(group_size=5, prompt_ids=[5, 6, 8])])
    start_worker("w0", *attached(faulty_engine))
    [group] = trainer_side.collect_groups(1)
    rows = faulty_engine.rows(faulty_engine.requests[0], "3")
    assert len(group.trajectories) == 5
    for trajectory, row in zip(group.trajectories, rows, strict=True):
        assert trajectory.token_ids.tolist() == [5, 6, 8, *row["output_ids"]]
        assert trajectory.completion_text == row["text"]
        assert trajectory.finish_reason == row["meta_info"]["finish_reason"]["type"]
        expected = np.array([0, 0, 0, *(lp for lp, _, _ in row["meta_info"]["output_token_logprobs"])], np.float32)
        np.testing.assert_array_equal(trajectory.behaviour_logprobs, expected)
        assert trajectory.version_runs == ((3, 3, 3 + len(row["output_ids"])),)


def test_tasks_that_sample_differently_share_a_pack_but_not_a_request(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    trainer_side.publish(0)
    tasks = [
        make_task("a", group_size=2),
        make_task("b", group_size=3),
        make_task("c", group_size=2, max_new_tokens=9),
        make_task("d", group_size=2, prompt_ids=[9]),
    ]
    trainer_side.issue("pack-0", tasks)
    start_worker("w0", *attached(faulty_engine))
    groups = trainer_side.collect_groups(1)
    assert [(group.group_id, len(group.trajectories)) for group in groups] == [("a", 2), ("b", 3), ("c", 2), ("d", 2)]
    asked = sorted((len(b["input_ids"]), b["sampling_params"]["n"]) for b in faulty_engine.requests)
    assert asked == [(1, 2), (1, 3), (2, 2)]


def test_a_task_with_a_baseline_has_one_more_greedy_completion(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """It is sampled at temperature 0, is the last of its group, and is marked as the baseline."""
    trainer_side.publish(0)
    with_baseline = make_task("a", group_size=3).model_copy(update={"with_baseline": True})
    trainer_side.issue("pack-0", [with_baseline, make_task("b", group_size=3)])
    start_worker("w0", *attached(faulty_engine))
    [delivery] = trainer_side.collect(1)
    assert [group.has_baseline for group in delivery.fact.groups] == [True, False]
    assert [len(group.completion_tokens) for group in delivery.fact.groups] == [4, 3]
    groups = group_pack.decode(trainer_side.blobs.get(delivery.fact.pack))
    assert [[row.is_baseline for row in group.trajectories] for group in groups] == [[False] * 3 + [True], [False] * 3]
    asked = {(b["sampling_params"]["temperature"], b["sampling_params"]["n"]): b for b in faulty_engine.requests}
    assert set(asked) == {(1.0, 3), (0.0, 1)}
    assert len(asked[0.0, 1]["input_ids"]) == 1


def test_tasks_too_large_for_a_message_are_read_from_s3(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A pack whose prompts are an object in S3 is generated like any other."""
    trainer_side.publish(0)
    tasks = TaskList(tasks=(make_task("a", group_size=2), make_task("b", group_size=2)))
    blob = trainer_side.blobs.put(f"runs/{trainer_side.run_id}/tasks/pack-0.msgpack", encode_unbounded(tasks))
    trainer_side.issue("pack-0", tasks_blob=blob)
    start_worker("w0", *attached(faulty_engine))
    assert [group.group_id for group in trainer_side.collect_groups(1)] == ["a", "b"]


def test_packs_in_flight_are_generated_together(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    trainer_side.publish(0)
    faulty_engine.flow.clear()
    for i in range(4):
        trainer_side.issue(f"pack-{i}", [make_task(f"e0.p{i}.a0")])
    start_worker("w0", *attached(faulty_engine), "worker.packs_in_flight=2")
    faulty_engine.wait_for_requests(2)
    consumer = streams.tasks_consumer(trainer_side.run_id, "train")
    wait_for(lambda: trainer_side.bus.consumer_state(consumer).wait().num_pending == 2, "two waiting packs")
    assert len(faulty_engine.requests) == 2
    faulty_engine.flow.set()
    trainer_side.collect(4)


def test_evaluation_goes_before_training(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """An evaluation pack that was issued last is generated before waiting training packs."""
    trainer_side.publish(0)
    faulty_engine.flow.clear()
    for i in range(6):
        trainer_side.issue(f"train-{i}", [make_task(f"e0.p{i}.a0")])
    start_worker("w0", *attached(faulty_engine), "worker.packs_in_flight=1")
    faulty_engine.wait_for_requests(1)
    trainer_side.issue("eval-0", [make_task("eval.v0.p0.s0", split="eval", temperature=0.0, group_size=1)])
    faulty_engine.flow.set()
    order = [delivery.fact.pack_id for delivery in trainer_side.collect(7)]
    assert order.index("eval-0") <= 2


def test_a_worker_takes_only_the_tasks_of_its_roles(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    trainer_side.publish(0)
    trainer_side.issue("train-0", [make_task("e0.p0.a0")])
    trainer_side.issue("eval-0", [make_task("eval.v0.p0.s0", split="eval")])
    start_worker("w0", *attached(faulty_engine), 'worker.roles=["eval"]')
    [delivery] = trainer_side.collect(1)
    assert delivery.fact.pack_id == "eval-0"
    wait_for(lambda: trainer_side.num_tasks() == 1, "the evaluation task to be acknowledged")


def test_a_killed_workers_pack_is_delivered_by_another(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """After SIGKILL during generation no pack is lost, and none is announced twice."""
    bootstrap(trainer_side.bus, trainer_side.blobs, trainer_side.run_id, StreamLimits(ack_wait_s=1.0))
    trainer_side.publish(0)
    trainer_side.issue("pack-0", [make_task("e0.p0.a0")])
    faulty_engine.flow.clear()
    events: list[RunEvent] = []
    trainer_side.bus.tail(
        f"{trainer_side.run_id}-events", subjects.events(trainer_side.run_id, "log"), RunEvent, events.append
    ).wait()
    first = start_worker("w0", *attached(faulty_engine))
    faulty_engine.wait_for_requests(1)
    first.kill()
    faulty_engine.flow.set()
    start_worker("w1", *attached(faulty_engine))
    [delivery] = trainer_side.collect(1)
    wait_for(lambda: events, "the event")
    assert events[0].data["text"] == "1 group redelivered (delivery 2), now with w1"
    assert (delivery.fact.worker_id, delivery.fact.pack_id) == ("w1", "pack-0")
    wait_for(lambda: trainer_side.num_tasks() == 0, "the acknowledgement")
    assert trainer_side.bus.stream_state(f"{trainer_side.run_id}-generated").wait().num_messages == 0


def test_a_pack_generated_twice_is_announced_once(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A pack that is redelivered after its announcement, because its worker was killed before it acknowledged, adds nothing."""
    trainer_side.publish(0)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.issue("pack-0", [make_task("e0.p0.a0")])
    trainer_side.collect(1)
    wait_for(lambda: trainer_side.num_tasks() == 0, "the acknowledgement")
    fact = trainer_side.task_issued("pack-0", [make_task("e0.p0.a0")])
    trainer_side.publish_task(fact, msg_id="pack-0-again")
    wait_for(lambda: len(faulty_engine.requests) == 2 and trainer_side.num_tasks() == 0, "the repetition to be settled")
    assert trainer_side.bus.stream_state(f"{trainer_side.run_id}-generated").wait().num_messages == 0


def test_a_stopping_worker_finishes_packs_in_flight(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """After SIGTERM the worker takes no new pack, announces the one in flight, and exits with status 0."""
    trainer_side.publish(0)
    faulty_engine.flow.clear()
    for i in range(3):
        trainer_side.issue(f"pack-{i}", [make_task(f"e0.p{i}.a0")])
    worker = start_worker("w0", *attached(faulty_engine), "worker.packs_in_flight=1")
    faulty_engine.wait_for_requests(1)
    worker.ask_to_stop()
    wait_for(lambda: "stopping" in worker.log_tail(), "the worker to notice")
    faulty_engine.flow.set()
    assert worker.wait(60) == 0
    [delivery] = trainer_side.collect(1)
    assert delivery.fact.pack_id == "pack-0"
    assert len(faulty_engine.requests) == 1
    assert trainer_side.num_tasks() == 2


def test_a_stopping_worker_requeues_what_takes_too_long(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """After ``finish_s`` the packs in flight are requeued immediately, not after their ack wait, which is an hour here."""
    bootstrap(trainer_side.bus, trainer_side.blobs, trainer_side.run_id, StreamLimits(ack_wait_s=3600.0))
    trainer_side.publish(0)
    faulty_engine.flow.clear()
    trainer_side.issue("pack-0", [make_task("e0.p0.a0")])
    worker = start_worker("w0", *attached(faulty_engine), "worker.finish_s=0.1")
    faulty_engine.wait_for_requests(1)
    worker.ask_to_stop()
    assert worker.wait(60) == 0
    faulty_engine.flow.set()
    start_worker("w1", *attached(faulty_engine))
    assert trainer_side.collect(1)[0].fact.worker_id == "w1"


def test_an_idle_worker_exits_on_sigterm(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A worker that waits for tasks, or for the first weights, exits with status 0."""
    waiting = start_worker("w0", *attached(faulty_engine))
    wait_for(lambda: "waiting for the trainer" in waiting.log_tail(), "the worker to wait for weights")
    waiting.ask_to_stop()
    assert waiting.wait(60) == 0
    trainer_side.publish(0)
    idle = start_worker("w1", *attached(faulty_engine))
    trainer_side.wait_applied("w1", 0)
    idle.ask_to_stop()
    assert idle.wait(60) == 0


def test_a_heartbeat_reports_the_workers_metrics(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """The live bucket holds version, busy time, CPU time and the number of tokens."""
    trainer_side.publish(7)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.issue("pack-0", [make_task("e0.p0.a0", group_size=3)])
    [delivery] = trainer_side.collect(1)
    wait_for(
        lambda: (beat := trainer_side.heartbeat("w0")) is not None and beat.figures["groups_generated"] == 1,
        "a heartbeat after the pack",
    )
    beat = trainer_side.heartbeat("w0")
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
    code = "import sys, penstock.rollout_service.__main__; assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
