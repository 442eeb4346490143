"""Killed between two actions of step, checkpoint, acknowledgement or publication, a run loses and repeats nothing."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.power import small_disk
from tests.servers import wait_for
from tests.trainer.learner.forks import Command
from tests.trainer.trained_run import Run

from penstock.console.record.lineage import version_lineage
from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.deploy.quickstart_task import write_data, write_model
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
STORED: dict[CrashPoint, tuple[str, ...]] = dict.fromkeys(
    (CrashPoint.COPIED, CrashPoint.REMOVING, CrashPoint.FETCHED), STORED_ALONE
)


@dataclass
class Scene:
    """Small runs on real servers."""

    folder: Path
    bus: Bus
    blobs: Blobs
    nats: NatsServer
    s3: S3Server

    @contextmanager
    def run(self, run_id: str) -> Iterator[CrashRun]:
        """Bootstrap a run; kill its processes and delete it in the end."""
        bootstrap(self.bus, self.blobs, run_id)
        run = CrashRun(self.folder, run_id, self.nats.settings, self.s3.settings, [], self)
        run.write(
            steps=STEPS,
            data={"eval": [str(self.folder / "eval.jsonl")]},
            rollout={
                "groups_per_step": GROUPS_PER_STEP,
                "groups_per_message": 2,
                "max_staleness": 0,
                "max_attempts": 30,
            },
            trainer={"checkpoint_every": 1, "lease_s": 1.0},
            eval={"at_start": False, "num_prompts": EVALUATED},
        )
        try:
            yield run
        finally:
            for session in run.sessions:
                session.kill()
        delete_run(self.bus, run_id)


@dataclass
class CrashRun(Run):
    scene: Scene

    @property
    def checkpoints(self) -> Path:
        return self.home / "checkpoints"

    @property
    def state(self) -> CheckpointState:
        return committed(self.checkpoints)[-1][1]

    @property
    def recorded(self) -> list[tuple[list[int], str]]:
        """The prompts of each recorded step, and the digest of the weights it made."""
        parts = reversed(list(chapters(self.state.record, self.scene.blobs.get)))
        return [([group.prompt for group in step.groups], step.weights_digest) for part in parts for step in part.steps]

    def audit(self, checkpoints: Path | None = None) -> AuditResult:
        scene, folder = self.scene, checkpoints or self.checkpoints
        return check_record(gather(self.id, scene.bus, scene.blobs, folder, reads_packs=True))

    def train(self, *overrides: str, expected: int = 0) -> Command:
        session = self.start(*overrides)
        session.wait(expected=expected)
        return session

    def kill(self, point: str, *overrides: str) -> None:
        """Train until the process kills itself at a crash point, such as ``committed:2``."""
        self.train(*overrides, f"trainer.kill_at={point}", expected=-9)

    def replay(self, *options: str, num_ranks: int = 1) -> dict[str, Any]:
        replayed = super().replay(*options, num_ranks=num_ranks)
        assert replayed["holds"], replayed
        return replayed

    def assert_balanced(self, where: object = "") -> AuditResult:
        proof = self.audit()
        assert proof.closes, (where, proof.breaches)
        return proof

    def assert_whole(self) -> None:
        """The accounting closes, and every group that a step needed counts once."""
        train, held_out = self.assert_balanced().splits
        assert (train.used, held_out.used) == (STEPS * GROUPS_PER_STEP, EVALUATED)
        assert not any(train.in_flight.values())
        assert not any(held_out.in_flight.values())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, nats_server: NatsServer, s3_server: S3Server) -> Iterator[Scene]:
    """The quickstart's model and data."""
    folder = tmp_path_factory.mktemp("crash")
    write_model(folder / "model", seed=0)
    write_data(folder, seed=0, num_sft=1, num_train=60, num_eval=EVALUATED)
    with Bus.connect(nats_server.settings, name="audit") as bus:
        yield Scene(folder, bus, Blobs(s3_server.settings), nats_server, s3_server)


@pytest.fixture(scope="module")
def undisturbed(scene: Scene) -> Iterator[CrashRun]:
    """A run that is not killed."""
    with scene.run("undisturbed") as run:
        with run.producer():
            run.train()
        yield run


@pytest.fixture
def run(scene: Scene, run_id: str) -> Iterator[CrashRun]:
    with scene.run(run_id) as run:
        yield run


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_kills_at_every_point_in_turn_change_nothing(run: CrashRun) -> None:
    """One session is killed at each point; the accounting closes after each, and at the end each group counts once.

    Groups that killed sessions issued arrive in any order, so the order of groups in steps differs from other runs.
    """
    # Few bytes change per version: only then are patches sparse, and full snapshots stored in addition.
    sparse = ("trainer.publish_dtype=bfloat16", "trainer.lr=1e-5", "trainer.anchor_every=1")
    with run.producer():
        for point in CrashPoint:
            more = ("algorithm.minibatches=2",) if point is CrashPoint.UPDATED else STORED.get(point, ())
            run.kill(f"{point}:{2 if point in SECOND else 1}", *sparse, *more)
            run.assert_balanced(point)
        run.train(*sparse)
    run.assert_whole()
    assert run.state.epoch == len(CrashPoint) + 1


@pytest.mark.parametrize("point", [CrashPoint.WRITTEN, pytest.param(CrashPoint.COMMITTED, marks=pytest.mark.chaos)])
def test_one_kill_changes_no_weight(run: CrashRun, undisturbed: CrashRun, point: CrashPoint) -> None:
    """Before or after the rename: the steps equal the undisturbed run's, and so does every version's hash.

    Groups that the killed session issued after its checkpoint are known from the log: none is refused as foreign.
    """
    with run.producer():
        run.kill(f"{point}:2")
        run.train()
    run.assert_whole()
    assert run.recorded == undisturbed.recorded
    assert "foreign" not in run.state.account.totals["train"].refused


def test_a_crash_of_the_trainer_discards_nothing_that_was_sampled(run: CrashRun, undisturbed: CrashRun) -> None:
    """With a bound of 0: killed before the first checkpoint, while it makes the steps again, and after a checkpoint.

    All steps equal the undisturbed run's, though other sessions published the versions that sampled for them. The
    record says which these are, and a replay makes the same weights.
    """
    rare = "trainer.checkpoint_every=6"
    with run.producer():
        for times in (5, 3, 9):
            run.kill(f"{CrashPoint.STEPPED}:{times}", rare)
        run.train(rare)
    run.assert_whole()
    state = run.state
    assert state.account.totals["train"].dropped == {}
    assert run.recorded == undisturbed.recorded
    assert {until for until, _, _ in state.remade} == {until for _, until in state.abandoned}
    record = StoredRecord.read(run.id, state.record, run.scene.blobs.get)
    sampled_by = [member for step in record.steps for member in version_lineage(record, step.made_version).groups]
    assert {member.staleness for member in sampled_by} == {0}
    abandoned = next(member.oldest_version for member in sampled_by if member.rolled_back)
    with pytest.raises(RecordBroken, match="is of a session that was rolled back"):
        version_lineage(record, abandoned)
    run.replay()


def test_a_trainer_without_the_folder_resumes_from_the_object_store(run: CrashRun) -> None:
    """Killed with a checkpoint copied and not named, then moved without its folder: no group is lost or doubled."""
    stored = "trainer.store_checkpoints=true"
    with run.producer():
        run.kill(f"{CrashPoint.COPIED}:3", stored)
        shutil.rmtree(run.checkpoints.parent)
        resumed = run.train(stored)
    assert "fetching the checkpoint from the object store" in resumed.err
    ((after, until),) = run.state.abandoned  # what the killed session published is known to later ones
    assert until > after + 1
    run.assert_whole()
    metrics = (run.checkpoints.parent / "metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, metrics) if line["kind"] == "step"] == list(range(1, STEPS + 1))


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
    run: CrashRun, points: tuple[str, ...]
) -> None:
    """Killed at each point: the accounting closes, and at most one checkpoint has files on the disk, in the end none.

    A replay of the last versions fetches the checkpoint that it begins with, and makes the same weights.
    """
    folder = run.checkpoints

    def on_the_disk() -> set[str]:
        return {
            path.relative_to(folder).parts[0]
            for path in folder.rglob("*")
            if path.is_file() and path.name != STATE_FILE
        }

    with run.producer():
        for point in points:
            run.kill(f"{point}", *STORED_ALONE)
            assert len(on_the_disk()) <= 1, point
            if folder.is_dir() and committed(folder):
                run.assert_balanced(point)
        run.train(*STORED_ALONE)
    run.assert_whole()
    assert on_the_disk() == set()
    newest = run.state
    replayed = run.replay("--from", str(newest.version))
    assert replayed["began_from"] == f"the checkpoint {folder_name(newest.step)}"
    assert on_the_disk() == set()


def test_whatever_ends_a_trainer_while_it_writes_a_checkpoint_the_one_before_counts(run: CrashRun) -> None:
    """Killed with a copy in memory, a shard on the disk, and before the first acknowledgement; then the disk is full.

    Each session resumes from the newest whole checkpoint, and the accounting closes after each. The error of the thread
    that writes ends the trainer with its cause, and no group of that checkpoint is acknowledged.
    """
    (disk := run.checkpoints).mkdir(parents=True)
    scored = streams.scored_consumer(run.id, "train").stream
    # Each session makes one step more.
    whole = {CrashPoint.CAPTURED: 1, CrashPoint.SHARD_WRITTEN: 2, CrashPoint.POINTED: 4}
    with run.producer():
        for point, step in whole.items():
            run.kill(f"{point}:2")
            assert run.state.step == step
            run.assert_balanced(point)
        size = sum(path.stat().st_size for path in disk.rglob("*") if path.is_file())
        with full_disk(disk, size * 5 // 4):
            failed = run.train(expected=2)
            ended = run.state
            assert "could not be written below" in failed.err
            assert "No space left on device" in failed.err
            assert not list(disk.glob("*.partial"))
            unacknowledged = run.scene.bus.stream_state(scored).wait().num_messages * 2
            assert unacknowledged >= GROUPS_PER_STEP, "a group of a checkpoint that was not written is acknowledged"
            run.assert_balanced()
        run.train()
    assert ended.step >= whole[CrashPoint.POINTED]
    run.assert_whole()


@contextmanager
def full_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Have ``folder`` on a file system of that size, and back with its files where it was."""
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    with small_disk(folder, size_bytes):
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        yield
        shutil.rmtree(kept)
        shutil.copytree(folder, kept)
    shutil.rmtree(folder)
    kept.rename(folder)


def test_without_the_ids_a_redelivery_is_trained_again_and_the_audit_fails(run: CrashRun) -> None:
    """Negative control: with the ids removed from a checkpoint before it acknowledges, groups are trained twice."""
    with run.producer():
        later = "rollout.max_staleness=6"  # a redelivery that comes after other groups is trained all the same
        run.kill(f"{CrashPoint.COMMITTED}", later)
        path = run.checkpoints / folder_name(1) / STATE_FILE
        state = json.loads(path.read_text())
        ids = [group_id for _, row in state["ledger"] for group_id in row]
        state["ledger"] = []
        state["dispatch"]["outstanding"] += ids
        state["account"]["in_flight"]["train"] += ids
        path.write_text(json.dumps(state))
        run.train(later)
    proof = run.audit()
    assert not proof.closes
    assert {breach.group_id for breach in proof.breaches if breach.kind == "trained twice"} == set(ids)


def test_a_suspended_trainer_that_resumes_changes_nothing(run: CrashRun) -> None:
    """Suspended for longer than its lease, it loses the run; resumed, it exits. A third trainer is refused."""
    with run.producer() as producer:
        producer.limit = 2 * GROUPS_PER_STEP
        first = run.start()
        wait_for(lambda: folder_name(2) in str(list(run.checkpoints.glob("*"))), "two steps")
        first.signal(signal.SIGSTOP)
        second = run.start()
        wait_for(lambda: '"event": "training"' in second.err, "the second trainer")
        taken = run.scene.nats.settings.url.rpartition(":")[
            2
        ]  # by NATS; the first trainer has the run's on this machine
        third = run.train(f"metrics.trainer_port={taken}", expected=2)
        assert "is held by trainer-" in third.err
        first.signal(signal.SIGCONT)
        first.wait(expected=2)
        assert "lost its lease of the run" in first.err
        producer.limit = None
        second.wait()
    run.assert_whole()
    assert run.state.epoch == 2


def test_the_audit_fails_when_ids_are_removed_from_the_checkpoint(undisturbed: CrashRun, tmp_path: Path) -> None:
    """A ledger without its groups differs from the committed record; the audit names every missing id."""
    shutil.copytree(undisturbed.checkpoints, tmp_path / "checkpoints")
    folder, state = committed(tmp_path / "checkpoints")[-1]
    ids = {group_id for _, row in state.ledger for group_id in row}
    (folder / STATE_FILE).write_text(state.model_copy(update={"ledger": ()}).model_dump_json())
    proof = undisturbed.audit(tmp_path / "checkpoints")
    assert not proof.closes
    assert {breach.kind for breach in proof.breaches} == {"checkpoint altered", "not in the ledger"}
    assert {breach.group_id for breach in proof.breaches} - {""} == ids


def test_a_point_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kill_at = 'nowhere': expected one of stepped, recorded"):
        crash_points.arm("nowhere")
