"""Writes the run record (`protocol/record/lineage.py`), one chapter per checkpoint.

A chapter is what one checkpoint adds to the record. It stores the sessions of a run as ``lives``.

The batch at which a run stopped by itself is written to the run's folder, for people to look at and to train on again.
```
stopped/step00000012/batch.json      step, version, why, and every group as it was scored
                     config.json     the settings of the session, as in the run's record
                     groups.parquet  their trajectories, a pack as workers store them: `protocol/packs/group_pack.py`
```

The packs in the object store may expire; the folder stays until somebody removes it. A run that stops at the same step again
replaces it.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from penstock.protocol import blob_keys, files
from penstock.protocol.facts import encode, encode_unbounded
from penstock.protocol.groups import BlobRef
from penstock.protocol.packs import group_pack
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import (
    CheckpointCommitted,
    LineageChapter,
    RecordedGroup,
    RecordedSession,
    RecordedStep,
)
from penstock.protocol.record.stopped_batch import BATCH, FOLDER, GROUPS, SETTINGS, StoppedBatch
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.groups.group_totals import Entries
from penstock.trainer.groups.prompt_cursor import GroupKey
from penstock.trainer.learner.step_plan import NO_AGES, ReadyGroup
from penstock.trainer.recovery.lease import FencedKey

_LIBRARIES = ("torch", "deepspeed", "transformers", "numpy")
_PACKAGES = ("trainer", "protocol")  # their code computes the numbers
THREADS = "threads"
_ROWS = "rows"
_BEFORE = {_ROWS: "padded"}  # in records without the key: the sums of a step are in another order, equal up to rounding

_PARTIAL = ".partial"


def environment_fingerprint(extensions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Describe this process; equal descriptions give the same bits on a CPU, for the same groups and settings.

    ``extensions`` are the digests of user code that the settings choose (`AlgorithmSettings.extension_digests`).
    """
    return {
        **{name: _version(name) for name in _LIBRARIES},
        "python": platform.python_version(),
        "code": _code_digest(),
        "machine": _machine(),
        THREADS: str(torch.get_num_threads()),
        _ROWS: "packed, prefixes once",
        **(extensions or {}),
    }


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    then = {**_BEFORE, **then} if then else then
    return [
        f"{name}: {then[name]} then, {now.get(name, 'unknown')} now" for name in then if then[name] != now.get(name)
    ]


@functools.cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


@functools.cache
def _code_digest() -> str:
    root, digest = Path(__file__).absolute().parents[2], hashlib.sha256()
    for path in sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{next(iter(names), platform.processor() or platform.machine())}, {torch.backends.cpu.get_cpu_capability()}"


class RunRecordWriter:
    """Collects sessions and steps until a checkpoint writes them as a chapter; `mark_committed` may be called by another thread."""

    def __init__(
        self, connections: Connections, pointer: FencedKey, *, epoch: int, resumed: CheckpointState | None
    ) -> None:
        self._run_id, self._blobs = connections.run_id, connections.blobs
        self._pointer, self._epoch = pointer, epoch
        self._last = resumed.record if resumed else None
        self._number = resumed.chapter if resumed else 0
        self._sessions: list[RecordedSession] = []
        self._steps: list[RecordedStep] = []
        self.committed: CheckpointState | None = None  # set by `mark_committed`
        self._open_step: dict[str, Any] | None = None  # the newest step, until the digest of its weights is known
        self._digest: Callable[[], str] | None = None

    @property
    def is_empty(self) -> bool:
        return not (self._sessions or self._steps or self._open_step)

    def set_weights(self, digest: Callable[[], str]) -> None:
        """Set the weights of the next step; ``digest`` is called once, before the next weights are copied."""
        self._digest = functools.cache(digest)

    def digest(self) -> str:
        if self._digest is None:
            raise ValueError("no weights were set yet")
        return self._digest()

    def add_session(
        self,
        *,
        holder: str,
        at: float,
        step: int,
        version: int,
        parent: int | None,
        config: bytes,
        extensions: Mapping[str, str] | None = None,
    ) -> None:
        """Add this session to the next chapter; ``extensions`` are the digests of user code."""
        key = blob_keys.lineage_config(self._run_id, hashlib.sha256(config).hexdigest())
        self._sessions.append(
            RecordedSession(
                epoch=self._epoch,
                holder=holder,
                at=at,
                step=step,
                version=version,
                parent_version=parent,
                weights_digest=self.digest(),
                config=self._blobs.put(key, config),
                environment=environment_fingerprint(extensions),
            )
        )

    def add_step(  # noqa: PLR0913  what a step is recorded with
        self,
        step: int,
        trained: PolicyVersion,
        made: PolicyVersion,
        batch: Sequence[ReadyGroup],
        skipped: Mapping[str, int],
        uses: Mapping[str, int],
        *,
        updates: Sequence[Sequence[int]] = (),
        left_out: Sequence[int] = (),
        ages: Mapping[int, int] = NO_AGES,
    ) -> None:
        """Add a step; `set_weights` with its result must follow. ``uses`` are each group's, this one included."""
        self._close_step()
        packs = {group.pack.key: group.pack for group in batch}
        numbers = {key: number for number, key in enumerate(packs)}
        self._digest = None
        self._open_step = {
            "epoch": self._epoch,
            "step": step,
            "trained_version": trained,
            "made_version": made,
            "packs": tuple(packs.values()),
            "groups": tuple(
                RecordedGroup(
                    prompt=GroupKey.parse(group.group_id).prompt,
                    pack=numbers[group.pack.key],
                    scored=group.scored,
                    use=uses[group.group_id],
                )
                for group in batch
            ),
            "skipped": dict(skipped),
            "updates": tuple(map(tuple, updates)),
            "left_out": tuple(left_out),
            "ages": tuple(ages.items()),
        }

    def write(self, entries: Entries, *, step: int, version: PolicyVersion) -> tuple[BlobRef, int, str]:
        """Store the next chapter; return its reference and number, and the digest of the weights.

        A chapter counts once a committed checkpoint names it; `mark_committed` must follow before the next one. Raises the errors of `Blobs.put`.
        """
        self._close_step()
        chapter = LineageChapter(
            run_id=self._run_id,
            number=self._number + 1,
            parent=self._last,
            epoch=self._epoch,
            step=step,
            version=version,
            weights_digest=self.digest(),
            lives=tuple(self._sessions),
            steps=tuple(self._steps),
            issued=entries.issued,
            revived=entries.reopened,
            dropped=entries.dropped,
            evaluated=entries.evaluated,
            closed_packs=entries.closed_packs,
            account=entries.account,
        )
        self._sessions, self._steps = [], []  # what is added from now on is of the next chapter
        key = blob_keys.lineage_chapter(self._run_id, chapter.number, self._epoch, secrets.token_hex(4))
        return self._blobs.put(key, encode_unbounded(chapter)), chapter.number, chapter.weights_digest

    def mark_committed(self, state: CheckpointState, state_json: bytes) -> None:
        """Name a committed checkpoint in NATS; raises LeaseLost, and BusUnreachable after two minutes."""
        committed = CheckpointCommitted(
            epoch=self._epoch,
            step=state.step,
            version=state.version,
            chapter=state.chapter,
            record=state.record,
            state_sha256=hashlib.sha256(state_json).hexdigest(),
        )
        self._pointer.move(encode(committed))
        self._last, self._number = state.record, state.chapter
        self.committed = state

    def _close_step(self) -> None:
        if self._open_step is not None:
            self._steps.append(RecordedStep(**self._open_step, weights_digest=self.digest()))
            self._open_step = None


def save_batch(
    run_folder: Path, batch: Sequence[ReadyGroup], error: Exception, *, config: bytes, **fields: Any
) -> Path:
    """Save the groups of a batch below a run's folder, in the order of their use, and return where; raises OSError.

    ``config`` are the session's settings as JSON, with which `penstock replay RUN --batch` trains on the batch again; ``fields``
    are the other fields of `StoppedBatch`.
    """
    scored = tuple(
        group.scored.model_copy(update={"generated": group.scored.generated.model_copy(update={"row_group": number})})
        for number, group in enumerate(batch)
    )
    document = StoppedBatch(reason=str(error), error=type(error).__name__, groups=scored, **fields)
    folder = run_folder / FOLDER / f"step{document.step:08d}"
    partial = folder.with_name(folder.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files.atomic_write(partial / SETTINGS, config, sync=True)
    files.atomic_write(partial / GROUPS, group_pack.encode([group.group for group in batch]), sync=True)
    files.atomic_write(partial / BATCH, document.model_dump_json(indent=1).encode() + b"\n", sync=True)
    shutil.rmtree(folder, ignore_errors=True)
    files.replace(partial, folder)
    return folder
