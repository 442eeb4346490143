"""A small run as a trainer leaves it: record, packs, checkpoint, metrics, events and queues; made without training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.groups import make_generated, make_group, make_scored, make_task, make_task_issued, pack_bytes

from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.forensics.audit.audit_checks import AuditResult, check_record
from penstock.forensics.audit.audit_inputs import gather
from penstock.protocol import blob_keys, streams, subjects
from penstock.protocol.facts import TaskIssued, TaskList, decode, encode, encode_unbounded
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.checkpoint_state import STATE_FILE, CheckpointState, folder_name
from penstock.protocol.record.lineage import (
    STEP_DIGEST,
    CheckpointCommitted,
    LineageChapter,
    chapters,
    group_digest,
    step_digest,
)
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.groups.group_totals import Drop, DropReason
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.recovery.lease import FencedKey
from penstock.trainer.recovery.run_record_writer import RunRecordWriter
from penstock.trainer.telemetry.event_writer import EventWriter

NUM_STEPS = 4
SETTINGS = {"settings": {"rollout": {"max_staleness": 1}, "algorithm": {"max_trained_count": 1}}}
DROPPED, EVALUATED, WAITING, LISTED = "e0.p90.a0", "eval.v1.p0", "e0.p91.a0", "e0.p92.a0"
Edit = Callable[[list[LineageChapter]], list[LineageChapter]]


def trained(step: int) -> tuple[str, str]:
    return f"e0.p{2 * step}.a0", f"e0.p{2 * step + 1}.a0"


@dataclass
class MadeRun:
    run_id: str
    bus: Bus
    blobs: Blobs
    folder: Path
    objects: dict[str, str]  # name -> key

    @property
    def state_file(self) -> Path:
        return self.folder / "checkpoints" / folder_name(NUM_STEPS) / STATE_FILE

    @property
    def state(self) -> CheckpointState:
        return CheckpointState.model_validate_json(self.state_file.read_bytes())

    @property
    def chapters(self) -> list[LineageChapter]:
        return list(chapters(self.state.record, self.blobs.get))[::-1]

    def audit(self, *, folder: Path | None = None) -> AuditResult:
        checkpoints = (folder or self.folder) / "checkpoints"
        return check_record(gather(self.run_id, self.bus, self.blobs, checkpoints, reads_packs=True))

    def pack(self, name: str, group_ids: tuple[str, ...], version: int, seed: int = 0) -> list[ReadyGroup]:
        groups = [make_group(group_id, size=2, version=version, seed=seed + i) for i, group_id in enumerate(group_ids)]
        key = blob_keys.group_pack(self.run_id, PolicyVersion(version), name, "a1")
        pack = self.blobs.put(key, pack_bytes(groups))
        self.objects[f"pack of {name}"] = key
        scored = make_scored(make_generated(self.run_id, groups, pack)).groups
        return [ReadyGroup(one, pack, group) for one, group in zip(scored, groups, strict=True)]

    def rewrite(self, edit: Edit) -> BlobRef:
        """Write the edited record in place of the stored one, with all hashes; return its end."""
        last = None
        for chapter in edit(self.chapters):
            key = self.objects.get(f"chapter {chapter.number}", f"{self.objects['chapter 1']}.{chapter.number}")
            last = self.blobs.put(key, encode_unbounded(chapter.model_copy(update={"parent": last})))
        assert last is not None
        return last


@contextmanager
def stored_run(run_id: str, nats: NatsServer, s3: S3Server, folder: Path) -> Iterator[MadeRun]:
    """Keep a run on servers for the length of the block."""
    blobs = Blobs(s3.settings)
    with Bus.connect(nats.settings, name="test") as bus:
        bootstrap(bus, blobs, run_id)
        yield _make_run(run_id, bus, blobs, folder)
        delete_run(bus, run_id)


def _make_run(run_id: str, bus: Bus, blobs: Blobs, folder: Path) -> MadeRun:
    """Four steps of two groups, one chapter each; of a bootstrapped run."""
    run = MadeRun(run_id, bus, blobs, folder, {})
    bucket = bus.key_value(streams.state_bucket(run_id).bucket).wait()
    connections = Connections(run_id, bus, blobs)
    writer = RunRecordWriter(
        connections, FencedKey(bucket, streams.CHECKPOINT_KEY, lambda _: None), epoch=1, resumed=None
    )
    groups = RunGroups()
    events = EventWriter(bus=bus, run_id=run_id, folder=folder, clock=lambda: 1.0)
    writer.set_weights(lambda: "0" * 64)
    writer.add_session(holder="t", at=1.0, step=0, version=0, parent=None, config=json.dumps(SETTINGS).encode())
    run.objects["settings"] = next(s.key for s in blobs.list(blob_keys.lineage_prefix(run_id)))
    ledger: list[tuple[int, tuple[str, ...]]] = []
    for number in range(1, NUM_STEPS + 1):
        batch = run.pack(f"step{number}", trained(number), number - 1, seed=10 * number)
        _step(number, batch, writer, groups, events)
        ledger = [*ledger, (number - 1, trained(number))][-2:]
        if number == 1:
            groups.train.issue([WAITING, LISTED])
        if number == 2:
            (dropped,), (evaluated,) = run.pack("dropped", (DROPPED,), 0), run.pack("evaluated", (EVALUATED,), 1)
            groups.train.issue([DROPPED])
            groups.train.drop(Drop(DROPPED, DropReason.STALE, dropped.num_tokens, dropped.pack))
            groups.held_out.issue([EVALUATED])
            groups.held_out.evaluate({EVALUATED: evaluated.num_tokens}, {EVALUATED: evaluated.pack})
        _commit(run, number, writer, groups, events, ledger)
    events.close()
    listed = blobs.put(blob_keys.task_list(run_id, "p1"), encode_unbounded(TaskList(tasks=(make_task(LISTED),))))
    run.objects["task list"] = listed.key
    for issued in (
        make_task_issued(run_id, "p0", [make_task(WAITING)]),
        TaskIssued(run_id=run_id, pack_id="p1", tasks_blob=listed),
    ):
        bus.publish(subjects.tasks(run_id, "train"), issued, msg_id=issued.pack_id).wait()
    return run


def _step(
    number: int, batch: list[ReadyGroup], writer: RunRecordWriter, groups: RunGroups, events: EventWriter
) -> None:
    ids = trained(number)
    groups.train.issue(ids)
    for group in batch:
        groups.train.arrive(group.group_id, number)
        groups.train.offer(group)
    groups.train.take(ids)
    groups.train.train(PolicyVersion(number - 1), batch, {})
    writer.add_step(number, PolicyVersion(number - 1), PolicyVersion(number), batch, {}, dict.fromkeys(ids, 1))
    writer.set_weights(lambda: "0" * 64)
    digests = [group_digest(group.scored, group.pack, 1) for group in batch]
    events.write(
        "step", {"step": number, STEP_DIGEST: step_digest(1, number, number - 1, number, digests).model_dump()}
    )


def _commit(
    run: MadeRun,
    number: int,
    writer: RunRecordWriter,
    groups: RunGroups,
    events: EventWriter,
    ledger: list[tuple[int, tuple[str, ...]]],
) -> None:
    entries = groups.take_entries()
    record, chapter, digest = writer.write(entries, step=number, version=PolicyVersion(number))
    run.objects[f"chapter {chapter}"] = record.key
    state = CheckpointState(
        run_id=run.run_id, epoch=1, step=number, version=number, weights_digest=digest, weights_dtype="float32",
        ledger=tuple(ledger), dispatch={"outstanding": list(entries.account.in_flight["train"])}, totals={},
        account=entries.account, metrics_bytes=events.sync(), record=record, chapter=chapter,
    )  # fmt: skip
    data = state.model_dump_json().encode()
    folder = run.folder / "checkpoints" / folder_name(number)
    folder.mkdir(parents=True)
    (folder / STATE_FILE).write_bytes(data)
    writer.mark_committed(state, data)


def replaced(run: MadeRun, fields: Mapping[str, object]) -> bytes:
    return run.state.model_copy(update=dict(fields)).model_dump_json().encode()


def pointer(run: MadeRun, fields: Mapping[str, object]) -> bytes:
    """The bytes of the checkpoint key in NATS with other values."""
    entry = run.bus.key_value(streams.state_bucket(run.run_id).bucket).wait().get(streams.CHECKPOINT_KEY).wait()
    assert entry is not None
    return encode(decode(entry.value, CheckpointCommitted).model_copy(update=dict(fields)))


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "flip": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "truncate": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "delete": lambda data: None,
    "other": lambda data: b"PK\x03\x04" + bytes(range(256)) * 4,
    "nested": lambda data: b"\x91" * 100_000,
    "list": lambda data: b"[]",
}


def damaged_copy(run: MadeRun, name: str, damage: str, folder: Path) -> Path:
    """Copy the run's folder to ``folder`` with one damaged file of it, or a folder in its place; return its path."""
    shutil.copytree(run.folder, folder)
    path = folder / name
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif (changed := DAMAGES[damage](data)) is not None:
        path.write_bytes(changed)
    return path


def damaged(run: MadeRun, key: str) -> Iterator[str]:
    """Damage an object in every way, one after another; yield the name of each damage while it lasts."""
    data = run.blobs.get_unverified(key)
    for damage, change in DAMAGES.items():
        changed = change(data)
        if changed is None:
            run.blobs.delete([key])
        else:
            run.blobs.put(key, changed)
        try:
            yield damage
        finally:
            run.blobs.put(key, data)
