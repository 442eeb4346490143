"""Rewards made of parts in the real service: stored parts, errors of a part, and refusals at the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.reward_service.conftest import Scripted, Wire, asking
from tests.reward_service.processes import StartEndpoint, StartService, good

from penstock.protocol.config.reward_settings import RewardDefinition, RewardSettings
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import RewardRequest
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.errors import BadGroundTruth, EndpointBusy, EndpointFailed, GraderFailed, RewardError
from penstock.reward_service.registry import definitions
from penstock.reward_service.registry.built_in import BUILT_INS, BY_SOURCE
from penstock.reward_service.registry.reward_registry import ComposedReward
from penstock.reward_service.scores import GroupScores, Outcome

RIGHT, WRONG, BARE = "<think>t</think><answer>4</answer>", "<think>t</think><answer>5</answer>", "4"

RUN_FILE = """
[reward.define.mine.parts.correct]
reward = "numeric"
parameters.relative = 0.01

[reward.define.mine.parts.form]
reward = "tags"
weight = 0.2
needs = 1.0
otherwise = -0.5

[reward.define.mine.parts.length]
reward = "overlong"
parameters.longest = 100
parameters.buffer = 50

[reward.define.mixed.parts.correct]
reward = "auto"

[reward.define.mixed.parts.style]
reward = "judge-RUN"
weight = 0.5
"""


def test_parts_are_stored_with_their_sum_and_an_error_in_one_is_the_groups(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint, tmp_path: Path
) -> None:
    """Built-ins and an endpoint are summed, gates apply, every part is kept; a part without a score means no reward."""
    (tmp_path / "run.toml").write_text(RUN_FILE.replace("RUN", wire.run_id))
    service = start_service(str(tmp_path / "run.toml"), "reward_service.endpoint_attempts=1")
    endpoint = start_endpoint(good(0.5))
    wire.announce(
        [
            asking("own", "mine", RIGHT, WRONG, BARE),
            asking("early", "mixed", RIGHT, BARE, data_source="math_reasoning"),
            asking("truthless", "mine", RIGHT, truth='"many"'),
        ]
    )
    (own,) = wire.wait_scored("own")["own"]
    assert own.rewards == pytest.approx((1.2, 0.2, -0.5))
    assert own.scorer == "mine(numeric, tags, overlong)"
    assert own.parts["correct"] == (1.0, 0.0, 1.0)
    assert own.parts["form"] == (1.0, 1.0, 0.0)
    assert own.parts["correct.has_answer"] == (1.0, 1.0, 1.0)
    assert own.parts["length.length"] == tuple(map(float, own.generated.completion_tokens))
    letters = {name: letter for letter in wire.wait_dead("truthless", "early") for name in letter.group_ids}
    assert (letters["truthless"].reason, letters["early"].reason) == ("BadGroundTruth", "UnknownReward")
    assert letters["truthless"].detail.startswith("part correct: numeric: the row's ground_truth must be a number")
    assert "did you mean" in letters["early"].detail or "There are:" in letters["early"].detail

    assert service.register(f"judge-{wire.run_id}", endpoint.url, version="2").status_code == 201
    wire.announce([asking("both", "mixed", RIGHT, WRONG, data_source="math_reasoning")], pack_id="later")
    (both,) = wire.wait_scored("both")["both"]
    assert both.rewards == (1.25, 0.25)
    assert both.scorer == f"mixed(math_flexible, judge-{wire.run_id}@2)"
    assert both.parts["style"] == (0.5, 0.5)
    rows = {row["name"]: row for row in service.get("/v1/rewards")["rewards"]}
    assert rows["mine"]["kind"] == "defined"
    assert "0.2 x form (tags, else -0.5 where below 1)" in rows["mine"]["description"]
    assert rows["overlong"]["description"].endswith("needs parameters (reward.define)")
    counted = {"completions": [RIGHT, BARE], "ground_truth": "4", "completion_tokens": [75, 75]}
    known = service.post("/v1/score", {"reward": "mine", "groups": [counted]}).json()
    assert [score["score"] for score in known["results"][0]["scores"]] == pytest.approx([0.7, -0.5])
    uncounted = {"completions": ["4"], "ground_truth": "4"}
    wrong = service.post("/v1/score", {"reward": "mine", "groups": [{**uncounted, "completion_tokens": [1, 1]}]})
    assert wrong.status_code == 422
    by_hand = service.post("/v1/score", {"reward": "mine", "groups": [uncounted]}).json()
    assert by_hand["results"][0]["error"]["reason"] == "LengthsUnknown"
    taken = service.register("tags", endpoint.url)
    assert taken.status_code in {409, 422}


def test_an_invalid_run_file_stops_the_service_at_the_start(tmp_path: Path) -> None:
    """Wrong parameters are one text on stderr with every error; no server is contacted."""
    (tmp_path / "run.toml").write_text(RUN_FILE.replace("relative", "relativ").replace("buffer = 50", "buffer = 500"))
    command = [
        sys.executable,
        "-m",
        "penstock.reward_service",
        str(tmp_path / "run.toml"),
        "nats.url=nats://127.0.0.1:1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert (
        "reward.define.mine.parts.correct.parameters.relativ: the reward numeric has no such parameter" in done.stderr
    )
    assert "did you mean relative?" in done.stderr
    assert "buffer = 500 is more than longest = 100" in done.stderr
    assert "Traceback" not in done.stderr


def _define(**parts: dict[str, Any]) -> dict[str, RewardDefinition]:
    settings = RewardSettings.model_validate({"define": {"mine": {"parts": parts}}})
    return dict(settings.define)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (
            {"reward": "numeric", "parameters": {"absolute": "much"}},
            r"parameters\.absolute: expected a valid number, got 'much'",
        ),
        (
            {"reward": "numeric", "parameters": {"units": "sane"}},
            r"parameters\.units: expected 'ignore', 'same' or 'convert'",
        ),
        ({"reward": "regex", "parameters": {"pattern": "("}}, "not a regular expression of Python's re"),
        ({"reward": "json_schema", "parameters": {"schema_text": '{"type": "objct"}'}}, "not a valid schema"),
        ({"reward": "json_schema", "parameters": {"schema_file": "nowhere.json"}}, "cannot be read"),
        ({"reward": "tags", "parameters": {"tags": ["<think>"]}}, "write think, not <think>"),
        ({"reward": "tags", "parameters": {"tags": ["a", "a"]}}, "a tag is named twice"),
        ({"reward": "length"}, "set shortest or longest"),
        ({"reward": "overlong", "parameters": {"longest": 5}}, r"parameters\.buffer: the reward overlong needs it"),
        (
            {"reward": "my_endpoint", "parameters": {"a": 1}},
            "only built-in rewards and your own code take parameters, my_endpoint is neither",
        ),
        ({"reward": "math_reasoning", "parameters": {"a": 1}}, "write math_flexible"),
        ({"reward": "gsm8k", "parameters": {"a": 1}}, "there are: none"),
    ],
)
def test_an_invalid_part_is_named(part: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        definitions.check(_define(one=part))
    assert "reward.define.mine.parts.one" in str(refused.value)


def test_a_definition_does_not_take_a_built_ins_name() -> None:
    with pytest.raises(ConfigError, match="gsm8k is a built-in reward"):
        definitions.check({"gsm8k": _define(one={"reward": "tags"})["mine"]})


def test_a_built_in_that_needs_parameters_is_not_named_alone() -> None:
    with pytest.raises(ConfigError, match=r"reward\.name = 'length': .* \(of unit, shortest, longest\)") as refused:
        definitions.check_settings(RewardSettings(name="length", by_source={"mine": "overlong", "sums": "gsm8k"}))
    assert "reward.by_source.mine = 'overlong'" in str(refused.value)
    assert "sums" not in str(refused.value)
    parameters = {"longest": 8}
    mine = _define(one={"reward": "length", "parameters": parameters})
    definitions.check_settings(RewardSettings(name="mine", define=mine))


@pytest.mark.parametrize(
    ("first", "second", "decides"),
    [
        (EndpointBusy("busy"), EndpointFailed("down"), "part b: down"),
        (GraderFailed("died"), EndpointFailed("down"), "part a: died"),
        (EndpointFailed("down"), BadGroundTruth("no number"), "part b: no number"),
        (EndpointBusy("busy", retry_in_s=3.0), GroupScores((1.0,), "x"), "part a: busy"),
    ],
)
async def test_the_most_severe_error_is_the_groups(first: Outcome, second: Outcome, decides: str) -> None:
    """A permanent error takes precedence over a transient one, and a failure over a wait; kind and wait are kept."""
    definition = _define(a={"reward": "x"}, b={"reward": "y"})["mine"]

    async def nobody(request: RewardRequest) -> Scripted:
        raise AssertionError(f"{request.name} was looked up")

    reward = ComposedReward("mine", definition, {"a": Scripted(first), "b": Scripted(second)}, nobody)
    (outcome,) = await reward.score([make_texts()], attempt=1)
    (again,) = await reward.score([make_texts()], attempt=2)
    assert isinstance(outcome, RewardError)
    assert str(outcome) == str(again) == decides
    cause = first if decides.startswith("part a") else second
    assert type(outcome) is type(cause)
    assert vars(outcome) == vars(cause)


def make_texts() -> GroupTexts:
    return GroupTexts("g", "", ("x",), ("stop",), RewardRequest(name="mine", ground_truth='"4"'))


def test_every_data_set_of_the_table_has_a_reward_that_needs_no_parameters() -> None:
    """The names that guides and verl use map to built-in rewards that need no parameters."""
    assert {name for name in BY_SOURCE.values() if name not in BUILT_INS or BUILT_INS[name].default is None} == set()
    named = "gsm8k openai/gsm8k math math_reasoning code code_generation qa trivia classification"
    verl = "lighteval/MATH math_dapo aime2024 numina_olympiads codecontests searchR1_nq hiyouga/geometry3k"
    assert {*named.split(), *verl.split()} <= BY_SOURCE.keys()
