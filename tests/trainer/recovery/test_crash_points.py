"""Killed between any two actions of step, checkpoint, acknowledgement and publication, a run loses and repeats nothing."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.servers import wait_for
from tests.trainer.learner.forks import Command
from tests.trainer.producer import ScriptedProducer, write_run_file

from penstock.console.record.lineage import version_lineage
from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.deploy.quickstart_task import write_data, write_model
from penstock.forensics.audit.audit import audit_run
from penstock.forensics.audit.audit_checks import AuditResult, check_record
from penstock.forensics.audit.audit_inputs import gather
from penstock.protocol import streams
from penstock.protocol.errors import ConfigError, RecordBroken
from penstock.protocol.record.checkpoint_state import STATE_FILE, CheckpointState, committed, folder_name
from penstock.protocol.record.lineage import chapters
from penstock.protocol.record.stored_record import StoredRecord
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer import crash_points
from penstock.trainer.crash_points import CrashPoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, GROUPS_PER_STEP, EVALUATED = 10, 2, 4

# Publication passes its points first for the version that a session starts with, then for those it makes.
SECOND = {
    CrashPoint.OBJECT_STORED, CrashPoint.SHARDS_STORED, CrashPoint.MANIFEST_STORED, CrashPoint.HEAD_MOVED,
    CrashPoint.ANNOUNCED,
}  # fmt: skip


# Passed only where checkpoints are in the object store; a fetch also needs one whose files are not all on the disk.
STORED_ALONE = ("trainer.store_checkpoints=true", "trainer.local_checkpoints=false")
OF_A_CHECKPOINT = list(CrashPoint)[1 : list(CrashPoint).index(CrashPoint.ACKNOWLEDGED) + 1]
STORED = dict.fromkeys((CrashPoint.COPIED, CrashPoint.REMOVING, CrashPoint.FETCHED), STORED_ALONE)


@dataclass
class Scene:
    """Small runs on real servers; the one called undisturbed is not killed."""

    folder: Path
    bus: Bus
    blobs: Blobs
    nats: NatsServer
    s3: S3Server

    def run_file(self, run_id: str) -> Path:
        bootstrap(self.bus, self.blobs, run_id)
        return write_run_file(
            self.folder / f"{run_id}.toml", nats=self.nats.settings, s3=self.s3.settings,
            sections={
                "run": {"id": run_id, "dir": str(self.folder / "runs"), "seed": 3},
                "model": {"path": str(self.folder / "model")},
                "data": {
                    "train": [str(self.folder / "train.jsonl")], "eval": [str(self.folder / "eval.jsonl")],
                    "max_prompt_tokens": 64,
                },
                "rollout": {
                    "group_size": 4, "groups_per_step": GROUPS_PER_STEP, "groups_per_message": 2, "max_new_tokens": 8,
                    "max_staleness": 0, "max_attempts": 30,
                },
                "trainer": {
                    "steps": STEPS, "lr": 1e-3, "micro_batch_tokens": 512, "checkpoint_every": 1, "lease_s": 1.0,
                },
                "eval": {"at_start": False, "num_prompts": EVALUATED},
            },
        )  # fmt: skip

    def checkpoints(self, run_id: str) -> Path:
        return self.folder / "runs" / run_id / "checkpoints"

    def state(self, run_id: str) -> CheckpointState:
        return committed(self.checkpoints(run_id))[-1][1]

    def audit(self, run_id: str) -> AuditResult:
        return check_record(gather(run_id, self.bus, self.blobs, self.checkpoints(run_id), reads_packs=True))

    def producer(self, run_id: str) -> ScriptedProducer:
        return ScriptedProducer(self.nats.settings, self.s3.settings, run_id)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, nats_server: NatsServer, s3_server: S3Server) -> Iterator[Scene]:
    """The quickstart's model and data, and one run of it without a crash."""
    folder = tmp_path_factory.mktemp("crash")
    write_model(folder / "model", seed=0)
    write_data(folder, seed=0, num_sft=1, num_train=60, num_eval=EVALUATED)
    with Bus.connect(nats_server.settings, name="audit") as bus:
        scene = Scene(folder, bus, Blobs(s3_server.settings), nats_server, s3_server)
        run_file = scene.run_file("undisturbed")
        with scene.producer("undisturbed"):
            undisturbed = start(run_file)
            try:
                undisturbed.wait()
            finally:
                undisturbed.kill()
        yield scene
        delete_run(bus, "undisturbed")


@pytest.fixture
def sessions() -> Iterator[list[Command]]:
    """Trainer processes that are killed at the end of a test."""
    started: list[Command] = []
    yield started
    for command in started:
        command.kill()


def start(run_file: Path, *overrides: str) -> Command:
    return Command(run_file.parent, "train", str(run_file), *overrides)


def steps_of(scene: Scene, run_id: str) -> list[tuple[list[int], str]]:
    """Return the prompts of each recorded step, and the digest of the weights it made."""
    found = reversed(list(chapters(scene.state(run_id).record, scene.blobs.get)))
    return [([group.prompt for group in step.groups], step.weights_digest) for part in found for step in part.steps]


def assert_whole(scene: Scene, run_id: str) -> None:
    """The accounting closes, and every group that a step needed counts once."""
    proof = scene.audit(run_id)
    assert proof.closes, proof.breaches
    train, held_out = proof.splits
    assert train.used == STEPS * GROUPS_PER_STEP
    assert held_out.used == EVALUATED
    assert not any(train.in_flight.values())
    assert not any(held_out.in_flight.values())


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_kills_at_every_point_in_turn_change_nothing(scene: Scene, run_id: str, sessions: list[Command]) -> None:
    """One session is killed at each point; the accounting closes after each, and at the end each group counts once.

    Groups that killed sessions issued arrive in any order, so the order of groups in steps differs from other runs.
    """
    run_file = scene.run_file(run_id)
    # Few bytes change per version: only then are patches sparse, and full snapshots stored in addition.
    sparse = ("trainer.publish_dtype=bfloat16", "trainer.lr=1e-5", "trainer.anchor_every=1")
    with scene.producer(run_id):
        for point in CrashPoint:
            more = ("algorithm.minibatches=2",) if point is CrashPoint.UPDATED else STORED.get(point, ())
            sessions.append(start(run_file, *sparse, *more, f"trainer.kill_at={point}:{2 if point in SECOND else 1}"))
            sessions[-1].wait(expected=-9)
            proof = scene.audit(run_id)
            assert proof.closes, (point, proof.breaches)
        sessions.append(start(run_file, *sparse))
        sessions[-1].wait()
    assert_whole(scene, run_id)
    assert scene.state(run_id).epoch == len(CrashPoint) + 1
    delete_run(scene.bus, run_id)


@pytest.mark.parametrize("point", [CrashPoint.WRITTEN, pytest.param(CrashPoint.COMMITTED, marks=pytest.mark.chaos)])
def test_one_kill_changes_no_weight(scene: Scene, run_id: str, sessions: list[Command], point: CrashPoint) -> None:
    """Before or after the rename: the steps equal the undisturbed run's, and so does every version's hash.

    Groups that the killed session issued after its checkpoint are known from the log: none is refused as foreign.
    """
    run_file = scene.run_file(run_id)
    with scene.producer(run_id):
        sessions.append(start(run_file, f"trainer.kill_at={point}:2"))
        sessions[-1].wait(expected=-9)
        sessions.append(start(run_file))
        sessions[-1].wait()
    assert_whole(scene, run_id)
    assert steps_of(scene, run_id) == steps_of(scene, "undisturbed")
    assert "foreign" not in scene.state(run_id).account.totals["train"].refused
    delete_run(scene.bus, run_id)


def test_a_crash_of_the_trainer_discards_nothing_that_was_sampled(
    scene: Scene, run_id: str, sessions: list[Command]
) -> None:
    """With a bound of 0: killed before the first checkpoint, while it makes these steps again, and 3 steps after a checkpoint.

    All steps equal the undisturbed run's, though other sessions published the versions that sampled for them. The record says
    which these are, and a replay makes the same weights.
    """
    run_file, rare = scene.run_file(run_id), "trainer.checkpoint_every=6"
    with scene.producer(run_id):
        for times in (5, 3, 9):
            sessions.append(start(run_file, rare, f"trainer.kill_at={CrashPoint.STEPPED}:{times}"))
            sessions[-1].wait(expected=-9)
        sessions.append(start(run_file, rare))
        sessions[-1].wait()
    assert_whole(scene, run_id)
    state = scene.state(run_id)
    assert state.account.totals["train"].dropped == {}
    assert steps_of(scene, run_id) == steps_of(scene, "undisturbed")
    assert {until for until, _, _ in state.remade} == {until for _, until in state.abandoned}
    record = StoredRecord.read(run_id, state.record, scene.blobs.get)
    sampled_by = [member for step in record.steps for member in version_lineage(record, step.made_version).groups]
    assert {member.staleness for member in sampled_by} == {0}
    abandoned = next(member.oldest_version for member in sampled_by if member.rolled_back)
    with pytest.raises(RecordBroken, match="is of a session that was rolled back"):
        version_lineage(record, abandoned)
    sessions.append(Command(run_file.parent, "replay", run_id, str(run_file), "--json"))
    replayed = json.loads(sessions[-1].wait().splitlines()[-1])
    assert replayed["holds"], replayed
    delete_run(scene.bus, run_id)


def test_a_trainer_without_the_folder_resumes_from_the_object_store(
    scene: Scene, run_id: str, sessions: list[Command]
) -> None:
    """Killed with a checkpoint copied and not yet named, and moved without its folder: no group is lost or counted twice."""
    run_file, stored = scene.run_file(run_id), "trainer.store_checkpoints=true"
    with scene.producer(run_id):
        sessions.append(start(run_file, stored, f"trainer.kill_at={CrashPoint.COPIED}:3"))
        sessions[-1].wait(expected=-9)
        shutil.rmtree(scene.checkpoints(run_id).parent)
        sessions.append(start(run_file, stored))
        sessions[-1].wait()
    assert "fetching the checkpoint from the object store" in sessions[-1].err
    ((after, until),) = scene.state(run_id).abandoned  # what the killed session published is known to later ones
    assert until > after + 1
    assert_whole(scene, run_id)
    metrics = (scene.checkpoints(run_id).parent / "metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, metrics) if line["kind"] == "step"] == list(range(1, STEPS + 1))
    delete_run(scene.bus, run_id)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param((f"{CrashPoint.REMOVING}:2", f"{CrashPoint.FETCHED}:1"), id="removing, fetching"),
        pytest.param(
            tuple(f"{point}:1" for point in OF_A_CHECKPOINT),
            id="every point of a checkpoint",
            marks=[pytest.mark.chaos, pytest.mark.timeout(900)],
        ),
    ],
)
def test_checkpoints_in_the_object_store_alone_lose_nothing_and_fill_no_disk(
    scene: Scene, run_id: str, sessions: list[Command], points: tuple[str, ...]
) -> None:
    """Killed at each point: the accounting closes, and at most one checkpoint has files on the disk; in the end none has.

    A replay of the last versions fetches the checkpoint that it begins with, and makes the same weights.
    """
    run_file, folder = scene.run_file(run_id), scene.checkpoints(run_id)

    def on_the_disk() -> set[str]:
        return {
            path.relative_to(folder).parts[0]
            for path in folder.rglob("*")
            if path.is_file() and path.name != STATE_FILE
        }

    with scene.producer(run_id):
        for point in points:
            sessions.append(start(run_file, *STORED_ALONE, f"trainer.kill_at={point}"))
            sessions[-1].wait(expected=-9)
            assert len(on_the_disk()) <= 1, point
            if folder.is_dir() and committed(folder):
                assert (proof := scene.audit(run_id)).closes, (point, proof.breaches)
        sessions.append(start(run_file, *STORED_ALONE))
        sessions[-1].wait()
    assert_whole(scene, run_id)
    assert on_the_disk() == set()
    newest = scene.state(run_id)
    sessions.append(Command(run_file.parent, "replay", run_id, str(run_file), "--json", "--from", str(newest.version)))
    replayed = json.loads(sessions[-1].wait().splitlines()[-1])
    assert replayed["holds"], replayed
    assert replayed["began_from"] == f"the checkpoint {folder_name(newest.step)}"
    assert on_the_disk() == set()
    delete_run(scene.bus, run_id)


def test_whatever_ends_a_trainer_while_it_writes_a_checkpoint_the_one_before_counts(
    scene: Scene, run_id: str, sessions: list[Command]
) -> None:
    """Killed with a copy in memory, with a shard on the disk, and before the first acknowledgement; then the disk is full.

    Each session resumes from the newest whole checkpoint, and the accounting closes after each. The error of the thread
    that writes ends the trainer with its cause, and no group of that checkpoint is acknowledged.
    """
    run_file = scene.run_file(run_id)
    (disk := scene.checkpoints(run_id)).mkdir(parents=True)
    scored = streams.scored_consumer(run_id, "train").stream
    whole = {
        CrashPoint.CAPTURED: 1,
        CrashPoint.SHARD_WRITTEN: 2,
        CrashPoint.POINTED: 4,
    }  # each session makes one step more
    with scene.producer(run_id):
        for point, step in whole.items():
            sessions.append(start(run_file, f"trainer.kill_at={point}:2"))
            sessions[-1].wait(expected=-9)
            assert scene.state(run_id).step == step
            assert (proof := scene.audit(run_id)).closes, (point, proof.breaches)
        size = sum(path.stat().st_size for path in disk.rglob("*") if path.is_file())
        with full_disk(disk, size * 5 // 4):
            sessions.append(start(run_file))
            sessions[-1].wait(expected=2)
            ended = scene.state(run_id)
            assert "could not be written below" in sessions[-1].err
            assert "No space left on device" in sessions[-1].err
            assert not list(disk.glob("*.partial"))
            unacknowledged = scene.bus.stream_state(scored).wait().num_messages * 2
            assert unacknowledged >= GROUPS_PER_STEP, "a group of a checkpoint that was not written is acknowledged"
            assert (proof := scene.audit(run_id)).closes, proof.breaches
        sessions.append(start(run_file))
        sessions[-1].wait()
    assert ended.step >= whole[CrashPoint.POINTED]
    assert_whole(scene, run_id)
    delete_run(scene.bus, run_id)


@contextmanager
def full_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Have ``folder`` on a file system of that size, and back with its files where it was."""
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        yield
        shutil.rmtree(kept)
        shutil.copytree(folder, kept)
    finally:
        subprocess.run(["umount", folder], check=True)
    shutil.rmtree(folder)
    kept.rename(folder)


def test_without_the_ids_a_redelivery_is_trained_again_and_the_audit_fails(
    scene: Scene, run_id: str, sessions: list[Command]
) -> None:
    """Negative control: with the ids removed from a checkpoint before its acknowledgements, groups are trained twice."""
    run_file = scene.run_file(run_id)
    with scene.producer(run_id):
        sessions.append(start(run_file, "rollout.max_staleness=1", f"trainer.kill_at={CrashPoint.COMMITTED}"))
        sessions[-1].wait(expected=-9)
        path = scene.checkpoints(run_id) / folder_name(1) / STATE_FILE
        state = json.loads(path.read_text())
        ids = [group_id for _, row in state["ledger"] for group_id in row]
        state["ledger"] = []
        state["dispatch"]["outstanding"] += ids
        state["account"]["in_flight"]["train"] += ids
        path.write_text(json.dumps(state))
        sessions.append(start(run_file, "rollout.max_staleness=1"))
        sessions[-1].wait()
    proof = scene.audit(run_id)
    assert not proof.closes
    assert {breach.group_id for breach in proof.breaches if breach.kind == "trained twice"} == set(ids)
    delete_run(scene.bus, run_id)


def test_a_suspended_trainer_that_resumes_changes_nothing(scene: Scene, run_id: str, sessions: list[Command]) -> None:
    """Suspended for longer than its lease, it loses the run; resumed, it exits without effect. A third trainer is refused."""
    run_file = scene.run_file(run_id)
    with scene.producer(run_id) as producer:
        producer.limit = 2 * GROUPS_PER_STEP
        sessions.append(first := start(run_file))
        wait_for(lambda: folder_name(2) in str(list(scene.checkpoints(run_id).glob("*"))), "two steps", 60.0)
        first.signal(signal.SIGSTOP)
        sessions.append(second := start(run_file))
        wait_for(lambda: '"event": "training"' in second.err, "the second trainer", 60.0)
        taken = scene.nats.settings.url.rpartition(":")[2]  # on one machine the first has the port of the run's metrics
        sessions.append(third := start(run_file, f"metrics.trainer_port={taken}"))
        third.wait(expected=2)
        assert "is held by trainer-" in third.err
        first.signal(signal.SIGCONT)
        first.wait(expected=2)
        assert "lost its lease of the run" in first.err
        producer.limit = None
        second.wait()
    assert_whole(scene, run_id)
    assert scene.state(run_id).epoch == 2
    delete_run(scene.bus, run_id)


def kinds(proof: AuditResult) -> set[str]:
    assert not proof.closes
    return {breach.kind for breach in proof.breaches}


def test_the_audit_fails_when_ids_are_removed_from_the_checkpoint(scene: Scene, tmp_path: Path) -> None:
    """A ledger without its groups differs from the committed record; the audit names every missing id."""
    shutil.copytree(scene.checkpoints("undisturbed"), tmp_path / "checkpoints")
    folder, state = committed(tmp_path / "checkpoints")[-1]
    ids = {group_id for _, row in state.ledger for group_id in row}
    (folder / STATE_FILE).write_text(state.model_copy(update={"ledger": ()}).model_dump_json())
    proof = check_record(gather("undisturbed", scene.bus, scene.blobs, tmp_path / "checkpoints", reads_packs=False))
    assert kinds(proof) == {"checkpoint altered", "not in the ledger"}
    assert {breach.group_id for breach in proof.breaches} - {""} == ids


def test_the_audit_command_prints_a_table_or_json(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [str(scene.folder / "undisturbed.toml")]
    assert audit_run("undisturbed", arguments, {}, fast=False, as_json=False) == 0
    assert "the accounting balances" in capfd.readouterr().out
    assert audit_run("undisturbed", arguments, {}, fast=True, as_json=True) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["closes"]
    assert document["step"] == STEPS
    assert [line["used"] for line in document["splits"]] == [STEPS * GROUPS_PER_STEP, EVALUATED]


def test_a_point_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kill_at = 'nowhere': expected one of stepped, recorded"):
        crash_points.arm("nowhere")
