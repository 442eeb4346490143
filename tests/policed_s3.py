"""A proxy for the real S3 server with MinIO's users and policies: it verifies signatures and asks policies.

It takes MinIO's requests that create policies and users (`penstock bootstrap --s3-users`), and passes allowed requests
on to the real server under its own user. ``allowed`` evaluates a policy as AWS documents it for the few elements that
ours have: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import re
import ssl
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from minio.credentials import Credentials
from minio.crypto import decrypt
from minio.signer import sign_v4_s3
from urllib3 import HTTPResponse

from penstock.protocol.config.connection import S3Settings
from tests.json_server import Handler, HttpServer, Threads

_ADMIN = "/minio/admin/v3/"
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>refused by the proxy of the tests</Message></Error>"
_PASSED = {"content-type", "content-md5", "range"}
_OF_LISTINGS = {
    *("list-type", "prefix", "delimiter", "max-keys", "encoding-type", "start-after", "continuation-token"),
    *("fetch-owner", "metadata", "marker"),
}
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d{8}/([^/]+)/s3/aws4_request, ?SignedHeaders=([^,]+), ?Signature=(\w{64})"
)
Policy = Mapping[str, Any]
Want = tuple[str, str, str | None]  # action, resource, prefix of a listing


def allowed(policy: Policy, want: Want) -> bool:
    """Return True if a statement allows an action on a resource; there are no statements that deny."""
    action, resource, prefix = want
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow"
        assert set(statement) <= {"Effect", "Action", "Resource", "Condition"}
        condition = statement.get("Condition")
        if condition is not None:
            assert set(condition) == {"StringLike"}
            assert set(condition["StringLike"]) == {"s3:prefix"}
            if prefix is None or not _matches(prefix, condition["StringLike"]["s3:prefix"]):
                continue
        if _matches(action, statement["Action"]) and _matches(resource, statement["Resource"]):
            return True
    return False


def _matches(text: str, patterns: Iterable[str]) -> bool:
    """Return True if a pattern matches; `*` and `?` have a meaning there, and nothing else has."""
    return any(fnmatch.fnmatchcase(text, pattern.replace("[", "[[]")) for pattern in patterns)


def wanted(method: str, path: str, query: Mapping[str, list[str]], body: bytes) -> list[Want]:
    """Return the actions that a request needs, as AWS's table of S3 actions says."""
    bucket, _, key = unquote(path).lstrip("/").partition("/")
    arn = f"arn:aws:s3:::{bucket}"
    if key:
        kinds = {
            "GET": "GetObject",
            "HEAD": "GetObject",
            "PUT": "PutObject",
            "POST": "PutObject",
            "DELETE": "DeleteObject",
        }
        name = kinds[method]
        if "uploadId" in query and method in ("GET", "DELETE"):
            name = {"GET": "ListMultipartUploadParts", "DELETE": "AbortMultipartUpload"}[method]
        if extra := {"tagging", "acl", "legal-hold", "retention", "policy"} & set(query):
            name = f"{name}{extra.pop()}"
        return [(f"s3:{name}", f"{arn}/{key}", None)]
    if method == "POST" and "delete" in query:
        keys = [one.text or "" for one in ET.fromstring(body).iter() if one.tag.rpartition("}")[2] == "Key"]
        return [("s3:DeleteObject", f"{arn}/{one}", None) for one in keys]
    if method == "GET" and set(query) <= _OF_LISTINGS:
        return [("s3:ListBucket", arn, query.get("prefix", [None])[0])]
    if method == "HEAD":
        return [("s3:ListBucket", arn, None)]
    return [(f"s3:{method} of a bucket {sorted(query)}", arn, None)]


class PolicedS3(HttpServer):
    """Users and policies before an S3 server that has one user. Use it as a context manager.

    ``refused`` collects what a user's policy did not allow: access key, action, resource.
    """

    def __init__(
        self,
        behind: S3Settings,
        root: tuple[str, str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``behind`` is the real server, ``root`` the access key and secret key of the user that may do all here."""
        self.behind, self.upstream = behind, urlsplit(behind.endpoint).netloc
        self.root, self.users, self.policies = root, dict[str, str](), dict[str, Policy]()
        self.attached: dict[str, str] = {}
        self.refused: list[tuple[str, str, str]] = []
        handler, kind = type("_OwnHandler", (_Handler,), {"proxy": self}), type("_OwnServer", (_Server,), {"tls": tls})
        super().__init__(handler, host=host, port=port, kind=kind)
        if tls is not None:
            self.url = self.url.replace("http:", "https:")

    def _user(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> str | None:
        """Return the access key whose secret signed a request; None for a wrong signature."""
        match = _AUTHORIZATION.fullmatch(headers.get("Authorization", ""))
        secret = None if match is None else dict([self.root, *self.users.items()]).get(match[1])
        if match is None or secret is None:
            return None
        stated = headers.get("x-amz-content-sha256", "")
        if stated != "UNSIGNED-PAYLOAD" and stated != hashlib.sha256(body).hexdigest():
            return None
        signed = {name: headers[name] for name in match[3].split(";")}
        date = datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        again = _signed(method, path, Credentials(match[1], secret), match[2], date, stated, signed)
        return match[1] if again["Authorization"].rpartition("Signature=")[2] == match[4] else None

    def _may(self, user: str, wants: Iterable[Want]) -> bool:
        if user == self.root[0]:
            return True
        policy = self.policies.get(self.attached.get(user, ""), {"Statement": []})
        denied = [want for want in wants if not allowed(policy, want)]
        self.refused += [(user, action, resource) for action, resource, _ in denied]
        return not denied

    def _administer(self, command: str, query: Mapping[str, list[str]], body: bytes) -> int:
        """Do what MinIO's admin interface does with the three requests of `S3Admin`; returns the status."""
        if command == "add-canned-policy":
            self.policies[query["name"][0]] = json.loads(body)
        elif command == "add-user":
            self.users[query["accessKey"][0]] = json.loads(decrypt(_stored(body), self.root[1]))["secretKey"]
        elif command == "set-user-or-group-policy" and query["policyName"][0] in self.policies:
            self.attached[query["userOrGroup"][0]] = query["policyName"][0]
        else:
            return 404
        return 200


def _signed(
    method: str, path: str, login: Credentials, region: str, date: datetime, sha: str, headers: Mapping[str, str]
) -> dict[str, str]:
    url = urlsplit(f"http://host{path}")
    query = "&".join(sorted(part if "=" in part else f"{part}=" for part in url.query.split("&") if part))
    url = url._replace(path=quote(unquote(url.path), safe="/~"), query=query)
    return sign_v4_s3(
        method=method, url=url, region=region, headers={**headers}, credentials=login, content_sha256=sha, date=date
    )  # fmt: skip


def _stored(body: bytes) -> Any:
    return HTTPResponse(body=io.BytesIO(body), preload_content=False)


class _Server(Threads):
    tls: ssl.SSLContext | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the handshake in the connection's own thread, so that a slow client delays no other."""
        if self.tls is not None:
            request = self.tls.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)


class _Handler(Handler):
    proxy: PolicedS3

    def refuse(self, code: str) -> None:
        self.answer(403, _ERROR.format(code=code).encode(), {"Content-Type": "application/xml"})

    def serve(self) -> None:
        url = urlsplit(self.path)
        body = self.body()
        if url.path == "/minio/health/live":
            return self.answer(200)
        user = self.proxy._user(self.command, self.path, self.headers, body)
        if user is None:
            return self.refuse("SignatureDoesNotMatch")
        if url.path.startswith(_ADMIN):
            if user != self.proxy.root[0]:
                return self.refuse("AccessDenied")
            return self.answer(self.proxy._administer(url.path.removeprefix(_ADMIN), parse_qs(url.query), body))
        if not self.proxy._may(user, wanted(self.command, url.path, parse_qs(url.query, keep_blank_values=True), body)):
            return self.refuse("AccessDenied")
        return self._pass_on(body)

    def _pass_on(self, body: bytes) -> None:
        proxy, unsigned = self.proxy, "UNSIGNED-PAYLOAD"
        passed = {name: value for name, value in self.headers.items() if name.lower() in _PASSED}
        now = datetime.now(UTC)
        to_sign = {"host": proxy.upstream, "x-amz-date": f"{now:%Y%m%dT%H%M%SZ}", "x-amz-content-sha256": unsigned}
        login = Credentials(proxy.behind.access_key, proxy.behind.secret())
        signed = _signed(self.command, self.path, login, proxy.behind.region, now, unsigned, to_sign)
        status, data, headers = self.answer_of(proxy.upstream, body, {**passed, **signed})
        self.answer(
            status, data, {name: value.replace("text/xml", "application/xml") for name, value in headers.items()}
        )
