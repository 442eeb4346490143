"""Copies of a run's checkpoints in the object store, to resume on a machine that lacks the run's folder.

With ``trainer.store_checkpoints`` a checkpoint is copied after the rename that commits it in the folder, and before its
key in NATS and its acknowledgements: whatever NATS names is whole in the object store, and no group is acknowledged
that only a disk remembers. ``state.json`` is stored last. A file that an earlier checkpoint of the same epoch stored is
not sent again.

The object store holds the checkpoints that the folder holds. A trainer removes objects of its epoch and of older epochs
only, and uses objects of an older epoch only for the checkpoint that it resumed. A trainer that goes on after it lost
its lease therefore removes nothing that its successor needs.

Without ``trainer.local_checkpoints`` only ``state.json`` of a checkpoint stays in the folder:

```
folder, whole ──▶ each file sent ──▶ each read back ──▶ state.json stored ──▶ key in NATS ──▶ files removed here
```

Wherever the trainer is killed, the checkpoint is complete in the folder or in the object store; until the first file is
removed, in both. What is missing here is fetched again before it is loaded, whatever part of the files that is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from penstock.protocol import blob_keys, files
from penstock.protocol.errors import BlobCorrupt, BlobError, BlobMissing
from penstock.protocol.facts import decode
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.checkpoint_state import (
    PARTIAL,
    STATE_FILE,
    CheckpointState,
    committed,
    folder_name,
    read_state,
)
from penstock.protocol.record.lineage import CheckpointCommitted
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer import crash_points
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import CheckpointError
from penstock.trainer.recovery.checkpoint import commit_folder, missing_files, path_of, sync_tree

log = structlog.get_logger("trainer.recovery.stored_checkpoints")

_THREADS = 4  # files sent or fetched at the same time
_READ_BACK_BYTES = 8 * 1024 * 1024  # of one request


class StoredCheckpoints:
    def __init__(self, blobs: Blobs, run_id: str, *, root: Path, metrics: Path, keeps_local: bool = True) -> None:
        """``root`` has the run's checkpoints, whose files stay there after they are stored if ``keeps_local``."""
        self._blobs, self._run_id, self._root = blobs, run_id, root
        self._metrics, self._keeps_local = metrics, keeps_local
        self._read_keys = set[str]()  # objects that this session has read whole
        self._named: list[tuple[Path, bytes]] = []  # folders whose files may be removed, with their state.json

    def store(self, folder: Path) -> None:
        """Copy one committed checkpoint, its ``state.json`` last, and read back files that will not stay in the folder.

        Raises CheckpointError for a file that is not the one that ``state.json`` names, BlobError if the object store refused it or
        gave no answer.
        """
        data = (folder / STATE_FILE).read_bytes()
        state, state_sha256 = read_state(folder), _sha256(data)
        stored = self._listed()
        last = blob_keys.checkpoint_state(self._run_id, state.epoch, state_sha256)
        paths = {blob_keys.checkpoint_file(self._run_id, state.epoch, sha): path for path, sha in state.files.items()}

        def send(key: str) -> None:
            self._read_keys.discard(key)
            digest = self._blobs.put_file(key, folder / paths[key]).sha256
            if digest != (expected := state.files[paths[key]]):
                self._blobs.delete([key])
                raise CheckpointError(
                    f"{folder / paths[key]}: expected sha256 {expected}, got {digest}: it was altered after it was "
                    "committed. The checkpoint before it is unchanged in the object store; start the trainer again"
                )

        if last not in stored:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(send, [key for key in paths if key not in stored]))
        if not self._keeps_local:
            self._read_back({key: folder / path for key, path in paths.items()}, last)
        if last in stored:
            return
        with self._metrics.open("rb") as file:
            metrics = file.read(state.metrics_bytes)
        self._blobs.put(
            blob_keys.checkpoint_metrics(self._run_id, state.epoch, state_sha256, _sha256(metrics)), metrics
        )
        self._blobs.put(last, data)

    def mark_named(self, folder: Path, state_json: bytes) -> None:
        """Record that `store` has copied a checkpoint and NATS names it: its files here are no longer needed."""
        if not self._keeps_local:
            self._named.append((folder, state_json))

    def remove_local(self, confirm: Callable[[], None]) -> None:
        """Remove the files of named checkpoints from the disk, each but its ``state.json``.

        No rank may be reading them. ``confirm`` raises LeaseLost when another trainer holds the run, and may read them.
        """
        while self._named:
            confirm()
            folder, state_json = self._named.pop()
            if not (folder / STATE_FILE).is_file() or (folder / STATE_FILE).read_bytes() != state_json:
                continue  # removed or replaced meanwhile
            state = read_state(folder)
            for path in state.files:
                path_of(folder, path).unlink(missing_ok=True)
                crash_points.reach(CrashPoint.REMOVING)
            for parent, _, names in os.walk(folder, topdown=False):
                for name in names:
                    if name.endswith(PARTIAL):  # of an interrupted fetch
                        (Path(parent) / name).unlink()
                if Path(parent) != folder and not any(Path(parent).iterdir()):
                    Path(parent).rmdir()

    def prune(self, epoch: int) -> None:
        kept = set[str]()
        for folder, state in committed(self._root):
            kept.update(blob_keys.checkpoint_file(self._run_id, state.epoch, file) for file in state.files.values())
            kept.add(_state_key(folder, state).removesuffix(STATE_FILE))
        self._blobs.delete(
            key
            for key in self._listed()
            if self._epoch_of(key) <= epoch and key not in kept and key.rpartition("/")[0] + "/" not in kept
        )

    def fetch(self, known: bytes | None, checkpoint: CheckpointState | None) -> bool:
        """Copy the checkpoint that NATS names into the folder, if it is newer; True if it was copied.

        Every file is verified against ``state.json``, and that against NATS, before the folder gets its name. Raises
        BlobError for an object that is missing, altered or unreachable, OSError when the disk is full.
        """
        wanted = decode(known, CheckpointCommitted) if known is not None else None
        if wanted is None or wanted.step is None or wanted.chapter is None or wanted.state_sha256 is None:
            return False  # no checkpoint was committed
        if checkpoint is not None and checkpoint.chapter >= wanted.chapter:
            return False
        sizes = self._listed()
        last = next((key for key in sizes if key.endswith(f"/{wanted.state_sha256}/{STATE_FILE}")), None)
        if last is None:
            return False
        final = self._root / folder_name(wanted.step)
        partial = self._root / f"{final.name}.fetched{PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        log.info("fetching the checkpoint from the object store", step=wanted.step, folder=str(final))
        self._blobs.get_file(
            BlobRef(key=last, size_bytes=sizes[last], sha256=wanted.state_sha256), partial / STATE_FILE
        )
        state = read_state(partial)
        self._read_keys |= _receive(self._blobs, partial, state, state.files, sizes)
        self._fetch_metrics(state, last.removesuffix(STATE_FILE) + "metrics.", sizes)
        sync_tree(partial)
        commit_folder(partial, final)
        return True

    def complete(self, folder: Path, state: CheckpointState) -> None:
        """Fetch the files of a checkpoint that are not in its folder, if the object store has a copy of it.

        ``state`` is the one that NATS names, or a person asked for. Raises BlobError for an object that is missing,
        altered or unreachable, OSError when the disk is full.
        """
        missing = missing_files(folder, state)
        if missing and _state_key(folder, state) in self._listed():
            log.info("fetching files of the checkpoint", step=state.step, folder=str(folder), num_files=len(missing))
            self._read_keys |= _receive(self._blobs, folder, state, missing, self._listed())

    def _read_back(self, files: dict[str, Path], last: str) -> None:
        sizes = self._listed()

        def read(key: str) -> None:
            size = files[key].stat().st_size
            ref = BlobRef(key=key, size_bytes=size, sha256=_sha256(b""))  # each part has a separate sha256
            try:
                if (stored_size := sizes.get(key)) != size:
                    raise BlobCorrupt(f"{key}: {stored_size} bytes, expected {size}")
                with files[key].open("rb") as file:
                    for offset in range(0, size, _READ_BACK_BYTES):
                        part = file.read(_READ_BACK_BYTES)
                        self._blobs.get_range(ref, offset, len(part), _sha256(part))
            except (BlobCorrupt, BlobMissing) as err:
                self._blobs.delete([last, key])
                raise CheckpointError(
                    f"the object store does not return what it was sent: {err}. {files[key].parent} is whole, and the "
                    "checkpoint before it is unchanged in the object store; "
                    "check the store, and start the trainer again"
                ) from err
            self._read_keys.add(key)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(read, sorted(files.keys() - self._read_keys)))

    def _fetch_metrics(self, state: CheckpointState, prefix: str, sizes: dict[str, int]) -> None:
        if self._metrics.exists() and self._metrics.stat().st_size >= state.metrics_bytes:
            return
        for key in (key for key in sizes if key.startswith(prefix)):
            sha256 = key.removeprefix(prefix).removesuffix(".jsonl")
            self._blobs.get_file(BlobRef(key=key, size_bytes=sizes[key], sha256=sha256), self._metrics)

    def _listed(self) -> dict[str, int]:
        return _sizes(self._blobs, self._run_id)

    def _epoch_of(self, key: str) -> int:
        return int(key.removeprefix(blob_keys.checkpoints_prefix(self._run_id)).split("/", 1)[0].removeprefix("e"))


def complete_copy(blobs: Blobs, folder: Path, state: CheckpointState, scratch: Path) -> Path:
    """Return a folder with all files of a checkpoint: ``folder`` if it is complete, else a copy in ``scratch`` of the stored one.

    The folder of the checkpoint is not changed; it is returned as it is where the object store has no copy of it
    either. Raises BlobError for an object that is missing, altered or unreachable.
    """
    if not missing_files(folder, state):
        return folder
    sizes = _sizes(blobs, state.run_id)
    if _state_key(folder, state) not in sizes:
        return folder
    copy = scratch / folder.name
    copy.mkdir()
    shutil.copyfile(folder / STATE_FILE, copy / STATE_FILE)
    _receive(blobs, copy, state, state.files, sizes)
    return copy


def _state_key(folder: Path, state: CheckpointState) -> str:
    return blob_keys.checkpoint_state(state.run_id, state.epoch, _sha256((folder / STATE_FILE).read_bytes()))


def _sizes(blobs: Blobs, run_id: str) -> dict[str, int]:
    return {stat.key: stat.size_bytes for stat in blobs.list(blob_keys.checkpoints_prefix(run_id))}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _receive(
    blobs: Blobs, folder: Path, state: CheckpointState, paths: Iterable[str], sizes: dict[str, int]
) -> set[str]:
    def receive(path: str) -> str:
        final = path_of(folder, path)
        key = blob_keys.checkpoint_file(state.run_id, state.epoch, state.files[path])
        if key not in sizes:
            raise BlobError(
                f"{key} is missing in the object store: the stored checkpoint of step {state.step} is not whole; "
                "restore the object, or remove the checkpoint's folder below run.dir and set trainer.resume_older_step "
                "to the step of the one before it"
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = final.with_name(f"{final.name}.fetched{PARTIAL}")
        blobs.get_file(BlobRef(key=key, size_bytes=sizes[key], sha256=state.files[path]), partial)
        files.fsync(partial)
        files.replace(partial, final)
        crash_points.reach(CrashPoint.FETCHED)
        return key

    with ThreadPoolExecutor(_THREADS) as pool:
        return set(pool.map(receive, paths))
