"""What the worker does when its engine, its tasks, NATS or S3 fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.groups import BlobRef
from tests.groups import make_task
from tests.rollout_service.trainer_side import WorkerRun
from tests.servers import secret_file, wait_for

Row = dict[str, Any]


@pytest.mark.parametrize("fault", ["an error", "no answer"])
def test_a_pack_is_redelivered_until_the_engine_recovers(run: WorkerRun, fault: str):
    """An engine that does not answer costs the time that its completion may take."""
    run.publish(0)
    if fault == "an error":
        run.engine.status = 500
    else:
        run.engine.flow.clear()
    worker = run.attach("w0", "worker.request_deadline_s=0.3")
    run.issue("pack-0", [make_task("e0.p0.a0")])
    run.engine.wait_for_requests(3)
    assert ("answered 500" if fault == "an error" else " gave no answer within ") in worker.log_tail()
    assert run.bus.stream_state(f"{run.run_id}-generated").wait().num_messages == 0
    run.engine.status = 200
    run.engine.flow.set()
    assert run.collect(1)[0].fact.pack_id == "pack-0"
    assert run.dead == []


def test_a_pack_that_fails_in_every_delivery_is_dead_lettered(run: WorkerRun):
    """After ``task_attempts`` deliveries the pack is a dead letter with its groups and the engine's error."""
    run.publish(0)
    run.engine.status = 500
    run.attach("w0", "worker.task_attempts=3")
    run.issue("pack-0", [make_task("e0.p0.a0"), make_task("e0.p1.a0")])
    wait_for(lambda: run.dead, "the dead letter")
    [letter] = run.dead
    assert (letter.reason, letter.stage, letter.num_delivered) == ("EngineRefused", "tasks", 3)
    assert letter.group_ids == ("e0.p0.a0", "e0.p1.a0")
    assert "out of luck" in letter.detail
    assert len(run.engine.requests) == 3
    wait_for(lambda: run.num_tasks() == 0, "the queue to be empty")


def test_a_reply_of_a_version_that_was_never_loaded_is_not_announced(run: WorkerRun):
    def rewrite(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows[1]["meta_info"]["weight_versions"][0]["version"] = "9"
        return rows

    run.publish(4)
    run.engine.rewrite = rewrite
    run.attach("w0", "worker.task_attempts=1")
    run.issue("pack-0", [make_task("e0.p0.a0", group_size=3)])
    wait_for(lambda: run.dead, "the dead letter")
    assert "which this worker never loaded" in run.dead[0].detail
    assert run.bus.stream_state(f"{run.run_id}-generated").wait().num_messages == 0


def test_impossible_tasks_are_refused_at_once_and_the_rest_of_the_pack_is_generated(run: WorkerRun):
    """An unknown token id and a prompt beyond the context are dead letters; the pack's other tasks are not."""
    run.publish(0)
    run.attach()
    tasks = [
        make_task("good"),
        make_task("alien", prompt_ids=[5, 100_000]),
        make_task("long", prompt_ids=[5] * 120),
        make_task("greedy", temperature=0.0),
    ]
    run.issue("pack-0", tasks)
    assert [group.group_id for group in run.collect(1)[0].fact.groups] == ["good"]
    wait_for(lambda: len(run.dead) == 3, "the dead letters")
    assert {letter.reason: letter.group_ids for letter in run.dead} == {
        "token_out_of_range": ("alien",),
        "too_long": ("long",),
        "inexact_sampling": ("greedy",),
    }
    run.issue("pack-1", tasks[1:2])  # of a pack without any that is possible nothing is announced
    wait_for(lambda: len(run.dead) == 4 and run.num_tasks() == 0, "the pack to be settled")
    assert len(run.engine.requests) == 1


def test_a_pack_whose_task_list_is_missing_is_dead_lettered(run: WorkerRun):
    run.publish(0)
    run.attach()
    gone = BlobRef(key=f"runs/{run.run_id}/tasks/gone.msgpack", size_bytes=3, sha256="0" * 64)
    run.issue("pack-0", tasks_blob=gone)
    wait_for(lambda: run.dead, "the dead letter")
    assert run.dead[0].reason == "BlobMissing"
    assert gone.key in run.dead[0].detail


def test_an_attached_server_that_lost_its_weights_is_given_them_again(run: WorkerRun):
    run.publish(2)
    run.attach()
    run.wait_applied("w0", 2)
    run.engine.version = "default"
    run.issue("pack-0", [make_task("e0.p0.a0")])
    [group] = run.collect_groups(1)
    assert {row.oldest_version for row in group.trajectories} == {2}
    assert [version for version, _ in run.engine.loads] == ["2", "2"]


def test_the_api_key_is_sent_to_the_server(run: WorkerRun, tmp_path: Path):
    run.publish(0)
    run.engine.api_key = "secret"
    (tmp_path / "key").write_text("secret\n")
    run.attach("w0", f"worker.engine_api_key_file={tmp_path / 'key'}")
    run.issue("pack-0", [make_task("e0.p0.a0")])
    run.collect(1)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.id=nobody", "stream nobody-tasks has no consumer rollout-train … penstock bootstrap run.id=nobody"),
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
def test_wrong_settings_are_named(run: WorkerRun, override: str, words: str):
    worker = run.attach("w0", override.replace("WRONG", str(secret_file("wrong"))))
    assert worker.wait(60.0) == 1
    log = worker.log_tail()
    assert all(part in log for part in words.split(" … "))
