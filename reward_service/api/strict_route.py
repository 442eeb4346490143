"""Routes whose JSON body must have one reading: a key that comes twice, NaN and other encodings are refused with 400."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from penstock.protocol.endpoints import strict_json


class StrictRoute(APIRoute):
    """Use it as ``route_class`` of a router; it needs no change to the routes."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which reads the body by `strict_json`."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


def checked_route(check: Callable[[Request], Awaitable[None]]) -> type[StrictRoute]:
    """Return a route class that awaits ``check`` before the body is parsed; what it raises is the answer."""

    class CheckedRoute(StrictRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = APIRoute.get_route_handler(self)

            async def checked(request: Request) -> Response:
                strict = _StrictRequest(request.scope, request.receive)
                await check(strict)
                return await handler(strict)

            return checked

    return CheckedRoute


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return strict_json.loads(await self.body())
        except strict_json.AmbiguousJson as err:
            raise HTTPException(400, f"the body is refused: {err}") from None
