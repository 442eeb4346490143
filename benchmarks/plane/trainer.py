"""The trainer of the plane benchmark: batches taken by the trainer's own collector, committed with fsync, acknowledged."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from benchmarks.plane.groups import GROUPS_PER_STEP, NUM_TEMPLATES, VOCABULARY, make_template
from benchmarks.plane.worker import RUN_ID

from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.packs.task_promise import TaskPromise, TaskSettings, content_hash
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.collect import Collector
from penstock.trainer.groups.dispatch_state import GroupKey
from penstock.trainer.groups.drops import Drop
from penstock.trainer.groups.ledger import Ledger
from penstock.trainer.groups.pack_reader import PackReader
from penstock.trainer.groups.reading_mark import ReadingMark

_NEVER_STALE = 10**9


class _EveryGroup:
    """Replace the issuer: every group that arrives counts as issued."""

    def __init__(self, size: str) -> None:
        self._promises = [_promise(make_template(size, seed)) for seed in range(NUM_TEMPLATES)]

    def outstanding(self) -> Collection[str]:
        return ()

    def promise(self, group_id: str) -> TaskPromise:
        """Return what the worker's templates are; as the real issuer it has it at hand."""
        return self._promises[GroupKey.parse(group_id).prompt % len(self._promises)]

    def is_late(self, version: PolicyVersion, holds: Callable[[str], bool]) -> bool:
        return False

    def accept(self, group_id: str, holds: Callable[[str], bool]) -> bool:
        return not holds(group_id)

    def drop(self, drop: Drop) -> None:
        raise AssertionError(drop)

    refuse = drop

    def drop_dead(self, drops: Sequence[Drop], sequence: int) -> None:
        raise AssertionError((drops, sequence))

    def pause(self, is_paused: bool) -> None:
        assert not is_paused


def _promise(group: Group) -> TaskPromise:
    first = group.trajectories[0]
    prompt = first.token_ids[: group.num_prompt_tokens].tobytes()
    content = content_hash(prompt, group.prompt_text, group.reward)
    asked = TaskSettings(len(group.trajectories), first.num_completion_tokens, "single_turn")
    return TaskPromise(content, "train", 0, (asked,))


def consume(bus: Bus, s3: S3Settings, folder: Path, *, size: str, num_groups: int) -> dict[str, float]:
    """Take batches as the trainer does, commit their ids, acknowledge; raises when a group comes twice or not at all."""
    ledger = Ledger()
    batcher = Batcher(groups_per_step=GROUPS_PER_STEP, max_staleness=_NEVER_STALE, ledger=ledger)
    seen: set[str] = set()
    commit_s = 0.0
    blobs = Blobs(s3)
    collector = Collector(
        Connections(RUN_ID, bus, blobs),
        batcher=batcher,
        issued=_EveryGroup(size),
        deadline_s=60.0,
        max_dead=1,
        reader=PackReader(blobs.get, vocab_size=VOCABULARY, mark=ReadingMark(folder)),
    )
    gc.freeze()  # as the service does
    with collector:
        print("ready", flush=True)
        cpu = time.process_time()
        for step in range(num_groups // GROUPS_PER_STEP):
            ids = [group.group_id for group in collector.collect(PolicyVersion(0))]
            assert not seen & set(ids), "trained twice"
            seen.update(ids)
            ledger.record(PolicyVersion(0), ids, max_staleness=_NEVER_STALE)
            collector.mark_trained(ids)
            settled = collector.settled()
            commit_s -= time.monotonic()
            commit(folder / f"step{step:08d}", ids)
            commit_s += time.monotonic()
            collector.acknowledge(settled)
        cpu = time.process_time() - cpu
        ended = time.time()
    assert len(seen) == num_groups, f"{len(seen)} of {num_groups} groups arrived"
    return {"ended": ended, "cpu_s": cpu, "commit_s": commit_s}


def commit(path: Path, ids: Sequence[str]) -> None:
    """Write a step's ids, and sync them to disk before the file is renamed."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump(ids, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def main() -> None:
    """Print "ready", take all groups, print the measurements."""
    given = json.loads(sys.argv[1])
    with Bus.connect(NatsSettings(**given["nats"]), name="bench-trainer") as bus:
        answer = consume(
            bus, S3Settings(**given["s3"]), Path(given["folder"]), size=given["case"]["size"], num_groups=given["count"]
        )
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
