"""A limit on the size of request bodies: a longer one is refused with 413 and not read."""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware that counts the bytes of a body, whatever its Content-Length says."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """``max_bytes`` is the longest body that is accepted."""
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 for a body that is too long; nothing of it reaches the app's handler."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _announced(scope) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        read, over, answering = 0, False, False

        async def counted() -> Message:
            nonlocal read, over
            message = await receive()
            read += len(message.get("body", b""))
            over = over or read > self._max_bytes
            return {"type": "http.disconnect"} if over else message

        async def noted(message: Message) -> None:
            nonlocal answering
            if answering or not over:  # the app's response to the truncated body would hide the reason
                answering = True
                await send(message)

        try:
            await self._app(scope, counted, noted)
        except ClientDisconnect:
            if not over:
                raise
        if over and not answering:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        detail = f"the body is longer than {self._max_bytes} bytes (reward_service.max_request_bytes)"
        answer = JSONResponse({"detail": detail}, 413, headers={"connection": "close"})
        await answer(scope, receive, send)


def _announced(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
