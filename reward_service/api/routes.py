"""The routes below /v1/endpoints (register, show, test, renew, drain, resume, unregister), /v1/rewards, and /v1/score: scoring by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request
from fastapi.security import HTTPBearer
from pydantic import ValidationError

from penstock.protocol.groups import RewardRequest
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.api.api_models import (
    EndpointRecord,
    GroupByHand,
    Lease,
    LeaseRenewal,
    Refusal,
    Registration,
    RewardList,
    RewardRecord,
    ScoreAnswer,
    ScoreByHand,
    TestRequest,
)
from penstock.reward_service.endpoints.endpoint import NAME_PATTERN, Caller, Endpoint, Role
from penstock.reward_service.endpoints.endpoint_queue import EndpointClient
from penstock.reward_service.endpoints.endpoint_registry import EndpointRegistry
from penstock.reward_service.endpoints.wire import example_groups
from penstock.reward_service.errors import EndpointRefused, NotAllowed
from penstock.reward_service.pack_scoring import score_groups
from penstock.reward_service.registry import definitions
from penstock.reward_service.registry.built_in import AUTO, BUILT_INS, BY_SOURCE
from penstock.reward_service.registry.reward_registry import RewardRegistry
from penstock.reward_service.rewards.reward import Reward
from penstock.serving.request_checks import StrictRoute

CALLER = "penstock.caller"  # key of the scope: the Caller of the request
Name = Annotated[str, Path(pattern=NAME_PATTERN)]
_SCHEME = HTTPBearer(auto_error=False, description="A token of reward_service.tokens_file or token_file.")


def _needs(role: Role) -> Callable[..., Caller]:
    def check(request: Request, _scheme: Annotated[object, Depends(_SCHEME)]) -> Caller:
        caller: Caller = request.scope[CALLER]
        if caller.role < role:
            raise HTTPException(
                403,
                f"the token {caller.name!r} has the role {caller.role.name.lower()}; this request needs {role.name.lower()}",
            )
        return caller

    return check


READING, REGISTERING = Depends(_needs(Role.READ)), Depends(_needs(Role.REGISTER))


def add_endpoints(app: FastAPI, registry: EndpointRegistry, client: EndpointClient) -> None:
    router = APIRouter(
        prefix="/v1/endpoints",
        route_class=StrictRoute,
        responses={404: {"model": Refusal, "description": "No such endpoint."}},
    )
    _show(router, registry, client)
    _change(router, registry, client)
    app.include_router(router)


def _record(endpoint: Endpoint, registry: EndpointRegistry, client: EndpointClient) -> EndpointRecord:
    problem = registry.problem(endpoint)
    return EndpointRecord(
        endpoint=endpoint, live=client.metrics(endpoint, "in service" if problem is None else problem.reason)
    )


async def _known(name: str, registry: EndpointRegistry) -> Endpoint:
    await registry.refresh()
    endpoint = registry.endpoints.get(name)
    if endpoint is None:
        there = ", ".join(sorted(registry.endpoints)) or "none"
        raise HTTPException(404, f"no endpoint {name!r} is registered; there are: {there}")
    return endpoint


def _show(router: APIRouter, registry: EndpointRegistry, client: EndpointClient) -> None:
    @router.get("", dependencies=[READING])
    async def list_endpoints() -> list[EndpointRecord]:
        """List the registered endpoints with their metrics in this replica."""
        await registry.refresh()
        return [_record(endpoint, registry, client) for _, endpoint in sorted(registry.endpoints.items())]

    @router.get("/{name}", dependencies=[READING])
    async def show(name: Name) -> EndpointRecord:
        """Show one endpoint."""
        return _record(await _known(name, registry), registry, client)

    @router.post("/{name}/test", dependencies=[REGISTERING])
    async def test(name: Name, request: TestRequest) -> ScoreAnswer:
        """Call an endpoint with a few rows, as the service does, and return its scores and their distribution."""
        groups = request.groups or example_groups()
        outcomes = await client.queue(await _known(name, registry)).call_now(groups)
        return ScoreAnswer.of([group.group_id for group in groups], outcomes)


def _change(router: APIRouter, registry: EndpointRegistry, client: EndpointClient) -> None:
    @router.post("", status_code=201, responses={409: {"model": Refusal, "description": "The name is taken."}})
    async def register(registration: Registration, caller: Caller = REGISTERING) -> EndpointRecord:
        """Register an endpoint under a reward name, or a new version of it (``replace``); 409 when the name is taken."""
        endpoint = registration.endpoint(owner=_owner(registration, caller))
        _check(endpoint, caller)
        await client.http.check(endpoint.url)
        if endpoint.health_url is not None:
            await client.http.check(endpoint.health_url)
        await registry.add(
            endpoint, replace_other=registration.replace, caller=caller, secrets=registration.endpoint_secrets()
        )
        return _record(endpoint, registry, client)

    @router.post(
        "/{name}/lease", responses={409: {"model": Refusal, "description": "Another version or URL has the name."}}
    )
    async def renew(name: Name, renewal: LeaseRenewal, caller: Caller = REGISTERING) -> Lease:
        """Renew a lease; after 404 the endpoint must register again, after 409 it was replaced."""
        renewed = await registry.renew(name, version=renewal.version, url=renewal.url, caller=caller)
        if renewed is None:
            known = await _known(name, registry)
            raise HTTPException(409, f"reward {name!r} is version {known.version} at {known.url} now")
        return Lease(lease_s=renewed.lease_s)

    @router.post("/{name}/drain")
    async def drain(name: Name, caller: Caller = REGISTERING) -> EndpointRecord:
        """Take an endpoint out of service: calls in progress finish, its other groups wait."""
        await registry.drain(name, caller=caller, on=True)
        return _record(await _known(name, registry), registry, client)

    @router.post("/{name}/resume")
    async def resume(name: Name, caller: Caller = REGISTERING) -> EndpointRecord:
        """Put a drained endpoint back into service."""
        await registry.drain(name, caller=caller, on=False)
        return _record(await _known(name, registry), registry, client)

    @router.delete(
        "/{name}", status_code=204, responses={409: {"model": Refusal, "description": "It is at another URL."}}
    )
    async def unregister(
        name: Name,
        url: Annotated[str | None, Query(description="Only if it is registered at this URL.")] = None,
        caller: Caller = REGISTERING,
    ) -> None:
        """Unregister an endpoint; groups that request it wait as for one that is down."""
        if not await registry.remove(name, caller=caller, url=url):
            await _known(name, registry)  # 404 when there is none
            raise HTTPException(409, f"endpoint {name!r} is registered at another URL")


def _owner(registration: Registration, caller: Caller) -> str:
    if caller.role is Role.ADMIN:
        return registration.owner or caller.name
    if registration.owner not in {"", caller.name}:
        raise NotAllowed(f"your token is {caller.name!r}; only an admin may register for owner {registration.owner!r}")
    return caller.name


def _check(endpoint: Endpoint, caller: Caller) -> None:
    if endpoint.name in BUILT_INS or endpoint.name == AUTO:
        raise EndpointRefused(f"{endpoint.name!r} is a built-in reward; choose another name")
    taken = [source for source in endpoint.data_sources if source in BY_SOURCE]
    if taken:
        raise EndpointRefused(
            f"rows of {', '.join(taken)} are scored by built-in rewards; request this one by name: "
            f"reward.name = {endpoint.name!r}"
        )
    if endpoint.has_secrets and not caller.has_token:
        raise EndpointRefused(
            "secrets are accepted only by a service with tokens; set reward_service.tokens_file (or token_file)"
        )


def add_scoring(app: FastAPI, registry: EndpointRegistry, reward_registry: RewardRegistry) -> None:
    @app.get("/v1/rewards", dependencies=[READING])
    async def rewards() -> RewardList:
        """List every reward that rows may request."""
        await registry.refresh()
        notes = {name: f"; {note}" for name, note in reward_registry.notes.items()}
        rows = [
            RewardRecord(
                name=name, kind="built-in", description=reward.description + notes.get(name, "") + _parameters(reward)
            )
            for name, reward in BUILT_INS.items()
        ]
        rows += [
            RewardRecord(name=name, kind="defined", description=definitions.describe(reward))
            for name, reward in reward_registry.definitions.items()
        ]
        rows += [
            RewardRecord(name=name, kind="user", description="code that the run file names")
            for name in reward_registry.user_rewards
        ]
        rows.append(RewardRecord(name=AUTO, kind="built-in", description="the reward that fits the row's data_source"))
        for endpoint in registry.endpoints.values():
            problem = registry.problem(endpoint)
            state = f", {problem.reason}" if problem is not None else ""
            text = f"{endpoint.url} (version {endpoint.version}{state})"
            rows.append(RewardRecord(name=endpoint.name, kind="endpoint", description=text))
        return RewardList(rewards=sorted(rows, key=lambda row: row.name), by_source=reward_registry.by_source())

    @app.post("/v1/score", dependencies=[REGISTERING])
    async def score(request: ScoreByHand) -> ScoreAnswer:
        """Score groups by any reward, by the same code that scores the run's groups."""
        texts = [_texts(request.reward, group) for group in request.groups]
        outcomes = await score_groups(reward_registry, texts)
        return ScoreAnswer.of([group.group_id for group in request.groups], outcomes)


def _parameters(reward: Reward) -> str:
    return "; needs parameters (reward.define)" if reward.default is None else ""


def _texts(reward: str, group: GroupByHand) -> GroupTexts:
    truth = None if group.ground_truth is None else json.dumps(group.ground_truth)
    try:
        request = RewardRequest(
            name=reward, data_source=group.data_source, ground_truth=truth, extra_info=json.dumps(group.extra_info)
        )
    except ValidationError as err:
        raise HTTPException(422, f"reward {reward!r}: {err.errors()[0]['msg']}") from None
    return GroupTexts(
        group_id=group.group_id, prompt_text=group.prompt, completions=tuple(group.completions),
        finish_reasons=("stop",) * len(group.completions), reward=request,
        completion_tokens=tuple(group.completion_tokens),
    )  # fmt: skip
