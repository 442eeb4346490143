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


@pytest.mark.parametrize(
    ("known", "found"),
    [
        pytest.param(None, None, id="a new run"),
        pytest.param(encode(CheckpointCommitted(epoch=1)), None, id="a run without a checkpoint"),
        pytest.param(None, at(3), id="a run whose key was deleted"),
        pytest.param(encode(CheckpointCommitted(epoch=1)), at(1), id="killed after the first rename, before its key"),
        pytest.param(
            key(2, state_json=b"an earlier one", record="earlier"),
            at(3),
            id="killed after a later rename, before its key",
        ),
        pytest.param(key(3), at(3), id="killed after the key"),
    ],
)
def test_every_checkpoint_that_a_kill_leaves_is_resumed(known: bytes | None, found: CheckpointState | None) -> None:
    """Between the rename and its key in NATS the folder is one chapter ahead; before and after they agree."""
    check_is_newest(known, Path("checkpoints"), found, JSON, older_step=None)


@pytest.mark.parametrize(
    ("known", "found", "expected"),
    [
        pytest.param(
            key(3, step=50),
            None,
            r"in NATS: the newest committed checkpoint is of step 50, version 9 .*checkpoints has no checkpoint.*run\.dir",
            id="no checkpoint",
        ),
        pytest.param(
            key(7, step=50),
            at(5),
            r"of step 50.*newest in checkpoints is older: checkpoints/step00000004 is of step 4.*resume_older_step = 4",
            id="the newest folder is missing",
        ),
        pytest.param(key(6), at(5), r"chapter 6 .*is older: .*\(chapter 5\)", id="the same step, an older state"),
        pytest.param(key(5, state_json=b"other"), at(5), r"was altered, or is of another run", id="an altered state"),
        pytest.param(key(5, record="elsewhere"), at(5), r"was altered, or is of another run", id="another record"),
    ],
)
def test_any_other_checkpoint_is_refused(known: bytes, found: CheckpointState | None, expected: str) -> None:
    """The error names what NATS expects, where it was looked for, and the setting that resumes anyway."""
    with pytest.raises(CheckpointError, match=expected):
        check_is_newest(known, Path("checkpoints"), found, JSON, older_step=None)
    with pytest.raises(CheckpointError, match=expected):
        check_is_newest(known, Path("checkpoints"), found, JSON, older_step=3)
    if found is not None:
        check_is_newest(known, Path("checkpoints"), found, JSON, older_step=4)


def _flip(folder: Path) -> None:
    path = folder / "engine" / "weights.bin"
    data = path.read_bytes()
    path.write_bytes(data[:3] + bytes([data[3] ^ 1]) + data[4:])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        pytest.param(_flip, r"engine/weights\.bin: expected sha256 [0-9a-f]{64}, got [0-9a-f]{64}", id="a flipped bit"),
        pytest.param(lambda f: (f / "engine" / "weights.bin").unlink(), r"engine/weights\.bin: missing", id="missing"),
        pytest.param(
            lambda f: (f / "engine" / "more_optim_states.pt").write_bytes(b"x"),
            r"engine/more_optim_states\.pt: not part of the checkpoint",
            id="one file more",
        ),
    ],
)
def test_an_altered_file_is_refused_by_its_name(
    tmp_path: Path, damage: Callable[[Path], object], expected: str
) -> None:
    """Hashes are recorded at the commit, and stay when only the state is replaced."""
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
