"""What an answer of the object store means: those of no S3 server, wrong clocks, refusals and what to change."""

from __future__ import annotations

import re
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import urllib3

_MAX_CLOCK_SKEW = timedelta(minutes=15)  # of Signature Version 4
_EXCERPT = 160  # characters of an answer in an error
_MOST_ERROR_BYTES = 1 << 20
_ERROR = re.compile(rb"(?:<\?xml[^>]*>\s*)?<(?:\w+:)?Error[\s>]")  # how the body of a refusal begins, of any type
_BEFORE_XML = b"\xef\xbb\xbf \t\r\n"
_FULL_CODES = {"XMinioStorageFull", "InsufficientStorage"}
_FULL_STATUS = 507
_ROOTS = {  # how the name of an answer in XML begins, by the parameter of its request; not every server adds "Result"
    ("GET", "list-type"): "ListBucket",
    ("POST", "delete"): "Delete",
    ("POST", "uploads"): "InitiateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
}
_CLOCK_SKEW_CODES = {"AccessDenied", "BadRequest", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "RequestExpired"}
_REGION_CODES = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "IllegalLocationConstraintException",
    "InvalidRegion",
}
_LOGIN_ADVICE = {
    "InvalidAccessKeyId": "no such key: check s3.access_key and s3.secret_key",
    "SignatureDoesNotMatch": "the secret key is another: check s3.access_key and s3.secret_key; or a proxy alters it",
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "InvalidClientTokenId"),
        "the session token has ended or is of other keys: have s3.session_token_file, s3.access_key_file and "
        "s3.secret_key_file rewritten, or set s3.credentials = 'aws' on a machine with a role",
    ),
}
_OTHER_LOGIN_ADVICE = "check s3.access_key, s3.secret_key and their policy (python -P -m penstock.deploy.s3_policies "
"ROLE)"
_EXPECTED_REGION = re.compile(r"(?:expecting|expected|use region) '?([a-z0-9-]{2,40})'?")
Kind = Literal["retry", "refused"]


class UnreadableAnswer(urllib3.exceptions.HTTPError):
    """An answer that no S3 server gives: a page of a proxy, an empty or damaged body, a header that is missing."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one attempt failed; ``refused``: the server does not accept the settings' login, region or bucket."""

    problem: str
    kind: Kind = "retry"


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
        f"it is {here} here and {there} at the server, {apart.total_seconds() / 60:.0f} minutes apart, and S3 takes "
        f"at most {_MAX_CLOCK_SKEW.total_seconds() / 60:.0f}: correct the clock that is wrong"
    )


def is_full(status: int, code: str = "") -> bool:
    """Return True if the store has no space left, or its bucket or user used up a quota."""
    return status == _FULL_STATUS or code in _FULL_CODES or "QuotaExceeded" in code


def judge(status: int, code: str, message: str, headers: Mapping[str, str], *, region: str, access_key: str) -> Failure:
    """Return what an error in XML, or one without a body, means; ``message``: the server's sentence, kept."""
    said = f"{code}: {message}" if message else code
    if code in _CLOCK_SKEW_CODES and (apart := clock_skew(headers, datetime.now(UTC))):
        return Failure(f"{code}: {apart}")  # ends when the clock is corrected
    theirs = headers.get("x-amz-bucket-region") or next(iter(_EXPECTED_REGION.findall(message)), "")
    if code in _REGION_CODES or (theirs and theirs != region and status in {301, 400}):
        wanted = f"set s3.region = {theirs!r}" if theirs else "set s3.region to that of the bucket"
        return Failure(f"s3.region is {region!r}: {said}; {wanted}, and s3.endpoint to that region's", "refused")
    if is_full(status, code):
        return Failure(f"full, or the quota of bucket or user is used up: {said}; remove runs, or raise the quota")
    if code == "InvalidObjectState":
        return Failure(
            f"the object is archived: {said}; restore it, and remove the bucket's rule that archives", "refused"
        )
    if code in _LOGIN_ADVICE or status in {401, 403}:
        advice = _LOGIN_ADVICE.get(code, _OTHER_LOGIN_ADVICE)
        return Failure(f"refused access key {access_key or '(none)'}: {said}; {advice}", "refused")
    if code == "InvalidBucketName":
        return Failure(f"{said}; change s3.bucket", "refused")
    return Failure(said)


class AnswerPool(urllib3.PoolManager):
    """The only way of requests to the store. Raises UnreadableAnswer for an answer that is no S3 server's.

    An error in XML is relabelled as such: the client does not read it as an error if it has another type. ``answer`` is
    the last answer that this thread got, in words, empty after `start`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._of_thread = threading.local()

    @property
    def answer(self) -> str:
        return getattr(self._of_thread, "answer", "")

    def start(self, until: float = float("inf")) -> None:
        """Begin an attempt of this thread; its later requests raise UnreadableAnswer after monotonic time ``until``."""
        self._of_thread.answer = ""
        self._of_thread.until = until

    def urlopen(self, method: str, url: str, **options: Any) -> Any:  # type: ignore[override]
        if self.answer and time.monotonic() > getattr(self._of_thread, "until", float("inf")):
            raise UnreadableAnswer(f"it has further pages after the deadline ({self.answer})")
        response = super().urlopen(method, url, **options)
        self._of_thread.answer = f"status {response.status}, {response.headers.get('content-type', 'no content type')}"
        is_error = response.status >= 300
        if is_error and method != "HEAD":
            response = _read(response)
        if is_error or options.get("preload_content", True):
            data = response.data or b""
            self._of_thread.answer += f", {len(data)} bytes: {excerpt(data)}"
        kind = response.headers.get("content-type", "").lower()
        is_html = kind.startswith(("text/html", "application/xhtml"))
        if is_error and _ERROR.match(response.data or b""):
            response.headers["content-type"] = "application/xml"
            problem = ""
        elif is_html and method != "HEAD" and (is_error or "etag" not in response.headers):
            problem = "a page in HTML"
        else:
            problem = "" if is_error else _missing(method, url, response)
        if problem:
            if not (is_error or options.get("preload_content", True)):
                self._of_thread.answer += f": {excerpt(response.read(_EXCERPT))}"
            response.close()
            response.release_conn()
            raise UnreadableAnswer(f"{problem} ({self.answer})")
        return response


def _read(response: urllib3.BaseHTTPResponse) -> urllib3.BaseHTTPResponse:
    """Return an error's answer with its body read, without what may stand before XML."""
    data = response.read(_MOST_ERROR_BYTES) or response.data or b""
    if len(data) >= _MOST_ERROR_BYTES:
        response.close()
    response.release_conn()
    return urllib3.HTTPResponse(data.lstrip(_BEFORE_XML), response.headers, response.status, reason=response.reason)


def _missing(method: str, url: str, response: urllib3.BaseHTTPResponse) -> str:
    """Return what a success lacks that every S3 server sends."""
    path, query = urlsplit(url).path, parse_qs(urlsplit(url).query, keep_blank_values=True)
    root = next((root for (verb, name), root in _ROOTS.items() if verb == method and name in query), None)
    if root is not None:
        try:
            element = ET.fromstring(response.data.decode())  # noqa: S314  as minio does after it
        except (ET.ParseError, ValueError) as err:
            return f"no XML: {err}"
        tag = element.tag.rpartition("}")[2]
        if not tag.startswith(root):
            return f"<{tag[:40]}> in place of <{root}…>"
        is_truncated = (element.findtext("{*}IsTruncated") or "").lower() == "true"
        token = element.findtext("{*}NextContinuationToken")
        if is_truncated and (not token or [token] == query.get("continuation-token")):
            return "IsTruncated, and no new NextContinuationToken"
        return ""
    is_of_object = "/" in path.strip("/") and method in {"GET", "HEAD", "PUT"}
    etag = response.headers.get("etag")
    if is_of_object and (etag is None or (method == "PUT" and not etag.strip('"'))):
        return "no ETag, which an S3 server sends with every object"
    return "an empty answer" if is_of_object and method == "GET" and response.status == 204 else ""


def excerpt(data: bytes | str | None) -> str:
    """Return the beginning of an answer as printable text."""
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data or ""
    return ascii(text[:_EXCERPT])
