"""Decide who may use the API: bearer tokens with a role, and the ASGI middleware that every request passes.

| role | may |
|---|---|
| `read` | read runs, their metrics and their texts |
| `log` | also write the figures of a script's own run |
| `run` | also create, start, pause, resume and stop runs |
| `admin` | also delete runs, and create and revoke tokens |

A line of the token file is ``NAME ROLE sha256:HEX [EXPIRES]``, the last in Unix seconds. The file has mode 0600 and is
read again when it changes, so that adding or revoking a token takes effect at once. A browser gets a token through a
one-time link, as a cookie that no script can read.

What `serving/request_checks.py` refuses comes first; then `admit` decides from the head of a request alone. Public are
the health route, the page and its static files, and the login; they hold no data. A request that changes something and
brings no Authorization header must come from the page itself (CSRF): its ``Origin`` is this server's, or the browser
says so (``Sec-Fetch-Site``).
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.console import connections
from penstock.console.web.problems import Problem
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import atomic_write
from penstock.serving.request_checks import is_of_this_site

TOKENS = "console-tokens"  # the default file, in the folder of runs
BROWSER_S = 30 * 24 * 3600.0  # a browser asks for a new link after this long
LINK_S = 12 * 3600.0  # a one-time link that was not used ends after this long
MAX_TOKENS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LINE = re.compile(r"(\S+) (read|log|run|admin) sha256:([0-9a-f]{64})(?: (\d{1,12}))?")
CALLER = "penstock.caller"  # key of the scope
PUBLIC = frozenset({"/", "/healthz", "/login", "/favicon.ico"})
STATIC = "/static/"
_GUIDE = re.compile(r"/api/jobs(?P<run>(?:/[^/]*)?)(?P<rest>.*)", re.DOTALL)
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Role(IntEnum):
    """What a caller may do; each role includes the lower ones."""

    READ = 1
    LOG = 2
    RUN = 3
    ADMIN = 4

    @property
    def text(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class _Token:
    name: str
    role: Role
    digest: bytes
    expires: int = 0  # Unix seconds; 0: never

    def line(self) -> str:
        end = f" {self.expires}" if self.expires else ""
        return f"{self.name} {self.role.text} sha256:{self.digest.hex()}{end}\n"


class Access:
    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._tokens: list[_Token] = []
        self._links: dict[bytes, tuple[Role, float]] = {}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as err:
            raise ConfigError(
                f"the token file {self.file} cannot be written ({err.strerror}); set --tokens to another file"
            ) from None
        self._tokens = _read(self.file)

    def caller(self, token: str | None) -> Caller | None:
        """Return the caller with a token, compared in constant time; None for an unknown or expired one."""
        digest, known_caller = _digest(token or ""), None
        now = time.time()
        for known in self._current():
            is_equal = hmac.compare_digest(known.digest, digest)
            if is_equal and (not known.expires or known.expires > now):
                known_caller = Caller(known.name, known.role)
        return known_caller

    def add(self, name: str, role: Role, *, lasts_s: float = 0.0) -> str:
        """Create a token and return it; only its SHA-256 is stored. Raises ConfigError for a taken or invalid name."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"token name {name!r}: expected 1 to 64 of A-Z, a-z, 0-9, '_', '.', '-'; choose another name"
            )
        token = secrets.token_urlsafe(32)
        expires = int(time.time() + lasts_s) if lasts_s else 0
        with self._changing() as tokens:
            if any(entry.name == name for entry in tokens):
                raise ConfigError(
                    f"token {name!r} exists in {self.file}; revoke it first: penstock console revoke {name}"
                )
            if len(tokens) >= MAX_TOKENS:
                raise ConfigError(f"{self.file} has {len(tokens)} tokens, the limit is {MAX_TOKENS}; revoke some")
            tokens.append(_Token(name, role, _digest(token), expires))
        return token

    def revoke(self, name: str) -> bool:
        """Remove a token; return False if there is none of that name."""
        with self._changing() as tokens:
            kept = [token for token in tokens if token.name != name]
            is_there = len(kept) < len(tokens)
            tokens[:] = kept
        return is_there

    def one_time_link(self, role: Role = Role.ADMIN) -> str:
        """Return a code that one browser may exchange for a token, once."""
        code = secrets.token_urlsafe(32)
        with self._lock:
            self._links[_digest(code)] = (role, time.monotonic() + LINK_S)
        return code

    def redeem(self, code: str) -> str | None:
        """Return a browser's token for a one-time code, which ends with that; None for a used, old or unknown one."""
        with self._lock:
            role, until = self._links.pop(_digest(code), (Role.READ, 0.0))
        if until < time.monotonic():
            return None
        return self.add(f"browser-{secrets.token_hex(6)}", role, lasts_s=BROWSER_S)

    def _current(self) -> list[_Token]:
        """Return the tokens of the file as it is now; those read last when it cannot be read."""
        with self._lock:
            try:
                stat = self.file.stat()
                if (seen := (stat.st_ino, stat.st_mtime_ns, stat.st_size)) != self._seen:
                    self._tokens, self._seen = _read(self.file), seen
            except FileNotFoundError:
                self._tokens, self._seen = [], (0, 0, 0)  # it was removed: no token is known any more
            except (OSError, ConfigError):
                pass
            return self._tokens

    @contextmanager
    def _changing(self) -> Iterator[list[_Token]]:
        """Give the tokens to change, without expired ones, and store them in one step; other processes wait."""
        with self.file.with_name(self.file.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            now = time.time()
            tokens = [entry for entry in _read(self.file) if not entry.expires or entry.expires > now]
            yield tokens
            atomic_write(self.file, "".join(token.line() for token in tokens), sync=True, mode=0o600)


def tokens_file(arguments: Sequence[str], environ: Mapping[str, str], file: Path | None) -> Path:
    return (file or connections.find(arguments, environ).settings.run.dir / TOKENS).absolute()


def _read(file: Path) -> list[_Token]:
    mode = file.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(f"the token file {file} has mode {mode:03o}, expected 600; run: chmod 600 {file}")
    tokens: list[_Token] = []
    for number, line in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or not _NAME.fullmatch(match[1]):
            raise ConfigError(
                f"{file}:{number}: expected NAME ROLE sha256:HEX [EXPIRES] with a role of read, log, run or admin; "
                "remove the line, and create tokens with: penstock console token NAME"
            )
        tokens.append(_Token(match[1], Role[match[2].upper()], bytes.fromhex(match[3]), int(match[4] or 0)))
    return tokens


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def cookie_name(host: str) -> str:
    """Return the name of the cookie for a Host header: cookies are shared by the ports of a machine, names are not."""
    port = host.rpartition(":")[2]
    return f"penstock_{port}" if port.isdigit() else "penstock"


class Gate:
    """ASGI middleware: the security headers are added to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                header_names = {name.lower() for name, _ in message["headers"]}
                more = dict(HEADERS)
                if not scope["path"].startswith(STATIC):
                    more["cache-control"] = "no-store"
                extra = [(n.encode(), v.encode()) for n, v in more.items() if n.encode() not in header_names]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        # The platform guide's name of a run, and its rows of metrics.
        if scope["type"] == "http" and (guide := _GUIDE.fullmatch(scope["path"])):
            rest = "/rows" if guide["rest"] == "/metrics" and scope["method"] == "GET" else guide["rest"]
            scope["path"] = f"/v1/runs{guide['run']}{rest}"
        await self._app(scope, receive, secured if scope["type"] == "http" else send)


def admit(request: HTTPConnection, access: Access) -> Response | None:
    """Put the caller into the scope; return the answer to a request without a token, or from another site."""
    scope, path = request.scope, request.scope["path"]
    token, is_bearer = _token(request)
    is_public = path in PUBLIC or path.startswith(STATIC)
    is_change = scope["method"] not in _SAFE
    if is_change and not is_bearer and (token or is_public) and not is_of_this_site(request, unknown=False):
        return Problem(
            403,
            "a request that changes something came without an Authorization header from another site",
            expected=f"Origin: {scope['scheme']}://{request.headers.get('host', '')}",
            got=f"Origin: {request.headers.get('origin', 'none')}",
            fix="send the token as Authorization: Bearer, or use the page of this server",
        ).response()
    caller = access.caller(token) if token else None
    if caller is not None:
        scope[CALLER] = caller
        return None
    if is_public:
        return None
    if "text/html" in request.headers.get("accept", "") and scope["method"] == "GET":
        return RedirectResponse("/", 303)  # the page has the form for a token
    return Problem(
        401,
        f"{path} needs a token",
        expected="Authorization: Bearer TOKEN with a token that was not revoked",
        got="an unknown, revoked or expired token" if token else "no token",
        fix="create one with: penstock console token NAME --role read|log|run|admin",
    ).response({"www-authenticate": "Bearer"})


def _token(request: HTTPConnection) -> tuple[str, bool]:
    """Return the token of a request, and whether the Authorization header brought it, which goes first."""
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, token = header.partition(" ")
        return (token.strip(), True) if scheme.lower() == "bearer" else ("", False)
    cookies = SimpleCookie()
    try:
        cookies.load(request.headers.get("cookie", ""))
    except CookieError:
        return "", False
    cookie = cookies.get(cookie_name(request.headers.get("host", "")))
    return (cookie.value if cookie else ""), False
