"""What every HTTP server checks of a request before its handler sees it: headers, length, signature, JSON.

Of bodies: one that is too long is refused with 413, and nothing of it is kept. One that, with those of the requests in
progress, exceeds what may be held at a time gets 503 with Retry-After: 512 connections with 16 MiB each are more memory
than a service should have. Most clients read no answer before they have sent their whole body, and a connection that is
closed with unread bytes is reset, which destroys the answer: the rest of a body not much too long is read first.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.protocol.metrics.server import LOOPBACK_NAMES, host_of
from penstock.serving import signature, strict_json

_HOST_FIX = "without --secret-file the Host header must be localhost, 127.0.0.1 or that of --url"
_HEADERS = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}
MAX_HEAD_BYTES = 32 * 1024
MAX_QUERY_BYTES = 4 * 1024
_DISCARD_BYTES = 64 * 1024 * 1024  # read beyond the limit; the client of a longer body may see a reset connection

Problem = tuple[int, str] | None  # status and reason of a refusal
Refuse = Callable[[int, str, Scope], Response]  # makes the answer of a status and a reason; of 503 with Retry-After
Admit = Callable[[HTTPConnection], Response | None]


def refuse(status: int, detail: str, scope: Scope | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, headers=_HEADERS.get(status))


def head_problem(scope: Scope) -> Problem:
    """Return status and reason for a target or headers too long, or that say twice where the body ends; else None."""
    if sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"]) > MAX_HEAD_BYTES:
        return 431, f"the request's target and headers are longer than {MAX_HEAD_BYTES} bytes"
    if len(scope.get("query_string", b"")) > MAX_QUERY_BYTES:
        return 414, f"the query is longer than {MAX_QUERY_BYTES} bytes"
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        return 400, "Content-Length and Transfer-Encoding end the body differently; send Content-Length alone"
    return None


def name_problem(request: HTTPConnection, hosts: Collection[str] | None, fix: str) -> Problem:
    """Return status and reason for a header given twice, or a Host, as of a web page, not in ``hosts`` (None: any)."""
    for name in ("host", "authorization", "origin", "content-length"):
        if len(request.headers.getlist(name)) > 1:
            return 400, f"the header {name} is there twice; send it once"
    if hosts is not None and host_of(request.headers.get("host", "")) not in hosts:
        return 403, fix
    return None


def is_of_this_site(request: HTTPConnection, *, unknown: bool) -> bool:
    """Return whether a request is of no other site's page; ``unknown``: what it is without a browser's headers."""
    if (site := request.headers.get("sec-fetch-site")) is not None:
        return site == "same-origin" or (unknown and site == "none")
    if (origin := request.headers.get("origin")) is None:
        return unknown
    host = request.headers.get("host", "")
    if unknown:  # behind a proxy that ends TLS the scheme is another one
        return urlsplit(origin).netloc.lower() == host.lower()
    return origin == f"{request.scope.get('scheme', 'http')}://{host}"


def page_problem(request: HTTPConnection, *, any_body: bool = False) -> Problem:
    """Return status and reason for what another site's page sends, or, unless ``any_body``, could; else None.

    A browser asks first before a page may send JSON elsewhere; other bodies, even without a type, it sends at once.
    """
    headers = request.headers
    if not is_of_this_site(request, unknown=True):
        return 403, "the request is that of a web page of another site; send it from a program"
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    is_json = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
    if has_body and not (is_json or any_body):
        return 415, "the body is not JSON; send Content-Type: application/json"
    return None


@dataclass(frozen=True, slots=True)
class Rules:
    """What a server asks of the head of a request."""

    hosts: Iterable[str] | None  # which a Host header may name besides those of the loopback; None: any
    admit: Admit = lambda _: None  # returns the answer to a sender who may not ask, before anything of a body is read
    has_page: bool = False  # `admit` decides about pages of other sites, and about the types of bodies
    any_body: bool = False  # bodies need not be JSON, as where any Host may be named
    is_open: Callable[[HTTPConnection], bool] = lambda _: False  # requests whose Host and sender's site do not matter
    answer: Refuse = refuse  # to what is refused before it is routed
    fix: str = _HOST_FIX  # the reason for another Host


class Guard:
    """ASGI middleware of every server: refuses a request by its headers, by whom it is from, by its body's length."""

    def __init__(
        self, app: ASGIApp, rules: Rules, *, max_bytes: int, max_total_bytes: int | None = None, section: str = ""
    ) -> None:
        """``max_total_bytes`` None: eight times ``max_bytes``; the other arguments are those of `BodyLimit`."""
        self._app = BodyLimit(app, max_bytes, max_total_bytes or 8 * max_bytes, rules.answer, section)
        self._rules = rules
        self._hosts = None if rules.hosts is None else LOOPBACK_NAMES | {host.lower() for host in rules.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope, HTTPConnection(scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope, request: HTTPConnection) -> Response | None:
        problem = head_problem(scope)
        is_malformed = problem is not None
        if problem is None and not self._rules.is_open(request):
            problem = name_problem(request, self._hosts, self._rules.fix)
            if problem is None and not self._rules.has_page:
                problem = page_problem(request, any_body=self._rules.any_body or self._hosts is None)
        if problem is None:
            return self._rules.admit(request)
        refusal = self._rules.answer(*problem, scope)
        if is_malformed:
            refusal.headers["connection"] = "close"  # what follows may not be where a request begins
        return refusal


class _Body:
    def __init__(self, receive: Receive, limit: BodyLimit) -> None:
        self._receive, self._limit = receive, limit
        self._num_held = self._num_read = 0
        self.is_crowded = False  # it, with the others, is more than may be held
        self._more = True

    @property
    def is_too_long(self) -> bool:
        return self._num_read > self._limit.max_bytes

    @property
    def is_over(self) -> bool:
        return self.is_too_long or self.is_crowded

    async def receive(self) -> Message:
        message = await self._next()
        size = len(message.get("body", b""))
        self.is_crowded = self.is_crowded or self._limit.num_held + size > self._limit.max_total_bytes
        if self.is_over:
            self.release()
            return {"type": "http.disconnect"}
        self._limit.num_held += size
        self._num_held += size
        return message

    def release(self) -> None:
        self._limit.num_held -= self._num_held
        self._num_held = 0

    async def discard(self) -> None:
        while self._more and self._num_read <= self._limit.max_bytes + _DISCARD_BYTES:
            await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._num_read += len(message.get("body", b""))
        self._more = message.get("more_body", False)
        return message


class BodyLimit:
    """ASGI middleware that counts the bytes of a body, whatever its Content-Length says."""

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_total_bytes: int, answer: Refuse = refuse, section: str = ""
    ) -> None:
        """Start with no body held.

        Args:
            app: Called with bodies within the limits.
            max_bytes: The longest body that is accepted.
            max_total_bytes: What all bodies in progress may be together.
            answer: Makes the answer to another one.
            section: That of a run file with these limits, ``max_request_bytes``, ``max_requests_bytes``; empty: fixed.
        """
        self.max_bytes, self.max_total_bytes = max_bytes, max(max_bytes, max_total_bytes)
        self.num_held = 0
        self._app, self._answer = app, answer
        self._section = section

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 for a body that is too long, 503 for one too many; nothing of it reaches the app's handler."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self)
        headers = HTTPConnection(scope).headers
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.max_bytes:
            await self._refuse(scope, body, send, discard=headers.get("expect", "").lower() != "100-continue")
            return
        answering = False

        async def noted(message: Message) -> None:
            nonlocal answering
            if answering or not body.is_over:  # the app's response to the truncated body would hide the reason
                answering = True
                await send(message)

        try:
            await self._app(scope, body.receive, noted)
        except ClientDisconnect:
            if not body.is_over:
                raise
        finally:
            body.release()
        if body.is_over and not answering:
            await self._refuse(scope, body, send, discard=True)

    async def _refuse(self, scope: Scope, body: _Body, send: Send, *, discard: bool) -> None:
        if discard:
            await body.discard()
        if body.is_crowded and not body.is_too_long:
            text = f"the bodies of all requests exceed {self.max_total_bytes} bytes{self._of('max_requests_bytes')}"
            answer = self._answer(503, f"{text}; try again", scope)
        else:
            text = f"the body is longer than {self.max_bytes} bytes{self._of('max_request_bytes')}"
            answer = self._answer(413, text, scope)
        answer.headers["connection"] = "close"
        await answer(scope, body.receive, send)

    def _of(self, key: str) -> str:
        return f" ({self._section}.{key})" if self._section else ""


class StrictRequest(Request):
    max_depth: int | None = None

    async def json(self) -> Any:
        """Return the body; raises HTTPException 400 for a key given twice, NaN, other encodings and too many levels."""
        if not hasattr(self, "_json"):
            try:
                self._json = strict_json.loads(await self.body(), self.max_depth, is_finite=True)
            except strict_json.AmbiguousJson as err:
                raise HTTPException(400, f"the body is refused: {err}") from None
        return self._json


class StrictRoute(APIRoute):
    """Use it as ``route_class`` of a router; it needs no change to the routes."""

    max_depth: int | None = None

    async def check(self, request: StrictRequest) -> None:
        """Raise for a request that is refused before its body is parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            read = StrictRequest(request.scope, request.receive)
            read.max_depth = self.max_depth
            await self.check(read)
            return await handler(read)

        return strict


def guard(
    app: FastAPI, check: Callable[[StrictRequest], Awaitable[None]], rules: Rules, *, max_bytes: int,
    max_depth: int | None = None,
) -> None:  # fmt: skip
    """Guard an app without routes; ``check`` raises the answer before a body, at most ``max_depth`` deep, is parsed."""
    members = {"check": staticmethod(check), "max_depth": max_depth}
    app.router.route_class = type("CheckedRoute", (StrictRoute,), members)
    app.add_middleware(Guard, rules=rules, max_bytes=max_bytes)


async def check_signature(secrets: Sequence[str], request: Request) -> str:
    """Return the id that was signed with the body; raises HTTPException 401 unless one of the secrets signed it."""
    try:
        return signature.verify(secrets, request.headers, await request.body(), now_s=time.time())
    except signature.BadSignature as err:
        raise HTTPException(401, str(err)) from None
