"""The HTTP API of the reward service: access, error responses, health, metrics, and the routes of the other files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer

from penstock.protocol.activity import Activity
from penstock.protocol.errors import BusError, TargetRefused
from penstock.protocol.facts import Heartbeat
from penstock.protocol.metrics.exporter import Exporter
from penstock.protocol.metrics.samples import Samples
from penstock.reward_service.api import endpoint_routes, metrics_samples, scoring_routes
from penstock.reward_service.api.access_gate import CALLER, AccessGate
from penstock.reward_service.api.api_models import Refusal
from penstock.reward_service.api.metrics_samples import EndpointState
from penstock.reward_service.endpoints.access import Access, Caller, Role
from penstock.reward_service.endpoints.endpoint_client import EndpointClient
from penstock.reward_service.endpoints.endpoint_registry import EndpointRegistry
from penstock.reward_service.errors import EndpointRefused, NameTaken, NotAllowed
from penstock.reward_service.metrics import ServiceMetrics
from penstock.reward_service.registry.reward_registry import RewardRegistry
from penstock.serving.request_checks import BodyLimit, StrictRoute

_SCHEME = HTTPBearer(auto_error=False, description="A token of reward_service.tokens_file or token_file.")
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": text}
    for status, text in {
        400: "The body is not JSON, or has a key twice.",
        401: "A token is needed.",
        403: "The token's role does not allow it.",
        408: "The request did not arrive in time.",
        413: "The body is longer than reward_service.max_request_bytes.",
        422: "A value breaks a rule.",
        503: "NATS is unreachable, all connections are in use, or the bodies of other requests fill the memory for them.",
        508: "A reward service called this API as an endpoint.",
    }.items()
}


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What the API reads and calls."""

    registry: EndpointRegistry
    reward_registry: RewardRegistry
    client: EndpointClient
    metrics: ServiceMetrics
    activity: Activity
    replica: str
    run_id: str
    nats_down_s: Callable[[], float]
    num_held: Callable[[], int]
    heartbeat: Callable[[], Heartbeat | None]
    spans: Callable[[], Mapping[str, int]]
    certificates: Mapping[str, float]  # when each ends that is used, by what names its file


def build(
    context: ApiContext, *, access: Access, hosts: Sequence[str] = (), max_request_bytes: int, max_requests_bytes: int
) -> FastAPI:
    """Return the app. Without tokens the Host header must name this machine or one of ``hosts``."""
    app = FastAPI(title="Penstock reward service", version="1", responses=_REFUSALS)
    app.router.route_class = StrictRoute
    app.add_middleware(
        BodyLimit, max_bytes=max_request_bytes, max_total_bytes=max_requests_bytes, section="reward_service"
    )
    app.add_middleware(AccessGate, access=access, hosts=hosts)  # the last one is the first that sees a request
    _answer_errors(app)
    _health(app, context)
    _metrics(app, context, needs(Role.READ))
    endpoint_routes.add(app, context.registry, context.client, needs)
    scoring_routes.add(app, context.registry, context.reward_registry, needs)
    return app


def needs(role: Role) -> Callable[..., Caller]:
    """Return a dependency that checks a role and gives the route its caller."""

    def check(request: Request, _scheme: Annotated[object, Depends(_SCHEME)]) -> Caller:
        caller: Caller = request.scope[CALLER]
        if caller.role < role:
            raise HTTPException(
                403,
                f"the token {caller.name!r} has the role {caller.role.name.lower()}; this request needs {role.name.lower()}",
            )
        return caller

    return check


def _answer_errors(app: FastAPI) -> None:
    def answer(error: type[Exception], status: int) -> None:
        @app.exception_handler(error)
        async def _answer(_: Request, err: Exception) -> JSONResponse:
            return JSONResponse({"detail": str(err)}, status)

    answer(NameTaken, 409)
    answer(NotAllowed, 403)
    answer(EndpointRefused, 422)
    answer(TargetRefused, 422)
    answer(BusError, 503)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, err: RequestValidationError) -> JSONResponse:
        """Name the wrong fields without their values, which may be secrets or not JSON."""
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in err.errors()]
        return JSONResponse({"detail": "; ".join(wrong[:10])}, 422)


def _health(app: FastAPI, context: ApiContext) -> None:
    @app.get("/healthz")
    async def healthz(response: Response) -> dict[str, Any]:
        """Return whether this replica can work: 503 while NATS is unreachable."""
        down_s = context.nats_down_s()
        response.status_code = 503 if down_s else 200
        reason = f"NATS unreachable for {down_s:.0f} s" if down_s else ""
        return {"ok": not down_s, "replica": context.replica, "run_id": context.run_id, "reason": reason}


def _metrics(app: FastAPI, context: ApiContext, may_read: Callable[..., Caller]) -> None:
    def collect(samples: Samples) -> None:
        endpoints = {
            name: EndpointState(context.client.metrics(endpoint), context.client.timings(endpoint))
            for name, endpoint in context.registry.endpoints.items()
        }
        metrics_samples.collect(samples, context.metrics, context.activity, endpoints, num_held=context.num_held())

    exporter = Exporter(
        "reward",
        run_id=context.run_id,
        service_id=context.replica,
        heartbeat=context.heartbeat,
        collect=collect,
        spans=context.spans,
        certificates=context.certificates,
    )

    @app.get("/metrics", dependencies=[Depends(may_read)], response_class=Response)
    async def metrics(request: Request) -> Response:
        """Return the counters for Prometheus."""
        samples = exporter.samples()  # here, where nothing changes meanwhile; written in a thread
        accept = request.headers.get("accept", "")
        body, content_type = await asyncio.to_thread(Exporter.written, samples, accept)
        return Response(body, headers={"content-type": content_type})
