"""What every request must pass, decided from its head alone: Host, size, origin and token. ASGI middleware.

Public are the health route, the page and its static files, and the login; they hold no data. Every other path needs a
token, as ``Authorization: Bearer`` or as the browser's cookie. A request that changes something and brings no Authorization
header must come from the page itself (CSRF): its ``Origin`` is this server's, or the browser says so (``Sec-Fetch-Site``).
"""

from __future__ import annotations

from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.console.web.access import Access
from penstock.console.web.problems import Problem

CALLER = "penstock.caller"  # key of the scope
TOKEN = "penstock.token"  # noqa: S105 - key of the scope: the token that was given
PUBLIC = frozenset({"/", "/healthz", "/login", "/favicon.ico"})
STATIC = "/static/"
MAX_HEAD_BYTES = 16 * 1024
MAX_QUERY_BYTES = 4 * 1024
MAX_BODY_BYTES = 1024 * 1024
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


def cookie_name(host: str) -> str:
    """Return the name of the cookie for a Host header: cookies are shared by the ports of a machine, names are not."""
    port = host.rpartition(":")[2]
    return f"penstock_{port}" if port.isdigit() else "penstock"


class Gate:
    """Refuse a request, or hand it on with its caller in the scope; add the security headers to every answer."""

    def __init__(self, app: ASGIApp, access: Access, hosts: Iterable[str] = ()) -> None:
        """``hosts``: names besides those of loopback that the Host header may have."""
        self._app = app
        self._access = access
        self._hosts = frozenset({*_LOOPBACK, *(host.lower() for host in hosts)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                more = dict(HEADERS)
                if not scope["path"].startswith(STATIC):
                    more["cache-control"] = "no-store"
                extra = [(n.encode(), v.encode()) for n, v in more.items() if n.encode() not in given]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        refusal = self._refusal(scope, HTTPConnection(scope))
        if refusal is not None:
            await refusal(scope, receive, secured)
            return
        body = _Body(receive)
        await self._app(scope, body.receive, secured)

    def _refusal(self, scope: Scope, request: HTTPConnection) -> Response | None:
        problem = self._malformed(scope, request)
        if problem is not None:
            return problem.response()
        token, is_bearer = _token(request)
        path = scope["path"]
        is_public = path in PUBLIC or path.startswith(STATIC)
        if scope["method"] not in _SAFE and not is_bearer and (token or is_public) and not _is_same_origin(request):
            return Problem(
                403,
                "a request that changes something came without an Authorization header from another site",
                expected=f"Origin: {request.url.scheme}://{request.headers.get('host', '')}",
                got=f"Origin: {request.headers.get('origin', 'none')}",
                fix="send the token as Authorization: Bearer, or use the page of this server",
            ).response()
        caller = self._access.caller(token) if token else None
        if caller is not None:
            scope[CALLER], scope[TOKEN] = caller, token
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
            fix="create one with: penstock console token NAME --role read|run|admin",
        ).response({"www-authenticate": "Bearer"})

    def _malformed(self, scope: Scope, request: HTTPConnection) -> Problem | None:
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope.get("raw_path") or b"")
        if size > MAX_HEAD_BYTES:
            return Problem(
                431, "the target and headers are too long", expected=f"<= {MAX_HEAD_BYTES} bytes", got=str(size)
            )
        if len(scope["query_string"]) > MAX_QUERY_BYTES:
            got = str(len(scope["query_string"]))
            return Problem(414, "the query is too long", expected=f"<= {MAX_QUERY_BYTES} bytes", got=got)
        for name in ("host", "authorization", "origin", "content-length"):
            if len(request.headers.getlist(name)) > 1:
                return Problem(400, f"the header {name} is there twice", fix="send it once")
        host = request.headers.get("host", "")
        if _name_of(host) not in self._hosts:  # a web page whose name resolves to this machine (DNS rebinding)
            return Problem(
                403,
                "the Host header names another machine",
                expected=", ".join(sorted(self._hosts)),
                got=host,
                fix="use one of these names, or start the console with --allow-host NAME",
            )
        length = request.headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > MAX_BODY_BYTES:
            return Problem(413, "the body is too long", expected=f"<= {MAX_BODY_BYTES} bytes", got=f"{length} bytes")
        return None


class _Body:
    """The body of one request, which ends the connection beyond the limit whatever its Content-Length says."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._num_bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes; send a shorter one")
        return message


def _token(request: HTTPConnection) -> tuple[str, bool]:
    """Return the token of a request, and whether the Authorization header brought it; the header goes before the cookie."""
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, token = header.partition(" ")
        return (token.strip(), True) if scheme.lower() == "bearer" else ("", False)
    cookies = SimpleCookie()
    try:
        cookies.load(request.headers.get("cookie", ""))
    except CookieError:
        return "", False
    found = cookies.get(cookie_name(request.headers.get("host", "")))
    return (found.value if found else ""), False


def _is_same_origin(request: HTTPConnection) -> bool:
    """Return True for a request of this server's own page; a browser's page cannot set either header."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    return request.headers.get("origin") == f"{request.url.scheme}://{request.headers.get('host', '')}"


def _name_of(host: str) -> str:
    host = host.lower()
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
