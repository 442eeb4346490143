"""The connection to the object store; the only file that imports minio.

Small objects and parts of objects are read and written by `obstore_fast_path` first; a request that fails there is
repeated here, where each failure becomes an error of its own.

Only calls that are safe on every S3 server are offered. Tag, legal-hold, retention and policy calls
are not: some servers replace or delete the object on them. Conditional writes are not either, since
several servers ignore them silently; compare-and-swap is done in a key-value bucket of the bus. Keys
are immutable: no object is overwritten, and every object read is verified against the size and sha256
in its message.
"""

from __future__ import annotations

import functools
import hashlib
import io
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
import urllib3
from minio import Minio
from minio.deleteobjects import DeleteObject
from minio.error import InvalidResponseError, S3Error, ServerError

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import BlobCorrupt, BlobError, BlobMissing, BlobStoreRefused, BlobStoreUnreachable
from penstock.protocol.facts import BlobRef
from penstock.protocol.transport.clock_skew import clock_skew
from penstock.protocol.transport.obstore_fast_path import ObstoreFastPath
from penstock.protocol.transport.tls import client_context, handshake_problem

T = TypeVar("T")
log = structlog.get_logger("protocol.blobs")

_RETRY_S = 0.05
_RETRY_MAX_S = 2.0
_WARN_S = 5.0  # a request that is repeated for longer is a line in the log
_CHUNK_BYTES = 1024 * 1024
_REFUSALS = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthorizationHeaderMalformed"}
# some servers report a full disk by the third; the last ends when the wrong clock is corrected
_TRANSIENT = {"RequestTimeout", "SlowDown", "NoSuchUpload", "RequestTimeTooSkewed"}
_CLOCK_SKEW_CODES = {"AccessDenied", "BadRequest", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "RequestExpired"}
_DELETE_BATCH = 1000  # the limit of one request
_MISSING = {"NoSuchKey", "NoSuchObject", "NotFound"}
_TOO_SHORT = "InvalidRange"  # the object ends before the part that was asked for
_MAX_PART_BYTES = 255  # of a key between two slashes; file systems below S3 servers take no longer name
_NO_DATE = datetime.fromtimestamp(0, UTC)  # for a server that sends none: such an object counts as old


class _XmlPool(urllib3.PoolManager):
    """A pool that relabels XML errors of type ``text/xml``, which the client does not read as errors."""

    def urlopen(self, *args: Any, **kwargs: Any) -> Any:
        response = super().urlopen(*args, **kwargs)
        if response.status >= 300 and response.headers.get("content-type", "").startswith("text/xml"):
            response.headers["content-type"] = "application/xml"
        return response


@dataclass(frozen=True, slots=True)
class BlobStat:
    """One object of a listing."""

    key: str
    size_bytes: int
    modified: datetime  # by the server's clock


class Blobs:
    """One bucket. Thread-safe; coroutines call it through ``asyncio.to_thread``."""

    def __init__(self, settings: S3Settings, *, deadline_s: float = 120.0) -> None:
        """Prepare a client; nothing is sent before the first call."""
        url = urlsplit(settings.endpoint)
        self._settings = settings
        self._deadline_s = deadline_s
        read_timeout_s = min(60.0, deadline_s)
        self._fast_path = ObstoreFastPath(settings, timeout_s=read_timeout_s / 2)  # the other client needs time too
        self._client = Minio(
            url.netloc,
            access_key=settings.access_key or None,
            secret_key=settings.secret() or None,
            secure=url.scheme == "https",
            region=settings.region,
            http_client=_XmlPool(
                maxsize=32,
                timeout=urllib3.Timeout(connect=5, read=read_timeout_s),
                retries=False,
                ssl_context=client_context(settings.ca_file, "s3.ca_file") if url.scheme == "https" else None,
            ),
        )

    @property
    def bucket(self) -> str:
        """Name of the bucket, for messages."""
        return self._settings.bucket

    def check(self, *, deadline_s: float = 15.0) -> None:
        """Raise unless the server answers, the credentials are right and the bucket exists."""
        if not self._retry(lambda: self._client.bucket_exists(self.bucket), "check", deadline_s=deadline_s):
            raise BlobStoreRefused(
                f"no bucket {self.bucket!r} at {self._settings.endpoint}; create it with: penstock bootstrap run.toml"
            )

    def ensure_bucket(self) -> None:
        """Create the bucket unless it exists (deploy/bootstrap only)."""
        if not self._retry(lambda: self._client.bucket_exists(self.bucket), "check", deadline_s=30.0):
            self._retry(lambda: self._client.make_bucket(self.bucket), "make bucket", deadline_s=30.0)

    def put(self, key: str, data: bytes) -> BlobRef:
        """Store an object and return the reference that a message carries."""
        if not self._fast_path.put(key, data):
            self._retry(lambda: self._client.put_object(self.bucket, key, io.BytesIO(data), len(data)), f"put {key}")
        return BlobRef(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def put_file(self, key: str, path: Path) -> BlobRef:
        """Store a file; large ones are sent in parts."""
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
        self._retry(lambda: self._client.fput_object(self.bucket, key, str(path)), f"put {key}")
        return BlobRef(key=key, size_bytes=size, sha256=digest.hexdigest())

    def get(self, ref: BlobRef) -> bytes:
        """Fetch an object and verify it; raises BlobMissing or BlobCorrupt.

        A short or altered answer is fetched once more before it counts as corrupt: the network may have
        altered it.
        """
        _require_key(ref.key)
        first = self._fast_path.get(ref)
        whole = f"{ref.size_bytes} bytes"
        return _verified(ref, first, lambda: self._fetch(ref), ref.size_bytes, ref.sha256, whole, "message")

    def get_unverified(self, key: str) -> bytes:
        """Fetch an object from a listing, without a size or sha256 to verify it by; raises BlobMissing."""
        _require_key(key)

        def once() -> bytes:
            response = self._client.get_object(self.bucket, key)
            try:
                return response.read()
            finally:
                response.close()
                response.release_conn()

        return self._retry(once, f"get {key}")

    def get_range(self, ref: BlobRef, offset: int, size_bytes: int, sha256: str) -> bytes:
        """Fetch a part of an object, verified by its own sha256; raises BlobMissing or BlobCorrupt.

        As in `get`, a short or altered answer is fetched once more before it counts as corrupt.
        """
        _require_key(ref.key)
        first = self._fast_path.get_range(ref, offset, size_bytes)
        part = f"{size_bytes} bytes at {offset}"
        fetch = functools.partial(self._fetch, ref, offset, size_bytes)
        return _verified(ref, first, fetch, size_bytes, sha256, part, "manifest")

    def get_file(self, ref: BlobRef, path: Path) -> None:
        """Fetch an object into a file, verified before the file gets its name."""
        _require_key(ref.key)
        partial = path.with_name(path.name + ".partial")
        if ref.size_bytes <= 64 * _CHUNK_BYTES:
            partial.write_bytes(self.get(ref))
        else:
            found = self._retry(lambda: self._client.stat_object(self.bucket, ref.key), f"stat {ref.key}")
            if found.size != ref.size_bytes:  # a larger one would fill the disk first
                raise BlobCorrupt(f"{ref.key}: {found.size} bytes, expected {ref.size_bytes}")
            self._retry(lambda: self._client.fget_object(self.bucket, ref.key, str(partial)), f"get {ref.key}")
            digest = hashlib.sha256()
            with partial.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
            if partial.stat().st_size != ref.size_bytes or digest.hexdigest() != ref.sha256:
                partial.unlink()
                raise BlobCorrupt(f"{ref.key}: the fetched file does not have sha256 {ref.sha256[:12]}…")
        partial.replace(path)

    def fetch_file(self, stat: BlobStat, path: Path) -> BlobRef:
        """Fetch an object of a listing into a file and return its reference; raises BlobMissing, or BlobCorrupt for another size."""
        _require_key(stat.key)
        self._retry(lambda: self._client.fget_object(self.bucket, stat.key, str(path)), f"get {stat.key}")
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if (size := path.stat().st_size) != stat.size_bytes:
            raise BlobCorrupt(f"{stat.key}: got {size} bytes, expected {stat.size_bytes} of the listing")
        return BlobRef(key=stat.key, size_bytes=size, sha256=sha256)

    def exists(self, key: str) -> bool:
        """Return True if an object exists."""
        try:
            self._retry(lambda: self._client.stat_object(self.bucket, key), f"stat {key}")
        except BlobMissing:
            return False
        return True

    def list(self, prefix: str) -> Iterator[BlobStat]:
        """List objects below a prefix."""
        found = self._retry(
            lambda: list(self._client.list_objects(self.bucket, prefix=prefix, recursive=True)), f"list {prefix}"
        )
        return (BlobStat(item.object_name or "", item.size or 0, item.last_modified or _NO_DATE) for item in found)

    def delete(self, keys: Iterable[str]) -> int:
        """Delete objects; missing ones are no error. Returns the number of keys."""
        wanted = [DeleteObject(key) for key in keys]
        for start in range(0, len(wanted), _DELETE_BATCH):
            batch = wanted[start : start + _DELETE_BATCH]
            left = self._retry(
                lambda batch=batch: list(self._client.remove_objects(self.bucket, batch)),
                f"delete {len(batch)} objects",
            )
            if left:
                raise BlobError(
                    f"{len(left)} of {len(batch)} objects were not deleted from bucket {self.bucket}; "
                    f"the first: {left[0].name}: {left[0].code} {left[0].message}"
                )
        return len(wanted)

    def _fetch(self, ref: BlobRef, offset: int = 0, size_bytes: int | None = None) -> bytes:
        def once() -> bytes:
            response = self._client.get_object(self.bucket, ref.key, offset=offset, length=size_bytes or 0)
            try:
                return response.read(
                    (ref.size_bytes if size_bytes is None else size_bytes) + 1
                )  # at most one byte more than expected
            finally:
                response.close()
                response.release_conn()

        return self._retry(once, f"get {ref.key}")

    def _retry(self, attempt: Callable[[], T], what: str, deadline_s: float | None = None) -> T:
        started = time.monotonic()
        deadline, has_warned = started + (deadline_s or self._deadline_s), False
        pause = _RETRY_S
        while True:
            try:
                return attempt()
            except S3Error as err:
                apart = clock_skew(err.response.headers, datetime.now(UTC))
                if (final := self._final(err, what, apart)) is not None:
                    raise final from None
                problem = f"{err.code}: {apart or err.message}"
            except (InvalidResponseError, ServerError, urllib3.exceptions.HTTPError, OSError) as err:
                if refused := handshake_problem(err, self._settings.endpoint, "s3.ca_file"):
                    raise BlobStoreRefused(f"{what}: {refused}") from None
                problem = f"{type(err).__name__}: {err}"
            if time.monotonic() + pause > deadline:
                raise BlobStoreUnreachable(
                    f"{what}: {self._settings.endpoint} gave no valid answer within "
                    f"{deadline_s or self._deadline_s:.0f} s ({problem})"
                ) from None
            if not has_warned and time.monotonic() - started > _WARN_S:
                has_warned = True
                waits_s = round(deadline - time.monotonic())
                log.warning(
                    "the object store does not answer",
                    url=self._settings.endpoint,
                    what=what,
                    error=problem,
                    gives_up_in_s=waits_s,
                )
            log.debug("retry", what=what, error=problem)
            time.sleep(pause)
            pause = min(2 * pause, _RETRY_MAX_S)

    def _final(self, err: S3Error, what: str, apart: str) -> BlobError | None:
        """Return the error for a permanent failure; None for one that is retried.

        A refusal while the clocks are ``apart`` is retried: it ends when the clock is corrected.
        """
        code, endpoint = err.code, self._settings.endpoint
        if code in _MISSING:
            return BlobMissing(f"{what}: no such object in bucket {self.bucket} ({code})")
        if code == _TOO_SHORT:
            return BlobCorrupt(f"{what}: the object is shorter than its manifest says")
        if code == "NoSuchBucket":
            return BlobStoreRefused(f"{what}: no bucket {self.bucket!r}; create it with: penstock bootstrap run.toml")
        if apart and code in _CLOCK_SKEW_CODES:
            return None
        if code in _REFUSALS:
            return BlobStoreRefused(
                f"{what}: {endpoint} refused access key {self._settings.access_key or '(none)'}: {code}; check "
                "s3.access_key and s3.secret_key"
            )
        if 400 <= err.response.status < 500 and code not in _TRANSIENT:
            hint = (
                "; is it https://? A server that speaks TLS only answers so" if endpoint.startswith("http://") else ""
            )
            return BlobError(
                f"{what}: {endpoint} refused it: {code}: {err.message}{hint if code == 'BadRequest' else ''}"
            )
        return None


def _require_key(key: str) -> None:
    """Raise BlobMissing for a key that no object of ours has and that clients or servers do not take.

    A message from outside names any key. What the clients raise for such a key is no error of the object store, and
    some servers answer it with a listing, with XML that does not parse, or with an internal error, which is retried.
    """
    parts = key.split("/")
    if not key.isprintable() or any(p.strip() in {"", ".", ".."} or len(p.encode()) > _MAX_PART_BYTES for p in parts):
        raise BlobMissing(f"{key[:200]!r} is no valid object key; the message that names it is wrong")


def _verified(
    ref: BlobRef,
    first: bytes | None,
    fetch: Callable[[], bytes],
    size_bytes: int,
    sha256: str,
    expected: str,
    source: str,
) -> bytes:
    """Return the verified bytes of ``first``, or of ``fetch`` when they are None or wrong; at most two tries."""
    data, digest = b"", ""
    for read in (fetch if first is None else lambda: first, fetch):
        data = read()
        digest = hashlib.sha256(data).hexdigest()
        if len(data) == size_bytes and digest == sha256:
            return data
    raise BlobCorrupt(
        f"{ref.key}: expected {expected} with sha256 {sha256[:12]}…, got {len(data)} bytes with {digest[:12]}…; "
        f"the object does not match its {source}"
    )
