"""Copies of a run's checkpoints in the object store, so that a trainer resumes on a machine that lacks the run's folder.

With ``trainer.store_checkpoints`` a checkpoint is copied after the rename that commits it in the folder, and before its key
in NATS and its acknowledgements: whatever NATS names is whole in the object store, and no group is acknowledged that only a
disk remembers. ``state.json`` is stored last. A file that an earlier checkpoint of the same epoch stored is not sent again.

The object store holds the checkpoints that the folder holds. A trainer removes objects of its own and older epochs only, and
never relies on files that an older epoch stored but for the checkpoint it resumed: one that lost its lease and goes on
removes nothing that its successor needs.
"""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from penstock.protocol import blob_keys
from penstock.protocol.errors import BlobError
from penstock.protocol.facts import BlobRef, decode
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
from penstock.trainer.errors import CheckpointError
from penstock.trainer.recovery import durable_folders

log = structlog.get_logger("trainer.recovery.stored_checkpoints")

_THREADS = 4  # files sent or fetched at the same time


class StoredCheckpoints:
    """The checkpoints of one run in the object store."""

    def __init__(self, blobs: Blobs, run_id: str, *, root: Path, metrics: Path) -> None:
        """Prepare; ``root`` is the folder of the run's checkpoints, ``metrics`` its ``metrics.jsonl``."""
        self._blobs = blobs
        self._run_id = run_id
        self._root = root
        self._metrics = metrics

    def store(self, folder: Path) -> None:
        """Copy one committed checkpoint, its ``state.json`` last.

        Raises:
            CheckpointError: A file is not the one that ``state.json`` names.
            BlobError: The object store refused it, or gave no answer.
        """
        data = (folder / STATE_FILE).read_bytes()
        state, state_sha256 = read_state(folder), hashlib.sha256(data).hexdigest()
        stored = self._listed()
        if (last := blob_keys.checkpoint_state(self._run_id, state.epoch, state_sha256)) in stored:
            return
        paths = {blob_keys.checkpoint_file(self._run_id, state.epoch, sha): path for path, sha in state.files.items()}

        def send(key: str) -> None:
            found = self._blobs.put_file(key, folder / paths[key]).sha256
            if found != (expected := state.files[paths[key]]):
                self._blobs.delete([key])
                raise CheckpointError(
                    f"{folder / paths[key]}: expected sha256 {expected}, got {found}: it was altered after it was committed. "
                    "The checkpoint before it is unchanged in the object store; start the trainer again"
                )

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(send, [key for key in paths if key not in stored]))
        with self._metrics.open("rb") as file:
            metrics = file.read(state.metrics_bytes)
        sha256 = hashlib.sha256(metrics).hexdigest()
        self._blobs.put(blob_keys.checkpoint_metrics(self._run_id, state.epoch, state_sha256, sha256), metrics)
        self._blobs.put(last, data)

    def prune(self, epoch: int) -> None:
        """Remove the objects of the present and older epochs that no checkpoint in the folder names."""
        kept = set[str]()
        for folder, state in committed(self._root):
            sha256 = hashlib.sha256((folder / STATE_FILE).read_bytes()).hexdigest()
            kept.update(blob_keys.checkpoint_file(self._run_id, state.epoch, one) for one in state.files.values())
            kept.add(blob_keys.checkpoint_state(self._run_id, state.epoch, sha256).removesuffix(STATE_FILE))
        self._blobs.delete(
            key
            for key in self._listed()
            if self._epoch_of(key) <= epoch and key not in kept and key.rpartition("/")[0] + "/" not in kept
        )

    def fetch(self, known: bytes | None, found: CheckpointState | None) -> bool:
        """Copy the checkpoint that NATS names into the folder, if the folder's newest is older and the object store has it.

        Args:
            known: The checkpoint key of the run in NATS, None when there is none.
            found: The newest checkpoint of the folder, None when there is none.

        Returns:
            True if the folder has a checkpoint more than before.

        Every file is verified against ``state.json``, and that against NATS, before the folder gets its name.
        Raises BlobError for an object that is missing, altered or not to be had, OSError when the disk is full.
        """
        wanted = decode(known, CheckpointCommitted) if known is not None else None
        if wanted is None or wanted.step is None or wanted.chapter is None or wanted.state_sha256 is None:
            return False  # no checkpoint was committed
        if found is not None and found.chapter >= wanted.chapter:
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

        def receive(path: str) -> None:
            key = blob_keys.checkpoint_file(self._run_id, state.epoch, state.files[path])
            if key not in sizes:
                raise BlobError(
                    f"{key} is missing in the object store: the stored checkpoint of step {state.step} is not whole"
                )
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            self._blobs.get_file(BlobRef(key=key, size_bytes=sizes[key], sha256=state.files[path]), partial / path)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(receive, state.files))
        self._fetch_metrics(state, last.removesuffix(STATE_FILE) + "metrics.", sizes)
        durable_folders.sync_tree(partial)
        durable_folders.commit(partial, final)
        return True

    def _fetch_metrics(self, state: CheckpointState, prefix: str, sizes: dict[str, int]) -> None:
        """Write the metrics up to the checkpoint, unless the folder has them."""
        if self._metrics.exists() and self._metrics.stat().st_size >= state.metrics_bytes:
            return
        for key in (key for key in sizes if key.startswith(prefix)):
            sha256 = key.removeprefix(prefix).removesuffix(".jsonl")
            self._blobs.get_file(BlobRef(key=key, size_bytes=sizes[key], sha256=sha256), self._metrics)

    def _listed(self) -> dict[str, int]:
        return {stat.key: stat.size_bytes for stat in self._blobs.list(blob_keys.checkpoints_prefix(self._run_id))}

    def _epoch_of(self, key: str) -> int:
        return int(key.removeprefix(blob_keys.checkpoints_prefix(self._run_id)).split("/", 1)[0].removeprefix("e"))
