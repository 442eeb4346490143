"""A worker follows weights: the newest, verified, never back, and exactly one version for an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.groups import make_task
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.ring_end import RingEnd, attached
from tests.servers import wait_for
from tests.system.ring import fill, small_disk

from penstock.deploy.child import Child
from penstock.protocol.trajectory import Group
from penstock.protocol.weights.digest import tensor_digest, weights_digest
from penstock.rollout_service.weights.servable_versions import ServableVersions
from penstock.rollout_service.weights.weight_follower import WeightFollower

StartWorker = Callable[..., Child]


async def test_a_worker_that_is_stopped_as_a_version_is_announced_stops():
    """A version announced at the same time does not swallow the cancellation."""
    parts: dict[str, Any] = dict.fromkeys(("bus", "mirror", "engine", "gate", "announcements", "swap"))
    follower = WeightFollower(**parts, servable=ServableVersions(parts["engine"]), run_id="r")
    following = asyncio.create_task(follower._wait_for_change())
    await asyncio.sleep(0)
    follower._changed.set()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


def versions_of(groups: Iterable[Group]) -> set[int]:
    """All versions that sampled any token."""
    return {run.version for group in groups for row in group.trajectories for run in row.version_runs}


def applied_by(ring_end: RingEnd, worker_id: str) -> list[int]:
    """The versions a worker announced as applied, in order."""
    return [fact.version for fact in ring_end.applied if fact.worker_id == worker_id]


def test_a_late_worker_starts_with_the_newest_version(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A worker with only NATS, S3 and the run's id loads the version that the head names, and nothing older."""
    for version in range(3):
        ring_end.publish(version)
    start_worker("w0", *attached(faulty_engine))
    ring_end.wait_applied("w0", 2)
    assert [version for version, _ in faulty_engine.loads] == ["2"]
    [fact] = ring_end.applied
    assert fact.previous_version is None
    assert len(fact.checksum) == 64
    assert fact.num_bytes > 0


def test_a_worker_waits_for_the_first_version(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """Started before the trainer, it logs that it waits for the trainer, and then works."""
    worker = start_worker("w0", *attached(faulty_engine))
    wait_for(lambda: "waiting for the trainer to publish weights" in worker.log_tail(), "the worker to log it")
    ring_end.publish(0)
    ring_end.wait_applied("w0", 0)


def test_versions_are_followed(ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine):
    """Each published version is applied, announced with its checksum, and the same on every worker."""
    with FaultyEngine() as other:
        start_worker("w0", *attached(faulty_engine))
        start_worker("w1", *attached(other))
        for version in range(4):
            ring_end.publish(version)
            ring_end.wait_applied("w0", version)
            ring_end.wait_applied("w1", version)
    assert applied_by(ring_end, "w0") == [0, 1, 2, 3]
    checksums = {(fact.version, fact.checksum) for fact in ring_end.applied}
    assert len(checksums) == 4


def test_a_pack_is_sampled_by_the_version_it_was_issued_for(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A task that arrives before its version waits for it: admission relies on its staleness."""
    ring_end.publish(0)
    start_worker("w0", *attached(faulty_engine))
    ring_end.wait_applied("w0", 0)
    ring_end.issue("pack-1", [make_task("e0.p1.a0", issued_version=1)])
    ring_end.issue("pack-0", [make_task("e0.p0.a0", issued_version=0)])
    [first] = ring_end.collect_groups(1)  # does not wait for the other
    assert (first.group_id, versions_of([first])) == ("e0.p0.a0", {0})
    ring_end.publish(1)
    [second] = ring_end.collect_groups(1)
    assert (second.group_id, versions_of([second])) == ("e0.p1.a0", {1})


def test_superseded_versions_are_skipped(ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine):
    """While a swap waits for a long generation, versions are published; afterwards only the newest is loaded."""
    ring_end.publish(0)
    start_worker("w0", *attached(faulty_engine))
    ring_end.wait_applied("w0", 0)
    faulty_engine.flow.clear()
    ring_end.issue("pack-0", [make_task("e0.p0.a0")])
    faulty_engine.wait_for_requests(1)
    ring_end.publish(1)
    wait_for(lambda: len(faulty_engine.loads) == 2, "the swap to version 1 to begin")
    for version in range(2, 7):
        ring_end.publish(version)
    faulty_engine.flow.set()
    ring_end.wait_applied("w0", 6)
    assert [version for version, _ in faulty_engine.loads] == ["0", "1", "6"]


def test_a_full_disk_keeps_the_version_before_until_there_is_space(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine, tmp_path: Path
):
    """Without space for the next copy the worker logs it and serves the version before; with space it loads the newest."""
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        ring_end.publish(0)
        worker = start_worker("w0", *attached(faulty_engine), f"worker.cache_dir={disk}")
        ring_end.wait_applied("w0", 0)
        ballast = fill(disk)
        ring_end.publish(1)
        wait_for(lambda: "has no room for version 1" in worker.log_tail(), "the worker to log it")
        ring_end.issue("pack-0", [make_task("e0.p0.a0", issued_version=0)])
        [group] = ring_end.collect_groups(1)
        assert versions_of([group]) == {0}
        ring_end.publish(2)
        ballast.unlink()
        ring_end.wait_applied("w0", 2)


def test_a_missed_announcement_is_repaired_by_the_head(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A version that only the head names is followed too."""
    ring_end.publish(0)
    start_worker("w0", *attached(faulty_engine))
    ring_end.wait_applied("w0", 0)
    ring_end.publish(1, announce=False)
    ring_end.wait_applied("w0", 1)


def test_an_older_version_is_never_loaded(ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine):
    """A late or repeated announcement of an older version is ignored."""
    late = ring_end.publish(3, announce=False)
    ring_end.publish(5)
    start_worker("w0", *attached(faulty_engine))
    ring_end.wait_applied("w0", 5)
    ring_end.announce(late)
    ring_end.publish(6)
    ring_end.wait_applied("w0", 6)
    assert applied_by(ring_end, "w0") == [5, 6]


def test_corrupt_weights_are_refused_and_the_old_version_is_still_served(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """An object with another hash is not applied: the worker announces it, and serves the trainer's answer."""
    ring_end.publish(0)
    start_worker("w0", *attached(faulty_engine))
    ring_end.wait_applied("w0", 0)
    ring_end.publish(1, corrupt=".safetensors")
    wait_for(lambda: ring_end.refused, "the refusal")
    [fact] = ring_end.refused
    assert (fact.worker_id, fact.version, fact.serving) == ("w0", 1, 0)
    assert "sha256" in fact.reason
    ring_end.issue("pack-0", [make_task("e0.p0.a0")])
    assert versions_of(ring_end.collect_groups(1)) == {0}
    ring_end.source.answer()
    ring_end.wait_applied("w0", 1)
    ring_end.publish(2)
    ring_end.wait_applied("w0", 2)
    assert applied_by(ring_end, "w0") == [0, 1, 2]


def test_a_worker_whose_first_version_is_corrupt_waits_for_a_better_one(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A corrupt config is refused like a corrupt shard."""
    ring_end.publish(0, corrupt="config.json")
    start_worker("w0", *attached(faulty_engine))
    wait_for(lambda: ring_end.refused, "the refusal")
    ring_end.source.answer()
    ring_end.wait_applied("w0", 0)
    assert [version for version, _ in faulty_engine.loads] == ["0"]


def test_an_update_that_is_refused_once_is_retried(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """After ``success: false`` the load is retried; only a confirmed version is announced as applied."""
    ring_end.publish(0)
    faulty_engine.refuse_loads = 1
    start_worker("w0", *attached(faulty_engine))
    ring_end.wait_applied("w0", 0)
    faulty_engine.lose_loads = 1
    ring_end.publish(1)
    ring_end.wait_applied("w0", 1)
    assert [version for version, _ in faulty_engine.loads] == ["0", "0", "1", "1"]


def test_a_server_that_does_not_confirm_a_version_ends_the_worker(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """It is unknown what such a server serves: the worker exits with status 1 and the reason."""
    ring_end.publish(0)
    worker = start_worker("w0", *attached(faulty_engine))
    ring_end.wait_applied("w0", 0)
    faulty_engine.lose_loads = 100
    ring_end.publish(1)
    assert worker.wait(60) == 1
    assert "answered that it loaded version 1, but its model_info names 0" in worker.log_tail()
    assert applied_by(ring_end, "w0") == [0]


def test_versions_are_written_to_two_folders(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine, tmp_path: Path
):
    """Versions alternate between two constant paths; a third for a pinned evaluation is removed afterwards."""
    cache = tmp_path / "cache"
    ring_end.publish(0)
    start_worker("w0", *attached(faulty_engine), f"worker.cache_dir={cache}")
    ring_end.wait_applied("w0", 0)
    for version in range(1, 5):
        ring_end.publish(version)
        ring_end.wait_applied("w0", version)
    folder = cache / ring_end.run_id / "w0"
    assert [path for _, path in faulty_engine.loads] == [str(folder / name) for name in "ababa"]
    config = folder / "a" / "config.json"
    assert config.samefile(folder / "b" / "config.json")
    ring_end.issue("eval-1", [make_task("eval.v1.p0.s0", split="eval", pinned_version=1, temperature=0.0)])
    assert versions_of(ring_end.collect_groups(1)) == {1}
    wait_for(lambda: faulty_engine.version == "4", "the newest version to be served again")
    wait_for(lambda: not (folder / "c").exists(), "the third folder to be removed")
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"a", "b", "files"}


def test_an_evaluation_is_sampled_by_exactly_its_version(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """While versions are published and training packs generated, every token of a pinned pack is of its version."""
    ring_end.publish(0)
    start_worker("w0", *attached(faulty_engine))
    packs = 0
    for version in range(1, 6):
        ring_end.publish(version)
        ring_end.issue(f"train-{version}", [make_task(f"e0.p{version}.a0")])
        pin = version - 1 if version % 2 else version
        for part in range(3):
            task = make_task(f"eval.v{pin}.p{part}.s{version}", split="eval", pinned_version=pin, temperature=0.0)
            ring_end.issue(f"eval-{version}-{part}", [task])
        packs += 4
    for group in ring_end.collect_groups(packs):
        if group.split == "eval":
            assert f"eval.v{max(versions_of([group]))}." in group.group_id
            assert len(versions_of([group])) == 1
    wait_for(lambda: faulty_engine.version == "5", "the worker to serve the newest version again")
    ring_end.issue("train-last", [make_task("e0.p99.a0")])
    assert versions_of(ring_end.collect_groups(1)) == {5}


def test_an_evaluation_waits_for_the_announcement_of_its_version(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A task that arrives before the weights it is pinned to is generated once they are published."""
    ring_end.publish(0)
    worker = start_worker("w0", *attached(faulty_engine))
    ring_end.issue("eval-0", [make_task("eval.v1.p0.s0", split="eval", pinned_version=1)])
    wait_for(lambda: (beat := ring_end.heartbeat("w0")) and beat.figures["packs_held"] == 1, "the task to be taken")
    ring_end.publish(1)
    assert versions_of(ring_end.collect_groups(1)) == {1}
    assert worker.alive


def test_an_evaluation_whose_weights_were_deleted_is_dead_lettered(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A version whose objects were deleted, or that is older than those known, cannot be evaluated: ``weights_gone``."""
    gone = ring_end.publish(1)
    ring_end.publish(2)
    ring_end.source.answer()  # a full snapshot: it needs no object of an earlier version
    ring_end.blobs.delete([gone.manifest.key])
    start_worker("w0", *attached(faulty_engine))
    for pin in (0, 1):
        ring_end.issue(f"eval-{pin}", [make_task(f"eval.v{pin}.p0.s0", split="eval", pinned_version=pin)])
    wait_for(lambda: len(ring_end.dead) == 2, "the dead letters")
    assert {letter.reason for letter in ring_end.dead} == {"weights_gone"}
    ring_end.issue("train-0", [make_task("e0.p0.a0")])
    assert versions_of(ring_end.collect_groups(1)) == {2}


def test_an_evaluation_sampled_by_another_version_is_not_announced(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """Tokens of another version than the pinned one are refused, and the pack is generated again."""
    ring_end.publish(1)
    ring_end.publish(2)
    start_worker("w0", *attached(faulty_engine))
    ring_end.wait_applied("w0", 2)

    def swapped(rows: list[dict]) -> list[dict]:
        if len(faulty_engine.requests) == 1:
            for row in rows:
                row["meta_info"]["weight_versions"][0]["version"] = "2"
        return rows

    faulty_engine.rewrite = swapped
    ring_end.issue("eval-0", [make_task("eval.v1.p0.s0", split="eval", pinned_version=1)])
    assert versions_of(ring_end.collect_groups(1)) == {1}
    assert len(faulty_engine.requests) == 2


def test_an_engine_that_serves_other_weights_is_not_used(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """The worker of an engine whose checksum differs from the first one's raises an alarm and exits."""
    faulty_engine.checksum = "right"
    with FaultyEngine() as other:
        other.checksum = "wrong"
        ring_end.publish(1)
        start_worker("w0", *attached(faulty_engine))
        ring_end.wait_applied("w0", 1)
        assert start_worker("w1", *attached(other)).wait(60) == 1
        wait_for(lambda: ring_end.events, "the alarm")
        [event] = [event for event in ring_end.events if event.kind == "alarm"]
        assert event.source == "w1"
        assert event.data["text"] == "the engine of worker w1 serves other weights than the others as version 1"
        other.checksum = "right"
        start_worker("w1", *attached(other))  # the report of its former engine does not count
        ring_end.publish(2)
        ring_end.wait_applied("w1", 2)


def test_a_late_joiner_serves_the_head_after_one_swap(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """40 versions behind, a worker reads one full snapshot and 40 patches, and its engine loads once."""
    tensors = ring_end.tensors(0)
    facts = [ring_end.publish(0)]
    for version in range(1, 41):
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.view(-1)[version::200] += 0.1
        facts.append(ring_end.source.publish(version, tensors))
    start_worker("w0", *attached(faulty_engine))
    ring_end.wait_applied("w0", 40)
    assert [version for version, _ in faulty_engine.loads] == ["40"]
    [applied] = ring_end.applied
    weights = sum(fact.num_bytes for fact in facts)
    assert weights <= applied.num_bytes < weights + 30_000  # config and tokenizer
    assert applied.checksum == weights_digest(
        tensor_digest(name, "float32", t.shape, t.view(-1).view(torch.uint8).numpy().data)
        for name, t in tensors.items()
    )
