"""Every tracker's real library, offline, in two sessions; what it wrote is read back.

The suite has tensorboardX; `make test-more NAME=trackers` installs the others in an environment of their own.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.console.tracking.interface import TRACKERS
from penstock.protocol.errors import ConfigError

_SESSIONS = """
import os, sys
from pathlib import Path
from penstock.console.tracking.interface import EVENT, TRACKERS, Destination, Row
name, folder = sys.argv[1], Path(sys.argv[2])
kind = TRACKERS.find(name).value
def row(event, step, **values):
    return Row(event, step, 1700000000.0 + event, {**values, EVENT: float(event)})
destination = Destination(run_id="my-run", key="00112233445566ff", project="p", name="n", folder=folder,
                          is_folder_chosen=True, tags=("a",), options={}, config={"trainer.lr": 1e-6})
if sys.argv[3] == "first":
    writer = kind.open(destination)
    print("held", writer.last_event)
    for event, step in ((1, 1), (2, 2), (4, 3)):
        writer.write(row(event, step, **{"train/loss": 1.0 / step}))
    writer.flush()
    if os.environ.get("KILLED"):
        os.kill(os.getpid(), 9)
    writer.close(finished=False)
else:
    writer = kind.open(destination)
    print("held", writer.last_event)
    writer.write(row(5, 1, **{"eval/accuracy": 0.75}))
    writer.write(row(6, 4, **{"train/loss": 0.25}))
    writer.flush()
    writer.table("samples", 4, ("step", "prompt", "completion", "reward"), [(4, "1+1", "2 | two", 1.0)])
    (folder / "report.md").write_text("# Report")
    writer.file(folder / "report.md")
    writer.flush()
    writer.close(finished=True)
"""
_EXPECTED = {
    ("train/loss", 1, 1.0),
    ("train/loss", 2, 0.5),
    ("train/loss", 3, 0.3333),
    ("train/loss", 4, 0.25),
    ("eval/accuracy", 1, 0.75),
}
_Found = Counter[tuple[str, int, float]]


def _tensorboard(folder: Path) -> _Found:
    from tests.console.tracking import event_files

    return event_files.values(folder)


def _mlflow(folder: Path) -> _Found:
    with sqlite3.connect(folder / "mlflow.db") as db:
        rows = db.execute("select key, step, value from metrics where key != 'penstock/event'").fetchall()
    return Counter((name, step, round(value, 4)) for name, step, value in rows)


def _trackio(folder: Path) -> _Found:
    with sqlite3.connect(folder / "p.db") as db:
        rows = db.execute("select step, metrics from metrics").fetchall()
    figures = ((name, step, value) for step, text in rows for name, value in json.loads(text).items())
    return Counter(
        (name, step, round(value, 4)) for name, step, value in figures if "/" in name and name != "penstock/event"
    )


def _wandb(folder: Path) -> _Found:
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    found: _Found = Counter()
    for path in folder.glob("wandb/offline-run-*/run-*.wandb"):
        for data in _leveldb(path.read_bytes()):
            items = {
                "/".join(one.nested_key) or one.key: one.value_json for one in Record.FromString(data).history.item
            }
            step = int(float(items.get("step", "0")))
            found.update((k, step, round(float(v), 4)) for k, v in items.items() if "/" in k and k != "penstock/event")
    return found


def _leveldb(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format: blocks of 32 KiB, a header of 7 bytes for the file and each part."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


_READERS: dict[str, Callable[[Path], _Found]] = {
    "tensorboard": _tensorboard, "mlflow": _mlflow, "trackio": _trackio, "wandb": _wandb,
}  # fmt: skip
_OF_THE_TABLE = {"wandb": b"samples.table.json"}  # offline, its artifacts wait in a folder of the user's, listed here
_CAN_TELL = ("tensorboard", "mlflow", "trackio")


def _session(name: str, folder: Path, which: str, **more: str) -> str:
    kind = TRACKERS.find(name).value
    try:
        kind.require_installed()
    except ConfigError as err:
        if os.environ.get("PENSTOCK_TEST_TRACKERS"):
            raise
        pytest.skip(str(err))
    environ = {**os.environ, "WANDB_MODE": "offline", "SWANLAB_MODE": "offline", **more}
    command = [sys.executable, "-c", _SESSIONS, name, str(folder), which]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == (-9 if "KILLED" in more else 0), done.stderr[-3000:]
    return next((line for line in done.stdout.splitlines() if line.startswith("held ")), "")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TRACKERS.built_in))
def test_a_tracker_holds_each_figure_of_two_sessions_once(name: str, tmp_path: Path) -> None:
    """Opened, closed and opened again; with a table of samples and the report."""
    _session(name, tmp_path, "first")
    held = _session(name, tmp_path, "second")
    if name in _CAN_TELL:
        assert held == "held 4"
    if name in _READERS:
        found = _READERS[name](tmp_path)
        assert {one for one in found if one[0] in ("train/loss", "eval/accuracy")} == _EXPECTED
        assert set(found.values()) == {1}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "report.md")
    assert _OF_THE_TABLE.get(name, b"1+1") in written, "the table of samples"


@pytest.mark.slow
@pytest.mark.parametrize("name", _CAN_TELL)
def test_a_tracker_that_can_tell_knows_what_it_held_when_it_was_killed(name: str, tmp_path: Path) -> None:
    _session(name, tmp_path, "first", KILLED="1")
    assert _session(name, tmp_path, "second") == "held 4"
    assert set(_READERS[name](tmp_path).values()) == {1}
