"""A worker follows weights: the newest, verified, never back, and exactly one version for an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest
import structlog
from tests.groups import make_task
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.trainer_side import TrainerSide, WorkerRun
from tests.servers import wait_for

from penstock.protocol import subjects
from penstock.protocol.heartbeats import apply_means
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.key_value import Entry, KeyValue
from penstock.rollout_service.weights.servable_versions import ServableVersions
from penstock.rollout_service.weights.weight_follower import WeightFollower


async def test_a_worker_that_is_stopped_as_a_version_is_announced_stops():
    parts: dict[str, Any] = dict.fromkeys(("bus", "mirror", "engine", "gate", "announcements", "swap"))
    follower = WeightFollower(**parts, servable=ServableVersions(parts["engine"]), run_id="r")
    following = asyncio.create_task(follower._wait_for_change())
    await asyncio.sleep(0)
    follower._changed.set()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


@pytest.mark.parametrize("value", [b"\xff", b"{}", b"[" * 5000, b'{"schema": "head.v9"}'])
async def test_a_head_that_cannot_be_read_ends_no_worker(value: bytes):
    class State:
        async def get(self, key: str, *, may_lag: bool = False) -> Entry:
            assert may_lag
            return Entry(key, value, 1)

    parts: dict[str, Any] = dict.fromkeys(("bus", "mirror", "engine", "gate", "announcements", "swap"))
    follower = WeightFollower(**parts, servable=ServableVersions(parts["engine"]), run_id="r")
    with structlog.testing.capture_logs() as logs:
        await follower._read_head(cast(KeyValue, State()))
    assert [line["log_level"] for line in logs] == ["warning"]
    assert follower._published.newest() is None


def versions_of(groups: Iterable[Group]) -> set[int]:
    return {run.version for group in groups for row in group.trajectories for run in row.version_runs}


def applied_by(run: TrainerSide, worker_id: str) -> list[int]:
    return [fact.version for fact in run.applied if fact.worker_id == worker_id]


def test_a_worker_waits_for_the_first_version_that_can_be_used(run: WorkerRun):
    """A corrupt config is refused like a corrupt shard."""
    worker = run.attach()
    wait_for(lambda: "waiting for the trainer to publish weights" in worker.log_tail(), "the worker to log it")
    run.publish(0, corrupt="config.json")
    wait_for(lambda: run.refused, "the refusal")
    run.source.answer()
    run.wait_applied("w0", 0)
    assert [version for version, _ in run.engine.loads] == ["0"]


def test_versions_are_followed(run: WorkerRun):
    """By their announcements, or by the head where one was missed."""
    with FaultyEngine() as other:
        run.attach()
        run.attach("w1", engine=other)
        for version in range(4):
            run.publish(version, announce=version != 3)
            run.wait_applied("w0", version)
            run.wait_applied("w1", version)
    assert applied_by(run, "w0") == [0, 1, 2, 3]
    checksums = {(fact.version, fact.checksum) for fact in run.applied}
    assert len(checksums) == 4
    measured = ("fetch", "check", "pause", "checksum")

    def stages() -> dict[str, float]:
        beat = run.heartbeat("w0")
        return apply_means(beat.figures) if beat is not None else {}

    wait_for(
        lambda: all(stages().get(stage, 0.0) > 0.0 for stage in measured), "a heartbeat with the time of each stage"
    )


def test_a_pack_is_sampled_by_the_version_it_was_issued_for(run: WorkerRun):
    """A task that arrives before its version waits for it: admission relies on its staleness."""
    run.publish(0)
    run.attach()
    run.wait_applied("w0", 0)
    run.issue("pack-1", [make_task("e0.p1.a0", issued_version=1)])
    run.issue("pack-0", [make_task("e0.p0.a0", issued_version=0)])
    [first] = run.collect_groups(1)  # does not wait for the other
    assert (first.group_id, versions_of([first])) == ("e0.p0.a0", {0})
    run.publish(1)
    [second] = run.collect_groups(1)
    assert (second.group_id, versions_of([second])) == ("e0.p1.a0", {1})


def test_what_is_announced_beyond_the_head_is_not_served(run: WorkerRun):
    """Nor another manifest of the version that the head names: the trainer that holds the run moves the head first."""
    real = run.publish(0)
    other = run.publish(1)
    run.attach()
    run.wait_applied("w0", 1)
    run.announce(real.model_copy(update={"version": 7}))
    run.announce(real.model_copy(update={"version": 1, "step": 3}))
    run.publish(2)
    run.wait_applied("w0", 2)
    run.announce(other.model_copy(update={"version": 3}))
    run.publish(3)
    run.wait_applied("w0", 3)
    assert run.refused == []
    assert applied_by(run, "w0") == [1, 2, 3]


def test_a_server_that_does_not_confirm_a_version_ends_the_worker(run: WorkerRun):
    """The load is retried first; then it is unknown what such a server serves: exit status 1, and the reason."""
    run.publish(0)
    run.engine.refuse_loads = 1
    worker = run.attach()
    run.wait_applied("w0", 0)
    run.engine.lose_loads = 1
    run.publish(1)
    run.wait_applied("w0", 1)
    assert [version for version, _ in run.engine.loads] == ["0", "0", "1", "1"]
    run.engine.lose_loads = 100
    run.publish(2)
    assert worker.wait(60) == 1
    assert "answered that it loaded version 2, but its model_info names 1" in worker.log_tail()
    assert applied_by(run, "w0") == [0, 1]


def test_an_evaluation_is_sampled_by_exactly_its_version(run: WorkerRun):
    """While versions are published and training packs generated, every token of a pinned pack is of its version."""
    run.publish(0)
    run.attach()
    packs = 0
    for version in range(1, 6):
        run.publish(version)
        run.issue(f"train-{version}", [make_task(f"e0.p{version}.a0")])
        pin = version - 1 if version % 2 else version
        for part in range(3):
            task = make_task(f"eval.v{pin}.p{part}.s{version}", split="eval", pinned_version=pin, temperature=0.0)
            run.issue(f"eval-{version}-{part}", [task])
        packs += 4
    for group in run.collect_groups(packs):
        if group.split == "eval":
            assert f"eval.v{max(versions_of([group]))}." in group.group_id
            assert len(versions_of([group])) == 1
    wait_for(lambda: run.engine.version == "5", "the worker to serve the newest version again")
    run.issue("train-last", [make_task("e0.p99.a0")])
    assert versions_of(run.collect_groups(1)) == {5}


def test_an_evaluation_waits_for_the_announcement_of_its_version(run: WorkerRun):
    """A task that arrives before the weights it is pinned to is generated once they are published."""
    run.publish(0)
    worker = run.attach()
    run.issue("eval-0", [make_task("eval.v1.p0.s0", split="eval", pinned_version=1)])
    wait_for(lambda: (beat := run.heartbeat("w0")) and beat.figures["packs_held"] == 1, "the task to be taken")
    run.publish(1)
    assert versions_of(run.collect_groups(1)) == {1}
    assert worker.alive


def test_an_evaluation_whose_weights_were_deleted_is_dead_lettered(run: WorkerRun):
    """A version whose objects were deleted, or that is older than those known: ``weights_gone``."""
    gone = run.publish(1)
    run.publish(2)
    run.source.answer()  # a full snapshot: it needs no object of an earlier version
    run.blobs.delete([gone.manifest.key])
    run.attach()
    for pin in (0, 1):
        run.issue(f"eval-{pin}", [make_task(f"eval.v{pin}.p0.s0", split="eval", pinned_version=pin)])
    wait_for(lambda: len(run.dead) == 2, "the dead letters")
    assert {letter.reason for letter in run.dead} == {"weights_gone"}
    run.issue("train-0", [make_task("e0.p0.a0")])
    assert versions_of(run.collect_groups(1)) == {2}


def test_an_evaluation_sampled_by_another_version_is_not_announced(run: WorkerRun):
    run.publish(1)
    run.publish(2)
    run.attach()
    run.wait_applied("w0", 2)

    def swapped(rows: list[dict]) -> list[dict]:
        if len(run.engine.requests) == 1:
            for row in rows:
                row["meta_info"]["weight_versions"][0]["version"] = "2"
        return rows

    run.engine.rewrite = swapped
    run.issue("eval-0", [make_task("eval.v1.p0.s0", split="eval", pinned_version=1)])
    assert versions_of(run.collect_groups(1)) == {1}
    assert len(run.engine.requests) == 2


@pytest.mark.slow
def test_an_engine_that_serves_other_weights_is_not_used(run: WorkerRun):
    """If its checksum differs from the first one's and from its files', its worker raises an alarm and exits."""
    run.engine.checksum = "right"
    with FaultyEngine() as other:
        other.checksum, other.next_checksum = "wrong", "right"
        run.publish(1)
        run.attach()
        run.wait_applied("w0", 1)
        assert run.attach("w1", engine=other).wait(60) == 1
        wait_for(lambda: run.events, "the alarm")
        [event] = [event for event in run.events if event.kind == "alarm"]
        assert event.source == "w1"
        assert event.data["text"] == "the engine of worker w1 serves other weights than the others as version 1"
        run.attach("w1", engine=other)  # the report of its former engine does not count
        run.publish(2)
        run.wait_applied("w1", 2)


def test_an_engine_that_reports_other_weights_than_the_manifest_is_not_used(run: WorkerRun):
    run.engine.checksum, run.engine.sharding = "0" * 64, {"engine": "embedded"}
    run.publish(1)
    worker = run.attach()
    assert worker.wait(60) == 1
    assert (
        "the engine of worker w0 serves other weights than those of version 1; this worker exits" in worker.log_tail()
    )
    assert not run.applied


@pytest.mark.parametrize("layout", ["mirror", "engine"])
def test_forged_checksums_stop_no_worker(run: WorkerRun, layout: str):
    """However many workers are said to serve other weights, an engine that serves its verified files goes on."""
    run.engine.checksum = "right" if layout == "engine" else ""
    run.publish(1)
    worker = run.attach()
    run.wait_applied("w0", 1)
    for name in ("x0", "x1", "w0"):
        forged = run.applied[0].model_copy(update={"worker_id": name, "checksum": "forged"})
        run.bus.publish(subjects.weights_applied(run.run_id), forged, msg_id=name).wait()
    if layout == "engine":
        wait_for(lambda: [version for version, _ in run.engine.loads] == ["1", "1"], "the files to be loaded again")
        wait_for(lambda: "what is in its verified files; others differ" in worker.log_tail(), "the worker to log it")
    run.publish(2)
    run.wait_applied("w0", 2)
    assert worker.alive
    assert [version for version, _ in run.engine.loads] == (["1", "1", "2"] if layout == "engine" else ["1", "2"])
