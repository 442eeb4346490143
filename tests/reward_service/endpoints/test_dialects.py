"""Dialects: request bodies, scores, and the client that splits groups to a dialect's unit."""

# pyright: reportCallIssue=false  (fields of models that have defaults)

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.reward_service.processes import StartEndpoint

from penstock.reward_service.endpoints.dialects.dialect import Call, CompletionDialect, DialectKind
from penstock.reward_service.endpoints.dialects.penstock import PenstockDialect
from penstock.reward_service.endpoints.endpoint import DIALECTS, Endpoint
from penstock.reward_service.endpoints.endpoint_client import EndpointClient
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.scores import GroupScores
from penstock.serving.target_policy import PRIVATE_TARGETS, TargetPolicy

GROUPS = [
    GroupToScore(group_id="a", completions=["x", "yy"], ground_truth=1),
    GroupToScore(group_id="b", completions=["zzz"]),
]


def answer(*groups: tuple[str, list[Any]]) -> bytes:
    return json.dumps({"results": [{"group_id": name, "scores": scores} for name, scores in groups]}).encode()


def test_our_own_dialect_matches_results_by_group() -> None:
    """Results may come in any order; a score without a number carries its error."""
    call = Call("mine", "id-1", GROUPS)
    sent = json.loads(PenstockDialect().request(call))
    assert (sent["reward"], sent["request_id"]) == ("mine", "id-1")
    assert [group["completions"] for group in sent["groups"]] == [["x", "yy"], ["zzz"]]
    read = PenstockDialect().read(call, answer(("b", [{"error": "no"}]), ("a", [{"score": 1}, {"score": 0.5}])))
    assert [[score.score for score in scores] for scores in read] == [[1.0, 0.5], [None]]
    assert read[1][0].error == "no"


def test_unknown_options_of_a_dialect_are_refused() -> None:
    with pytest.raises(ValueError, match="options of dialect penstock: temperature"):
        Endpoint(name="x", url="http://127.0.0.1:1/", options={"temperature": 1})


class LengthDialect(CompletionDialect):
    """One number per request, like many reward servers."""

    def body(self, group: GroupToScore, text: str, request_id: str) -> dict[str, Any]:
        return {"response": text, "label": group.ground_truth}

    def score(self, value: Any) -> Score:
        return Score(score=value)


async def test_a_dialect_for_single_completions_is_asked_for_each_and_joined(
    monkeypatch: pytest.MonkeyPatch, start_endpoint: StartEndpoint
) -> None:
    """The client splits groups into completions, sends one request for each, and joins the scores in their order."""
    monkeypatch.setitem(DIALECTS.built_in, "penstock", DialectKind("penstock", LengthDialect))
    server = start_endpoint(lambda body: (200, {}, str(len(body["response"])).encode()))
    endpoint = Endpoint(name="length", url=server.url)
    async with EndpointClient(TargetPolicy(PRIVATE_TARGETS), max_response_bytes=1000) as client:
        outcomes = await client.queue(endpoint).score_groups(GROUPS, attempt=1)
    assert [outcome.rewards for outcome in outcomes if isinstance(outcome, GroupScores)] == [(1.0, 2.0), (3.0,)]
    assert len(server.keys) == len(set(server.keys)) == 3
