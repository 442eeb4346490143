"""The HTTP API of the reward service, put together: who may call it, how errors are answered, health, metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from penstock.protocol.activity import Activity
from penstock.protocol.errors import BusError
from penstock.reward_service.api import endpoint_routes, metrics_text, scoring_routes
from penstock.reward_service.api.api_models import Refusal
from penstock.reward_service.api.body_limit import BodyLimit
from penstock.reward_service.endpoints.access import Access, Caller, Role
from penstock.reward_service.endpoints.endpoint_client import EndpointClient
from penstock.reward_service.endpoints.endpoint_registry import Registry
from penstock.reward_service.errors import EndpointRefused, NameTaken, NotAllowed
from penstock.reward_service.metrics import Figures
from penstock.reward_service.registry.reward_registry import RewardRegistry

_SCHEME = HTTPBearer(auto_error=False, description="A token of reward_service.tokens_file or token_file.")
_LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": text}
    for status, text in {
        400: "The body is not JSON.",
        401: "A token is needed.",
        403: "The token's role does not allow it.",
        413: "The body is longer than reward_service.max_request_bytes.",
        422: "A value breaks a rule.",
        503: "NATS is away.",
    }.items()
}


@dataclass(frozen=True, slots=True)
class Parts:
    """What the API shows and uses."""

    registry: Registry
    reward_registry: RewardRegistry
    client: EndpointClient
    figures: Figures
    activity: Activity
    replica: str
    run_id: str
    away_s: Callable[[], float]
    num_held: Callable[[], int]


def build(parts: Parts, *, access: Access, hosts: Sequence[str] = (), max_request_bytes: int) -> FastAPI:
    """Return the app. Without tokens only requests that name this machine, or one of ``hosts``, are answered."""
    app = FastAPI(title="Penstock reward service", version="1", responses=_REFUSALS)
    app.add_middleware(BodyLimit, max_bytes=max_request_bytes)
    needs = _needs(access, frozenset({*_LOOPBACK_NAMES, *hosts}))
    _answer_errors(app)
    _health(app, parts, needs(Role.READ))
    endpoint_routes.add(app, parts.registry, parts.client, needs)
    scoring_routes.add(app, parts.registry, parts.reward_registry, needs)
    return app


def _needs(access: Access, hosts: frozenset[str]) -> Callable[[Role], Callable[..., Caller]]:
    """Return what makes a route ask for a role; it gives the route its caller."""

    def needs(role: Role) -> Callable[..., Caller]:
        def check(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)]) -> Caller:
            if access.is_open and _host_of(request) not in hosts:  # a web page that had its name point here
                raise HTTPException(403, "without tokens only requests to this machine by its own name are answered")
            caller = access.caller(given.credentials if given is not None else None)
            if caller is None:
                raise HTTPException(
                    401, "a bearer token is needed: Authorization: Bearer ...", headers={"WWW-Authenticate": "Bearer"}
                )
            if caller.role < role:
                raise HTTPException(
                    403, f"the token of {caller.name} is {caller.role.name.lower()}, this needs {role.name.lower()}"
                )
            return caller

        return check

    return needs


def _host_of(request: Request) -> str:
    host = request.headers.get("host", "").lower()
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]


def _answer_errors(app: FastAPI) -> None:
    def answer(error: type[Exception], status: int) -> None:
        @app.exception_handler(error)
        async def _answer(_: Request, err: Exception) -> JSONResponse:
            return JSONResponse({"detail": str(err)}, status)

    answer(NameTaken, 409)
    answer(NotAllowed, 403)
    answer(EndpointRefused, 422)
    answer(BusError, 503)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, err: RequestValidationError) -> JSONResponse:
        """Say what is wrong and where, without what was sent: it may be a secret, or no JSON."""
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in err.errors()]
        return JSONResponse({"detail": "; ".join(wrong[:10])}, 422)


def _health(app: FastAPI, parts: Parts, may_read: Callable[..., Caller]) -> None:
    @app.get("/healthz")
    async def healthz(response: Response) -> dict[str, Any]:
        """Say whether this replica can work: 503 while NATS is away."""
        away_s = parts.away_s()
        response.status_code = 503 if away_s else 200
        reason = f"NATS has been away for {away_s:.0f} s" if away_s else ""
        return {"ok": not away_s, "replica": parts.replica, "run_id": parts.run_id, "reason": reason}

    @app.get("/metrics", dependencies=[Depends(may_read)], response_class=Response)
    async def metrics() -> Response:
        """Return the counters for Prometheus."""
        live = {name: parts.client.figures(endpoint) for name, endpoint in parts.registry.endpoints.items()}
        text = metrics_text.render(parts.figures, parts.activity, live, num_held=parts.num_held())
        return Response(text, media_type=metrics_text.CONTENT_TYPE)
