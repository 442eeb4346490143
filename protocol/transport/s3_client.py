"""The requests to the object store, by minio, which only this file imports; repeated until they succeed or fail for good.

`blobs` imports it with its first request: the libraries take 0.1 s of CPU to import, and a process that looks at a run may
never need them. A server that refuses signed requests because its clock differs is reported with both times (`clock_skew`).
"""

from __future__ import annotations

import io
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
import urllib3
from minio import Minio
from minio.credentials import StaticProvider
from minio.datatypes import Object
from minio.deleteobjects import DeleteError, DeleteObject
from minio.error import InvalidResponseError, MinioAdminException, S3Error, ServerError
from minio.minioadmin import MinioAdmin

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import BlobCorrupt, BlobError, BlobMissing, BlobStoreRefused, BlobStoreUnreachable
from penstock.protocol.transport import store_errors
from penstock.protocol.transport.tls import client_context, handshake_problem

_MAX_CLOCK_SKEW = timedelta(minutes=15)  # of Signature Version 4


T = TypeVar("T")
log = structlog.get_logger("protocol.blobs")

_PART_BYTES = 64 * 1024 * 1024  # a larger object is sent in parts
_CONNECT_S = 5.0
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
_NO_XML_400 = "Response code: 400,"  # how minio reports an answer that is not S3's
_ADMIN_DEADLINE_S = 30.0
_ADMIN_RETRY_S = 0.2
_ADMIN_STATUS = re.compile(r"Status: (\d{3})")  # how minio reports an answer of the admin interface
_ADMIN_CODE = re.compile(r"Code\W{1,4}(\w{3,80})")  # of its body in XML or JSON
_TOO_SHORT = "InvalidRange"  # the object ends before the part that was asked for


def clock_skew(headers: Mapping[str, str], now: datetime) -> str:
    """Return the difference of the clocks and both times, in words, when it is too large; else an empty text.

    ``Date`` of the answer's ``headers`` is the server's time, ``now`` this machine's, with a time zone.
    """
    try:
        theirs = parsedate_to_datetime(headers["Date"])
    except (KeyError, ValueError):
        return ""
    theirs = theirs if theirs.tzinfo else theirs.replace(tzinfo=UTC)
    apart = abs(now - theirs)
    if apart <= _MAX_CLOCK_SKEW:
        return ""
    here, there = (f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" for time in (now, theirs))
    return (
        f"it is {here} here and {there} at the server, {apart.total_seconds() / 60:.0f} minutes apart, and S3 takes at most "
        f"{_MAX_CLOCK_SKEW.total_seconds() / 60:.0f}: correct the clock that is wrong"
    )


def _count(status: int | None, code: str | None = None) -> None:
    if status is not None:
        store_errors.count("s3", "full" if status == _FULL_STATUS or code in _FULL else "error")


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
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=min(60.0, deadline_s)),
                retries=False,
                ssl_context=tls,
            ),
        )

    @property
    def bucket(self) -> str:
        return self._settings.bucket

    def bucket_exists(self, *, deadline_s: float) -> bool:
        return self._retry(lambda: self._client.bucket_exists(self.bucket), "check", deadline_s=deadline_s)

    def make_bucket(self, *, deadline_s: float) -> None:
        self._retry(lambda: self._client.make_bucket(self.bucket), "make bucket", deadline_s=deadline_s)

    def put(self, key: str, data: bytes) -> None:
        """Store an object; one of more than 64 MiB is sent in parts."""

        def once() -> None:
            self._client.put_object(self.bucket, key, io.BytesIO(data), len(data), part_size=_PART_BYTES)

        self._retry(once, f"put {key}")

    def put_file(self, key: str, path: Path) -> None:
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
        self._retry(lambda: self._client.fget_object(self.bucket, key, str(path)), f"get {key}")

    def size_bytes(self, key: str) -> int:
        return self._retry(lambda: self._client.stat_object(self.bucket, key), f"stat {key}").size or 0

    def list(self, prefix: str, *, deadline_s: float | None = None) -> list[Object]:
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
                if _NO_XML_400 in problem and self._settings.endpoint.startswith("http://"):  # no S3 server's own
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


class S3Admin:
    """Users and policies of MinIO and its forks, through their admin interface, with the store's own user (deploy/s3_policies.py only).

    Every call may be repeated. AWS and other stores have other interfaces: they answer with an error, which says to create
    the users there by hand.
    """

    def __init__(self, settings: S3Settings) -> None:
        url = urlsplit(settings.endpoint)
        self._settings = settings
        is_encrypted = url.scheme == "https"
        self._client = MinioAdmin(
            endpoint=url.netloc,
            credentials=StaticProvider(settings.access_key, settings.secret()),
            region=settings.region,
            secure=is_encrypted,
            http_client=urllib3.PoolManager(
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=_ADMIN_DEADLINE_S),
                retries=False,
                ssl_context=client_context(settings.ca_file, "s3.ca_file") if is_encrypted else None,
            ),
        )

    def put_policy(self, name: str, policy: Mapping[str, Any]) -> None:
        self._call(f"policy {name}", lambda: self._client.policy_add(name, policy=dict(policy)))

    def put_user(self, access_key: str, secret_key: str, *, policy: str) -> None:
        """Create a user, or give it another secret key; ``policy`` is its only one."""
        self._call(f"user {access_key}", lambda: self._client.user_add(access_key, secret_key))
        self._call(f"policy of user {access_key}", lambda: self._client.policy_set(policy, user=access_key))

    def _call(self, what: str, request: Callable[[], object]) -> None:
        endpoint, deadline = self._settings.endpoint, time.monotonic() + _ADMIN_DEADLINE_S
        while True:
            try:
                request()
            except MinioAdminException as err:
                status, code = _ADMIN_STATUS.search(str(err)), _ADMIN_CODE.search(str(err))
                problem = f"status {status[1] if status else 'unknown'}{f', {code[1]}' if code else ''}"
                if status is not None and int(status[1]) < 500:
                    raise BlobStoreRefused(
                        f"{what}: {endpoint} refused it ({problem}); s3.access_key must be the store's own user, and the "
                        "store MinIO or a fork. For another store leave --s3-users out, and create the users there with "
                        "the policies that `python -P -m penstock.deploy.s3_policies ROLE` prints"
                    ) from None
            except (urllib3.exceptions.HTTPError, OSError) as err:
                if refused := handshake_problem(err, endpoint, "s3.ca_file"):
                    raise BlobStoreRefused(f"{what}: {refused}") from None
                problem = f"{type(err).__name__}: {err}"
            else:
                return
            if time.monotonic() + _ADMIN_RETRY_S > deadline:
                raise BlobStoreUnreachable(
                    f"{what}: {endpoint} gave no valid answer within {_ADMIN_DEADLINE_S:.0f} s ({problem})"
                )
            time.sleep(_ADMIN_RETRY_S)
