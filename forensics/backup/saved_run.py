"""The folder of a backup: ``backup.json``, a file for each stream, a file for each object.

    backup.json                 what is saved, with sizes and hashes; written last
    streams/NAME.snapshot       a stream with its consumers, in the server's own format
    objects/SHA256              an object, under the hash of its bytes

Objects never change, so a second backup into the same folder copies only those that are new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from penstock.protocol import blob_keys, streams
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.facts import Sha256
from penstock.protocol.files import read_regular
from penstock.protocol.subjects import check_run_id

CONTENTS = "backup.json"
_CHUNK_BYTES = 1024 * 1024


class BackupBroken(PenstockError):
    """A file of a backup is missing or altered."""


class SavedStream(BaseModel):
    """One stream or key-value bucket; ``config`` and ``state`` are the server's words."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    config: dict[str, Any]
    state: dict[str, Any]
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class SavedObject(BaseModel):
    """One object; ``sha256`` is also the name of its file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class SavedRun(BaseModel):
    """What ``backup.json`` holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["penstock_backup.v1"] = "penstock_backup.v1"
    run_id: str
    penstock: str  # version that made it
    made_at: str  # ISO 8601, UTC
    streams: tuple[SavedStream, ...]
    objects: tuple[SavedObject, ...]

    @field_validator("run_id")
    @classmethod
    def _run_id(cls, value: str) -> str:
        return check_run_id(value)

    @property
    def num_bytes(self) -> int:
        """Bytes of all streams and objects."""
        return sum(one.size_bytes for one in (*self.streams, *self.objects))

    @property
    def num_messages(self) -> int:
        """Messages of all streams and buckets."""
        return sum(int(one.state.get("messages", 0)) for one in self.streams)


def names(run_id: str) -> tuple[str, ...]:
    """Return the streams that are saved, the state last: a restored run that has it is whole.

    Heartbeats and leases are not: they end within seconds.
    """
    kept = (streams.scoring_bucket(run_id), streams.state_bucket(run_id))
    return (*streams.stream_names(run_id), *(f"KV_{spec.bucket}" for spec in kept))


def stream_file(folder: Path, name: str) -> Path:
    """Return the file of a stream."""
    return folder / "streams" / f"{name}.snapshot"


def object_file(folder: Path, sha256: str) -> Path:
    """Return the file of an object."""
    return folder / "objects" / sha256


def read(folder: Path) -> SavedRun:
    """Read what a folder holds; raises ConfigError when it is no backup, or names what no run has."""
    try:
        data = read_regular(folder / CONTENTS)
    except OSError as err:
        raise ConfigError(
            f"{folder} is no whole backup: {CONTENTS} cannot be read ({err.strerror or err}); it is written last, so repeat the "
            "backup: penstock runs backup RUN --to FOLDER"
        ) from None
    try:
        found = SavedRun.model_validate(json.loads(data))
    except (ValueError, ValidationError) as err:
        raise ConfigError(f"{folder / CONTENTS} is not what penstock runs backup writes: {str(err)[:500]}") from None
    prefix = blob_keys.run_prefix(found.run_id)
    if [one.name for one in found.streams] != [name for name in names(found.run_id) if name in _named(found)]:
        raise ConfigError(
            f"{folder / CONTENTS} names the streams {sorted(_named(found))}; run {found.run_id} has "
            f"{', '.join(names(found.run_id))}, in this order"
        )
    for stream in found.streams:
        if stream.config.get("name") != stream.name:
            raise ConfigError(f"{folder / CONTENTS}: stream {stream.name} has the configuration of another stream")
    for one in found.objects:
        if not one.key.startswith(prefix):
            raise ConfigError(f"{folder / CONTENTS}: {one.key[:200]!r} is no object of run {found.run_id}")
    return found


def verified(path: Path, size_bytes: int, sha256: str) -> Path:
    """Return a file whose bytes are those that were saved; raises BackupBroken."""
    digest, size = hashlib.sha256(), 0
    try:
        for chunk in chunks(path, _CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    except OSError as err:
        raise BackupBroken(f"{path} cannot be read: {err.strerror or err}; the backup is not whole") from None
    if (size, digest.hexdigest()) != (size_bytes, sha256):
        raise BackupBroken(
            f"{path}: expected {size_bytes} bytes with sha256 {sha256[:12]}…, got {size} with {digest.hexdigest()[:12]}…; the "
            "file was altered"
        )
    return path


def chunks(path: Path, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file."""
    with path.open("rb") as file:
        while chunk := file.read(size):
            yield chunk


def _named(saved: SavedRun) -> set[str]:
    return {one.name for one in saved.streams}
