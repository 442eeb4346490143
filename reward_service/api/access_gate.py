"""Who may talk to the API, decided from the headers alone: nothing of a body is read before its sender is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastapi.responses import JSONResponse
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.reward_service.endpoints.access import Access
from penstock.reward_service.endpoints.endpoint_http import CALL_HEADER

CALLER = "penstock.caller"  # key of the scope: the Caller of the request, for the routes' check of its role
_LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_MAX_HEAD_BYTES = 32 * 1024
_PUBLIC = frozenset({"/healthz", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"})


class AccessGate:
    """ASGI middleware: 401 without a known token, 403 for a foreign Host without tokens, 508 for calls of a service."""

    def __init__(self, app: ASGIApp, access: Access, hosts: Iterable[str]) -> None:
        """``hosts``: names of this machine besides those of loopback, used when there are no tokens."""
        self._app = app
        self._access = access
        self._hosts = frozenset({*_LOOPBACK_NAMES, *hosts})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand the request on with its caller in the scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope, HTTPConnection(scope))
        if refusal is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, request: HTTPConnection) -> JSONResponse | None:
        """Return the answer to a request that is refused; else store its caller and return None."""
        if CALL_HEADER in request.headers:
            return _refuse(
                508, "a reward service calls its own API, or another one's, as an endpoint; register another URL"
            )
        if sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"]) > _MAX_HEAD_BYTES:
            return _refuse(431, f"the request's target and headers are longer than {_MAX_HEAD_BYTES} bytes")
        if "content-length" in request.headers and "transfer-encoding" in request.headers:
            return _refuse(400, "the request has Content-Length and Transfer-Encoding, which end its body differently")
        if scope["path"] in _PUBLIC:
            return None
        for name in ("authorization", "host"):
            if len(request.headers.getlist(name)) > 1:
                return _refuse(400, f"the header {name} is there twice; send it once")
        if self._access.is_open and _host_of(request.headers.get("host", "")) not in self._hosts:
            # a web page whose name resolves to this machine
            return _refuse(
                403,
                "without tokens the Host header must be localhost or 127.0.0.1; set reward_service.tokens_file to allow "
                "other names",
            )
        caller = self._access.caller(bearer(request.headers.getlist("authorization")))
        if caller is None:
            return _refuse(401, "a bearer token is needed: Authorization: Bearer ...")
        scope[CALLER] = caller
        return None


def bearer(values: Sequence[str]) -> str | None:
    """Return the token of the Authorization header, None for another scheme or none."""
    scheme, _, token = values[0].partition(" ") if values else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else None


def _host_of(host: str) -> str:
    host = host.lower()
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]


def _refuse(status: int, detail: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"detail": detail}, status, headers=headers)
