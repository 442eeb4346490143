"""`penstock runs backup` and `penstock runs restore`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.console import connections
from penstock.deploy.bootstrap import ConnectionSettings
from penstock.forensics.backup.saved_run import SavedRun, checkpoint_elsewhere, inputs_of, restore, save
from penstock.protocol import logs
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

_CONNECT_S = 10.0
_REPORT_EVERY_S = 5.0


def backup_run(run: str, arguments: Sequence[str], folder: Path) -> int:
    return _explained(lambda: _save(run, arguments, folder))


def restore_run(folder: Path, arguments: Sequence[str]) -> int:
    return _explained(lambda: _restore(folder, arguments))


def _explained(work: Callable[[], int]) -> int:
    logs.configure("backup", level="error")
    try:
        return work()
    except OSError as err:
        print(f"penstock: {err}; nothing on the servers was changed", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("penstock: interrupted; repeat the command, it continues", file=sys.stderr)
        return 130


def _save(run: str, arguments: Sequence[str], folder: Path) -> int:
    settings = connections.find(arguments, os.environ, run_id=run).settings
    with Bus.connect(settings.nats, name="backup", deadline_s=_CONNECT_S) as bus:
        saved = save(run, bus, Blobs(settings.s3), folder, _Progress())
        missing = checkpoint_elsewhere(saved, bus)
    print(f"saved run {run} in {folder}: {_described(saved)}")
    if missing is not None:
        print(
            f"the checkpoint of step {missing} is in the trainer's run folder only: copy that folder too (by default "
            f"runs/{run}), without its store/, or the restored run cannot be resumed, only audited and replayed"
        )
    for name in inputs_of(saved, folder):
        print(f"it trained on the groups of {name}: replay needs them too; back up or keep {name}")
    print(f"next, on the other servers: penstock runs restore {folder} nats.url=URL s3.endpoint=URL")
    return 0


def _restore(folder: Path, arguments: Sequence[str]) -> int:
    files, overrides = split_arguments(arguments)
    settings = load(ConnectionSettings, files=files, overrides=overrides, environ=os.environ).settings
    with Bus.connect(settings.nats, name="restore", deadline_s=_CONNECT_S) as bus:
        saved = restore(folder, bus, Blobs(settings.s3), settings.retention.limits(), _Progress())
    print(
        f"restored run {saved.run_id}, saved {saved.made_at}, at {settings.nats.url} and "
        f"{settings.s3.endpoint}/{settings.s3.bucket}: {_described(saved)}"
    )
    print(f"next: penstock audit {saved.run_id}")
    return 0


def _described(saved: SavedRun) -> str:
    return (
        f"{len(saved.streams)} streams and buckets ({saved.num_messages} messages), {len(saved.objects)} objects, "
        f"{saved.num_bytes / 1e6:.1f} MB"
    )


class _Progress:
    def __init__(self) -> None:
        self._next = time.monotonic() + _REPORT_EVERY_S

    def __call__(self, text: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_EVERY_S
            print(text, file=sys.stderr)
