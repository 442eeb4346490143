"""The door to the object store, and the only file that imports minio.

Small objects, which is what travels between the services, and their parts take a shorter way (`short_way`); what
does not go well there is asked again here, where every way of failing has its name.

Only the calls that are safe on every S3 server are here. Tag, legal-hold, retention and policy
calls are not, on purpose: some servers replace or delete the object on them. Conditional writes are
not either, since several servers ignore them in silence; whoever needs compare-and-swap uses the
key-value bucket of the bus. Keys are immutable: nothing is ever overwritten, and everything read is
verified against the size and sha256 that its message promised.
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
from penstock.protocol.transport.clock_skew import clocks_apart
from penstock.protocol.transport.obstore_fast_path import ShortWay

T = TypeVar("T")
log = structlog.get_logger("protocol.blobs")

_RETRY_S = 0.05
_RETRY_MAX_S = 2.0
_CHUNK_BYTES = 1024 * 1024
_REFUSALS = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthorizationHeaderMalformed"}
# the third is how some servers say "disk full"; the last passes when whoever's clock was wrong is set right
_PASSING = {"RequestTimeout", "SlowDown", "NoSuchUpload", "RequestTimeTooSkewed"}
_PERHAPS_THE_CLOCK = {"AccessDenied", "BadRequest", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "RequestExpired"}
_DELETE_BATCH = 1000  # the most one request may name
_GONE = {"NoSuchKey", "NoSuchObject", "NotFound"}
_TOO_SHORT = "InvalidRange"  # the object ends before the part that was asked for
_NO_DATE = datetime.fromtimestamp(0, UTC)  # of a server that gives none: such an object is old, not new


class _XmlPool(urllib3.PoolManager):
    """Some servers label their XML errors ``text/xml``, which the client refuses to read as errors."""

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
        self._short_way = ShortWay(settings, timeout_s=read_timeout_s / 2)  # the long way has to fit in as well
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
                f"no bucket {self.bucket!r} at {self._settings.endpoint}; create it with: python -m penstock.deploy.bootstrap"
            )

    def ensure_bucket(self) -> None:
        """Create the bucket when it is not there (deploy/bootstrap only)."""
        if not self._retry(lambda: self._client.bucket_exists(self.bucket), "check", deadline_s=30.0):
            self._retry(lambda: self._client.make_bucket(self.bucket), "make bucket", deadline_s=30.0)

    def put(self, key: str, data: bytes) -> BlobRef:
        """Store an object and return the reference that a message carries."""
        if not self._short_way.put(key, data):
            self._retry(lambda: self._client.put_object(self.bucket, key, io.BytesIO(data), len(data)), f"put {key}")
        return BlobRef(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def put_file(self, key: str, path: Path) -> BlobRef:
        """Store a file; large ones go in parts."""
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
        self._retry(lambda: self._client.fput_object(self.bucket, key, str(path)), f"put {key}")
        return BlobRef(key=key, size_bytes=size, sha256=digest.hexdigest())

    def get(self, ref: BlobRef) -> bytes:
        """Fetch an object and verify it; raises BlobMissing or BlobCorrupt.

        A short or altered answer is fetched once more before it is called corrupt: the network may
        be to blame, the stored object may not.
        """
        first = self._short_way.get(ref)
        whole = f"{ref.size_bytes} bytes"
        return _verified(ref, first, lambda: self._fetch(ref), ref.size_bytes, ref.sha256, whole, "message")

    def get_unverified(self, key: str) -> bytes:
        """Fetch an object that was found in a listing and that nobody vouches for; raises BlobMissing."""

        def once() -> bytes:
            response = self._client.get_object(self.bucket, key)
            try:
                return response.read()
            finally:
                response.close()
                response.release_conn()

        return self._retry(once, f"get {key}")

    def get_range(self, ref: BlobRef, offset: int, size_bytes: int, sha256: str) -> bytes:
        """Fetch a part of an object, verified by a sha256 of its own; raises BlobMissing or BlobCorrupt.

        As in `get`, what is short or altered is fetched once more before it is called corrupt.
        """
        first = self._short_way.get_range(ref, offset, size_bytes)
        part = f"{size_bytes} bytes at {offset}"
        fetch = functools.partial(self._fetch, ref, offset, size_bytes)
        return _verified(ref, first, fetch, size_bytes, sha256, part, "manifest")

    def get_file(self, ref: BlobRef, path: Path) -> None:
        """Fetch an object into a file, verified before the file gets its name."""
        partial = path.with_name(path.name + ".partial")
        if ref.size_bytes <= 64 * _CHUNK_BYTES:
            partial.write_bytes(self.get(ref))
        else:
            self._retry(lambda: self._client.fget_object(self.bucket, ref.key, str(partial)), f"get {ref.key}")
            digest = hashlib.sha256()
            with partial.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
            if partial.stat().st_size != ref.size_bytes or digest.hexdigest() != ref.sha256:
                partial.unlink()
                raise BlobCorrupt(f"{ref.key}: the fetched file does not have sha256 {ref.sha256[:12]}…")
        partial.replace(path)

    def exists(self, key: str) -> bool:
        """Say whether an object is there."""
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
        """Delete objects; missing ones are fine. Returns how many were asked for."""
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
                )  # never more than promised
            finally:
                response.close()
                response.release_conn()

        return self._retry(once, f"get {ref.key}")

    def _retry(self, attempt: Callable[[], T], what: str, deadline_s: float | None = None) -> T:
        deadline = time.monotonic() + (deadline_s or self._deadline_s)
        pause = _RETRY_S
        while True:
            try:
                return attempt()
            except S3Error as err:
                apart = clocks_apart(err.response.headers, datetime.now(UTC))
                if (final := self._final(err, what, apart)) is not None:
                    raise final from None
                problem = f"{err.code}: {apart or err.message}"
            except (InvalidResponseError, ServerError, urllib3.exceptions.HTTPError, OSError) as err:
                problem = f"{type(err).__name__}: {err}"
            if time.monotonic() + pause > deadline:
                raise BlobStoreUnreachable(
                    f"{what}: {self._settings.endpoint} gave no usable answer within "
                    f"{deadline_s or self._deadline_s:.0f} s ({problem})"
                ) from None
            log.debug("retry", what=what, error=problem)
            time.sleep(pause)
            pause = min(2 * pause, _RETRY_MAX_S)

    def _final(self, err: S3Error, what: str, apart: str) -> BlobError | None:
        """Return the error for an answer that stays what it is; None for one that may be another soon.

        A refusal while the clocks are ``apart`` passes when the wrong one is set right: no key need be to blame.
        """
        code, endpoint = err.code, self._settings.endpoint
        if code in _GONE:
            return BlobMissing(f"{what}: no such object in bucket {self.bucket} ({code})")
        if code == _TOO_SHORT:
            return BlobCorrupt(f"{what}: the object is shorter than its manifest promised")
        if code == "NoSuchBucket":
            return BlobStoreRefused(
                f"{what}: no bucket {self.bucket!r}; create it with: python -m penstock.deploy.bootstrap"
            )
        if apart and code in _PERHAPS_THE_CLOCK:
            return None
        if code in _REFUSALS:
            return BlobStoreRefused(
                f"{what}: {endpoint} refused access key {self._settings.access_key or '(none)'}: {code}; check "
                "s3.access_key and s3.secret_key"
            )
        if 400 <= err.response.status < 500 and code not in _PASSING:
            return BlobError(f"{what}: {endpoint} refused it: {code}: {err.message}")
        return None


def _verified(
    ref: BlobRef,
    first: bytes | None,
    fetch: Callable[[], bytes],
    size_bytes: int,
    sha256: str,
    expected: str,
    promised_by: str,
) -> bytes:
    """Return what was read ``first``, or what ``fetch`` brings when that is nothing or wrong; two tries at most."""
    data, digest = b"", ""
    for read in (fetch if first is None else lambda: first, fetch):
        data = read()
        digest = hashlib.sha256(data).hexdigest()
        if len(data) == size_bytes and digest == sha256:
            return data
    raise BlobCorrupt(
        f"{ref.key}: expected {expected} with sha256 {sha256[:12]}…, got {len(data)} bytes with {digest[:12]}…; "
        f"the object is not what its {promised_by} promised"
    )
