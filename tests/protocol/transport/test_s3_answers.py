"""Answers of the object store that no S3 server gives, and logins that end or turn, on a small HTTP server."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.json_server import Handler, HttpServer

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import (
    BlobCorrupt,
    BlobDenied,
    BlobError,
    BlobLoginRefused,
    BlobMissing,
    BlobStoreUnreachable,
)
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import Blobs

Serve = Callable[..., S3Settings]
DATA = b"a pack of groups"
KEY = "runs/r/groups/x.parquet"
REF = BlobRef(key=KEY, size_bytes=len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
ETAG = hashlib.md5(DATA, usedforsecurity=False).hexdigest()
LIST = (
    "<ListBucketResult><Name>penstock</Name><IsTruncated>false</IsTruncated><Contents><Key>k</Key><Size>1</Size>"
    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"
)
ERROR = "<Error><Code>{}</Code><Message>{}</Message></Error>"
HTML = "<!DOCTYPE html><html><body>Sign in to the guest network</body></html>"
Answer = tuple[int, str, bytes, dict[str, str]]  # status, content type, body, further headers


def xml(body: str, status: int = 200, kind: str = "application/xml", **headers: str) -> Answer:
    return status, kind, body.encode(), headers


class S3Handler(Handler):
    """Answers as ``wrong`` says, and as S3 does when that returns None."""

    wrong: Callable[[str, Answer, str], Answer | None]

    def serve(self) -> None:
        self.body()
        right = self._right()
        login = self.headers.get("Authorization", "") + self.headers.get("X-Amz-Security-Token", "")
        status, kind, body, headers = type(self).wrong(self.command, right, login) or right
        self.answer(status, body, {"Content-Type": kind, **headers} if kind else headers)

    def _right(self) -> Answer:
        etag = {"ETag": f'"{ETAG}"'}
        if self.command == "POST":
            bodies = {
                "delete": "<DeleteResult/>",
                "uploads": "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
            }
            whole = "<CompleteMultipartUploadResult><ETag>x-2</ETag></CompleteMultipartUploadResult>"
            return xml(next((body for name, body in bodies.items() if f"?{name}" in self.path), whole))
        if self.command == "GET" and "list-type" in self.path:
            return xml(LIST)
        if self.command == "DELETE":
            return 204, "", b"", {}
        return 200, "application/octet-stream", DATA if self.command != "PUT" else b"", etag


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[HttpServer] = []

    def start(wrong: Callable[[str, Answer, str], Answer | None], **more: object) -> S3Settings:
        servers.append(HttpServer(type("Wrong", (S3Handler,), {"wrong": staticmethod(wrong)})))
        has_login = "credentials" in more or "access_key_file" in more
        login = {} if has_login else {"access_key": "k", "secret_key": "secret-key"}
        return S3Settings.model_validate({"endpoint": servers[-1].url, **login, **more})

    yield start
    for server in servers:
        server.close()


def operations(settings: S3Settings, folder: Path, deadline_s: float) -> dict[str, Callable[[], object]]:
    blobs = Blobs(settings, deadline_s=deadline_s, run_id="r")
    large = folder / "large"
    large.write_bytes(bytes(6 << 20))  # two parts
    return {
        "put": lambda: blobs.put(KEY, DATA),
        "put_file": lambda: blobs.put_file(KEY, large),
        "get": lambda: blobs.get(REF),
        "get_unverified": lambda: blobs.get_unverified(KEY),
        "get_file": lambda: blobs._fetch_large(KEY, folder / "got"),
        "size": lambda: blobs.exists(KEY),
        "list": lambda: list(blobs.list("runs/r/")),
        "delete": lambda: blobs.delete([KEY]),
        "check": lambda: blobs.check("r", deadline_s=deadline_s),
        "bucket": lambda: blobs._requests.call("check", lambda client, bucket: client.bucket_exists(bucket)),
    }  # fmt: skip


def flipped(body: bytes, chance: random.Random) -> bytes:
    if not body:
        return b"\xff"
    place = chance.randrange(len(body))
    return body[:place] + bytes([body[place] ^ (1 << chance.randrange(8))]) + body[place + 1 :]


_chance = random.Random(7)
UNREADABLE: dict[str, Callable[[Answer], Answer]] = {
    "html": lambda _: xml(HTML, kind="text/html; charset=utf-8"),
    "html with an error's status": lambda _: xml(HTML, 404, kind="text/html"),
    "html as xml": lambda _: xml(HTML),
    "html as a refusal in xml": lambda _: xml("<html/>", 403),
    "empty": lambda _: (200, "application/xml", b"", {}),
    "json": lambda _: (200, "application/json", b'{"error": "busy"}', {}),
    "random bytes": lambda _: (200, "application/octet-stream", _chance.randbytes(50), {}),
    "random bytes as an error": lambda _: (400, "application/xml", _chance.randbytes(50), {}),
    "cut": lambda right: (right[0], right[1], right[2][: len(right[2]) // 2], {}),
    "an error with status 200": lambda _: xml(ERROR.format("InternalError", "We encountered an internal error")),
    "an internal error": lambda _: (500, "text/plain", b"try again", {}),
    "an unknown error": lambda _: xml(ERROR.format("QuiteNew", "of a later version"), 418),
    "slow down": lambda _: xml(ERROR.format("SlowDown", ""), 503, **{"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
    "too many requests": lambda _: (429, "text/plain", b"", {"Retry-After": "3600"}),
    "a gateway's": lambda _: xml(HTML, 502, kind="text/html"),
    "a redirect": lambda _: (307, "text/html", b"", {"Location": "/sign-in"}),
    "ended early": lambda right: (*right[:2], right[2][:3], {"Content-Length": "999", "Connection": "close"}),
}  # fmt: skip
LASTING = ("slow down", "ended early")


@pytest.mark.parametrize("fault", UNREADABLE)
def test_an_answer_that_cannot_be_read_is_transient_for_every_operation(
    serve: Serve, tmp_path: Path, fault: str
) -> None:
    """After such answers each operation succeeds; if they stay, the error says operation, URL, deadline, answer."""
    for name in operations(S3Settings(), tmp_path, 1.0):
        if name in {"size", "get_file"} and fault == "html with an error's status":
            continue  # they begin with a HEAD, of whose answer only the status counts
        for times in (1, 4) if fault in LASTING else (1,):
            left = [times]

            def lasting(_: str, right: Answer, __: str, left: list[int] = left) -> Answer | None:
                left[0] -= 1
                return UNREADABLE[fault](right) if left[0] >= 0 else None

            operations(serve(lasting), tmp_path, 20.0)[name]()
        settings = serve(lambda _, right, __: UNREADABLE[fault](right))
        error = failure_of(operations(settings, tmp_path, 0.2)[name])
        if (
            error is None
        ):  # what such an answer cannot be told from; a bucket's HEAD has no body, and what is not verified has no size
            assert name in {"bucket", "get_unverified", "get_file", "size"}, f"{name} takes it"
        elif isinstance(error, BlobCorrupt):
            assert name == "get"
        else:
            assert settings.endpoint in str(error), name
            assert "within" in str(error) or "tried for" in str(error), name


def failure_of(operation: Callable[[], object]) -> BlobError | None:
    try:
        operation()
    except BlobError as err:
        return err
    return None


def test_one_flipped_bit_in_any_answer_never_ends_in_an_internal_error(serve: Serve, tmp_path: Path) -> None:
    chance = random.Random(11)
    settings = serve(lambda _, r, __: (*r[:2], flipped(r[2], chance), r[3]) if chance.random() < 0.5 else None)
    calls = operations(settings, tmp_path, 3.0)
    for number in range(24):
        for name in ("list", "delete", "get", "put_file") if number % 8 == 0 else ("list", "delete", "get"):
            assert not isinstance(failure_of(calls[name]), BlobLoginRefused)


def test_a_put_is_stored_only_if_its_answer_names_the_object(serve: Serve) -> None:
    answers = [
        None,
        (200, "", b"", {}),
        (204, "", b"", {}),
        (200, "", b"", {"ETag": '""'}),
        (200, "", b"", {"ETag": '"' + "0" * 32 + '"'}),
    ]
    settings = serve(lambda *_: answers.pop(0) if answers else None)
    blobs = Blobs(settings, deadline_s=20.0)
    blobs.put(KEY, DATA)
    blobs.put(KEY, DATA)
    assert not answers
    opaque = serve(lambda *_: (200, "", b"", {"ETag": '"' + "0" * 32 + '"'}))  # as S3 Express has
    Blobs(opaque, deadline_s=1.0).put(KEY, DATA)


@pytest.mark.parametrize(
    ("status", "code", "message", "headers", "says"),
    [
        (400, "ExpiredToken", "The provided token has expired.", {}, "s3.session_token_file"),
        (403, "InvalidAccessKeyId", "The key does not exist.", {}, "s3.access_key"),
        (403, "SignatureDoesNotMatch", "Check your key.", {}, "s3.secret_key"),
        (403, "AccessDenied", "Access Denied.", {}, "s3_policies"),
        (403, "SomethingElse", "No.", {}, "s3.access_key"),
        (400, "AuthorizationHeaderMalformed", "expecting 'eu-central-1'", {}, "s3.region = 'eu-central-1'"),
        (301, "PermanentRedirect", "elsewhere", {"x-amz-bucket-region": "eu-west-3"}, "s3.region = 'eu-west-3'"),
        (400, "InvalidBucketName", "The bucket is not valid.", {}, "s3.bucket"),
    ],
)  # fmt: skip
def test_a_refusal_is_tried_again_and_named_with_the_setting_to_change(
    serve: Serve, status: int, code: str, message: str, headers: dict[str, str], says: str
) -> None:
    refusal = xml(ERROR.format(code, message), status, **headers)
    answers = [refusal] * 3
    Blobs(serve(lambda *_: answers.pop() if answers else None), deadline_s=20.0).put(KEY, DATA)
    blobs = Blobs(serve(lambda *_: refusal), deadline_s=0.2, run_id="r")
    for operation in (lambda: blobs.put(KEY, DATA), lambda: blobs.get(REF), lambda: list(blobs.list("runs/r/"))):
        with pytest.raises(BlobStoreUnreachable) as caught:
            operation()
        assert says in str(caught.value)
        assert code in str(caught.value)
        assert message in str(caught.value) or headers
        assert isinstance(caught.value, BlobLoginRefused)


@pytest.mark.parametrize("tokens", [[], ["t"], ["", "t"], ["a", "b"], None], ids=str)
def test_a_list_that_never_ends_is_given_up_at_the_deadline(serve: Serve, tokens: list[str] | None) -> None:
    num_pages = [0]

    def page(_: str, __: Answer, ___: str) -> Answer:
        num_pages[0] += 1
        token = f"t{num_pages[0]}" if tokens is None else tokens[num_pages[0] % len(tokens)] if tokens else None
        mark = "" if token is None else f"<NextContinuationToken>{token}</NextContinuationToken>"
        truncated = (
            "true" if time.monotonic() < started + 3.0 else "false"
        )  # it ends, so that a client without a deadline does
        return xml(LIST.replace("false</IsTruncated>", f"{truncated}</IsTruncated>{mark}"))

    started = time.monotonic()
    with pytest.raises(BlobStoreUnreachable, match=r"no new NextContinuationToken|further pages after the deadline"):
        list(Blobs(serve(page), deadline_s=0.3).list("runs/r/"))
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/octet-stream", "", "text/xml", "Application/XML; charset=utf-8", "text/html"]
)
@pytest.mark.parametrize("before", ["", "\n<?xml version='1.0'?>", "\ufeff"])
def test_an_object_is_missing_by_the_body_of_the_answer(serve: Serve, kind: str, before: str) -> None:
    blobs = Blobs(serve(lambda *_: xml(before + ERROR.format("NoSuchKey", "m"), 404, kind=kind)), deadline_s=0.5)
    with pytest.raises(BlobMissing):
        blobs.get(REF)
    assert not blobs.exists(KEY)


def test_an_object_may_be_stored_as_html_and_its_head_has_any_type(serve: Serve) -> None:
    blobs = Blobs(serve(lambda _, right, __: (*right[:1], "text/html", *right[2:])), deadline_s=0.5)
    assert blobs.get(REF) == DATA
    assert blobs.exists(KEY)


@pytest.mark.parametrize(
    ("code", "says", "never"),
    [
        ("InsufficientStorage", "full, or the quota", "access key"),
        ("QuotaExceeded", "quota of bucket or user", "access key"),
        ("XMinioAdminBucketQuotaExceeded", "quota of bucket or user", "access key"),
        ("InvalidObjectState", "is archived", "access key"),
        ("BadRequest", "BadRequest", "https://?"),
    ],
)
def test_what_no_key_causes_is_not_blamed_on_it(serve: Serve, code: str, says: str, never: str) -> None:
    settings = serve(lambda *_: xml(ERROR.format(code, "m"), 400 if code == "BadRequest" else 403))
    with pytest.raises(BlobStoreUnreachable) as caught:
        Blobs(settings, deadline_s=0.2).put(KEY, DATA)
    assert says in str(caught.value)
    assert never not in str(caught.value)


def test_one_object_that_may_not_be_read_is_denied_and_the_login_is_not(serve: Serve) -> None:
    settings = serve(
        lambda _, right, __: xml(ERROR.format("AccessDenied", ""), 403) if right[2] != LIST.encode() else None
    )
    for key in (KEY, "elsewhere", "runs/other/x"):
        with pytest.raises(BlobDenied, match="unreadable"):
            Blobs(settings, deadline_s=0.2, run_id="r").get(REF.model_copy(update={"key": key}))
    started = time.monotonic()
    with pytest.raises(BlobDenied):  # as AWS says of a missing key that the login may not list
        Blobs(settings, run_id="r").get(REF, is_expected=False)
    assert time.monotonic() - started < 20.0


def test_keys_of_files_are_read_again_when_they_are_refused(serve: Serve, tmp_path: Path) -> None:
    names = ("access_key", "secret_key", "session_token")
    for name in names:
        (tmp_path / name).write_text(f"{name}-1\n")
    present = ["1"]

    def wrong(_: str, __: Answer, login: str) -> Answer | None:
        is_new = f"access_key-{present[0]}/" in login and f"session_token-{present[0]}" in login
        return None if is_new else xml(ERROR.format("ExpiredToken", "ended"), 400)

    settings = serve(wrong, **{f"{name}_file": tmp_path / name for name in names})
    (tmp_path / "secret_key").write_text("")  # filled by another container
    blobs = Blobs(settings, deadline_s=20.0)
    threading.Timer(0.2, (tmp_path / "secret_key").write_text, ("secret_key-1",)).start()
    assert blobs.get(REF) == DATA
    for turn in "234":
        present[0] = turn

        def rewrite(turn: str = turn) -> None:
            for name in names:
                (tmp_path / name).unlink()  # a moment without a file
            for name in names:
                (tmp_path / name).write_text(f"{name}-{turn}")

        threading.Timer(0.2, rewrite).start()
        assert blobs.get(REF) == DATA


def test_the_login_of_the_machine_is_that_of_aws_tools(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the environment, from the file of credentials that was rewritten, or by a web identity (IRSA)."""
    logins: list[str] = []
    sts = xml(
        "<R><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>web</AccessKeyId>"
        "<SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
        "<Expiration>2036-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult></R>"
    )
    settings = serve(lambda _, __, login: logins.append(login), credentials="aws")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = filed\naws_secret_access_key = s\naws_session_token = t"
    )
    Blobs(settings).put(KEY, DATA)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "environ")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    Blobs(settings).put(KEY, DATA)
    assert ["filed/" in logins[0], logins[0].endswith("t"), "environ/" in logins[1]] == [True, True, True]
    with pytest.raises(ValueError, match="takes no access_key"):
        S3Settings(credentials="aws", access_key="k")
    # minio signs nothing for a web identity: the file's token is exchanged at the endpoint of STS
    from minio.credentials import IamAwsProvider

    (tmp_path / "token").write_text("jwt")
    endpoint = serve(lambda *_: sts).endpoint
    provider = IamAwsProvider(custom_endpoint=endpoint, token_file=str(tmp_path / "token"), role_arn="r")
    assert provider.retrieve().access_key == "web"
