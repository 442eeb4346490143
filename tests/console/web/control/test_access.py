"""Tokens: hashed in one file of mode 0600, with a role, revoked at once; one-time links; what a browser may send."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import Route
from tests.console.web.control.api import BASE, Api

from penstock.console.web.access import MAX_TOKENS, Access, Role
from penstock.console.web.app import MAX_BODY_BYTES
from penstock.console.web.context import require
from penstock.console.web.problems import Problem
from penstock.protocol.errors import ConfigError

PUBLIC = {("GET", "/healthz"), ("GET", "/"), ("POST", "/login"), ("POST", "/logout")}


def test_only_the_digest_of_a_token_is_stored(tmp_path: Path):
    """The file has mode 0600 and no token in it, and another process that reads it accepts the token."""
    access = Access(tmp_path / "tokens")
    token = access.add("me", Role.RUN)
    text = access.file.read_text()
    assert access.file.stat().st_mode & 0o777 == 0o600
    assert token not in text
    assert text == f"me run sha256:{hashlib.sha256(token.encode()).hexdigest()}\n"
    caller = Access(access.file).caller(token)
    assert caller is not None
    assert (caller.name, caller.role) == ("me", Role.RUN)
    assert access.caller(token + "x") is None
    assert access.caller("") is None
    assert access.caller(None) is None


def test_a_file_that_others_may_read_is_refused(tmp_path: Path):
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 640, expected 600; run: chmod 600"):
        Access(file)


@pytest.mark.parametrize(
    "line", ["me run 1234", "me root sha256:" + "0" * 64, "me run sha256:" + "0" * 63, "a b c d e"]
)
def test_a_wrong_line_is_refused_with_its_number(tmp_path: Path, line: str):
    file = tmp_path / "tokens"
    file.write_text(f"# comment\n{line}\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"tokens:2: expected NAME ROLE") as refused:
        Access(file)
    assert line not in str(refused.value)


def test_a_revoked_or_expired_token_ends_at_once(tmp_path: Path):
    """Also in a console that is running: another process changed the file."""
    access, other = Access(tmp_path / "tokens"), Access(tmp_path / "tokens")
    token, brief = access.add("me", Role.READ), access.add("brief", Role.READ, lasts_s=60.0)
    assert other.caller(token)
    assert other.caller(brief)
    assert other.revoke("me")
    assert not other.revoke("me")
    assert access.caller(token) is None
    lines = access.file.read_text()
    access.file.write_text(re.sub(r"\d+\n$", f"{int(time.time()) - 1}\n", lines))
    assert access.caller(brief) is None


def test_a_token_name_is_given_once(tmp_path: Path):
    """Else a revoke would leave a token that somebody believes revoked."""
    access = Access(tmp_path / "tokens")
    access.add("me", Role.READ)
    for name, message in (("me", "'me' exists"), ("a b", "expected 1 to 64")):
        with pytest.raises(ConfigError, match=message):
            access.add(name, Role.ADMIN)


def test_a_file_holds_a_bounded_number_of_tokens(tmp_path: Path):
    """Each request is compared with all of them; a link that is used makes one too."""
    access = Access(tmp_path / "tokens")
    access.file.write_text("".join(f"t{number} read sha256:{number:064x}\n" for number in range(MAX_TOKENS)))
    with pytest.raises(ConfigError, match=f"{MAX_TOKENS} tokens, the limit is {MAX_TOKENS}; revoke some"):
        access.add("me", Role.READ)


def test_a_token_file_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/tokens cannot be written .*set --tokens to another file"):
        Access(tmp_path / "file" / "tokens")


def test_a_token_file_that_disappears_leaves_no_token_valid(tmp_path: Path):
    access = Access(tmp_path / "tokens")
    token = access.add("me", Role.ADMIN)
    assert access.caller(token)
    access.file.unlink()
    assert access.caller(token) is None


def test_a_one_time_link_gives_one_browser_a_cookie_that_outlives_the_console(api: Api):
    """The cookie is HttpOnly and SameSite=Strict; the link's second use gives nothing."""
    code = api.access.one_time_link()
    anybody = api.client(None)
    first = anybody.get(f"/?token={code}")
    assert (first.status_code, first.headers["location"]) == (303, "/")
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/" in cookie
    assert anybody.get("/v1/runs").status_code == 200
    again = Api(api.folder).client(None)  # the console was started anew
    again.cookies = anybody.cookies
    assert again.get("/v1/runs").status_code == 200
    assert api.client(None).get(f"/?token={code}").headers["location"] == "/?expired"


def test_the_form_takes_a_token_and_logging_out_ends_a_browser_s_own(api: Api):
    browser = api.client(None, origin=BASE)
    refused = browser.post("/login", data={"token": "wrong"})
    assert (refused.headers["location"], "set-cookie" in refused.headers) == ("/?refused", False)
    browser.post("/login", data={"token": api.tokens[Role.READ]})
    assert browser.get("/v1/runs").status_code == 200
    browser.post("/logout")
    assert browser.get("/v1/runs").status_code == 401
    browser.get(f"/?token={api.access.one_time_link()}")
    (own,) = [value for name, value in browser.cookies.items() if name.startswith("penstock")]
    browser.post("/logout")
    assert api.access.caller(own) is None


def all_routes(routes: list[Any]) -> Iterator[Route]:
    """Every route, also those of included routers; not the static files."""
    for route in routes:
        if (router := getattr(route, "original_router", None)) is not None:
            yield from all_routes(router.routes)
        elif isinstance(route, Route):
            yield route


def roles_of(dependant: Dependant) -> Iterator[Role]:
    for direct in dependant.dependencies:
        if (role := getattr(direct.call, "__penstock_role__", None)) is not None:
            yield role
        yield from roles_of(direct)


def routes(api: Api) -> list[tuple[str, str, Role | None]]:
    found = []
    for route in all_routes(api.app.routes):
        role = max(roles_of(route.dependant), default=None) if isinstance(route, APIRoute) else None
        found += [(method, route.path, role) for method in sorted((route.methods or set()) - {"HEAD"})]
    return found


def test_no_route_answers_without_its_token_or_with_a_lower_role(api: Api):
    roles = set()
    for method, template, role in routes(api):
        path = re.sub(r"\{(\w+)(:\w+)?\}", "x1", template)
        roles.add(role)
        if (method, template) in PUBLIC:
            assert role is None
            continue
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert api.client(None, **headers).request(method, path).status_code == 401, (method, template)
        if template != "/openapi.json":
            assert role is not None, f"{method} {template} requires no role"
            for lower in (lower for lower in Role if lower < role):
                refused = api.client(lower).request(method, path)
                assert refused.status_code == 403, (method, template, lower)
                assert refused.json()["expected"] == f"role {role.text}"
    assert roles == {None, *Role}


ATTACKS: dict[str, tuple[str, str, dict[str, str], int]] = {
    "empty bearer": ("GET", "/v1/runs", {"authorization": "Bearer "}, 401),
    "basic scheme": ("GET", "/v1/runs", {"authorization": "Basic {read}"}, 401),
    "token in the query": ("GET", "/v1/runs?token={admin}", {}, 401),
    "token in a foreign cookie": ("GET", "/v1/runs", {"cookie": "penstock_9999={admin}"}, 401),
    "wrong header beats a right cookie": ("GET", "/v1/runs", {"authorization": "Bearer x", "cookie": "{cookie}"}, 401),
    "DNS rebinding": ("GET", "/v1/runs", {"authorization": "Bearer {admin}", "host": "evil.example"}, 403),
    "rebinding of the page": ("GET", "/", {"host": "evil.example"}, 403),
    "CSRF by a form": ("POST", "/v1/runs/x/stop", {"cookie": "{cookie}", "origin": "http://evil.example"}, 403),
    "CSRF without an origin": ("POST", "/v1/runs/x/stop", {"cookie": "{cookie}"}, 403),
    "CSRF with a null origin": ("POST", "/v1/runs/x/stop", {"cookie": "{cookie}", "origin": "null"}, 403),
    "CSRF from another port": ("POST", "/v1/runs/x/stop", {"cookie": "{cookie}", "origin": "http://127.0.0.1:1"}, 403),
    "CSRF from the same site": ("POST", "/v1/runs/x/stop", {"cookie": "{cookie}", "sec-fetch-site": "same-site"}, 403),
    "CSRF with a forged origin": (
        "POST", "/v1/runs/x/stop", {"cookie": "{cookie}", "origin": BASE, "sec-fetch-site": "cross-site"}, 403,
    ),
    "CSRF by DELETE": ("DELETE", "/v1/runs/x", {"cookie": "{cookie}", "origin": "http://evil.example"}, 403),
    "CSRF of the login": ("POST", "/login", {"origin": "http://evil.example"}, 403),
    "same origin in another scheme": (
        "POST", "/v1/runs/x/stop", {"cookie": "{cookie}", "origin": BASE.replace("http:", "https:")}, 403,
    ),
    "path with dots": ("GET", "/v1/runs/..%2f..%2fetc/config", {"authorization": "Bearer {admin}"}, 404),
    "path with encoded dots": ("GET", "/v1/runs/%2e%2e/config", {"authorization": "Bearer {admin}"}, 422),
    "path with NUL": ("GET", "/v1/runs/a%00b", {"authorization": "Bearer {admin}"}, 422),
    "run name as HTML": ("GET", "/v1/runs/%3Cscript%3E", {"authorization": "Bearer {admin}"}, 422),
    "run that is a link": ("GET", "/v1/runs/linked", {"authorization": "Bearer {admin}"}, 404),
    "delete of a link": ("DELETE", "/v1/runs/linked", {"authorization": "Bearer {admin}"}, 404),
    "static file outside": ("GET", "/static/..%2f..%2faccess.py", {}, 404),
    "static file by dots": ("GET", "/static/%2e%2e/access.py", {}, 404),
    "static folder": ("GET", "/static/", {}, 404),
    "long body": (
        "POST", "/v1/runs", {"authorization": "Bearer {admin}", "content-length": str(MAX_BODY_BYTES + 1)}, 413,
    ),
    "documentation from a CDN": ("GET", "/docs", {"authorization": "Bearer {admin}"}, 404),
}  # fmt: skip


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Api, dict[str, str]]:
    """An app with a link in its folder of runs, and what an attacker may know: tokens, and a browser's cookie."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "linked").symlink_to(tmp_path_factory.mktemp("outside"))
    api = Api(folder)
    browser = api.client(None)
    browser.get(f"/?token={api.access.one_time_link()}")
    cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    return api, {role.text: token for role, token in api.tokens.items()} | {"cookie": cookie}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused(attacked: tuple[Api, dict[str, str]], attack: str):
    """Refused with the status that says why, as a problem, without the token in the answer."""
    api, words = attacked
    method, path, headers, status = ATTACKS[attack]
    filled = {name: value.format(**words) for name, value in headers.items()}
    answer = api.client(None).request(method, path.format(**words) if "{" in path else path, headers=filled)
    assert answer.status_code == status, answer.text
    assert words["admin"] not in answer.text
    assert "x-content-type-options" in answer.headers
    assert answer.headers["x-frame-options"] == "DENY"
    assert (api.folder / "linked").resolve().is_dir()


@pytest.mark.parametrize(
    ("body", "status"), [(b"token=" + b"a" * 5000, 413), (b"token=\xff", 400), (b"&".join([b"a=1"] * 11), 400)]
)
def test_a_login_form_is_small_and_plain(api: Api, body: bytes, status: int):
    answer = api.client(None, origin=BASE).post("/login", content=body)
    assert (answer.status_code, "set-cookie" in answer.headers) == (status, False)


async def test_a_route_with_a_role_is_refused_on_a_public_path():
    with pytest.raises(Problem) as refused:
        await require(Role.READ)(Request({"type": "http"}), None)
    assert refused.value.status == 401


def test_the_page_s_own_requests_pass(api: Api):
    """A POST with the cookie and the browser's word that it comes from this page is accepted: the run is not there."""
    browser = api.client(None)
    browser.get(f"/?token={api.access.one_time_link()}")
    for own in ({"origin": BASE}, {"sec-fetch-site": "same-origin", "origin": "null"}):
        assert browser.post("/v1/runs/x/stop", headers=own).status_code == 404


def test_a_body_that_is_longer_than_it_says_is_refused(api: Api):
    def chunks():
        for _ in range(3):
            yield b" " * (MAX_BODY_BYTES // 2)

    answer = api.client().post("/v1/runs", content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_browser_without_a_token_is_sent_to_the_page(api: Api):
    """A link to a route of the API opens the form, and an API client gets the reason."""
    answer = api.client(None, accept="text/html").get("/v1/runs")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    problem = api.client(None).get("/v1/runs")
    assert problem.headers["content-type"] == "application/problem+json"
    assert problem.json()["fix"] == "create one with: penstock console token NAME --role read|log|run|admin"


def test_only_health_and_the_page_are_public(api: Api):
    """The page's answer allows scripts and styles of this server only."""
    page = api.client(None).get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe-inline" not in page.headers["content-security-policy"]
    assert api.client(None).get("/healthz").json() == {"ok": True}
