"""The HTTP API of the reward service: who scores what, how it is doing, and scoring by hand."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field, ValidationError

from protocol.activity import Activity
from protocol.errors import BusError
from protocol.facts import RewardRequest
from protocol.group_pack import GroupTexts
from reward_service import built_in, metrics_text
from reward_service.catalogue import Catalogue
from reward_service.endpoint import Endpoint
from reward_service.endpoint_client import EndpointClient, LiveFigures
from reward_service.errors import EndpointRefused, NameTaken
from reward_service.figures import Figures
from reward_service.registry import Registry
from reward_service.rewards.data_sources import AUTO, BY_SOURCE
from reward_service.scores import GroupScores, Outcome
from reward_service.scoring import score_groups
from reward_service.wire import GroupToScore, ScoreRequest, example_groups

_SCHEME = HTTPBearer(auto_error=False)


class Registration(Endpoint):
    """An endpoint to register."""

    replace: bool = Field(False, description="Take the name over from whoever has it.")

    def endpoint(self) -> Endpoint:
        """Return what is kept."""
        return Endpoint.model_validate(self.model_dump(exclude={"replace"}))


class EndpointRecord(BaseModel):
    """A registered endpoint, and how it does as seen from this replica."""

    endpoint: Endpoint
    live: LiveFigures


class RewardRecord(BaseModel):
    """A reward that tasks may ask for."""

    name: str
    kind: str
    description: str


class RewardList(BaseModel):
    """All rewards, and which of them fits which data set."""

    rewards: list[RewardRecord]
    by_source: dict[str, str]


class Failure(BaseModel):
    """Why a group could not be scored; ``permanent`` failures are not tried again."""

    reason: str
    detail: str
    permanent: bool


class CompletionScore(BaseModel):
    """The score of one completion."""

    score: float
    parts: dict[str, float]


class ScoredByHand(BaseModel):
    """One group: its scores and who gave them, or why there are none."""

    group_id: str
    scorer: str | None = None
    scores: list[CompletionScore] = []
    error: Failure | None = None


class ScoreAnswer(BaseModel):
    """The outcome of every group, in the order they were sent."""

    ok: bool
    results: list[ScoredByHand]


class TestRequest(BaseModel):
    """Rows to try an endpoint with; example rows when there are none."""

    groups: list[GroupToScore] = []


@dataclass(frozen=True, slots=True)
class Parts:
    """What the API shows and uses."""

    registry: Registry
    catalogue: Catalogue
    client: EndpointClient
    figures: Figures
    activity: Activity
    replica: str
    run_id: str
    away_s: Callable[[], float]
    num_held: Callable[[], int]


def build(parts: Parts, *, token: str) -> FastAPI:
    """Return the app; with a ``token`` every call but /healthz must carry it as a bearer token."""
    app = FastAPI(title="Penstock reward service", version="1", dependencies=[Depends(_bearer(token))])
    _answer_errors(app)
    _health(app, parts)
    _endpoints(app, parts)
    _scoring(app, parts)
    return app


def _bearer(token: str) -> Callable[..., None]:
    def check(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)]) -> None:
        if not token or request.url.path == "/healthz":
            return
        if given is None or not secrets.compare_digest(given.credentials.encode(), token.encode()):
            raise HTTPException(
                401, "a bearer token is needed: Authorization: Bearer ...", headers={"WWW-Authenticate": "Bearer"}
            )

    return check


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(NameTaken)
    async def _taken(_: Request, err: NameTaken) -> JSONResponse:
        return JSONResponse({"detail": str(err)}, 409)

    @app.exception_handler(EndpointRefused)
    async def _refused(_: Request, err: EndpointRefused) -> JSONResponse:
        return JSONResponse({"detail": str(err)}, 422)

    @app.exception_handler(BusError)
    async def _away(_: Request, err: BusError) -> JSONResponse:
        return JSONResponse({"detail": str(err)}, 503)


def _health(app: FastAPI, parts: Parts) -> None:
    @app.get("/healthz")
    async def healthz(response: Response) -> dict[str, Any]:
        """Say whether this replica can work: 503 while NATS is away."""
        away_s = parts.away_s()
        response.status_code = 503 if away_s else 200
        reason = f"NATS has been away for {away_s:.0f} s" if away_s else ""
        return {"ok": not away_s, "replica": parts.replica, "run_id": parts.run_id, "reason": reason}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the counters for Prometheus."""
        live = {name: parts.client.figures(endpoint) for name, endpoint in parts.registry.endpoints.items()}
        text = metrics_text.render(parts.figures, parts.activity, live, num_held=parts.num_held())
        return Response(text, media_type=metrics_text.CONTENT_TYPE)


async def _known(name: str, registry: Registry) -> Endpoint:
    await registry.refresh()
    endpoint = registry.endpoints.get(name)
    if endpoint is None:
        there = ", ".join(sorted(registry.endpoints)) or "none"
        raise HTTPException(404, f"no endpoint {name!r} is registered; there are: {there}")
    return endpoint


def _endpoints(app: FastAPI, parts: Parts) -> None:
    def record(endpoint: Endpoint) -> EndpointRecord:
        return EndpointRecord(endpoint=endpoint, live=parts.client.figures(endpoint))

    @app.post("/v1/endpoints", status_code=201)
    async def register(registration: Registration) -> EndpointRecord:
        """Register an endpoint under a reward name; 409 when the name is taken."""
        endpoint = registration.endpoint()
        if endpoint.name in built_in.DESCRIPTIONS or endpoint.name == AUTO:
            raise EndpointRefused(f"{endpoint.name!r} is a built-in reward; take another name")
        await parts.client.check(endpoint.url)
        await parts.registry.add(endpoint, replace=registration.replace)
        return record(endpoint)

    @app.get("/v1/endpoints")
    async def list_endpoints() -> list[EndpointRecord]:
        """List the registered endpoints with this replica's live figures."""
        await parts.registry.refresh()
        return [record(endpoint) for _, endpoint in sorted(parts.registry.endpoints.items())]

    @app.get("/v1/endpoints/{name}")
    async def show(name: str) -> EndpointRecord:
        """Show one endpoint."""
        return record(await _known(name, parts.registry))

    @app.delete("/v1/endpoints/{name}", status_code=204)
    async def unregister(
        name: str, url: Annotated[str | None, Query(description="Only if it is registered at this URL.")] = None
    ) -> None:
        """Unregister an endpoint; groups that ask for it wait for it as for one that is down."""
        if not await parts.registry.remove(name, url=url):
            await _known(name, parts.registry)  # 404 when there is none
            raise HTTPException(409, f"endpoint {name!r} is registered at another URL than {url}")

    @app.post("/v1/endpoints/{name}/test")
    async def test(name: str, request: TestRequest) -> ScoreAnswer:
        """Call an endpoint with a few rows, as the service would, and show what it says."""
        groups = request.groups or example_groups()
        outcomes = await parts.client.call(await _known(name, parts.registry), groups, attempt=1)
        return _answer([group.group_id for group in groups], outcomes)


def _scoring(app: FastAPI, parts: Parts) -> None:
    @app.get("/v1/rewards")
    async def rewards() -> RewardList:
        """List every reward that tasks may ask for."""
        await parts.registry.refresh()
        rows = [RewardRecord(name=n, kind="built-in", description=d) for n, d in built_in.DESCRIPTIONS.items()]
        rows.append(RewardRecord(name=AUTO, kind="built-in", description="whatever fits the row's data_source"))
        rows += [
            RewardRecord(
                name=endpoint.name, kind="endpoint", description=f"{endpoint.url} (version {endpoint.version})"
            )
            for endpoint in parts.registry.endpoints.values()
        ]
        return RewardList(rewards=sorted(rows, key=lambda row: row.name), by_source=BY_SOURCE)

    @app.post("/v1/score")
    async def score(request: ScoreRequest) -> ScoreAnswer:
        """Score groups by any reward, by the same code that scores the run's groups."""
        texts = [_texts(request.reward, group) for group in request.groups]
        outcomes = await score_groups(parts.catalogue, texts, attempt=1)
        return _answer([group.group_id for group in request.groups], outcomes)


def _texts(reward: str, group: GroupToScore) -> GroupTexts:
    truth = None if group.ground_truth is None else json.dumps(group.ground_truth)
    try:
        request = RewardRequest(
            name=reward, data_source=group.data_source, ground_truth=truth, extra_info=json.dumps(group.extra_info)
        )
    except ValidationError as err:
        raise HTTPException(422, f"reward {reward!r}: {err.errors()[0]['msg']}") from None
    return GroupTexts(
        group_id=group.group_id,
        prompt_text=group.prompt,
        completions=tuple(group.completions),
        finish_reasons=("stop",) * len(group.completions),
        reward=request,
    )


def _answer(group_ids: list[str], outcomes: list[Outcome]) -> ScoreAnswer:
    results = [_by_hand(group_id, outcome) for group_id, outcome in zip(group_ids, outcomes, strict=True)]
    return ScoreAnswer(ok=all(result.error is None for result in results), results=results)


def _by_hand(group_id: str, outcome: Outcome) -> ScoredByHand:
    if isinstance(outcome, GroupScores):
        scores = [
            CompletionScore(score=reward, parts={name: values[i] for name, values in outcome.parts.items()})
            for i, reward in enumerate(outcome.rewards)
        ]
        return ScoredByHand(group_id=group_id, scorer=outcome.scorer, scores=scores)
    failure = Failure(reason=outcome.reason, detail=str(outcome), permanent=outcome.permanent)
    return ScoredByHand(group_id=group_id, error=failure)
