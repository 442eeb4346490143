"""Only the newest committed checkpoint is resumed, and only with the bytes that were committed."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.trainer.recovery.test_checkpoint import RECORD, state, write

from penstock.deploy.quickstart_task import write_data, write_model
from penstock.protocol import streams
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import encode
from penstock.protocol.record.checkpoint_state import CheckpointState, read_state
from penstock.protocol.record.lineage import CheckpointCommitted
from penstock.protocol.transport.bus import Bus
from penstock.trainer.assemble import train
from penstock.trainer.errors import CheckpointError
from penstock.trainer.preflight import check_is_newest
from penstock.trainer.ranks import Ranks
from penstock.trainer.recovery import checkpoint
from penstock.trainer.recovery.checkpoint import verify_files
from penstock.trainer.settings import TrainerSettings

JSON = b"the state of step 4"


def key(chapter: int, step: int = 4, *, state_json: bytes = JSON, record: str = "") -> bytes:
    digest = hashlib.sha256(state_json).hexdigest()
    reference = RECORD.model_copy(update={"key": record}) if record else RECORD
    return encode(
        CheckpointCommitted(epoch=1, step=step, version=9, chapter=chapter, record=reference, state_sha256=digest)
    )


def at(chapter: int) -> CheckpointState:
    return state(4, chapter=chapter)


LEFT_BY_A_KILL: dict[str, tuple[bytes | None, CheckpointState | None]] = {
    "a new run": (None, None),
    "a run without a checkpoint": (encode(CheckpointCommitted(epoch=1)), None),
    "a run whose key was deleted": (None, at(3)),
    "killed after the first rename, before its key": (encode(CheckpointCommitted(epoch=1)), at(1)),
    "killed after a later rename, before its key": (key(2, state_json=b"an earlier one", record="earlier"), at(3)),
    "killed after the key": (key(3), at(3)),
}


@pytest.mark.parametrize("case", LEFT_BY_A_KILL)
def test_every_checkpoint_that_a_kill_leaves_is_resumed(case: str) -> None:
    """Between the rename and its key in NATS the folder is one chapter ahead; before and after they agree."""
    known, found = LEFT_BY_A_KILL[case]
    check_is_newest(known, Path("checkpoints"), found, JSON, older_step=None)


ALTERED = r"was altered, or is of another run"
REFUSED: dict[str, tuple[bytes, CheckpointState | None, str]] = {
    "no checkpoint": (
        key(3, step=50),
        None,
        r"in NATS: the newest committed checkpoint is of step 50, version 9 .*checkpoints has no checkpoint.*run\.dir",
    ),
    "the newest folder is missing": (
        key(7, step=50),
        at(5),
        r"of step 50.*newest in checkpoints is older: checkpoints/step00000004 is of step 4.*resume_older_step = 4",
    ),
    "the same step, an older state": (key(6), at(5), r"chapter 6 .*is older: .*\(chapter 5\)"),
    "an altered state": (key(5, state_json=b"other"), at(5), ALTERED),
    "another record": (key(5, record="elsewhere"), at(5), ALTERED),
}


@pytest.mark.parametrize("case", REFUSED)
def test_any_other_checkpoint_is_refused(case: str) -> None:
    """The error names what NATS expects, where it was looked for, and the setting that resumes anyway."""
    known, found, expected = REFUSED[case]
    for older_step in (None, 3):
        with pytest.raises(CheckpointError, match=expected):
            check_is_newest(known, Path("checkpoints"), found, JSON, older_step=older_step)
    if found is not None:
        check_is_newest(known, Path("checkpoints"), found, JSON, older_step=4)


def _flip(folder: Path) -> None:
    path = folder / "engine" / "weights.bin"
    data = path.read_bytes()
    path.write_bytes(data[:3] + bytes([data[3] ^ 1]) + data[4:])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (_flip, r"engine/weights\.bin: expected sha256 [0-9a-f]{64}, got [0-9a-f]{64}"),
    "missing": (lambda f: (f / "engine" / "weights.bin").unlink(), r"engine/weights\.bin: missing"),
    "one file more": (
        lambda f: (f / "engine" / "more_optim_states.pt").write_bytes(b"x"),
        r"engine/more_optim_states\.pt: not part of the checkpoint",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_an_altered_file_is_refused_by_its_name(tmp_path: Path, case: str) -> None:
    """Hashes are recorded at the commit, and stay when only the state is replaced."""
    damage, expected = DAMAGES[case]
    checkpoint.commit(tmp_path, state(2), write, keep=2)
    checkpoint.commit(tmp_path, state(2, chapter=2), write, keep=2)
    folder = tmp_path / "step00000002"
    assert read_state(folder).files.keys() == {"engine/weights.bin"}
    verify_files(folder, read_state(folder))
    damage(folder)
    with pytest.raises(CheckpointError, match=expected):
        verify_files(folder, read_state(folder))


def test_a_checkpoint_of_a_release_without_hashes_is_accepted(tmp_path: Path) -> None:
    checkpoint.commit(tmp_path, state(2), write, keep=2)
    verify_files(tmp_path / "step00000002", state(2))


def test_a_trainer_refuses_before_it_loads_anything(
    tmp_path: Path, nats_settings: NatsSettings, s3_settings: S3Settings, run_streams: str, bus: Bus
) -> None:
    """A trainer with the real key in NATS: the newest folder missing, then back with one flipped bit."""
    write_model(tmp_path / "model", seed=0)
    write_data(tmp_path, seed=0, num_sft=1, num_train=20, num_eval=1)
    settings = TrainerSettings.model_validate(
        {
            "run": {"id": run_streams, "dir": tmp_path / "runs"}, "nats": nats_settings, "s3": s3_settings,
            "model": {"path": tmp_path / "model"}, "data": {"train": [tmp_path / "train.jsonl"]},
            "rollout": {"max_new_tokens": 8},
        }
    )  # fmt: skip
    root = settings.run.folder / "checkpoints"
    for chapter, step in ((1, 2), (2, 4)):
        data = checkpoint.commit(root, state(step, run_streams, chapter=chapter), write, keep=2)
    bucket = bus.key_value(streams.state_bucket(run_streams).bucket).wait()
    bucket.put(streams.CHECKPOINT_KEY, key(2, state_json=data)).wait()
    single = Ranks.__new__(Ranks)
    single.rank, single.num_ranks = 0, 1

    def start() -> None:
        train(settings, b"{}", single, threading.Event())

    shutil.move(root / "step00000004", tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"of step 4, .*is older: .*step00000002 .*resume_older_step = 2"):
        start()
    shutil.move(tmp_path / "kept", root / "step00000004")
    _flip(root / "step00000004")
    with pytest.raises(
        CheckpointError, match=r"step00000004 is not as it was committed:\n  engine/weights\.bin: expected"
    ):
        start()
