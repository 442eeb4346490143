"""What the worker does when its engine, its tasks, NATS or S3 fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.processes.child import Child
from penstock.deploy.processes.servers import S3Server
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from tests.groups import make_task
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.trainer_side import TrainerSide, attached, worker_process
from tests.servers import secret_file, wait_for

StartWorker = Callable[..., Child]
Row = dict[str, Any]


def test_a_pack_is_redelivered_until_the_engine_recovers(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A pack whose request is answered with 500 is requeued; it is announced once the engine has recovered."""
    trainer_side.publish(0)
    faulty_engine.status = 500
    start_worker("w0", *attached(faulty_engine))
    trainer_side.issue("pack-0", [make_task("e0.p0.a0")])
    faulty_engine.wait_for_requests(3)
    assert trainer_side.bus.stream_state(f"{trainer_side.run_id}-generated").wait().num_messages == 0
    faulty_engine.status = 200
    assert trainer_side.collect(1)[0].fact.pack_id == "pack-0"
    assert trainer_side.dead == []


def test_a_pack_that_fails_in_every_delivery_is_dead_lettered(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """After ``task_attempts`` deliveries the pack is a dead letter with its groups and the engine's error."""
    trainer_side.publish(0)
    faulty_engine.status = 500
    start_worker("w0", *attached(faulty_engine), "worker.task_attempts=3")
    trainer_side.issue("pack-0", [make_task("e0.p0.a0"), make_task("e0.p1.a0")])
    wait_for(lambda: trainer_side.dead, "the dead letter")
    [letter] = trainer_side.dead
    assert (letter.reason, letter.stage, letter.num_delivered) == ("EngineRefused", "tasks", 3)
    assert letter.group_ids == ("e0.p0.a0", "e0.p1.a0")
    assert "out of luck" in letter.detail
    assert len(faulty_engine.requests) == 3
    wait_for(lambda: trainer_side.num_tasks() == 0, "the queue to be empty")


def test_a_request_that_hangs_ends_at_its_deadline(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """An engine that does not answer costs the time that its completion may take, then the pack is redelivered."""
    trainer_side.publish(0)
    faulty_engine.flow.clear()
    worker = start_worker("w0", *attached(faulty_engine), "worker.request_deadline_s=0.3")
    trainer_side.issue("pack-0", [make_task("e0.p0.a0")])
    faulty_engine.wait_for_requests(2)
    assert " gave no answer within " in worker.log_tail()
    faulty_engine.flow.set()
    assert trainer_side.collect(1)[0].fact.pack_id == "pack-0"


def with_wrong_row(change: Callable[[Row], object]) -> Callable[[list[Row]], list[Row]]:
    def rewrite(rows: list[Row]) -> list[Row]:
        change(rows[1])
        return rows

    return rewrite


def test_inconsistent_replies_are_not_announced(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """NaN, tokens of an unknown version and aborted samples are refused; the pack is dead-lettered."""
    trainer_side.publish(4)
    start_worker("w0", *attached(faulty_engine), "worker.task_attempts=1")
    changes: dict[str, Callable[[Row], object]] = {
        "not finite": lambda row: row["meta_info"]["output_token_logprobs"][0].__setitem__(0, math.nan),
        "which this worker never loaded": lambda row: row["meta_info"]["weight_versions"][0].update(version="9"),
        "aborted": lambda row: row["meta_info"].update(finish_reason={"type": "abort", "message": "why not"}),
    }
    for number, (words, change) in enumerate(changes.items(), 1):
        faulty_engine.rewrite = with_wrong_row(change)
        trainer_side.issue(f"pack-{number}", [make_task("e0.p0.a0", group_size=3)])
        wait_for(lambda: len(trainer_side.dead) == number, f"the dead letter about {words!r}")  # noqa: B023
        assert words in trainer_side.dead[-1].detail
    assert trainer_side.bus.stream_state(f"{trainer_side.run_id}-generated").wait().num_messages == 0


def test_impossible_tasks_are_refused_at_once_and_the_rest_of_the_pack_is_generated(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A token id beyond the vocabulary and a prompt beyond the context are dead letters; the pack's other tasks are not."""
    trainer_side.publish(0)
    start_worker("w0", *attached(faulty_engine))
    tasks = [
        make_task("good"),
        make_task("alien", prompt_ids=[5, 100_000]),
        make_task("long", prompt_ids=[5] * 120),
        make_task("greedy", temperature=0.0),
    ]
    trainer_side.issue("pack-0", tasks)
    assert [group.group_id for group in trainer_side.collect(1)[0].fact.groups] == ["good"]
    wait_for(lambda: len(trainer_side.dead) == 3, "the dead letters")
    assert {letter.reason: letter.group_ids for letter in trainer_side.dead} == {
        "token_out_of_range": ("alien",),
        "too_long": ("long",),
        "inexact_sampling": ("greedy",),
    }


def test_a_pack_of_impossible_tasks_only_is_settled(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """Nothing is announced, the queue is empty, the engine received no request."""
    trainer_side.publish(0)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.issue("pack-0", [make_task("alien", prompt_ids=[100_000])])
    wait_for(lambda: trainer_side.dead and trainer_side.num_tasks() == 0, "the pack to be settled")
    assert faulty_engine.requests == []


def test_a_pack_whose_task_list_is_missing_is_dead_lettered(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    trainer_side.publish(0)
    start_worker("w0", *attached(faulty_engine))
    gone = BlobRef(key=f"runs/{trainer_side.run_id}/tasks/gone.msgpack", size_bytes=3, sha256="0" * 64)
    trainer_side.issue("pack-0", tasks_blob=gone)
    wait_for(lambda: trainer_side.dead, "the dead letter")
    assert trainer_side.dead[0].reason == "BlobMissing"
    assert gone.key in trainer_side.dead[0].detail


def test_an_attached_server_that_lost_its_weights_is_given_them_again(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    trainer_side.publish(2)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 2)
    faulty_engine.version = "default"
    trainer_side.issue("pack-0", [make_task("e0.p0.a0")])
    [group] = trainer_side.collect_groups(1)
    assert {run.version for row in group.trajectories for run in row.version_runs} == {2}
    assert [version for version, _ in faulty_engine.loads] == ["2", "2"]


def test_the_api_key_is_sent_to_the_server(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine, tmp_path: Path
):
    trainer_side.publish(0)
    faulty_engine.api_key = "secret"
    (tmp_path / "key").write_text("secret\n")
    start_worker("w0", *attached(faulty_engine), f"worker.engine_api_key_file={tmp_path / 'key'}")
    trainer_side.issue("pack-0", [make_task("e0.p0.a0")])
    trainer_side.collect(1)


def test_the_worker_survives_a_restart_of_s3(
    own_s3: Callable[[], S3Server], nats_settings: NatsSettings, bus: Bus, run_id: str, tmp_path: Path
):
    """While S3 is unreachable a generated pack is kept; it is stored afterwards."""
    s3 = own_s3()
    blobs = Blobs(s3.settings)
    bootstrap(bus, blobs, run_id)
    trainer_side = TrainerSide(bus, blobs, run_id, tmp_path)
    trainer_side.publish(0)
    with FaultyEngine() as engine:
        engine.flow.clear()
        worker = worker_process(tmp_path, run_id, "w0", nats_settings, s3.settings, *attached(engine))
        try:
            trainer_side.issue("pack-0", [make_task("e0.p0.a0")])
            engine.wait_for_requests(1)
            s3.kill()
            engine.flow.set()
            wait_for(lambda: engine.num_running == 0, "the generation to end")
            assert bus.stream_state(f"{run_id}-generated").wait().num_messages == 0
            s3.restart()
            assert len(trainer_side.collect_groups(1)) == 1
            assert len(engine.requests) == 1
        finally:
            worker.kill()


def log_of_failed(worker: Child) -> str:
    assert worker.wait(60.0) == 1
    return worker.log_tail()


def test_a_run_that_was_not_bootstrapped_is_named(
    start_worker: StartWorker, faulty_engine: FaultyEngine, run_streams: str
):
    """The worker exits immediately; its error names the command that creates the streams."""
    log = log_of_failed(start_worker("w0", *attached(faulty_engine), "run.id=nobody"))
    assert "stream nobody-tasks has no consumer rollout-train" in log
    assert "penstock bootstrap run.id=nobody" in log


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("nats.password_file=WRONG", "refused user penstock"),
        ("s3.secret_key_file=WRONG", "check s3.access_key and s3.secret_key"),
        ("s3.bucket=elsewhere", "no bucket 'elsewhere'"),
        ("worker.engin=embedded", "did you mean worker.engine?"),
        ("worker.engine_url=", "needs worker.engine_url"),
        ("worker.id=a b", "must be 1 to 64 characters"),
        ("worker.engine_api_key_file=/nowhere/key", "/nowhere/key: not readable"),
        ("worker.cache_dir=/proc/nowhere", "worker.cache_dir: cannot create"),
    ],
)
def test_wrong_settings_are_named(start_worker: StartWorker, faulty_engine: FaultyEngine, override: str, words: str):
    override = override.replace("WRONG", str(secret_file("wrong")))
    assert words in log_of_failed(start_worker("w0", *attached(faulty_engine), override))
