"""Each check of a request and of an endpoint's URL refuses on its own, for its own reason."""

from __future__ import annotations

import pytest
from starlette.types import Message
from tests.reward_service.processes import api_app

from penstock.protocol.errors import TargetRefused
from penstock.reward_service.endpoints.endpoint import Access, Role
from penstock.serving import strict_json
from penstock.serving.http_connections import HttpConnections
from penstock.serving.target_policy import TargetPolicy

TOKEN = ("a", Role.ADMIN, "right-0123456789abcdef")
RIGHT = ("authorization", f"Bearer {TOKEN[2]}")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://[::1", "is not a URL"),
        ("http://127.0.0.1:x/", "is not a URL"),
        ("http://user@127.0.0.1/", "no user name or password"),
        ("http://:@127.0.0.1/", "no user name or password"),
        ("ftp://127.0.0.1/", "only http:// and https://"),
        ("http:///x", "has no host"),
        ("http://127.0.0.1:0/", "has no host"),
        ("http://127.0.0.1\\.8.8.8.8/", "its host must be a name or an address"),
        ("http://\u2603.example/", "its host must be a name or an address"),
        ("http://127.0.0.1/\u2603", "its host must be a name or an address"),
        ("http://-a/", "its host must be a name or an address"),
        (f"http://{'a.' * 130}com/", "its host must be a name or an address"),
        ("http://999.1.1.1/", "its host must be a name or an address"),
        ("http://[fe80::1%25eth0]/", "its host must be a name or an address"),
        ("http://[v1.a]/", "only an IPv6 address is put between brackets"),
        ("http://127.0.0.1/#x", "a fragment"),
        ("http://xn--/", "is not a URL"),
        ("http://169.254.169.254/", "are never called"),
        ("http://8.8.8.8/", "allowed_targets"),
    ],
)
async def test_a_url_is_refused_for_its_own_reason(url: str, reason: str) -> None:
    """The reason names the rule, so that no later rule hides that one is missing."""
    http = HttpConnections(keep_s=1.0, policy=TargetPolicy(["127.0.0.0/8"]))
    with pytest.raises(TargetRefused, match=reason):
        await http.check(url)
    await http.close()


async def asked_with(
    method: str, path: str, headers: list[tuple[str, str]], tokens: tuple[tuple[str, Role, str], ...]
) -> tuple[int, bool]:
    """Return the status of an answer, and whether anything of the request's body was asked for."""
    asked, sent = list[int](), list[Message]()

    async def receive() -> Message:
        asked.append(1)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": raw,
    }
    await api_app(Access(tokens))(scope, receive, send)
    return sent[0]["status"], bool(asked)


@pytest.mark.parametrize(
    ("authorization", "status"), [("Bearer wrong", 401), (None, 401), (f"Basic {TOKEN[2]}", 401), (RIGHT[1], 413)]
)
async def test_the_token_is_checked_before_anything_of_the_body(authorization: str | None, status: int) -> None:
    """A stranger whose body is too long is told that a token is missing, and no byte of the body is asked for."""
    headers = [("host", "x"), ("content-length", "2000")]
    headers += [("authorization", authorization)] if authorization is not None else []
    assert await asked_with("POST", "/v1/score", headers, (TOKEN,)) == (status, status == 413)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": 1, "a": 2}', "has the key 'a' twice"),
        (b'{"x": {"a": 1, "\\u0061": 2}}', "has the key 'a' twice"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b"[-Infinity]", "Infinity is not a JSON number"),
        ('{"a": 1}'.encode("utf-16"), "it is not UTF-8"),
        (b'{"\\ud800": 1}', "half of a surrogate pair"),
        (b'["\\uDC00"]', "half of a surrogate pair"),
        (b"[-1e999]", "-1e999 is not a JSON number"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "too many digits"),
        (b"{} {}", "it is not JSON"),
    ],
)
def test_json_has_one_reading(body: bytes, reason: str) -> None:
    """Whatever two parsers could read differently is refused for its own reason."""
    with pytest.raises(strict_json.AmbiguousJson, match=reason):
        strict_json.loads(body, is_finite=True)


@pytest.mark.parametrize(
    ("tokens", "headers", "status"),
    [
        ((), [("host", "localhost:80")], 404),
        ((), [("host", "evil.example")], 403),
        ((TOKEN,), [("host", "evil.example"), RIGHT], 404),
        ((TOKEN,), [RIGHT, ("penstock-endpoint-call", "1")], 508),
        ((), [("host", "evil.example"), ("penstock-endpoint-call", "1")], 508),
        ((TOKEN,), [RIGHT, RIGHT], 400),
        ((TOKEN,), [("authorization", "Bearer other")], 401),
    ],
)
async def test_headers_are_checked_one_by_one(
    tokens: tuple[tuple[str, Role, str], ...], headers: list[tuple[str, str]], status: int
) -> None:
    """Each rule about headers has a status of its own; a request that keeps all of them reaches the app."""
    assert await asked_with("GET", "/v1/x", headers, tokens) == (status, False)
