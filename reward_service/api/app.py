"""The HTTP API of the reward service: access, error responses, health, metrics, and the routes of the other files.

Who may talk to the API is decided from the headers alone: nothing of a body is read before its sender is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.requests import HTTPConnection

from penstock.protocol.errors import BusError, TargetRefused
from penstock.protocol.facts import Heartbeat
from penstock.protocol.heartbeats import Activity, cpu_seconds
from penstock.protocol.metrics.exporter import Exporter
from penstock.protocol.metrics.table import Samples
from penstock.reward_service.api import routes
from penstock.reward_service.api.api_models import Refusal
from penstock.reward_service.endpoints.endpoint import Access
from penstock.reward_service.endpoints.endpoint_call import BreakerState, EndpointMetrics
from penstock.reward_service.endpoints.endpoint_queue import EndpointClient
from penstock.reward_service.endpoints.endpoint_registry import EndpointRegistry
from penstock.reward_service.endpoints.wire import CALL_HEADER
from penstock.reward_service.errors import EndpointRefused, NameTaken, NotAllowed
from penstock.reward_service.metrics import ServiceMetrics, Timings
from penstock.reward_service.registry.reward_registry import RewardRegistry
from penstock.serving.request_checks import Guard, Rules, StrictRoute, refuse

_PREFIX = "penstock_reward_"
_OPEN = "without tokens the Host header must be localhost or 127.0.0.1; other names need reward_service.tokens_file"
_PUBLIC = frozenset({"/healthz", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"})
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": text}
    for status, text in {
        400: "The body is not JSON, or has a key twice.",
        401: "A token is needed.",
        403: "The token's role does not allow it.",
        408: "The request did not arrive in time.",
        413: "The body is longer than reward_service.max_request_bytes.",
        415: "Without tokens: the body is not called JSON.",
        422: "A value breaks a rule.",
        503: "NATS is unreachable, all connections are in use, or the bodies of other requests fill the memory for them.",
        508: "A reward service called this API as an endpoint.",
    }.items()
}


def collect_samples(
    samples: Samples, metrics: ServiceMetrics, activity: Activity, endpoints: Mapping[str, tuple[EndpointMetrics, Timings]], *,
    num_held: int,
) -> None:  # fmt: skip
    def add(name: str, value: float, **labels: str) -> None:
        samples.add(_PREFIX + name, value, **labels)

    for scorer, number in metrics.scored.items():
        add("groups_scored_total", number, scorer=scorer)
    samples.add("penstock_groups_total", metrics.scored.total(), outcome="scored", reason="")
    add("completions_scored_total", metrics.completions)
    for reason, number in metrics.dead.items():
        add("groups_dead_total", number, reason=reason)
        samples.add("penstock_groups_total", number, outcome="dead_lettered", reason=reason)
    for reason, number in metrics.waited.items():
        add("groups_waited_total", number, reason=reason)
        samples.add("penstock_groups_total", number, outcome="requeued", reason=reason)
    packs = metrics.packs
    add("packs_total", packs.num_calls)
    add("pack_errors_total", packs.num_failed + metrics.num_errors)
    samples.add(
        f"{_PREFIX}pack_seconds",
        {"0.5": packs.quantile(0.5), "0.99": packs.quantile(0.99), "sum": packs.total_s, "count": packs.num_calls},
    )
    add("packs_held", num_held)
    add("packs_waiting", metrics.queue)
    busy_s, idle_s = activity.totals()
    add("busy_seconds_total", busy_s)
    add("idle_seconds_total", idle_s)
    add("cpu_seconds_total", cpu_seconds())
    for name, (live, timings) in endpoints.items():
        _endpoint_samples(samples, name, live, timings)


def _endpoint_samples(samples: Samples, name: str, live: EndpointMetrics, timings: Timings) -> None:
    for metric, value in {
        "calls_total": live.calls,
        "errors_total": live.errors,
        "under_way": live.under_way,
        "waiting": live.waiting,
        "retries_total": live.retries,
        "hedges_total": live.hedges,
        "turned_away_total": live.turned_away,
        "breaker_open": float(live.breaker is not BreakerState.CLOSED),
    }.items():
        samples.add(f"{_PREFIX}endpoint_{metric}", value, endpoint=name)
    quantiles = {"0.5": live.latency_p50_s, "0.99": live.latency_p99_s}
    samples.add(f"{_PREFIX}endpoint_seconds", quantiles, endpoint=name)
    for outcome, histogram in timings.by_outcome.items():
        samples.add(f"{_PREFIX}request_seconds", histogram, endpoint=name, outcome=outcome)


def bearer(values: Sequence[str]) -> str | None:
    scheme, _, token = values[0].partition(" ") if values else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else None


@dataclass(frozen=True, slots=True)
class ApiContext:
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

    def admit(request: HTTPConnection) -> Response | None:
        if CALL_HEADER in request.headers:
            text = "a reward service calls its own API, or another one's, as an endpoint; register another URL"
            return refuse(508, text)
        if request.scope["path"] in _PUBLIC:
            return None
        request.scope[routes.CALLER] = caller = access.caller(bearer(request.headers.getlist("authorization")))
        return None if caller is not None else refuse(401, "a bearer token is needed: Authorization: Bearer ...")

    def is_open(request: HTTPConnection) -> bool:
        return request.scope["path"] in _PUBLIC or CALL_HEADER in request.headers

    app.add_middleware(
        Guard, rules=Rules(hosts if access.is_open else None, admit=admit, is_open=is_open, fix=_OPEN),
        max_bytes=max_request_bytes, max_total_bytes=max_requests_bytes, section="reward_service",
    )  # fmt: skip
    _answer_errors(app)
    _health(app, context)
    _metrics(app, context)
    routes.add_endpoints(app, context.registry, context.client)
    routes.add_scoring(app, context.registry, context.reward_registry)
    return app


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
        wrong = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in err.errors()]
        return JSONResponse({"detail": "; ".join(wrong[:10])}, 422)


def _health(app: FastAPI, context: ApiContext) -> None:
    @app.get("/healthz")
    async def healthz(response: Response) -> dict[str, Any]:
        """Return whether this replica can work: 503 while NATS is unreachable."""
        down_s = context.nats_down_s()
        response.status_code = 503 if down_s else 200
        reason = f"NATS unreachable for {down_s:.0f} s" if down_s else ""
        return {"ok": not down_s, "replica": context.replica, "run_id": context.run_id, "reason": reason}


def _metrics(app: FastAPI, context: ApiContext) -> None:
    def collect(samples: Samples) -> None:
        endpoints = {
            name: (context.client.metrics(endpoint), context.client.queue(endpoint).timings)
            for name, endpoint in context.registry.endpoints.items()
        }
        collect_samples(samples, context.metrics, context.activity, endpoints, num_held=context.num_held())

    exporter = Exporter(
        "reward", run_id=context.run_id, service_id=context.replica, heartbeat=context.heartbeat, collect=collect,
        spans=context.spans, certificates=context.certificates,
    )  # fmt: skip

    @app.get("/metrics", dependencies=[routes.READING], response_class=Response)
    async def metrics(request: Request) -> Response:
        """Return the counters for Prometheus."""
        samples = exporter.samples()  # here, where nothing changes meanwhile; written in a thread
        accept = request.headers.get("accept", "")
        body, content_type = await asyncio.to_thread(Exporter.written, samples, accept)
        return Response(body, headers={"content-type": content_type})
