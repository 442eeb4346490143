"""A worker follows weights: the newest, verified, never back, and exactly one version for an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from tests.groups import make_task
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.trainer_side import TrainerSide, attached
from tests.servers import wait_for

from penstock.deploy.processes.child import Child
from penstock.protocol import subjects
from penstock.protocol.heartbeats import apply_means
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.key_value import Entry, KeyValue
from penstock.rollout_service.weights.servable_versions import ServableVersions
from penstock.rollout_service.weights.weight_follower import WeightFollower

StartWorker = Callable[..., Child]


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


def applied_by(trainer_side: TrainerSide, worker_id: str) -> list[int]:
    return [fact.version for fact in trainer_side.applied if fact.worker_id == worker_id]


def test_a_late_worker_starts_with_the_newest_version(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A worker with only NATS, S3 and the run's id loads the version that the head names, and nothing older."""
    for version in range(3):
        trainer_side.publish(version)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 2)
    assert [version for version, _ in faulty_engine.loads] == ["2"]
    [fact] = trainer_side.applied
    assert fact.previous_version is None
    assert len(fact.checksum) == 64
    assert fact.num_bytes > 0


def test_a_worker_waits_for_the_first_version(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    worker = start_worker("w0", *attached(faulty_engine))
    wait_for(lambda: "waiting for the trainer to publish weights" in worker.log_tail(), "the worker to log it")
    trainer_side.publish(0)
    trainer_side.wait_applied("w0", 0)


def test_versions_are_followed(trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine):
    with FaultyEngine() as other:
        start_worker("w0", *attached(faulty_engine))
        start_worker("w1", *attached(other))
        for version in range(4):
            trainer_side.publish(version)
            trainer_side.wait_applied("w0", version)
            trainer_side.wait_applied("w1", version)
    assert applied_by(trainer_side, "w0") == [0, 1, 2, 3]
    checksums = {(fact.version, fact.checksum) for fact in trainer_side.applied}
    assert len(checksums) == 4
    measured = ("fetch", "check", "pause", "checksum")

    def stages() -> dict[str, float]:
        beat = trainer_side.heartbeat("w0")
        return apply_means(beat.figures) if beat is not None else {}

    wait_for(
        lambda: all(stages().get(stage, 0.0) > 0.0 for stage in measured), "a heartbeat with the time of each stage"
    )


def test_a_pack_is_sampled_by_the_version_it_was_issued_for(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A task that arrives before its version waits for it: admission relies on its staleness."""
    trainer_side.publish(0)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 0)
    trainer_side.issue("pack-1", [make_task("e0.p1.a0", issued_version=1)])
    trainer_side.issue("pack-0", [make_task("e0.p0.a0", issued_version=0)])
    [first] = trainer_side.collect_groups(1)  # does not wait for the other
    assert (first.group_id, versions_of([first])) == ("e0.p0.a0", {0})
    trainer_side.publish(1)
    [second] = trainer_side.collect_groups(1)
    assert (second.group_id, versions_of([second])) == ("e0.p1.a0", {1})


def test_superseded_versions_are_skipped(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """While a swap waits for a long generation, versions are published; afterwards only the newest is loaded."""
    trainer_side.publish(0)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 0)
    faulty_engine.flow.clear()
    trainer_side.issue("pack-0", [make_task("e0.p0.a0")])
    faulty_engine.wait_for_requests(1)
    trainer_side.publish(1)
    wait_for(lambda: len(faulty_engine.loads) == 2, "the swap to version 1 to begin")
    for version in range(2, 7):
        trainer_side.publish(version)
    faulty_engine.flow.set()
    trainer_side.wait_applied("w0", 6)
    assert [version for version, _ in faulty_engine.loads] == ["0", "1", "6"]


def test_a_missed_announcement_is_repaired_by_the_head(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    trainer_side.publish(0)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 0)
    trainer_side.publish(1, announce=False)
    trainer_side.wait_applied("w0", 1)


def test_what_is_announced_beyond_the_head_is_not_served(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """Nor another manifest of the version that the head names: the trainer that holds the run moves the head first."""
    real = trainer_side.publish(0)
    other = trainer_side.publish(1)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 1)
    trainer_side.announce(real.model_copy(update={"version": 7}))
    trainer_side.announce(real.model_copy(update={"version": 1, "step": 3}))
    trainer_side.publish(2)
    trainer_side.wait_applied("w0", 2)
    trainer_side.announce(other.model_copy(update={"version": 3}))
    trainer_side.publish(3)
    trainer_side.wait_applied("w0", 3)
    assert trainer_side.refused == []
    assert applied_by(trainer_side, "w0") == [1, 2, 3]


def test_an_older_version_is_never_loaded(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    late = trainer_side.publish(3, announce=False)
    trainer_side.publish(5)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 5)
    trainer_side.announce(late)
    trainer_side.publish(6)
    trainer_side.wait_applied("w0", 6)
    assert applied_by(trainer_side, "w0") == [5, 6]


def test_a_worker_whose_first_version_is_corrupt_waits_for_a_better_one(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A corrupt config is refused like a corrupt shard."""
    trainer_side.publish(0, corrupt="config.json")
    start_worker("w0", *attached(faulty_engine))
    wait_for(lambda: trainer_side.refused, "the refusal")
    trainer_side.source.answer()
    trainer_side.wait_applied("w0", 0)
    assert [version for version, _ in faulty_engine.loads] == ["0"]


def test_an_update_that_is_refused_once_is_retried(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """After ``success: false`` the load is retried; only a confirmed version is announced as applied."""
    trainer_side.publish(0)
    faulty_engine.refuse_loads = 1
    start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 0)
    faulty_engine.lose_loads = 1
    trainer_side.publish(1)
    trainer_side.wait_applied("w0", 1)
    assert [version for version, _ in faulty_engine.loads] == ["0", "0", "1", "1"]


def test_a_server_that_does_not_confirm_a_version_ends_the_worker(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """It is unknown what such a server serves: the worker exits with status 1 and the reason."""
    trainer_side.publish(0)
    worker = start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 0)
    faulty_engine.lose_loads = 100
    trainer_side.publish(1)
    assert worker.wait(60) == 1
    assert "answered that it loaded version 1, but its model_info names 0" in worker.log_tail()
    assert applied_by(trainer_side, "w0") == [0]


def test_versions_are_written_to_two_folders(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine, tmp_path: Path
):
    """Versions alternate between two constant paths; a third for a pinned evaluation is removed afterwards."""
    cache = tmp_path / "cache"
    trainer_side.publish(0)
    start_worker("w0", *attached(faulty_engine), f"worker.cache_dir={cache}")
    trainer_side.wait_applied("w0", 0)
    for version in range(1, 5):
        trainer_side.publish(version)
        trainer_side.wait_applied("w0", version)
    folder = cache / trainer_side.run_id / "w0"
    assert [path for _, path in faulty_engine.loads] == [str(folder / name) for name in "ababa"]
    config = folder / "a" / "config.json"
    assert config.samefile(folder / "b" / "config.json")
    trainer_side.issue("eval-1", [make_task("eval.v1.p0.s0", split="eval", pinned_version=1, temperature=0.0)])
    assert versions_of(trainer_side.collect_groups(1)) == {1}
    wait_for(lambda: faulty_engine.version == "4", "the newest version to be served again")
    wait_for(lambda: not (folder / "c").exists(), "the third folder to be removed")
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"a", "b", "files"}


def test_an_evaluation_is_sampled_by_exactly_its_version(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """While versions are published and training packs generated, every token of a pinned pack is of its version."""
    trainer_side.publish(0)
    start_worker("w0", *attached(faulty_engine))
    packs = 0
    for version in range(1, 6):
        trainer_side.publish(version)
        trainer_side.issue(f"train-{version}", [make_task(f"e0.p{version}.a0")])
        pin = version - 1 if version % 2 else version
        for part in range(3):
            task = make_task(f"eval.v{pin}.p{part}.s{version}", split="eval", pinned_version=pin, temperature=0.0)
            trainer_side.issue(f"eval-{version}-{part}", [task])
        packs += 4
    for group in trainer_side.collect_groups(packs):
        if group.split == "eval":
            assert f"eval.v{max(versions_of([group]))}." in group.group_id
            assert len(versions_of([group])) == 1
    wait_for(lambda: faulty_engine.version == "5", "the worker to serve the newest version again")
    trainer_side.issue("train-last", [make_task("e0.p99.a0")])
    assert versions_of(trainer_side.collect_groups(1)) == {5}


def test_an_evaluation_waits_for_the_announcement_of_its_version(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A task that arrives before the weights it is pinned to is generated once they are published."""
    trainer_side.publish(0)
    worker = start_worker("w0", *attached(faulty_engine))
    trainer_side.issue("eval-0", [make_task("eval.v1.p0.s0", split="eval", pinned_version=1)])
    wait_for(lambda: (beat := trainer_side.heartbeat("w0")) and beat.figures["packs_held"] == 1, "the task to be taken")
    trainer_side.publish(1)
    assert versions_of(trainer_side.collect_groups(1)) == {1}
    assert worker.alive


def test_an_evaluation_whose_weights_were_deleted_is_dead_lettered(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A version whose objects were deleted, or that is older than those known, cannot be evaluated: ``weights_gone``."""
    gone = trainer_side.publish(1)
    trainer_side.publish(2)
    trainer_side.source.answer()  # a full snapshot: it needs no object of an earlier version
    trainer_side.blobs.delete([gone.manifest.key])
    start_worker("w0", *attached(faulty_engine))
    for pin in (0, 1):
        trainer_side.issue(f"eval-{pin}", [make_task(f"eval.v{pin}.p0.s0", split="eval", pinned_version=pin)])
    wait_for(lambda: len(trainer_side.dead) == 2, "the dead letters")
    assert {letter.reason for letter in trainer_side.dead} == {"weights_gone"}
    trainer_side.issue("train-0", [make_task("e0.p0.a0")])
    assert versions_of(trainer_side.collect_groups(1)) == {2}


def test_an_evaluation_sampled_by_another_version_is_not_announced(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    trainer_side.publish(1)
    trainer_side.publish(2)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 2)

    def swapped(rows: list[dict]) -> list[dict]:
        if len(faulty_engine.requests) == 1:
            for row in rows:
                row["meta_info"]["weight_versions"][0]["version"] = "2"
        return rows

    faulty_engine.rewrite = swapped
    trainer_side.issue("eval-0", [make_task("eval.v1.p0.s0", split="eval", pinned_version=1)])
    assert versions_of(trainer_side.collect_groups(1)) == {1}
    assert len(faulty_engine.requests) == 2


def test_an_engine_that_serves_other_weights_is_not_used(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """The worker of an engine whose checksum differs from the first one's, and from that of its files, raises an alarm and exits."""
    faulty_engine.checksum = "right"
    with FaultyEngine() as other:
        other.checksum, other.next_checksum = "wrong", "right"
        trainer_side.publish(1)
        start_worker("w0", *attached(faulty_engine))
        trainer_side.wait_applied("w0", 1)
        assert start_worker("w1", *attached(other)).wait(60) == 1
        wait_for(lambda: trainer_side.events, "the alarm")
        [event] = [event for event in trainer_side.events if event.kind == "alarm"]
        assert event.source == "w1"
        assert event.data["text"] == "the engine of worker w1 serves other weights than the others as version 1"
        start_worker("w1", *attached(other))  # the report of its former engine does not count
        trainer_side.publish(2)
        trainer_side.wait_applied("w1", 2)


def test_an_engine_that_reports_other_weights_than_the_manifest_is_not_used(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    faulty_engine.checksum, faulty_engine.sharding = "0" * 64, {"engine": "embedded"}
    trainer_side.publish(1)
    worker = start_worker("w0", *attached(faulty_engine))
    assert worker.wait(60) == 1
    assert (
        "the engine of worker w0 serves other weights than those of version 1; this worker exits" in worker.log_tail()
    )
    assert not trainer_side.applied


@pytest.mark.parametrize("layout", ["mirror", "engine"])
def test_forged_checksums_stop_no_worker(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine, layout: str
):
    """However many workers are said to serve other weights, an engine that serves its verified files goes on."""
    faulty_engine.checksum = "right" if layout == "engine" else ""
    trainer_side.publish(1)
    worker = start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 1)
    for name in ("x0", "x1", "w0"):
        forged = trainer_side.applied[0].model_copy(update={"worker_id": name, "checksum": "forged"})
        trainer_side.bus.publish(subjects.weights_applied(trainer_side.run_id), forged, msg_id=name).wait()
    if layout == "engine":
        wait_for(lambda: [version for version, _ in faulty_engine.loads] == ["1", "1"], "the files to be loaded again")
        wait_for(lambda: "what is in its verified files; others differ" in worker.log_tail(), "the worker to log it")
    trainer_side.publish(2)
    trainer_side.wait_applied("w0", 2)
    assert worker.alive
    assert [version for version, _ in faulty_engine.loads] == (["1", "1", "2"] if layout == "engine" else ["1", "2"])
