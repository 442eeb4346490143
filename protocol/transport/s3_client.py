"""Requests to the object store, by minio (imported here and in `s3_login`), until they succeed or fail for good.

`blobs` imports it with its first request: the libraries take 0.1 s of CPU to import, and a process that looks at a run
may never need them. A server that refuses requests because its clock differs is reported with both times.
"""

from __future__ import annotations

import hashlib
import io
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
import urllib3
from minio import Minio
from minio.credentials import StaticProvider
from minio.datatypes import Object
from minio.deleteobjects import DeleteError, DeleteObject
from minio.error import InvalidResponseError, MinioAdminException, S3Error, ServerError
from minio.helpers import ObjectWriteResult
from minio.minioadmin import MinioAdmin

from penstock.protocol import blob_keys
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import (
    BlobCorrupt,
    BlobDenied,
    BlobError,
    BlobLoginRefused,
    BlobMissing,
    BlobStoreRefused,
    BlobStoreUnreachable,
    PenstockError,
)
from penstock.protocol.transport import store_errors
from penstock.protocol.transport.s3_answers import AnswerPool, Failure, UnreadableAnswer, is_full, judge
from penstock.protocol.transport.s3_login import Login, NoLogin, has_login
from penstock.protocol.transport.tls import client_context, handshake_problem

T = TypeVar("T")
log = structlog.get_logger("protocol.blobs")

_PART_BYTES = 64 * 1024 * 1024  # a larger object is sent in parts
_CONNECT_S = 5.0
_RETRY_S = 0.05
_RETRY_MAX_S = 2.0
_WARN_S = 5.0  # a request that is repeated for longer is a line in the log
_MISSING = {"NoSuchKey", "NoSuchObject", "NotFound"}
_RUN_OF_KEY = re.compile(r"^\w+ runs/([^/]+)/")
_READS = ("get ", "stat ")  # how requests for one object begin
_DENIED_S = 60.0  # a policy takes effect with a delay; then what a login may not read counts as missing
_MAX_PROBLEM = 600
_ETAG_CHECKED_BYTES = 1024 * 1024  # the MD5 of a larger object costs more than its request
_MD5 = re.compile(r"[0-9a-f]{32}")
_OPAQUE_ETAG = ("x-amz-server-side-encryption-aws-kms-key-id", "x-amz-server-side-encryption-customer-algorithm")
_ADMIN_DEADLINE_S = 30.0
_ADMIN_RETRY_S = 0.2
_ADMIN_STATUS = re.compile(r"Status: (\d{3})")  # how minio reports an answer of the admin interface
_ADMIN_CODE = re.compile(r"Code\W{1,4}(\w{3,80})")  # of its body in XML or JSON
_STATUS = re.compile(r"^status (\d{3})")  # of `AnswerPool.answer`
_TOO_SHORT = "InvalidRange"  # the object ends before the part that was asked for


def _count(status: int | None, code: str = "") -> None:
    if status is not None:
        store_errors.count("s3", "full" if is_full(status, code) else "error")


class S3Requests:
    """Requests to one bucket. Thread-safe. All raise BlobMissing, BlobStoreRefused, BlobStoreUnreachable, BlobError."""

    def __init__(
        self, settings: S3Settings, tls: ssl.SSLContext | None, *, deadline_s: float, run_id: str = ""
    ) -> None:
        """``run_id``: the run of which the login may list what every role may; else that of a key it may not read."""
        url = urlsplit(settings.endpoint)
        self._settings = settings
        self._deadline_s = deadline_s
        self._login = Login(settings) if has_login(settings) else None
        self._etags_are_md5 = False
        self._run_id = run_id
        self._pool = AnswerPool(
            maxsize=32,
            timeout=urllib3.Timeout(connect=_CONNECT_S, read=min(60.0, deadline_s)),
            retries=False,
            ssl_context=tls,
        )
        self._client = Minio(
            url.netloc,
            credentials=self._login,
            secure=url.scheme == "https",
            region=settings.region,
            http_client=self._pool,
        )

    def put(self, key: str, data: bytes) -> None:
        """Store an object; one of more than 64 MiB is sent in parts."""

        def once(client: Minio, bucket: str) -> None:
            stored = client.put_object(bucket, key, io.BytesIO(data), len(data), part_size=_PART_BYTES)
            self._check_etag(data, stored)

        self.call(f"put {key}", once)

    def get(
        self,
        key: str,
        *,
        offset: int = 0,
        size_bytes: int = 0,
        most: int | None = None,
        accept: Callable[[bytes], None] = lambda _: None,
        denied_s: float = _DENIED_S,
    ) -> bytes:
        """Return an object, or ``size_bytes`` of it from ``offset``; at most ``most`` bytes of the answer are read.

        ``accept`` raises UnreadableAnswer for bytes that are fetched again; a denied read is tried for ``denied_s``.
        """

        def once(client: Minio, bucket: str) -> bytes:
            response = client.get_object(bucket, key, offset=offset, length=size_bytes)
            try:
                data = response.read() if most is None else response.read(most)
            finally:
                response.close()
                response.release_conn()
            accept(data)
            return data

        return self.call(f"get {key}", once, denied_s=denied_s)

    def list(self, prefix: str, *, deadline_s: float | None = None) -> list[Object]:
        def once(client: Minio, bucket: str) -> list[Object]:
            return list(client.list_objects(bucket, prefix=prefix, recursive=True))

        return self.call(f"list {prefix}", once, deadline_s=deadline_s)

    def delete(self, keys: Sequence[str]) -> list[DeleteError]:
        """Delete objects, at most a thousand; return those that were not."""
        batch = [DeleteObject(key) for key in keys]
        what = f"delete {len(batch)} objects"
        return self.call(what, lambda client, bucket: list(client.remove_objects(bucket, batch)))

    def _check_etag(self, data: bytes, stored: ObjectWriteResult) -> None:
        """Raise UnreadableAnswer for the ETag of other bytes, of a server whose ETags are MD5; some have others."""
        headers = stored.http_headers
        is_opaque = headers.get("x-amz-server-side-encryption", "AES256") != "AES256" or any(
            name in headers for name in _OPAQUE_ETAG
        )
        if is_opaque or len(data) > _ETAG_CHECKED_BYTES or not _MD5.fullmatch(stored.etag or ""):
            return
        digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if digest == stored.etag:
            self._etags_are_md5 = True
        elif self._etags_are_md5:
            raise UnreadableAnswer(f"ETag {stored.etag} for bytes with MD5 {digest}: it is of another object")

    def call(
        self,
        what: str,
        attempt: Callable[[Minio, str], T],
        *,
        deadline_s: float | None = None,
        denied_s: float = _DENIED_S,
    ) -> T:
        """Return what ``attempt`` returns of the client and the bucket; ``what`` is the verb and the key.

        It is tried until it succeeds or fails for good: every other answer, even an unreadable one, is tried again.
        """
        started = time.monotonic()
        limit_s, has_warned, pause = deadline_s or self._deadline_s, False, _RETRY_S
        while True:
            self._pool.start(started + limit_s if what.startswith("list ") else float("inf"))
            try:
                return attempt(self._client, self._settings.bucket)
            except PenstockError:
                raise
            except Exception as err:  # noqa: BLE001  minio raises any error for an answer that it cannot read
                failure = self._failure(err, what)
            is_refused = failure.kind == "refused"
            if is_refused and self._login is not None:
                self._login.refused()
            deadline = started + (min(limit_s, denied_s) if is_refused and what.startswith(_READS) else limit_s)
            if time.monotonic() + pause > deadline:
                raise self._given_up(failure, what, deadline - started) from None
            if not has_warned and time.monotonic() - started > _WARN_S:
                has_warned = True
                log.warning(
                    "the object store refuses the request" if is_refused else "the object store does not answer",
                    url=self._settings.endpoint,
                    what=what,
                    error=failure.problem,
                    gives_up_in_s=round(deadline - time.monotonic()),
                )
            log.debug("retry", what=what, error=failure.problem)
            time.sleep(pause)
            pause = min(2 * pause, _RETRY_MAX_S)

    def _failure(self, err: Exception, what: str) -> Failure:
        """Return why an attempt failed; raises the error that no repetition ends, and what is no answer's fault."""
        endpoint, is_xml = self._settings.endpoint, False
        if isinstance(err, S3Error) and err.code:
            self._raise_final(err.code, what)
            _count(err.response.status, err.code)
            status: int | None = err.response.status
            access_key = "" if self._login is None else self._login.access_key
            failure = judge(
                err.response.status,
                err.code,
                err.message or "",
                err.response.headers,
                region=self._settings.region,
                access_key=access_key,
            )
            problem, is_xml = failure.problem, "xml" in err.response.headers.get("content-type", "")
        elif isinstance(err, NoLogin):
            return Failure(str(err), "refused")
        elif isinstance(err, ServerError | InvalidResponseError | urllib3.exceptions.HTTPError | OSError):
            if refused := handshake_problem(err, endpoint, "s3.ca_file"):
                raise BlobStoreRefused(f"{what}: {refused}") from None
            failure, problem = Failure(""), f"{type(err).__name__}: {err}"
            match = _STATUS.search(self._pool.answer)
            status = int(match[1]) if match else None
            _count(status)
        elif self._pool.answer:
            failure, status = Failure(""), None
            _count(0)
            problem = f"{type(err).__name__}: {err} ({self._pool.answer})"
        else:
            raise err
        if status == 400 and not is_xml and failure.kind == "retry" and endpoint.startswith("http://"):
            problem += "; is it https://? A server that speaks TLS only answers so"
        return Failure(problem[:_MAX_PROBLEM], failure.kind)

    def _raise_final(self, code: str, what: str) -> None:
        if code in _MISSING and what.startswith(_READS):
            raise BlobMissing(f"{what}: no such object in bucket {self._settings.bucket} ({code})")
        if code == _TOO_SHORT:
            raise BlobCorrupt(f"{what}: the object is shorter than its manifest says")
        if code == "NoSuchBucket":
            raise BlobStoreRefused(
                f"{what}: no bucket {self._settings.bucket!r} at {self._settings.endpoint}; create it with: "
                "penstock bootstrap run.toml, or correct s3.bucket"
            )

    def _given_up(self, failure: Failure, what: str, waited_s: float) -> BlobError:
        endpoint = self._settings.endpoint
        if failure.kind == "retry":
            return BlobStoreUnreachable(
                f"{what}: {endpoint} gave no valid answer within {waited_s:.0f} s ({failure.problem})"
            )
        run_id = self._run_id or "".join(_RUN_OF_KEY.findall(what))
        if what.startswith(_READS) and run_id and self._is_accepted(run_id):
            # Any message may name any key: what a login may not read is as good as not there, and ends no service.
            # A store also answers so for a key that does not exist when the login may not list its bucket.
            return BlobDenied(
                f"{what}: no such object in bucket {self._settings.bucket}, or unreadable: {endpoint} {failure.problem}"
            )
        return BlobLoginRefused(f"{what}: {endpoint} {failure.problem} (tried for {waited_s:.0f} s)")

    def _is_accepted(self, run_id: str) -> bool:
        """Return True if the login may do what is checked at the start; then a refusal is that of one object."""
        try:
            self.list(blob_keys.access_check_prefix(run_id), deadline_s=min(_CONNECT_S, self._deadline_s))
        except BlobError:
            return False
        return True


class S3Admin:
    """Users and policies of MinIO and forks, by their admin interface, with the store's own user (s3_policies).

    Every call may be repeated. Other stores than these answer with an error, which says to create users by hand.
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
                        f"{what}: {endpoint} refused it ({problem}); s3.access_key must be the store's own user, the "
                        "store MinIO or a fork. For another store leave --s3-users out, and create users there with "
                        "the policies that `python -P -m penstock.deploy.s3_policies ROLE` prints"
                    ) from None
            except Exception as err:  # noqa: BLE001  minio raises any error for an answer that it cannot read
                if refused := handshake_problem(err, endpoint, "s3.ca_file"):
                    raise BlobStoreRefused(f"{what}: {refused}") from None
                problem = f"{type(err).__name__}: {err}"[:_MAX_PROBLEM]
            else:
                return
            if time.monotonic() + _ADMIN_RETRY_S > deadline:
                raise BlobStoreUnreachable(
                    f"{what}: {endpoint} gave no valid answer within {_ADMIN_DEADLINE_S:.0f} s ({problem})"
                )
            time.sleep(_ADMIN_RETRY_S)
