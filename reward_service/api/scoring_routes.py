"""The routes /v1/rewards and /v1/score: the rewards there are, and scoring by hand."""

from __future__ import annotations

import json
from collections.abc import Callable

from fastapi import Depends, FastAPI, HTTPException
from pydantic import ValidationError

from penstock.protocol.facts import RewardRequest
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.api.api_models import GroupByHand, RewardList, RewardRecord, ScoreAnswer, ScoreByHand
from penstock.reward_service.endpoints.access import Caller, Role
from penstock.reward_service.endpoints.endpoint_registry import EndpointRegistry
from penstock.reward_service.registry import definitions
from penstock.reward_service.registry.built_in import AUTO, BUILT_INS
from penstock.reward_service.registry.reward_registry import RewardRegistry
from penstock.reward_service.rewards.reward import Reward
from penstock.reward_service.scoring import score_groups


def add(
    app: FastAPI,
    registry: EndpointRegistry,
    reward_registry: RewardRegistry,
    needs: Callable[[Role], Callable[..., Caller]],
) -> None:
    """Add the routes; ``needs`` returns a dependency that checks a role."""

    @app.get("/v1/rewards", dependencies=[Depends(needs(Role.READ))])
    async def rewards() -> RewardList:
        """List every reward that rows may request."""
        await registry.refresh()
        notes = {name: f"; {note}" for name, note in reward_registry.notes.items()}
        rows = [
            RewardRecord(name=name, kind="built-in", description=one.description + notes.get(name, "") + _needs(one))
            for name, one in BUILT_INS.items()
        ]
        rows += [
            RewardRecord(name=name, kind="defined", description=definitions.describe(one))
            for name, one in reward_registry.definitions.items()
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

    @app.post("/v1/score", dependencies=[Depends(needs(Role.REGISTER))])
    async def score(request: ScoreByHand) -> ScoreAnswer:
        """Score groups by any reward, by the same code that scores the run's groups."""
        texts = [_texts(request.reward, group) for group in request.groups]
        outcomes = await score_groups(reward_registry, texts)
        return ScoreAnswer.of([group.group_id for group in request.groups], outcomes)


def _needs(reward: Reward) -> str:
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
        group_id=group.group_id,
        prompt_text=group.prompt,
        completions=tuple(group.completions),
        finish_reasons=("stop",) * len(group.completions),
        reward=request,
        completion_tokens=tuple(group.completion_tokens),
    )
