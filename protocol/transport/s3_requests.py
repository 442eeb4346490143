"""The requests to the object store that `blobs` makes, repeated until they succeed or fail for good; only this file and `s3_admin` import minio.

`blobs` imports it with its first request that is not for `s3_fast_path`: the libraries take 0.1 s of CPU to import, and a
process that looks at a run may never need them.
"""

from __future__ import annotations

import io
import ssl
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
import urllib3
from minio import Minio
from minio.datatypes import Object
from minio.deleteobjects import DeleteError, DeleteObject
from minio.error import InvalidResponseError, S3Error, ServerError

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import BlobCorrupt, BlobError, BlobMissing, BlobStoreRefused, BlobStoreUnreachable
from penstock.protocol.transport import store_errors
from penstock.protocol.transport.clock_skew import clock_skew
from penstock.protocol.transport.tls import handshake_problem

T = TypeVar("T")
log = structlog.get_logger("protocol.blobs")

_RETRY_S = 0.05
_RETRY_MAX_S = 2.0
_WARN_S = 5.0  # a request that is repeated for longer is a line in the log
_REFUSALS = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthorizationHeaderMalformed"}
# some servers report a full disk by the third; the last ends when the wrong clock is corrected
_TRANSIENT = {"RequestTimeout", "SlowDown", "NoSuchUpload", "RequestTimeTooSkewed"}
_CLOCK_SKEW_CODES = {"AccessDenied", "BadRequest", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "RequestExpired"}
_MISSING = {"NoSuchKey", "NoSuchObject", "NotFound"}
_FULL, _FULL_STATUS = {"XMinioStorageFull", "InsufficientStorage"}, 507  # no space left, as MinIO and others say it
_READS = ("get ", "stat ")  # how requests for one object begin
_TOO_SHORT = "InvalidRange"  # the object ends before the part that was asked for


def _count(status: int | None, code: str | None = None) -> None:
    """Count an answer that said that the store failed; None is no answer."""
    if status is not None:
        store_errors.take_note("s3", "full" if status == _FULL_STATUS or code in _FULL else "error")


class _XmlPool(urllib3.PoolManager):
    """A pool that relabels XML errors of type ``text/xml``, which the client does not read as errors."""

    def urlopen(self, *args: Any, **kwargs: Any) -> Any:
        response = super().urlopen(*args, **kwargs)
        if response.status >= 300 and response.headers.get("content-type", "").startswith("text/xml"):
            response.headers["content-type"] = "application/xml"
        return response


class S3Requests:
    """Requests to one bucket. Thread-safe. Every method raises BlobMissing, BlobStoreRefused, BlobStoreUnreachable or BlobError."""

    def __init__(self, settings: S3Settings, tls: ssl.SSLContext | None, *, deadline_s: float) -> None:
        """Prepare a client; nothing is sent before the first call. ``tls`` is for an endpoint with https."""
        url = urlsplit(settings.endpoint)
        self._settings = settings
        self._deadline_s = deadline_s
        self._client = Minio(
            url.netloc,
            access_key=settings.access_key or None,
            secret_key=settings.secret() or None,
            secure=url.scheme == "https",
            region=settings.region,
            http_client=_XmlPool(
                maxsize=32,
                timeout=urllib3.Timeout(connect=5, read=min(60.0, deadline_s)),
                retries=False,
                ssl_context=tls,
            ),
        )

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return self._settings.bucket

    def bucket_exists(self, *, deadline_s: float) -> bool:
        """Return True if the server has the bucket."""
        return self._retry(lambda: self._client.bucket_exists(self.bucket), "check", deadline_s=deadline_s)

    def make_bucket(self, *, deadline_s: float) -> None:
        """Create the bucket."""
        self._retry(lambda: self._client.make_bucket(self.bucket), "make bucket", deadline_s=deadline_s)

    def put(self, key: str, data: bytes) -> None:
        """Store an object."""
        self._retry(lambda: self._client.put_object(self.bucket, key, io.BytesIO(data), len(data)), f"put {key}")

    def put_file(self, key: str, path: Path) -> None:
        """Store a file; a large one is sent in parts."""
        self._retry(lambda: self._client.fput_object(self.bucket, key, str(path)), f"put {key}")

    def get(self, key: str, *, offset: int = 0, size_bytes: int = 0, most: int | None = None) -> bytes:
        """Return an object, or ``size_bytes`` of it from ``offset``; no more than ``most`` bytes of the answer are read."""

        def once() -> bytes:
            response = self._client.get_object(self.bucket, key, offset=offset, length=size_bytes)
            try:
                return response.read() if most is None else response.read(most)
            finally:
                response.close()
                response.release_conn()

        return self._retry(once, f"get {key}")

    def get_file(self, key: str, path: Path) -> None:
        """Write an object to a file."""
        self._retry(lambda: self._client.fget_object(self.bucket, key, str(path)), f"get {key}")

    def size_bytes(self, key: str) -> int:
        """Return the size of an object."""
        return self._retry(lambda: self._client.stat_object(self.bucket, key), f"stat {key}").size or 0

    def list(self, prefix: str, *, deadline_s: float | None = None) -> list[Object]:
        """Return the objects below a prefix."""
        return self._retry(
            lambda: list(self._client.list_objects(self.bucket, prefix=prefix, recursive=True)),
            f"list {prefix}",
            deadline_s=deadline_s,
        )

    def delete(self, keys: Sequence[str]) -> list[DeleteError]:
        """Delete objects, at most a thousand; return those that were not."""
        batch = [DeleteObject(key) for key in keys]
        return self._retry(
            lambda: list(self._client.remove_objects(self.bucket, batch)), f"delete {len(batch)} objects"
        )

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
                _count(err.response.status, err.code)
                problem = f"{err.code}: {apart or err.message}"
            except InvalidResponseError as err:
                problem = str(err)
                if err._code == 400 and self._settings.endpoint.startswith(
                    "http://"
                ):  # without XML: no S3 server's own
                    raise BlobError(
                        f"{what}: {self._settings.endpoint} refused it; is it https://? A server that speaks TLS only answers so"
                    ) from None
            except (ServerError, urllib3.exceptions.HTTPError, OSError) as err:
                if refused := handshake_problem(err, self._settings.endpoint, "s3.ca_file"):
                    raise BlobStoreRefused(f"{what}: {refused}") from None
                _count(getattr(err, "status_code", None))  # of a ServerError, an answer without XML
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
            return BlobStoreRefused(
                f"{what}: no bucket {self.bucket!r} at {endpoint}; create it with: penstock bootstrap run.toml"
            )
        if apart and code in _CLOCK_SKEW_CODES:
            return None
        if code == "AccessDenied" and what.startswith(_READS):
            # Any message may name any key: what a login may not read is as good as not there, and ends no service. A store
            # also answers so for a key that does not exist when the login may not list its bucket.
            return BlobMissing(
                f"{what}: no such object in bucket {self.bucket}, or access key {self._settings.access_key or '(none)'} may "
                f"not read it ({code})"
            )
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
