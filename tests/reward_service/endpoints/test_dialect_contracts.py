"""Every dialect against a typical server of its users, over real HTTP through the service's client."""

# pyright: reportCallIssue=false  (fields of models that have defaults)

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from tests.reward_service.processes import StartEndpoint, raw

from penstock.reward_service.endpoints.dialects.dialect import Call, CompletionDialect, DialectKind, PenstockDialect
from penstock.reward_service.endpoints.endpoint import DIALECTS, Endpoint
from penstock.reward_service.endpoints.endpoint_queue import EndpointClient
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.errors import RewardError
from penstock.reward_service.scores import GroupScores, Outcome
from penstock.serving.target_policy import PRIVATE_TARGETS, TargetPolicy

GROUPS = [
    GroupToScore(
        group_id="a",
        prompt="2+2=",
        completions=["4", "five"],
        data_source="sums",
        ground_truth="4",
        extra_info={"level": 3, "index": 7},
    ),
    GroupToScore(group_id="b", prompt="3+3=", completions=["6"], data_source="sums", ground_truth="6"),
]


class VerifyRequest(BaseModel):
    responses_create_params: dict[str, Any]
    response: Response
    expected_answer: str
    level: int = 0


async def ask(url: str, dialect: str, groups: Sequence[GroupToScore] = GROUPS, **options: Any) -> list[Outcome]:
    endpoint = Endpoint(name="far", url=url, dialect=dialect, options=options, retries=0, timeout_s=20)
    async with EndpointClient(TargetPolicy(PRIVATE_TARGETS), max_response_bytes=10_000) as client:
        return await client.queue(endpoint).score_groups(groups, attempt=1)


Serve = Callable[[Callable[[dict[str, Any]], Any]], str]


@pytest.fixture
def serve(start_endpoint: StartEndpoint) -> Serve:
    """A factory of servers that answer with what a function returns for their JSON body; it returns the URL."""
    return lambda function: start_endpoint(lambda body: (200, {}, json.dumps(function(body)).encode())).url


def rewards(outcomes: Sequence[Outcome]) -> list[tuple[float, ...]]:
    for outcome in outcomes:
        assert isinstance(outcome, GroupScores), str(outcome)
    return [outcome.rewards for outcome in outcomes if isinstance(outcome, GroupScores)]


def parts(outcome: Outcome) -> dict[str, tuple[float, ...]]:
    assert isinstance(outcome, GroupScores), str(outcome)
    return outcome.parts


async def test_verl_functions_behind_one_line_of_http(serve: Serve) -> None:
    """``compute_score(**body)`` gets verl's four arguments and may answer a number, a bool or a dict with ``score``."""

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        if data_source != "sums":
            raise NotImplementedError(data_source)
        if ground_truth == "6":
            return solution_str == ground_truth
        return {"score": float(solution_str == ground_truth), "level": extra_info["level"], "pred": solution_str}

    outcomes = await ask(serve(lambda body: compute_score(**body)), "verl")
    assert rewards(outcomes) == [(1.0, 0.0), (1.0,)]
    assert parts(outcomes[0]) == {"level": (3.0, 3.0)}


async def test_verl_batch_functions_get_four_lists(serve: Serve) -> None:
    """The batch manager's arguments carry every completion of several groups in one call."""
    sizes = []

    def compute_score(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> list[float]:
        sizes.append((len(data_sources), len(extra_infos)))
        return [float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)]

    assert rewards(await ask(serve(lambda body: compute_score(**body)), "verl-batch")) == [(1.0, 0.0), (1.0,)]
    assert sum(rows for rows, _ in sizes) == 3
    assert all(rows == infos for rows, infos in sizes)


async def test_trl_functions_get_prompts_completions_and_columns(serve: Serve) -> None:
    """The function sees lists of one length, the row's columns by name; None means that it does not apply."""

    def reward_func(prompts: Any, completions: Any, level: Any = None, **kwargs: Any) -> list[float | None]:
        assert len(prompts) == len(completions) == len(kwargs["ground_truth"])
        if level is None:
            return [None] * len(completions)
        rows = zip(completions, kwargs["ground_truth"], level, strict=True)
        return [float(text[0]["content"] == truth) * number for text, truth, number in rows]

    scored, skipped = await ask(serve(lambda body: reward_func(**body)), "trl", conversational=True)
    assert rewards([scored]) == [(3.0, 0.0)]
    assert isinstance(skipped, RewardError)
    assert "body[0] = null" in str(skipped)


async def test_slime_servers_answer_one_sample(serve: Serve) -> None:
    """``{prompt, response, label}`` is sent; the number may be under slime's reward key."""

    def right(body: dict[str, Any]) -> float:
        assert body.keys() == {"prompt", "response", "label"}
        return float(body["response"] == body["label"])

    keyed = serve(lambda body: {"acc": right(body), "length": len(body["prompt"])})
    assert rewards(await ask(serve(right), "slime")) == [(1.0, 0.0), (1.0,)]
    outcomes = await ask(keyed, "slime", reward_key="acc")
    (unkeyed,) = await ask(keyed, "slime", GROUPS[1:])
    assert rewards(outcomes) == [(1.0, 0.0), (1.0,)]
    assert parts(outcomes[0]) == {"length": (4.0, 4.0)}
    assert "reward_key" in str(unkeyed)


async def test_openrlhf_servers_answer_batches(serve: Serve) -> None:
    """A server like its ``serve_rm`` reads query, prompts and labels, and answers rewards, scores, extra_logs."""

    def get_reward(data: dict[str, Any]) -> dict[str, Any]:
        queries, prompts, labels = data["query"], data["prompts"], data["labels"]
        found = [float(q == p + label) for q, p, label in zip(queries, prompts, labels, strict=True)]
        return {"rewards": found, "scores": found, "extra_logs": {"long": [len(q) for q in queries]}}

    outcomes = await ask(serve(get_reward), "openrlhf")
    bare = await ask(serve(lambda data: {"rewards": [0.25] * len(data["query"])}), "openrlhf")
    assert rewards(bare) == [(0.25, 0.25), (0.25,)]
    assert rewards(outcomes) == [(1.0, 0.0), (1.0,)]
    assert parts(outcomes[0]) == {"scores": (1.0, 0.0), "long": (5.0, 8.0)}


async def test_nemo_gym_servers_verify_a_response(serve: Serve) -> None:
    """A resources server gets the row's columns and an OpenAI response, and answers with ``reward``."""

    def verify(sent: dict[str, Any]) -> dict[str, Any]:
        body = VerifyRequest.model_validate(sent)
        assert body.responses_create_params["input"][0]["role"] == "user"
        right = float(body.response.output_text == body.expected_answer)
        return {**body.model_dump(), "reward": right, "reward_components": {"right": right, "level": body.level}}

    outcomes = await ask(serve(verify), "nemo-gym")
    assert rewards(outcomes) == [(1.0, 0.0), (1.0,)]
    assert parts(outcomes[0]) == {"right": (1.0, 0.0), "level": (3.0, 3.0)}


async def test_openai_graders_are_run_once_a_completion(serve: Serve) -> None:
    """The grader, the row as item and the sample are sent; a flagged error means no score, whatever the reward is."""

    def run(body: dict[str, Any]) -> dict[str, Any]:
        assert body["grader"]["type"] == "string_check"
        right = float(body["model_sample"] == body["item"]["reference_answer"])
        flags = {"formula_parse_error": False, "model_grader_server_error": "level" not in body["item"]}
        metadata = {"errors": flags | {"model_grader_server_error_details": "overloaded"}, "name": "g", "type": "s"}
        return {"reward": right, "sub_rewards": {"same": right}, "metadata": metadata}

    grader = {"type": "string_check", "name": "g", "operation": "eq", "input": "{{sample.output_text}}"}
    scored, failed = await ask(serve(run), "openai-grader", grader=grader)
    assert rewards([scored]) == [(1.0, 0.0)]
    assert parts(scored) == {"same": (1.0, 0.0)}
    assert "model_grader_server_error" in str(failed)
    assert "overloaded" in str(failed)


MALFORMED = [
    ("verl", "yes", "not JSON"),
    ("verl", '"1.0"', "a text at body, expected a number"),
    ("verl", '{"acc": 1}', "without 'score' at body"),
    ("verl", '{"score": 1, "acc": NaN}', "NaN is not a JSON number"),
    ("verl", "1e999", "a number at body that is not finite"),
    ("verl", "null", "body = null"),
    ("verl", '{"score": null, "acc": 1e999}', "body.score = null"),
    ("verl-batch", "[1]", "1 values at body for 2 completions"),
    ("verl-batch", '[1, "x"]', "a text at body[1], expected a number"),
    ("trl", "1.0", "a number at body, expected a list"),
    ("trl", "[1, null]", "body[1] = null"),
    ("slime", "[1]", "a list at body, expected a number"),
    ("openrlhf", '{"scores": [1, 1]}', "no object with 'rewards'"),
    ("openrlhf", '{"rewards": [1, 2, 3]}', "3 values at rewards for 2 completions"),
    ("openrlhf", '{"rewards": [1, 2], "scores": [1]}', "1 values at scores"),
    ("openrlhf", '{"rewards": [1, 2], "extra_logs": {"n": [1]}}', "1 values at extra_logs.n"),
    ("nemo-gym", '{"score": 1}', "no object with 'reward'"),
    ("nemo-gym", '{"reward": "high"}', "a text at reward, expected a number"),
    ("openai-grader", "[]", "no object with 'reward'"),
    ("openai-grader", '{"reward": null}', "reward = null"),
]


@pytest.mark.parametrize(("dialect", "said", "place"), MALFORMED)
async def test_a_malformed_answer_is_an_error_that_names_the_place(
    dialect: str, said: str, place: str, start_endpoint: StartEndpoint
) -> None:
    """No dialect makes a reward of malformed values, null or a short list; the error names place and dialect."""
    options = {"grader": {"type": "string_check"}} if dialect == "openai-grader" else {}
    (outcome,) = await ask(start_endpoint(raw(said)).url, dialect, GROUPS[:1], **options)
    assert isinstance(outcome, RewardError)
    assert place in str(outcome)
    assert "null" in place or f"(dialect {dialect})" in str(outcome)


def test_options_are_checked_at_registration() -> None:
    """An OpenAI grader without its grader, and an unknown option, are refused before any request."""
    with pytest.raises(ValueError, match="dialect openai-grader: grader: Field required"):
        Endpoint(name="x", url="http://127.0.0.1:1/", dialect="openai-grader")
    with pytest.raises(ValueError, match="dialect verl: reward_key"):
        Endpoint(name="x", url="http://127.0.0.1:1/", dialect="verl", options={"reward_key": "a"})


SHORT = [
    GroupToScore(group_id="a", completions=["x", "yy"], ground_truth=1),
    GroupToScore(group_id="b", completions=["zzz"]),
]


def answer(*groups: tuple[str, list[Any]]) -> bytes:
    return json.dumps({"results": [{"group_id": name, "scores": scores} for name, scores in groups]}).encode()


def test_our_own_dialect_matches_results_by_group() -> None:
    """Results may come in any order; a score without a number carries its error."""
    call = Call("mine", "id-1", SHORT)
    sent = json.loads(PenstockDialect().request(call))
    assert (sent["reward"], sent["request_id"]) == ("mine", "id-1")
    assert [group["completions"] for group in sent["groups"]] == [["x", "yy"], ["zzz"]]
    read = PenstockDialect().read(call, answer(("b", [{"error": "no"}]), ("a", [{"score": 1}, {"score": 0.5}])))
    assert [[score.score for score in scores] for scores in read] == [[1.0, 0.5], [None]]
    assert read[1][0].error == "no"


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
        outcomes = await client.queue(endpoint).score_groups(SHORT, attempt=1)
    assert [outcome.rewards for outcome in outcomes if isinstance(outcome, GroupScores)] == [(1.0, 2.0), (3.0,)]
    assert len(server.keys) == len(set(server.keys)) == 3
