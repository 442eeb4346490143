"""OpenAI's graders, evaluated here: their scores, what they refuse, and the cause of a missing value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.reward_service.conftest import Wire
from tests.reward_service.processes import Serve, StartEndpoint, StartService, chat_said

from penstock.protocol.errors import ConfigError
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.hosting import openai_grader
from penstock.reward_service.hosting.chat_client import Chat
from penstock.reward_service.hosting.chat_rewards import GraderReward
from penstock.reward_service.hosting.judge_settings import JudgeSettings
from penstock.reward_service.hosting.openai_grader import evaluate, similarity

ITEM = {"reference_answer": "Paris", "deep": {"list": [1, "two"]}}
CHECK = {
    "type": "string_check",
    "name": "c",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "{{item.reference_answer}}",
}
ASK = {
    "type": "score_model",
    "name": "s",
    "model": "o4-mini",
    "range": [0, 10],
    "input": [{"role": "user", "content": "Grade {{sample.output_text}} by {{ item.reference_answer }}"}],
    "sampling_params": {"seed": 3, "max_completions_tokens": 77},
}


async def score(given: dict[str, Any], answer: str, chat: Chat | None = None) -> Score:
    return await evaluate(openai_grader.read(given), ITEM, answer, chat)


@pytest.mark.parametrize(
    ("operation", "scores"),
    [("eq", (1, 0, 0, 0)), ("ne", (0, 1, 1, 1)), ("like", (1, 1, 0, 0)), ("ilike", (1, 1, 1, 0))],
)
async def test_strings_are_checked_by_openais_guide(operation: str, scores: tuple[int, ...]) -> None:
    """Eq and ne compare whole texts, like and ilike look for the reference inside the input."""
    answers = ("Paris", "It is Paris.", "PARIS", "Rome")
    found = [(await score({**CHECK, "operation": operation}, answer)).score for answer in answers]
    assert found == list(map(float, scores))


@pytest.mark.parametrize(
    ("metric", "text", "reference", "value"),
    [
        ("fuzzy_match", "abcd", "abce", 0.75),
        ("rouge_1", "the cat sat", "the cat ran far", 2 * 2 / 7),
        ("rouge_2", "the cat sat", "the cat ran far", 2 * 1 / 5),
        ("rouge_3", "the cat sat", "the cat ran far", 0.0),
        ("rouge_l", "a x b y c", "a b c", 2 * 3 / 8),
        ("gleu", "a b c d e", "a b c d e", 1.0),
        ("gleu", "the the the", "the cat", 1 / 6),
        ("rouge_1", "", "word", 0.0),
        ("rouge_1", "...", "!", 1.0),
        ("rouge_1", "ÜBER Straße 12", "über straße, 12!", 1.0),
    ],
)
def test_similarities_are_those_of_their_definitions(metric: str, text: str, reference: str, value: float) -> None:
    """Worked by hand: shared n-grams over given and expected ones, the longest common subsequence, the edit ratio."""
    assert similarity(metric, text, reference) == pytest.approx(value)


async def test_a_multi_grader_computes_from_its_parts() -> None:
    """The formula's value is the score, every grader's own score a part."""
    graders = {"exact": CHECK, "loose": {**CHECK, "operation": "ilike"}}
    multi = {"type": "multi", "graders": graders, "calculate_output": "0.75 * exact + 0.25 * loose ^ 2"}
    assert await score(multi, "Paris!") == Score(score=0.25, parts={"exact": 0.0, "loose": 1.0})
    broken = await score({**multi, "calculate_output": "1 / exact"}, "Rome")
    assert broken.score is None
    assert "calculate_output has no value" in (broken.error or "")


def test_formulas_are_arithmetic_and_nothing_else() -> None:
    """Operators, parentheses and the guide's functions; other calls, attributes, lists and other names are refused."""
    names = {"a": 0.25, "b": 4.0}
    for text, value in {
        "a + b * 2 - 1": 7.25,
        "-(a - b) / 2": 1.875,
        "b ** 0.5": 2.0,
        "b ^ 2": 16.0,
        "max(a, b, 1) + min(a, 1) + min(b)": 8.25,
        "floor(a) + ceil(a) + abs(-a) + sqrt(b)": 3.25,
        "exp(log(b))": 4.0,
    }.items():
        openai_grader.check_formula(text, names)
        assert openai_grader.compute_formula(text, names) == pytest.approx(value), text
    for text in ("c", "max", "sqrt"):
        with pytest.raises(ValueError, match="there is no grader"):
            openai_grader.check_formula(text, names)
    calls = ("__import__('os')", "sqrt(a, b)", "max()", "max(*[a])", "a(", "lambda: a")
    for text in (*calls, "a.real", "[a]", "a if b else 0", "a <= b", "'x'", "True", "a @ b", "a = 1"):
        with pytest.raises(ValueError, match="calculate_output"):
            openai_grader.check_formula(text, names)
    for text in ("1 / (a - a)", "9 ** 9 ** 9 ** 9", "log(a - a)", "exp(10000)", "sqrt(-b)"):
        openai_grader.check_formula(text, names)
        with pytest.raises(ValueError, match="calculate_output"):
            openai_grader.compute_formula(text, names)


async def test_a_row_without_the_column_is_an_error_an_answer_without_the_key_is_not() -> None:
    """A grader that does not fit the data is an error; an answer that is not JSON scores lowest: it is the policy's."""
    missing = await score({**CHECK, "reference": "{{item.absent}}"}, "x")
    assert missing.score is None
    assert "no item.absent" in (missing.error or "")
    keyed = {**CHECK, "input": "{{sample.output_json.city}}"}
    assert await score(keyed, '{"city": "Paris"}') == Score(score=1.0)
    for unfit in ("Paris", '{"town": "Paris"}', "[" * 100_000):
        assert await score(keyed, unfit) == Score(score=0.0, parts={"sample_unfit": 1.0})
    deep = {**CHECK, "input": "{{item.deep.list[1]}}{{item.deep.list[0]}}", "reference": "two1"}
    assert await score(deep, "") == Score(score=1.0)


REFUSED = [
    ({"type": "python", "source": "def grade(s, i): return 1"}, "sandbox"),
    ({"type": "multi", "graders": {"p": {"type": "python", "source": ""}}, "calculate_output": "p"}, "graders.p"),
    ({"type": "label_model"}, "label_model"),
    ({**CHECK, "operation": "starts_with"}, "operation"),
    ({**CHECK, "input": "{{sample.output_tools[0]}}"}, "output_tools"),
    ({**CHECK, "input": "{{answer}}"}, "is not a variable"),
    ({**CHECK, "colour": 1}, "colour"),
    ({**CHECK, "type": "text_similarity", "evaluation_metric": "cosine"}, "evaluation_metric"),
    ({"type": "multi", "graders": {"c": CHECK}, "calculate_output": "c + d"}, "no grader 'd'"),
    ({**ASK, "range": [1, 1]}, "must be below"),
    ([], "the grader"),
]


@pytest.mark.parametrize(("given", "text"), REFUSED)
def test_graders_that_cannot_be_evaluated_are_refused_when_they_are_read(given: Any, text: str, tmp_path: Path) -> None:
    """Code, unknown types, metrics, variables and names are refused with the file and the place."""
    file = tmp_path / "grader.json"
    file.write_text(json.dumps(given))
    with pytest.raises(ConfigError) as refused:
        openai_grader.load(file)
    assert text in str(refused.value)
    assert "grader.json" in str(refused.value)


async def test_a_model_scores_by_the_guides_response_format(start_endpoint: StartEndpoint) -> None:
    """The filled messages, the sampling and the schema are sent; prose and numbers out of range are errors."""
    texts = iter(['{"steps": [], "result": 7.5}', "7.5", '{"result": 11}', '{"result": true}', '{"result": NaN}'])
    server = start_endpoint(lambda _: chat_said(next(texts)))
    chat = Chat(JudgeSettings(base_url=server.url, model="x", retries=0), "")
    try:
        assert (await score(ASK, "Rome", chat)).score == 7.5
        for _ in range(4):
            assert "score_model answered" in ((await score(ASK, "Rome", chat)).error or "")
    finally:
        await chat.close()
    body = server.requests[0]
    assert body["messages"] == [{"role": "user", "content": "Grade Rome by Paris"}]
    assert (body["model"], body["seed"], body["max_completion_tokens"], body["temperature"]) == ("o4-mini", 3, 77, 0.0)
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["steps", "result"]


def test_a_model_grader_needs_a_chat_endpoint(tmp_path: Path) -> None:
    """Without --base-url a grader that asks a model is refused at the start."""
    (tmp_path / "g.json").write_text(json.dumps(ASK))
    with pytest.raises(ConfigError, match="--base-url"):
        GraderReward(tmp_path / "g.json", "reference_answer", None)


@pytest.mark.slow
def test_the_example_is_served_by_one_command(wire: Wire, start_service: StartService, serve: Serve) -> None:
    """The example's grader, registered by its command, scores through the service with its parts."""
    service = start_service()
    name = f"grader-{wire.run_id}"
    assert serve("serve-grader", "examples/grader.json", "--name", name, "--register", service.url).url
    group = GroupToScore(completions=["Paris", "Parks"], ground_truth="Paris").model_dump()
    answer = service.post("/v1/score", {"reward": name, "groups": [group]}).json()["results"][0]
    assert [one["score"] for one in answer["scores"]] == pytest.approx([1.0, 0.08])
    assert answer["scores"][1]["parts"] == {"exact": 0.0, "near": pytest.approx(0.8)}
