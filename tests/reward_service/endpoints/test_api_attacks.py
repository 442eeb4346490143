"""Attacks on the HTTP API, each on the same process: requests it must refuse, and after them it works as before."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from tests.reward_service.conftest import replica_of
from tests.reward_service.processes import Service

from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.reward_service.endpoints.endpoint import DIALECTS

RUN = "attacked"
TOKENS = {role: f"{role}-0123456789abcdef" for role in ("read", "register", "admin")}
MAX_BYTES = 300_000
MINE = "attacked-mine"  # an endpoint of the token `register`
OTHERS = "attacked-others"  # an endpoint of the admin
NOWHERE = "http://127.0.0.1:9/"
FORM = "x-www-form-urlencoded"
ROUTES = [
    ("GET", "/v1/endpoints"),
    ("GET", f"/v1/endpoints/{OTHERS}"),
    ("GET", "/v1/rewards"),
    ("GET", "/metrics"),
    ("POST", "/v1/score"),
    ("POST", "/v1/endpoints"),
    ("POST", f"/v1/endpoints/{OTHERS}/test"),
    ("POST", f"/v1/endpoints/{OTHERS}/lease"),
    ("POST", f"/v1/endpoints/{OTHERS}/drain"),
    ("POST", f"/v1/endpoints/{OTHERS}/resume"),
    ("DELETE", f"/v1/endpoints/{OTHERS}"),
]


@pytest.fixture(scope="module")
def service(
    nats_server: NatsServer, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A replica with a token for each role, and an endpoint of each of two owners."""
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "tokens").write_text("".join(f"{role} {role} {token}\n" for role, token in TOKENS.items()))
    given = (f"reward_service.tokens_file={folder}/tokens", f"reward_service.max_request_bytes={MAX_BYTES}")
    with replica_of(RUN, nats_server.settings, s3_server.settings, folder, *given) as found:
        found.register(MINE, NOWHERE, token=TOKENS["register"]).raise_for_status()
        found.register(OTHERS, NOWHERE, token=TOKENS["admin"], lease_s=3600).raise_for_status()
        yield found
        for name in (MINE, OTHERS):
            found.delete(name, token=TOKENS["admin"])


@pytest.fixture(autouse=True)
def it_works_as_before(service: Service) -> Iterator[None]:
    """After each attack both endpoints are there with their owners, and nothing crashed."""
    yield
    _, body = send(service, get("/v1/endpoints", role="read"))
    owners = {row["endpoint"]["name"]: row["endpoint"]["owner"] for row in json.loads(body)}
    assert (owners[MINE], owners[OTHERS]) == ("register", "admin")
    assert not [name for name in owners if name.startswith("attack-")]
    assert "Traceback" not in service.output


def bearer(role: str) -> dict[str, str]:
    return {"authorization": f"Bearer {TOKENS[role]}"}


@dataclass(frozen=True)
class Attack:
    """One request as bytes, the statuses that may answer it, and words of the answer."""

    name: str
    statuses: set[int]
    data: bytes
    text: str = ""


def request(
    method: str, path: str, body: bytes = b"", *headers: str, role: str = "admin", length: str | None = None
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "connection: close", *headers]
    lines += [f"authorization: Bearer {TOKENS[role]}"] if role else []
    if body or length is not None:
        lines += ["content-type: application/json"] * (not any("content-type" in line for line in headers))
        lines += [f"content-length: {len(body) if length is None else length}"] * (length != "")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(path: str, *headers: str, role: str = "admin") -> bytes:
    return request("GET", path, b"", *headers, role=role)


def registration(**more: object) -> bytes:
    return json.dumps({"name": "attack-x", "url": NOWHERE, **more}).encode()


def posted(body: bytes, *headers: str, path: str = "/v1/endpoints") -> bytes:
    return request("POST", path, body, *headers)


def chunked(body: bytes) -> bytes:
    return request("POST", "/v1/endpoints", body, "transfer-encoding: chunked", length="")


def send(service: Service, data: bytes) -> tuple[int, bytes]:
    """Send bytes and return the status and body of the first answer."""
    port = int(service.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


FOREIGN = [f"authorization: {value}" for value in (
    "Bearer wrong-0123456789abcdef", f"Bearer {TOKENS['admin'][:-1]}", f"Bearer {TOKENS['admin'].upper()}",
    f"Bearer {TOKENS['admin']} {TOKENS['read']}", f"Basic {TOKENS['admin']}", f"Digest {TOKENS['admin']}", "Bearer",
    "Bearer ", "", TOKENS["admin"], "Bearer null", "Bearer \xfc\xff", "Bearer " + "a" * 20_000,
)]  # fmt: skip
WITHOUT_TOKEN = [
    *(Attack(f"credentials {line[15:40]!r}", {401}, get("/v1/endpoints", line, role="")) for line in FOREIGN),
    Attack("token in the query", {401}, get(f"/v1/rewards?access_token={TOKENS['admin']}", role="")),
    Attack("token in a cookie", {401}, get("/v1/rewards", f"cookie: token={TOKENS['admin']}", role="")),
    Attack("forwarded for loopback", {401}, get("/metrics", "x-forwarded-for: 127.0.0.1", role="")),
    Attack("path rewritten", {401}, get("/healthz/x", "x-original-url: /v1/endpoints", role="")),
    Attack("path with dots", {401}, get("/healthz/../v1/endpoints", role="")),
    Attack("path with an encoded letter", {401}, get("/v1/%65ndpoints", role="")),
    Attack("path with two slashes", {401}, get("//v1/endpoints", role="")),
    Attack("body of 300 kB that never comes", {401}, request("POST", "/v1/score", role="", length="299999")),
    Attack("second of two requests", {200}, get("/healthz", role="").replace(b"close", b"keep-alive")
           + get("/v1/endpoints", role=""), "401 Unauthorized"),
]  # fmt: skip

HTTP = [
    Attack("two lengths", {400}, request("POST", "/v1/score", b"{}", "content-length: 1")),
    Attack("negative length", {400}, request("POST", "/v1/score", b"{}", length="-1")),
    Attack("length with a sign", {400}, request("POST", "/v1/score", b"{}", length="+2")),
    Attack("length of 30 digits", {400, 413},
           request("POST", "/v1/score", b"", "expect: 100-continue", length="9" * 30)),
    Attack("chunk of no size", {400}, chunked(b"zz\r\n{}\r\n0\r\n\r\n")),
    Attack("unknown coding", {400, 501}, request("POST", "/v1/score", b"", "transfer-encoding: gzip", length="")),
    Attack("header with a space", {400}, get("/healthz", "ho st: x")),
    Attack("header with NUL", {400}, get("/healthz", "x: a\0b")),
    Attack("header folded", {200, 400}, get("/healthz", "x: a\r\n b")),
    Attack("400 headers of 100 B", {431}, get("/healthz", *["x: " + "a" * 100] * 400)),
    Attack("target of 40 kB", {431}, get("/" + "a" * 40_000)),
    Attack("no HTTP", {400}, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10 + b"\r\n\r\n"),
    Attack("HTTP/0.9", {400}, b"GET /healthz\r\n\r\n"),
    Attack("no host", {400}, b"GET /healthz HTTP/1.1\r\n\r\n"),
    Attack("unknown method", {405}, request("BREW", "/v1/endpoints")),
    Attack("TRACE", {405}, request("TRACE", "/v1/endpoints")),
    Attack("CONNECT", {400, 404, 405}, request("CONNECT", "127.0.0.1:4222")),
    Attack("absolute target", {404}, get("http://169.254.169.254/latest/meta-data")),
    Attack("upgrade to a web socket", {404, 405},
           request("POST", "/v1/rewards/x", b"", "upgrade: websocket", "connection: upgrade")),
    Attack("other method by a header", {200},
           get(f"/v1/endpoints/{OTHERS}", "x-http-method-override: DELETE", role="read")),
    Attack("call of a reward service", {508},
           request("POST", f"/v1/endpoints/{OTHERS}/test", b"{}", "penstock-endpoint-call: 1"), "another URL"),
]  # fmt: skip

TOO_MANY = json.dumps({"reward": "gsm8k", "groups": [{"completions": ["1"]}] * 1025}).encode()
SCORE = b'{"reward": "gsm8k", "groups": [{"completions": ["1"], "ground_truth": "1", "ground_truth": "2"}]}'
BODIES = [
    Attack("key twice, inside", {400}, posted(SCORE, path="/v1/score"), "'ground_truth' twice"),
    Attack("a list", {422}, posted(b"[]")),
    Attack("null", {422}, posted(b"null")),
    Attack("nothing", {422}, request("POST", "/v1/endpoints", length="0")),
    Attack("a form", {422}, posted(b"name=attack-x&url=" + NOWHERE.encode(), f"content-type: application/{FORM}")),
    Attack("JSON called text", {422}, posted(registration(), "content-type: text/plain")),
    Attack("field of the store", {422}, posted(registration(secret_id="x")), "secret_id"),
    Attack("3 MB", {413}, posted(b" " * 3_000_000), "max_request_bytes"),
    Attack("3 MB in chunks", {413}, chunked(b"2dc6c0\r\n" + b" " * 3_000_000 + b"\r\n0\r\n\r\n"), "max_request_bytes"),
    Attack("3 MB, asked for first", {413},
           request("POST", "/v1/endpoints", b"", "expect: 100-continue", length="3000000"), "max_request_bytes"),
    Attack("1,025 groups", {422}, posted(TOO_MANY, path="/v1/score")),
]  # fmt: skip

URLS = [
    "", " ", "http:", "http://", "http:///x", "//127.0.0.1/", "127.0.0.1:9", "http:/127.0.0.1", "file:///etc/passwd",
    "gopher://127.0.0.1:4222/_CONNECT", "ftp://127.0.0.1/", "javascript:alert(1)", "http://[::1",
    "http://[::1%25eth0]/", "http://[::1%eth0]/", "http://[v1.a]/", "http://a..b/", f"http://{'a' * 64}.com/",
    f"http://{'a.' * 130}com/", "http://\u2603.example/", "http://a\u200b/", "http://xn--/", "http://xn--\u00fc/",
    "http://-a/", "http://%31%32%37.0.0.1/", "http://127.0.0.1/\0", "http://127.0.0.1:8\t0/",
    "http://127.0.0.1\r\nhost: x/", "http://127.0.0.1 /", "http://127.0.0.1:80\\@8.8.8.8/",
    "http://127.0.0.1\\.8.8.8.8/", "http://user@127.0.0.1/", "http://user:hunter2@127.0.0.1/", "http://:@127.0.0.1/",
    "http://127.0.0.1:99999/", "http://127.0.0.1:-1/", "http://127.0.0.1:0/", "http://127.0.0.1:http/",
    "http://127.0.0.1/#x", "http://999.1.1.1/", "http://2852039166/", "http://0xa9fea9fe/", "http://169.254.169.254/",
    "http://169.254.43518/", "http://[::ffff:a9fe:a9fe]/", "http://0/", "http://[::]/", "http://8.8.8.8/",
    "http://134744072/", "http://127.0.0.1:8222/",
]  # fmt: skip


ATTACKS = [*WITHOUT_TOKEN, *HTTP, *BODIES]


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_an_attack_is_refused_with_the_reason(attack: Attack, service: Service) -> None:
    """A request without a right token in the right place, that is no plain HTTP, or whose body has no single reading.

    Without a token nothing of a body is read; what two HTTP parsers could read in two ways ends the connection; a body
    is UTF-8 JSON with one reading and of bounded size.
    """
    status, body = send(service, attack.data)
    assert status in attack.statuses, body
    assert attack.text.encode() in body


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[f"{m} {p}" for m, p in ROUTES])
def test_every_route_needs_a_token(method: str, path: str, service: Service) -> None:
    """No route but the health check answers a stranger; what changes or calls something needs more than `read`."""
    assert send(service, request(method, path, role=""))[0] == 401
    if method != "GET":
        status, body = send(service, request(method, path, registration(), role="read"))
        assert status == 403
        assert b"role read" in body


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", f"/v1/endpoints/{OTHERS}", b""),
        ("DELETE", f"/v1/endpoints/{OTHERS}?url={NOWHERE}", b""),
        ("POST", f"/v1/endpoints/{OTHERS}/drain", b""),
        ("POST", f"/v1/endpoints/{OTHERS}/resume", b""),
        ("POST", f"/v1/endpoints/{OTHERS}/lease", json.dumps({"version": "1", "url": NOWHERE}).encode()),
        ("POST", "/v1/endpoints", registration(name=OTHERS)),
        ("POST", "/v1/endpoints", registration(name=OTHERS, replace=True)),
        ("POST", "/v1/endpoints", registration(name=OTHERS, replace=True, owner="register")),
        ("POST", "/v1/endpoints", registration(owner="admin")),
        ("POST", "/v1/endpoints", registration(owner="Register")),
    ],
)  # fmt: skip
def test_an_owner_cannot_touch_the_endpoints_of_another(method: str, path: str, body: bytes, service: Service) -> None:
    """With the role `register` another owner's endpoint is not removed, drained, resumed, renewed or replaced."""
    assert send(service, request(method, path, body, role="register"))[0] == 403


@pytest.mark.parametrize("url", URLS)
def test_urls_that_are_none_or_lead_elsewhere_are_refused(url: str, service: Service) -> None:
    """A URL that cannot be read in one way, or whose address may not be called, is refused; so is a health URL."""
    for more in ({"url": url}, {"health_url": url}) if url else ({"url": url},):
        status, body = send(service, posted(registration(**more)))
        assert status == 422, body
        assert b"hunter2" not in body, "a password is not repeated"


@pytest.mark.parametrize("path", ["/v1/endpoints", "/v1/endpoints/{}/test", "/healthz", "/v1/score"])
def test_the_service_is_no_endpoint_of_itself(path: str, service: Service) -> None:
    """Its own API is refused as an endpoint and as a health URL, by each of its names."""
    port = service.url.rsplit(":", 1)[1]
    for host in ("127.0.0.1", "localhost", "127.0.0.2"):
        url = f"http://{host}:{port}{path.format('attack-x')}"
        for more in ({"url": url}, {"health_url": url}):
            status, body = send(service, posted(registration(**more)))
            assert (status, b"the API of this service" in body) == (422, True)


@pytest.mark.slow
def test_an_endpoint_that_is_no_reward_is_never_quoted(service: Service, nats_server: NatsServer) -> None:
    """The test of an endpoint at the monitoring port of NATS, in every dialect, shows nothing of what it answers."""
    (ports,) = nats_server.store.glob("*.ports")
    (url,) = json.loads(ports.read_text())["monitoring"]
    given = {"slime": {"reward_key": "server_id"}, "openai-grader": {"grader": {"type": "x"}}}
    dialects = {name: given.get(name, {}) for name in DIALECTS.built_in}
    assert len(dialects) == 8
    shown = httpx.get(f"{url}/varz", timeout=60).json()
    for number, (dialect, options) in enumerate(dialects.items()):
        for path in ("/varz", "/nosuchpage"):
            name = f"{MINE}-probe-{number}"
            more = {"dialect": dialect, "options": options, "retries": 0, "replace": True}
            assert service.register(name, url + path, token=TOKENS["register"], **more).status_code == 201
            tried = service.post(f"/v1/endpoints/{name}/test", {}, token=TOKENS["register"])
            assert tried.json()["ok"] is False
            known = httpx.get(f"{service.url}/v1/endpoints/{name}", headers=bearer("read"), timeout=60).text
            for text in (tried.text, known):
                for secret in (shown["server_id"], shown["version"], "max_payload", "git_commit", "404 page"):
                    assert secret not in text, (dialect, path)
            httpx.delete(f"{service.url}/v1/endpoints/{name}", headers=bearer("register"), timeout=60)
