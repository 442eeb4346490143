"""What every HTTP server here checks of a request before its handler sees it: headers, length of the body, signature, JSON.

Of bodies: one that is too long is refused with 413, and nothing of it is kept. One that, with those of the requests in progress, exceeds
what may be held at a time gets 503 with Retry-After: 512 connections with 16 MiB each are more memory than a service should have.
Most clients read no answer before they have sent their whole body, and a connection that is closed with unread bytes is reset,
which destroys the answer. So the rest of a body that is not much too long is read and thrown away first.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.protocol.metrics.server import host_of
from penstock.serving import signature, strict_json

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_HOST_FIX = "without --secret-file the Host header must be localhost, 127.0.0.1 or that of --url"
_HEADERS = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}
_MAX_HEAD_BYTES = 32 * 1024
_DISCARD_BYTES = 64 * 1024 * 1024  # read beyond the limit; the client of a longer body may see a reset connection

Refuse = Callable[[int, str], JSONResponse]  # makes the answer of a status and a reason; of 503 with Retry-After


def refuse(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, headers=_HEADERS.get(status))


def head_problem(scope: Scope) -> tuple[int, str] | None:
    """Return status and reason for headers that are too long, or say twice where the body ends; else None."""
    if sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"]) > _MAX_HEAD_BYTES:
        return 431, f"the request's target and headers are longer than {_MAX_HEAD_BYTES} bytes"
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        return 400, "the request has Content-Length and Transfer-Encoding, which end its body differently"
    return None


def name_problem(request: HTTPConnection, hosts: Collection[str] | None, fix: str) -> tuple[int, str] | None:
    """Return status and reason for a header that is there twice, or a Host that is none of ``hosts`` (None: any); else None.

    A web page whose name resolves to this machine could otherwise call a server that trusts every program of the machine.
    """
    for name in ("authorization", "host"):
        if len(request.headers.getlist(name)) > 1:
            return 400, f"the header {name} is there twice; send it once"
    if hosts is not None and host_of(request.headers.get("host", "")) not in hosts:
        return 403, fix
    return None


def page_problem(request: HTTPConnection, *, is_signed: bool) -> tuple[int, str] | None:
    """Return status and reason for what the page of another site makes a browser send, or could; else None.

    A browser asks the server first before a page may send JSON elsewhere; other bodies, also those without a type, it sends at once.
    """
    headers = request.headers
    origin = headers.get("origin")
    is_elsewhere = origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    if is_elsewhere or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return 403, "the request is that of a web page of another site; send it from a program"
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if (
        not is_signed
        and has_body
        and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json"
    ):
        return 415, "the body is not JSON; send Content-Type: application/json"
    return None


class HeadCheck:
    """ASGI middleware that refuses requests by their headers alone: nothing of a body is read before."""

    def __init__(
        self, app: ASGIApp, hosts: Iterable[str] | None, answer: Refuse = refuse, fix: str = _HOST_FIX
    ) -> None:
        """``hosts``: which a Host header may name besides those of the loopback; None: any."""
        self._app, self._answer, self._fix = app, answer, fix
        self._hosts = None if hosts is None else LOOPBACK_NAMES | {*hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = None
        if scope["type"] == "http":
            request = HTTPConnection(scope)
            problem = self.problem(scope, request)
        await (self._app if problem is None else self._answer(*problem))(scope, receive, send)

    def problem(self, scope: Scope, request: HTTPConnection) -> tuple[int, str] | None:
        """Return status and reason of a refusal; None for a request that may pass."""
        return (
            head_problem(scope)
            or name_problem(request, self._hosts, self._fix)
            or page_problem(request, is_signed=self._hosts is None)
        )


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
            section: That of a run file with these limits as ``max_request_bytes`` and ``max_requests_bytes``; empty: they are fixed.
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
        if _announced(scope) > self.max_bytes:
            await self._refuse(scope, body, send, discard=not _waits_for_continue(scope))
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
            text, key = f"the bodies of all requests exceed {self.max_total_bytes} bytes", "max_requests_bytes"
            answer = self._answer(503, f"{text}{self._of(key)}; try again")
        else:
            answer = self._answer(413, f"the body is longer than {self.max_bytes} bytes{self._of('max_request_bytes')}")
        answer.headers["connection"] = "close"
        await answer(scope, body.receive, send)

    def _of(self, key: str) -> str:
        return f" ({self._section}.{key})" if self._section else ""


def _waits_for_continue(scope: Scope) -> bool:
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])


def _announced(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


class StrictRequest(Request):
    max_depth: int | None = None

    async def json(self) -> Any:
        """Return the body; raises HTTPException 400 for a key that comes twice, NaN, other encodings and too many levels."""
        if not hasattr(self, "_json"):
            try:
                self._json = strict_json.loads(await self.body(), self.max_depth)
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
    app: FastAPI, check: Callable[[StrictRequest], Awaitable[None]], *, max_bytes: int, hosts: Iterable[str] | None,
    max_depth: int | None = None, answer: Refuse = refuse,
) -> None:  # fmt: skip
    """Add all checks of a server that anybody may start to an app that has no route yet.

    Args:
        app: The app.
        check: Awaited before the body is parsed; what it raises is the answer.
        max_bytes: The longest body that is accepted; eight of these may be held at a time.
        hosts: As those of `HeadCheck`.
        max_depth: How often the body's lists and objects may be nested; None: as often as Python can read.
        answer: Makes the answer to a request that is refused before it is routed.
    """
    members = {"check": staticmethod(check), "max_depth": max_depth}
    app.router.route_class = type("CheckedRoute", (StrictRoute,), members)
    guard_heads(app, max_bytes=max_bytes, hosts=hosts, answer=answer)


def guard_heads(
    app: Starlette, *, max_bytes: int, hosts: Iterable[str] | None, answer: Refuse = refuse, fix: str = _HOST_FIX
) -> None:
    """Add the checks of headers and of the body's length; the arguments are those of `guard` and `HeadCheck`."""
    app.add_middleware(BodyLimit, max_bytes=max_bytes, max_total_bytes=8 * max_bytes, answer=answer)
    app.add_middleware(HeadCheck, hosts=hosts, answer=answer, fix=fix)  # the last one is the first that sees a request


async def check_signature(secrets: Sequence[str], request: Request) -> str:
    """Return the id that was signed with the body; raises HTTPException 401 unless one of the secrets signed it."""
    try:
        return signature.verify(secrets, request.headers, await request.body(), now_s=time.time())
    except signature.BadSignature as err:
        raise HTTPException(401, str(err)) from None
