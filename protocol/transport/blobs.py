"""The connection to the object store.

Only calls that are safe on every S3 server are offered. Tag, legal-hold, retention and policy calls
are not: some servers replace or delete the object on them. Conditional writes are not either, since
several servers ignore them silently; compare-and-swap is done in a key-value bucket of the bus. Keys
are immutable: none is overwritten, and each is verified by the size and sha256 in its message.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.protocol import blob_keys, files
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import BlobCorrupt, BlobError, BlobMissing
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.tls import client_context

if TYPE_CHECKING:
    from penstock.protocol.transport.s3_client import S3Requests

_CHUNK_BYTES = 1024 * 1024
_LARGE_TRIES = 3  # of a file that arrives altered each time
_DELETE_BATCH = 1000  # the limit of one request
_MAX_PART_BYTES = 255  # of a key between two slashes; file systems below S3 servers take no longer name
_NO_DATE = datetime.fromtimestamp(0, UTC)  # for a server that sends none: such an object counts as old


@dataclass(frozen=True, slots=True)
class BlobStat:
    key: str
    size_bytes: int
    modified: datetime  # by the server's clock


class Blobs:
    """One bucket. Thread-safe; coroutines call it through ``asyncio.to_thread``."""

    def __init__(self, settings: S3Settings, *, deadline_s: float = 120.0, run_id: str = "") -> None:
        """``run_id``: the run of a service, whose messages may name any key: one it may not read is `BlobMissing`."""
        self._settings = settings
        self._run_id = run_id
        self._deadline_s = deadline_s
        is_encrypted = settings.endpoint.startswith("https://")
        self._tls = client_context(settings.ca_file, "s3.ca_file") if is_encrypted else None

    @functools.cached_property
    def _requests(self) -> S3Requests:
        """The client, imported when it is first needed."""
        from penstock.protocol.transport.s3_client import S3Requests  # noqa: PLC0415

        return S3Requests(self._settings, self._tls, deadline_s=self._deadline_s, run_id=self._run_id)

    @property
    def bucket(self) -> str:
        return self._settings.bucket

    def check(self, run_id: str, *, deadline_s: float = 15.0) -> None:
        """Raise unless the server answers, the bucket exists and the credentials may list objects of a run.

        A role's credentials may list below some prefixes and not ask for the bucket itself.
        """
        self._requests.list(blob_keys.access_check_prefix(run_id), deadline_s=deadline_s)

    def ensure_bucket(self) -> None:
        """Create the bucket unless it exists (deploy/bootstrap only)."""
        if not self._requests.call("check", lambda client, bucket: client.bucket_exists(bucket), deadline_s=30.0):
            self._requests.call("make bucket", lambda client, bucket: client.make_bucket(bucket), deadline_s=30.0)

    def put(self, key: str, data: bytes) -> BlobRef:
        sha256 = hashlib.sha256(data).hexdigest()
        self._requests.put(key, data)
        return BlobRef(key=key, size_bytes=len(data), sha256=sha256)

    def put_file(self, key: str, path: Path) -> BlobRef:
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
        self._requests.call(f"put {key}", lambda client, bucket: client.fput_object(bucket, key, str(path)))
        return BlobRef(key=key, size_bytes=size, sha256=digest.hexdigest())

    def get(self, ref: BlobRef, *, is_expected: bool = True) -> bytes:
        """Fetch an object and verify it; raises BlobMissing or BlobCorrupt.

        Unless it ``is_expected``, a denied read is not tried again: AWS denies missing keys the login may not list.

        A short or altered answer is fetched again: the network may have altered it. The same twice is the object.
        """
        return self._fetch(ref, 0, ref.size_bytes, ref.sha256, "message", is_expected=is_expected)

    def get_unverified(self, key: str) -> bytes:
        """Fetch an object from a listing, without a size or sha256 to verify it by; raises BlobMissing."""
        _require_key(key)
        return self._requests.get(key)

    def get_range(self, ref: BlobRef, offset: int, size_bytes: int, sha256: str) -> bytes:
        """Fetch a part of an object, verified by the part's sha256; raises BlobMissing or BlobCorrupt.

        As in `get`, a short or altered answer is fetched again before it counts as corrupt.
        """
        return self._fetch(ref, offset, size_bytes, sha256, "manifest")

    def get_file(self, ref: BlobRef, path: Path) -> None:
        """Fetch an object into a file, verified before the file gets its name."""
        _require_key(ref.key)
        partial = path.with_name(path.name + ".partial")
        if ref.size_bytes <= 64 * _CHUNK_BYTES:
            partial.write_bytes(self.get(ref))
        else:
            stored_bytes = self._size_bytes(ref.key)
            if stored_bytes != ref.size_bytes:  # a larger one would fill the disk first
                raise BlobCorrupt(f"{ref.key}: {stored_bytes} bytes, expected {ref.size_bytes}")
            before: set[str] = set()
            while (digest := self._fetch_large(ref.key, partial)) != ref.sha256:
                if digest in before or len(before) == _LARGE_TRIES:  # the same twice is the object
                    partial.unlink()
                    raise BlobCorrupt(f"{ref.key}: the fetched file does not have sha256 {ref.sha256[:12]}…")
                before.add(digest)
        files.replace(partial, path)

    def _fetch_large(self, key: str, path: Path) -> str:
        self._requests.call(f"get {key}", lambda client, bucket: client.fget_object(bucket, key, str(path)))
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def fetch_file(self, stat: BlobStat, path: Path) -> BlobRef:
        _require_key(stat.key)
        sha256 = self._fetch_large(stat.key, path)
        if (size := path.stat().st_size) != stat.size_bytes:
            raise BlobCorrupt(f"{stat.key}: got {size} bytes, expected {stat.size_bytes} of the listing")
        return BlobRef(key=stat.key, size_bytes=size, sha256=sha256)

    def exists(self, key: str) -> bool:
        try:
            self._size_bytes(key)
        except BlobMissing:
            return False
        return True

    def _size_bytes(self, key: str) -> int:
        return self._requests.call(f"stat {key}", lambda client, bucket: client.stat_object(bucket, key)).size or 0

    def list(self, prefix: str) -> Iterator[BlobStat]:
        stats = self._requests.list(prefix)
        return (BlobStat(item.object_name or "", item.size or 0, item.last_modified or _NO_DATE) for item in stats)

    def delete(self, keys: Iterable[str]) -> int:
        """Delete objects; missing ones are no error. Returns the number of keys."""
        wanted = list(keys)
        for start in range(0, len(wanted), _DELETE_BATCH):
            batch = wanted[start : start + _DELETE_BATCH]
            if left := self._requests.delete(batch):
                raise BlobError(
                    f"{len(left)} of {len(batch)} objects left in bucket {self.bucket}, such as {left[0].name}: "
                    f"{left[0].code} {left[0].message}"
                )
        return len(wanted)

    def _fetch(
        self, ref: BlobRef, offset: int, size_bytes: int, sha256: str, source: str, *, is_expected: bool = True
    ) -> bytes:
        _require_key(ref.key)
        from penstock.protocol.transport.s3_answers import UnreadableAnswer  # noqa: PLC0415  see `_requests`

        is_whole = offset == 0 and size_bytes == ref.size_bytes
        before: set[str] = set()

        def accept(data: bytes) -> None:
            digest = hashlib.sha256(data).hexdigest()
            if len(data) == size_bytes and digest == sha256:
                return
            part = f"{size_bytes} bytes" if is_whole else f"{size_bytes} bytes at {offset}"
            problem = f"expected {part} with sha256 {sha256[:12]}…, got {len(data)} bytes with {digest[:12]}…"
            if digest in before:
                raise BlobCorrupt(f"{ref.key}: {problem}; the object does not match its {source}")
            before.add(digest)
            raise UnreadableAnswer(problem)

        # one byte more shows that the object is longer; without a size the whole object is asked for
        asked: dict[str, Any] = {} if is_whole else {"offset": offset, "size_bytes": size_bytes}
        if not is_expected:
            asked["denied_s"] = 0.0
        return self._requests.get(ref.key, **asked, most=size_bytes + 1, accept=accept)


def _require_key(key: str) -> None:
    """Raise BlobMissing for a key that no object of ours has and that clients or servers do not take.

    A message from outside names any key. What the clients raise for such a key is no error of the object store, and
    some servers answer it with a listing, with XML that does not parse, or with an internal error, which is retried.
    """
    parts = key.split("/")
    if not key.isprintable() or any(p.strip() in {"", ".", ".."} or len(p.encode()) > _MAX_PART_BYTES for p in parts):
        raise BlobMissing(f"{key[:200]!r} is not a valid object key; the message that names it is wrong")
