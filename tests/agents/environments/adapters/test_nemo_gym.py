"""Episodes of a server with NeMo-Gym's protocol: tools, sessions, verification, hostile and broken servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import Response
from tests.agents.environments.played import call, check_exact, play, results, said, task_of

from penstock.agents.environments.adapters import nemo_gym
from penstock.agents.environments.adapters.nemo_gym import NEMO_GYM, GymRow, NemoGymOptions
from penstock.agents.environments.over_http import servers
from penstock.agents.environments.play import Row
from penstock.agents.proxy.messages import Message, ToolCall
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.errors import TaskRefused
from penstock.trainer.data.read_rows import prompt_row, rename
from penstock.trainer.data_settings import DataSettings

if TYPE_CHECKING:
    from tests.agents.environments.adapters.gym_server import GymServer


def tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "description": f"Do {name}.", "parameters": schema, "strict": True}


TOOLS = [tool("increment_counter", count="integer"), tool("get_counter_value"), tool("wait")]


def row(expected: int = 5, **params: Any) -> dict[str, Any]:
    """A row as `resources_servers/example_session_state_mgmt` has them."""
    given = {"input": [{"role": "user", "content": "Add 2 and 1."}], "tools": TOOLS, **params}
    return {
        "responses_create_params": given,
        "initial_count": 2,
        "expected_count": expected,
        "agent_ref": {"type": "responses_api_agents", "name": "simple"},
    }


@pytest.fixture(scope="module")
def served() -> Iterator[GymServer]:
    from tests.agents.environments.adapters.gym_server import GymServer  # imports openai: two CPU seconds

    running = GymServer()
    yield running
    running.stop()


@pytest.fixture
def server(served: GymServer) -> Iterator[GymServer]:
    served.counters.clear()
    served.verified.clear()
    served.headers.clear()
    yield served
    served.instead.clear()


def episodes(
    model: Path, server: GymServer, script: Sequence[str], given: Any = None, *, size: int = 1, **options: Any
) -> Any:
    """Return the episodes of a group, or why there are none, and the engine."""
    settings = {name: options.pop(name) for name in ("attempts", "max_turns", "reply_deadline_s") if name in options}
    task = task_of(size=size, extra_info=json.dumps(given or row()))
    return play(model, NEMO_GYM, script, task, options={"url": server.url, **options}, **settings)


def test_an_episode_is_verified_by_its_server(tool_model: Path, server: GymServer) -> None:
    """Calls of one answer are made in turn, in one session; the server sees row and response, and rewards the end."""
    script = [
        call("increment_counter", count=2) + "\n" + call("increment_counter", count=1),
        call("get_counter_value"),
        "5",
    ]
    (episode,), engine = episodes(tool_model, server, script)
    check_exact(episode, engine, tool_model, script)
    assert ("user", "Add 2 and 1.") in said(episode)
    assert results(episode) == ['{"success":true,"done":false}'] * 2 + ['{"count":5}']
    assert (episode.status, [turn.reward for turn in episode.rows[0].turns]) == ("done", [0, 0, 1.0])
    assert dict(episode.reward_parts) == {"tool_calls": 3.0, "tool_errors": 0.0, "count": 1.0, "used": 1.0}
    assert "Do increment_counter." in engine.tokenizer.decode(engine.prompts[0])
    (verified,) = server.verified
    response = verified.pop("response")
    assert verified == row()
    once = ["function_call", "function_call_output"]
    assert [one["type"] for one in response["output"]] == [once[0], once[0], once[1], once[1], *once, "message"]
    assert {one["call_id"] for one in response["output"][:2]} == {one["call_id"] for one in response["output"][2:4]}
    assert {header["penstock-seed"] for header in server.headers} == {str(episode.seed)}
    assert len(server.counters) == 1


def test_what_goes_wrong_in_a_call_is_text_for_the_policy(tool_model: Path, server: GymServer) -> None:
    """Wrong arguments, a refusal, an unknown tool, a tool that raises, no answer in time: the episode goes on."""
    server.instead["/get_counter_value"] = lambda: Response("x" * 300 + " KeyError", status_code=500)
    script = [
        call("increment_counter", count="many"),
        call("increment_counter", count=-1),
        call("verify", reward=1),
        call("get_counter_value"),
        call("wait"),
        "\n".join([call("increment_counter", count=1)] * 3),
        "5",
    ]
    (episode,), _ = episodes(tool_model, server, script, call_deadline_s=0.5, max_output_chars=200, max_calls=2)
    wrong, refused, unknown, raised, late, *three = results(episode)
    assert wrong.startswith("error: HTTP 422: ")
    assert refused == 'error: HTTP 404: {"detail":"no such count"}'
    assert unknown == "error: there is no tool 'verify'; there are get_counter_value, increment_counter, wait"
    assert raised.startswith("error: HTTP 500: xxx")
    assert "characters left out" in raised
    assert late == "error: no answer within 0.5 seconds"
    assert three[-1] == "error: only the first 2 calls of an answer are made"
    assert dict(episode.reward_parts)["tool_errors"] == 6.0
    assert episode.reward == 0.0  # of the server: the count is 4
    assert len(server.verified) == 1


async def test_arguments_that_are_no_object_are_not_sent() -> None:
    options = NemoGymOptions.model_validate({"url": "http://127.0.0.1:9"})
    sessions = nemo_gym.Sessions(options, ())
    played = nemo_gym.NemoGymPlay(1, Row((), None, row(), ""), options, sessions)
    given = ("[1]", "{", '{"count": NaN}', '{"count": 1, "count": 2}', '"\ud800"')
    calls = tuple(ToolCall(str(n), "increment_counter", text) for n, text in enumerate(given))
    reply = await played.step(Message("assistant", tool_calls=calls))
    listed, *others = [message.content for message in reply.messages]
    assert listed == "error: the arguments are not a JSON object"
    assert all(other.startswith("error: the arguments are not valid JSON: ") for other in others)
    assert reply.parts == {"tool_calls": 5.0, "tool_errors": 5.0}
    await sessions.close()


def test_sessions_of_episodes_are_apart(tool_model: Path, server: GymServer) -> None:
    """Two episodes at once, each with its own count; one that the turns ended is verified too."""
    script = [call("increment_counter", count=2)] * 4
    found, _ = episodes(tool_model, server, script, row(6), size=2, max_turns=2)
    assert [(one.status, one.reward) for one in found] == [("truncated", 1.0)] * 2
    assert sorted(server.counters.values()) == [6, 6]


def test_a_tool_may_end_the_episode_and_a_row_may_have_one_call(tool_model: Path, server: GymServer) -> None:
    script = ["\n".join([call("increment_counter", count=98)] * 2)]
    given = row(100, parallel_tool_calls=False, instructions="Be brief.", temperature=0.5)
    (episode,), engine = episodes(tool_model, server, script, given, use_done_flag=True)
    assert (episode.status, episode.reward) == ("done", 1.0)
    assert (
        server.verified[0]["response"]["output"][-1]["output"] == "error: only the first 1 calls of an answer are made"
    )
    assert "Be brief." in engine.tokenizer.decode(engine.prompts[0])


def answers(text: str | bytes, status: int = 200, **headers: str) -> Callable[[], Response]:
    return lambda: Response(text, status_code=status, headers=headers)


def cookies() -> Response:
    response = Response("{}")
    for number in range(8):
        response.set_cookie(f"c{number}", "x" * 2000)
    return response


async def never() -> Response:
    await asyncio.sleep(600)
    return Response("")


HOSTILE: list[tuple[str, Any, str]] = [
    ("/verify", answers("it broke", 500), "/verify answers HTTP 500: 'it broke'"),
    ("/verify", answers("ok"), "/verify answers with something other than JSON: it is not JSON"),
    ("/verify", answers('{"reward": NaN}'), "/verify answers with something other than JSON: NaN is not a JSON number"),
    ("/verify", answers('{"reward": 1, "reward": 0}'), "the key 'reward' twice"),
    ("/verify", answers('{"reward": 1e999}'), "/verify: reward is 'inf', expected a number"),
    ("/verify", answers('{"reward": true}'), "/verify: reward is 'True', expected a number"),
    ("/verify", answers('{"reward": "1"}'), "/verify: reward is '1', expected a number"),
    ("/verify", answers('{"reward": 1, "reward_components": {"a": null}}'), "reward_components.a is 'None'"),
    ("/verify", answers('{"score": 1}'), "/verify answers no object with a reward"),
    ("/verify", answers('{"reward": 0, "mask_sample": true, "failure_kind": "judge"}'), "(mask_sample): judge: None"),
    ("/verify", answers("x" * 2000), "/verify answers with more than 1024 bytes"),
    ("/verify", answers("", 307, Location="http://192.0.2.1"), "HTTP 307: to 'http://192.0.2.1', which is not"),
    ("/increment_counter", answers(b"\xff"), "/increment_counter answers what is not UTF-8"),
    ("/increment_counter", answers("x" * 2000), "/increment_counter answers with more than 1024 bytes"),
    ("/increment_counter", answers("", 302, Location="/verify"), "HTTP 302: to '/verify', which is not followed"),
    ("/increment_counter", answers("", 503), "/increment_counter answers HTTP 503"),
    ("/increment_counter", answers("", 401), "/increment_counter answers HTTP 401"),
    ("/increment_counter", answers('{"detail":"Not Found"}', 404), "has no tool increment_counter, which the row"),
    ("/increment_counter", cookies, "sets cookies of more than 8192 characters"),
    ("/seed_session", answers("hello"), "/seed_session answers with something other than JSON"),
    ("/seed_session", answers("{}", 422), "/seed_session answers HTTP 422"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "instead", "problem"), HOSTILE)
def test_a_server_that_fails_is_no_reward(
    tool_model: Path, server: GymServer, path: str, instead: Any, problem: str
) -> None:
    """The group is refused with the reason, after the episode was begun as often as `attempts` says."""
    server.instead[path] = instead
    script = [call("increment_counter", count=3), "5"]
    refused, _ = episodes(tool_model, server, script, attempts=1, max_message_bytes=1024)
    assert isinstance(refused, TaskRefused)
    assert problem in str(refused)


def test_an_episode_is_begun_again_with_its_seed(tool_model: Path, server: GymServer) -> None:
    """The first verification fails; the second attempt has another session and the same seed."""

    def once() -> Response:
        server.instead.clear()
        return Response("", status_code=502)

    server.instead["/verify"] = once
    script = [call("increment_counter", count=3), "5"] * 2
    (episode,), _ = episodes(tool_model, server, script, attempts=2)
    assert (episode.reward, len(server.counters)) == (1.0, 2)
    assert {header["penstock-seed"] for header in server.headers} == {str(episode.seed)}


def test_a_server_that_hangs_has_failed(tool_model: Path, server: GymServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has no answer, and nothing else has one either; a verification takes too long."""
    monkeypatch.setattr(nemo_gym, "ALIVE_WITHIN_S", 0.3)
    server.instead["/"] = server.instead["/verify"] = never
    refused, _ = episodes(tool_model, server, [call("wait")], attempts=1, call_deadline_s=0.3)
    assert "did not answer a call of wait, and does not answer GET / either: no answer within 0.3 s" in str(refused)
    refused, _ = episodes(tool_model, server, ["5"], attempts=1, call_deadline_s=0.3, reply_deadline_s=1.0)
    assert "no reply within 1 s (reply_deadline_s)" in str(refused)


def test_a_server_that_is_busy_is_asked_again(
    tool_model: Path, server: GymServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another one that is none is left out; the token goes with every request."""
    monkeypatch.setattr(servers, "_FULL_S", 0.05)

    def once() -> Response:
        server.instead.clear()
        return Response("", status_code=503)

    server.instead["/seed_session"] = once
    token = tmp_path / "token"
    token.write_text("secret\n")
    script = [call("increment_counter", count=3), "5"]
    urls = ["http://127.0.0.1:9", server.url]
    (episode,), _ = episodes(tool_model, server, script, url=urls, token_file=str(token))
    assert episode.reward == 1.0
    assert {header["authorization"] for header in server.headers} == {"Bearer secret"}


def test_a_server_that_is_none_is_named(tool_model: Path, server: GymServer) -> None:
    for url, problem in (
        ("http://127.0.0.1:9", "no session within 0.2 s (options.place_deadline_s): http://127.0.0.1:9/seed_session"),
        ("http://169.254.169.254", "metadata and multicast addresses are never called"),
        ("http://192.0.2.1", "options.allowed_targets"),
    ):
        refused, _ = episodes(tool_model, server, [], url=url, place_deadline_s=0.2, attempts=1)
        assert problem in str(refused)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"expected_count": 1}, "no object responses_create_params"),
        (row(input=[]), "input: expected messages, the last one of the user; there is none"),
        (row(input=[{"role": "assistant", "content": "a"}]), "the last is of the assistant"),
        (row(input=[{"role": "user", "content": [{"type": "input_audio"}]}]), "a part of type 'input_audio'"),
        (row(tools=[{"type": "web_search"}]), "a tool of type 'web_search'"),
        (row(tools="none"), "tools must be a list of objects"),
        (row(tools=[tool("a/verify")]), "tools[0].name: expected 1 to 64 letters"),
        (row(tools=[tool("verify")]), "verify is a path that the server has for itself"),
        (row(tools=[tool("a"), tool("a")]), "two have the same name"),
        (row(tools=[{**tool("a"), "parameters": {"type": "array"}}]), "expected a JSON schema of an object"),
        (row(tools=[{**tool("a"), "parameters": {"type": "object", "required": "b"}}]), "required: expected a list"),
        (row(tool_choice="required"), "tool_choice: expected auto, got required"),
        (row(parallel_tool_calls="no"), "parallel_tool_calls: expected true or false"),
        (row(previous_response_id="a"), "previous_response_id"),
    ],
)
def test_rows_that_cannot_be_played_are_named(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match="responses_create_params") as caught:
        GymRow.of(Row((), None, given, ""))
    assert problem in str(caught.value)


def test_a_system_prompt_of_the_data_is_not_lost_silently() -> None:
    read = Row((Message("system", "s"), Message("user", "u")), None, row(), "")
    with pytest.raises(ValueError, match=r"data\.system_prompt"):
        GymRow.of(read)


def test_a_row_of_nemo_gym_passes_through_the_trainers_reader() -> None:
    """With `data.map.messages` all of it but the columns that a format reads; within `extra_info` all of it."""
    given = {**row(), "ground_truth": [{"name": "a"}]}
    mapped = DataSettings(map={"messages": "responses_create_params.input"})
    for read, data in (
        (given, mapped),
        ({"messages": row()["responses_create_params"]["input"], "extra_info": given}, DataSettings()),
    ):
        prompt = prompt_row(rename(read, data, nested_texts=False), data)
        assert prompt.chat == ({"role": "user", "content": "Add 2 and 1."},)
        truth = None if prompt.ground_truth is None else json.loads(prompt.ground_truth)
        assert GymRow.of(Row((), truth, json.loads(prompt.extra_info), "")).fields == given


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "url: Field required"),
        ({"url": "http://a", "tool": "x"}, "tool: Extra inputs"),
        ({"url": "http://a", "max_calls": 0}, "max_calls: Input should be greater"),
        ({"url": "http://a", "call_deadline_s": 50}, "reply_deadline_s = 60: expected more than 60"),
    ],
)
def test_options_are_checked(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        NEMO_GYM.defined("mine", EnvironmentDefinition(type="nemo_gym", options=options))
