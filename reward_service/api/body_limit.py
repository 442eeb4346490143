"""Limits on the size of request bodies: a longer one is refused with 413, and nothing of it is kept.

So is one that, with those of the requests in progress, exceeds what may be held at a time: 503 with Retry-After. Every caller
has a token by then, but 512 connections with 16 MiB each are more memory than the service should have.

Most clients read no answer before they have sent their whole body, and a connection that is closed with unread bytes is
reset, which destroys the answer. So the rest of a body that is not much too long is read and thrown away first.
"""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DISCARD_BYTES = 64 * 1024 * 1024  # read beyond the limit; the client of a longer body may see a reset connection


class _Held:
    """The bytes of all bodies in progress."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class _Body:
    """The body of one request: how much of it was read, and whether more will come."""

    def __init__(self, receive: Receive, max_bytes: int, held: _Held) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._held = held
        self._num_held = 0
        self.is_crowded = False  # it, with the others, is more than may be held
        self._num_read = 0
        self._more = True

    @property
    def is_too_long(self) -> bool:
        return self._num_read > self._max_bytes

    @property
    def is_over(self) -> bool:
        return self.is_too_long or self.is_crowded

    async def receive(self) -> Message:
        """Return the next part, or the end of the connection for a part beyond a limit."""
        message = await self._next()
        size = len(message.get("body", b""))
        self.is_crowded = self.is_crowded or self._held.num_bytes + size > self._held.max_bytes
        if self.is_over:
            self.release()
            return {"type": "http.disconnect"}
        self._held.num_bytes += size
        self._num_held += size
        return message

    def release(self) -> None:
        """Count this body as no longer held."""
        self._held.num_bytes -= self._num_held
        self._num_held = 0

    async def discard(self) -> None:
        """Read the rest, up to a bound."""
        while self._more and self._num_read <= self._max_bytes + _DISCARD_BYTES:
            await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._num_read += len(message.get("body", b""))
        self._more = message.get("more_body", False)
        return message


class BodyLimit:
    """ASGI middleware that counts the bytes of a body, whatever its Content-Length says."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_total_bytes: int) -> None:
        """``max_bytes`` is the longest body that is accepted, ``max_total_bytes`` what all bodies in progress may be together."""
        self._app = app
        self._max_bytes = max_bytes
        self._held = _Held(max(max_bytes, max_total_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 for a body that is too long, 503 for one too many; nothing of it reaches the app's handler."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._max_bytes, self._held)
        if _announced(scope) > self._max_bytes:
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
            detail = f"the bodies of all requests exceed {self._held.max_bytes} bytes (reward_service.max_requests_bytes); try again"
            status, headers = 503, {"connection": "close", "retry-after": "1"}
        else:
            detail = f"the body is longer than {self._max_bytes} bytes (reward_service.max_request_bytes)"
            status, headers = 413, {"connection": "close"}
        answer = JSONResponse({"detail": detail}, status, headers=headers)
        await answer(scope, body.receive, send)


def _waits_for_continue(scope: Scope) -> bool:
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])


def _announced(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
