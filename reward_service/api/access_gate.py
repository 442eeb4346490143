"""Who may talk to the API, decided from the headers alone: nothing of a body is read before its sender is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.reward_service.endpoints.access import Access
from penstock.reward_service.endpoints.wire import CALL_HEADER
from penstock.serving.request_checks import LOOPBACK_NAMES, head_problem, name_problem, refuse

CALLER = "penstock.caller"  # key of the scope: the Caller of the request, for the routes' check of its role
_OPEN = (
    "without tokens the Host header must be localhost or 127.0.0.1; set reward_service.tokens_file to allow other names"
)
_PUBLIC = frozenset({"/healthz", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"})


class AccessGate:
    """ASGI middleware: 401 without a known token, 403 for a foreign Host without tokens, 508 for calls of a service."""

    def __init__(self, app: ASGIApp, access: Access, hosts: Iterable[str]) -> None:
        """``hosts``: names of this machine besides those of loopback, used when there are no tokens."""
        self._app = app
        self._access = access
        self._hosts = LOOPBACK_NAMES | {*hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand the request on with its caller in the scope."""
        refusal = self._refusal(scope, HTTPConnection(scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else refuse(*refusal))(scope, receive, send)

    def _refusal(self, scope: Scope, request: HTTPConnection) -> tuple[int, str] | None:
        """Return status and reason for a request that is refused; else store its caller and return None."""
        if CALL_HEADER in request.headers:
            text = "a reward service calls its own API, or another one's, as an endpoint; register another URL"
            return 508, text
        problem = head_problem(scope)
        if problem is not None or scope["path"] in _PUBLIC:
            return problem
        if problem := name_problem(request, self._hosts if self._access.is_open else None, _OPEN):
            return problem
        caller = self._access.caller(bearer(request.headers.getlist("authorization")))
        if caller is None:
            return 401, "a bearer token is needed: Authorization: Bearer ..."
        scope[CALLER] = caller
        return None


def bearer(values: Sequence[str]) -> str | None:
    """Return the token of the Authorization header, None for another scheme or none."""
    scheme, _, token = values[0].partition(" ") if values else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else None
