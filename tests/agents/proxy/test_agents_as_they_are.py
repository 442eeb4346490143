"""Requests as agents of other people send them: what is stripped, merged, counted, left out or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.agents.proxy.agent_model import QWEN25, TEMPLATES, bench
from tests.agents.proxy.conversation import LOOK, Agent, check_rows, result, system, user
from tests.agents.proxy.test_proxy_http import ASK, served

from penstock.agents.proxy.api import anthropic_messages, chat_completions, responses
from penstock.agents.proxy.messages import AgentRequest, Lenience, Message, RequestRefused
from penstock.agents.proxy.system_messages import without_lines
from penstock.protocol.config.environment_settings import EpisodeSettings

END = "<|im_end|>"
BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={};"
# As Qwen3.5's: one system message, the first.
ONE_SYSTEM = QWEN25.replace(
    "{%- for message in messages %}",
    "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}",
)
LEAVES_OUT = QWEN25.replace(" or (message.role == 'system' and not loop.first)", "")
TEMPLATES.update(one_system=ONE_SYSTEM, leaves_out=LEAVES_OUT)


@pytest.mark.parametrize(("patterns", "rows", "stripped"), [(None, 1, 4), ((), 4, 0)])
async def test_a_header_that_changes_with_every_request_is_one_row(
    tmp_path: Path, patterns: tuple[str, ...] | None, rows: int, stripped: int
) -> None:
    one = bench(tmp_path, **({} if patterns is None else {"stripped_lines": patterns}))
    messages: list[dict[str, Any]] = []
    async with served(one) as (client, episode):
        for number in range(4):
            blocks = [{"type": "text", "text": text} for text in (BILLING.format(f"{number:05x}"), "You are an agent.")]
            messages.append(user("go on"))
            body = {"model": "m", "max_tokens": 8, "system": blocks, "messages": messages}
            reply = (await client.post("messages", json=body)).json()
            messages.append({"role": "assistant", "content": reply["content"]})
        made = one.proxy.end(episode)
    assert (len(made.rows), episode.counts["stripped_lines"]) == (rows, stripped)
    assert episode.messages[0].content.endswith("You are an agent.")


def test_only_whole_lines_of_system_messages_are_stripped() -> None:
    text = f"first\n  {BILLING}\nlast"
    messages = (
        Message("system", text),
        Message("user", text),
        Message("system", BILLING),
        Message("system", "  indented"),
    )
    left, stripped = without_lines(messages, EpisodeSettings().stripped_lines)  # pyright: ignore[reportCallIssue]
    assert ([message.content for message in left], stripped) == (["first\nlast", text, "  indented"], 2)
    with pytest.raises(ValueError, match="no regular expression"):
        EpisodeSettings(stripped_lines=("(",))  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(("template", "merges"), [("one_system", 1), ("leaves_out", 1), ("qwen25", 0), ("smollm2", 0)])
@pytest.mark.parametrize("late", [
    [{"role": "developer", "content": "d"}, system("late"), user("hello")],
    [system("s"), user("hello"), {"role": "developer", "content": "late"}],
    [user("hello"), system("late"), user("more")],
    [system("s"), user("hello"), {"role": "assistant", "content": "yes"}, {"role": "developer", "content": "late"}],
])  # fmt: skip
async def test_late_system_messages_are_merged_for_templates_that_want_one(
    tmp_path: Path, template: str, merges: int, late: list[dict[str, Any]]
) -> None:
    agent = Agent(bench(tmp_path, template), *late)
    await agent.ask()
    await agent.ask(user("more"))
    prompts = [agent.bench.engine.tokenizer.decode(ids) for ids in agent.bench.engine.prompts]
    assert agent.episode.counts["merged_system_messages"] == 2 * merges
    assert [prompt.count("late") for prompt in prompts] == [1, 1]
    assert len(agent.end().rows) == 1


@pytest.mark.parametrize("turn", [
    lambda n: [system(f"reminder {n}"), user("go on")],
    lambda n: [user("go on"), system(f"reminder {n}")],
    lambda n: [user("go on"), system(f"reminder {n}"), system("and"), user("more")],
    lambda n: [system(f"reminder {n}")],
    lambda n: [system(f"reminder {n}"), {"role": "user", "content": [{"type": "text", "text": "go on"}]}],
])  # fmt: skip
@pytest.mark.parametrize("template", ["one_system", "leaves_out"])
async def test_reminders_of_every_turn_are_one_row(
    tmp_path: Path, template: str, turn: Callable[[int], list[dict[str, Any]]]
) -> None:
    agent = Agent(bench(tmp_path, template), system("s"), user("hello"))
    await agent.ask()
    for number in range(3):
        await agent.ask(*turn(number))
    prompt = agent.bench.engine.tokenizer.decode(agent.bench.engine.prompts[-1])
    assert [prompt.count(f"reminder {number}") for number in range(3)] == [1, 1, 1]
    assert agent.episode.counts["merged_system_messages"] in (1 + 2 + 3, 2 * (1 + 2 + 3))
    assert len(agent.end().rows) == 1


async def test_a_reminder_behind_a_result_of_a_tool_is_one_row(tmp_path: Path) -> None:
    script = ['<tool_call>{"name": "look", "arguments": {}}</tool_call>' + END, "star" + END]
    agent = Agent(bench(tmp_path, "one_system", script=script), tools=[LOOK])
    answer = await agent.ask()
    await agent.ask(result(answer["tool_calls"][0], "star"), system("late"))
    assert len(agent.end().rows) == 1


async def test_tokens_are_counted_as_they_will_be_sent(tmp_path: Path) -> None:
    async with served(bench(tmp_path)) as (client, episode):
        body = {
            "model": "m",
            "system": "s",
            "messages": [user("hello")],
            "tools": [{"name": "look", "input_schema": {}}],
        }
        for _ in range(2):
            counted = (await client.post("messages/count_tokens", json=body)).json()
            reply = (await client.post("messages", json={**body, "max_tokens": 8})).json()
            assert counted == {"input_tokens": reply["usage"]["input_tokens"]}
            body["messages"] += [{"role": "assistant", "content": reply["content"]}]
            assert (await client.post("messages/count_tokens", json=body)).json()["input_tokens"] > counted[
                "input_tokens"
            ]
            body["messages"].append(user("more"))
        forced = {**body, "tool_choice": {"type": "any"}}
        assert (await client.post("messages/count_tokens", json=forced)).json()["input_tokens"] > 0
        assert (len(episode.tree.turns), episode.counts["token_counts"]) == (2, 4 + 1)
        for path, headers in (("messages/other", {}), ("nothing", {"anthropic-version": "2023-06-01"})):
            refused = await client.post(path, json=body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
            assert refused.json()["type"] == "error"
        assert (await client.post("nothing", json=body)).json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_of_the_client_is_reported(tmp_path: Path, stream: bool) -> None:
    async with served(bench(tmp_path, script=[f"one STOP two{END}", f"one{END}"], stop=("halt",))) as (client, _):
        for reason, sequence in (("stop_sequence", "STOP"), ("end_turn", None)):
            body = {**ASK, "max_tokens": 64, "stop_sequences": ["END", "STOP"], "stream": stream}
            reply = await client.post("messages", json=body)
            lines = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
            said = next(line["delta"] for line in lines if line["type"] == "message_delta") if stream else reply.json()
            assert (said["stop_reason"], said["stop_sequence"]) == (reason, sequence)


async def test_arguments_may_be_objects_and_results_without_an_id(tmp_path: Path) -> None:
    """As clients of Ollama write them: one row, and the ids of the calls in order."""
    script = [
        "".join(f'<tool_call>{{"name": "look", "arguments": {{"word": "{one}"}}}}</tool_call>' for one in ("a", "b"))
        + END
    ]
    agent = Agent(bench(tmp_path, script=script), tools=[LOOK])
    answer = await agent.ask()
    for call in answer["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        del call["id"]
    agent.messages[-1] = answer
    await agent.ask({"role": "tool", "content": "1"}, {"role": "tool", "tool_name": "look", "content": "2"})
    assert len(agent.end().rows) == 1
    named = {**answer, "tool_calls": [{**answer["tool_calls"][0], "id": "c1"}]}
    request = read(chat_completions, {"messages": [*agent.messages[:1], named, {"role": "tool", "content": "1"}]})
    assert request.messages[-1].tool_call_id == "c1"


HOSTED, CUSTOM = {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}
FUNCTION = {"type": "function", "name": "look", "parameters": {}}
USER = {"role": "user", "content": "x"}
ITEMS = [USER, {"type": "custom_tool_call", "call_id": "c"}, {"type": "item_reference", "id": "i"}]
GRAMMAR, JSON_OBJECT = {"response_format": {"type": "json_schema"}}, {"format": {"type": "json_object"}}
CONSTRAINED: list[tuple[Any, dict[str, Any], list[str]]] = [
    (chat_completions, {"tool_choice": "required"}, ["tool_choice"]),
    (chat_completions, {"tool_choice": {"type": "function"}}, ["tool_choice"]),
    (chat_completions, {**GRAMMAR, "logit_bias": {"1": 2}}, ["response_format", "logit_bias"]),
    (responses, {"tool_choice": "required"}, ["tool_choice"]),
    (responses, {"text": JSON_OBJECT}, ["text.format"]),
    (anthropic_messages, {"tool_choice": {"type": "any"}}, ["tool_choice"]),
    (anthropic_messages, {"output_config": JSON_OBJECT}, ["output_config", "output_config.format"]),
]
UNSUPPORTED: list[tuple[Any, dict[str, Any], list[str]]] = [
    (chat_completions, {"tools": [LOOK, HOSTED]}, ["tools.web_search"]),
    (responses, {"tools": [HOSTED, CUSTOM, FUNCTION]}, ["tools.web_search", "tools.custom"]),
    (responses, {"input": ITEMS}, ["input.custom_tool_call", "input.item_reference"]),
    (anthropic_messages, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, ["tools.bash_20250124"]),
    (anthropic_messages, {"tools": [{"type": "a b/" + "x" * 90}]}, ["tools.a_b_" + "x" * 36]),
]


def read(api: Any, body: dict[str, Any], **more: Any) -> AgentRequest:
    return api.read_request({**({"input": "x"} if api is responses else ASK), **body}, 1.0, **more)


def counted_of(request: AgentRequest) -> list[str]:
    return [name for name in request.overruled if name != "temperature"]


@pytest.mark.parametrize(
    ("api", "body", "counted", "code"),
    [*((*row, "constrained_decoding") for row in CONSTRAINED), *((*row, "unsupported") for row in UNSUPPORTED)],
)
def test_what_only_a_vendors_server_has_is_refused_or_left_out_and_counted(
    api: Any, body: dict[str, Any], counted: list[str], code: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        read(api, body)
    assert refused.value.code == code
    request = read(api, body, lenience=Lenience(drops_unknown=True, ignores_constraints=True))
    assert counted_of(request) == counted
    assert request.reads_calls
    assert all(tool["function"]["name"] == "look" for tool in request.tools)


STRICT_TOOL = {"type": "function", "function": {**LOOK["function"], "strict": True}}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
SHOWN = {"type": "function_call_output", "call_id": "c", "output": [PICTURE]}
ALONE = {"type": "auto", "disable_parallel_tool_use": True}


@pytest.mark.parametrize(
    ("api", "body", "counted"),
    [
        (chat_completions, {"tools": [STRICT_TOOL], "seed": 0, "n": 1, "store": True, "stream_options": {}},
         ["seed", "tools.strict"]),
        (chat_completions, {"best_of": 3, "a b": 1, "metadata": {"a": "b"}, "stop": ["x"], "top_p": 1},
         ["best_of", "a_b"]),
        (responses, {"context_management": [{}], "stop": ["x"], "include": ["x"], "store": False},
         ["context_management", "stop"]),
        (responses, {"input": [USER, SHOWN], "reasoning": {"effort": "low"}}, ["reasoning", "image_detail"]),
        (anthropic_messages, {"tool_choice": ALONE}, ["parallel_tool_calls"]),
        (anthropic_messages, {"context_management": {"edits": []}, "betas": ["x"], "speed": "fast"},
         ["context_management", "speed"]),
    ],
)  # fmt: skip
def test_no_field_is_ignored_in_silence(api: Any, body: dict[str, Any], counted: list[str]) -> None:
    assert counted_of(read(api, body)) == counted


async def test_tools_of_a_namespace_are_functions(tmp_path: Path) -> None:
    """As Codex offers and calls its sub-agents; no name of another tool looks like one."""
    space = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "strict": False}]}
    body: dict[str, Any] = {"input": [system("s"), *ITEMS[:1]], "tools": [FUNCTION, space], "stream": True}
    one = bench(
        tmp_path, script=['<tool_call>{"name": "agents.spawn", "arguments": {}}</tool_call>' + END, "star" + END]
    )
    async with served(one) as (client, episode):
        lines = (await client.post("responses", json=body)).text.splitlines()
        (item,) = (
            json.loads(line[6:])["item"] for line in lines if line.startswith('data: {"type": "response.output_item.d')
        )
        assert (item["name"], item["namespace"]) == ("spawn", "agents")
        body["input"] += [item, {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}]
        assert (await client.post("responses", json=body)).status_code == 200
        refused = await client.post("responses", json={**body, "tools": [{**FUNCTION, "name": "a.b"}]})
        assert "has a dot" in refused.json()["error"]["message"]
        made = one.proxy.end(episode)
    check_rows(episode, made)
    assert [len(row.spans) for row in made.rows] == [2]


@pytest.mark.parametrize(("added", "rows"), [("\nCalling tools:\n[{'id': 'call_1'}]", 1), ("", 1), (None, 2)])
async def test_text_behind_an_answer_that_a_stop_string_ended_is_context(
    tmp_path: Path, added: str | None, rows: int
) -> None:
    """As smolagents' CodeAgent writes its history; None: the client writes another answer."""
    agent = Agent(bench(tmp_path, script=["I look.\n<code>\nlook()\n</code>"] * 3))
    for number in range(3):
        answer = await agent.ask(stop=["Observation:", "</code>"])
        assert answer["content"] == "I look.\n<code>\nlook()\n"
        answer["content"] = f"{answer['content']}</code>{added or ''}" if added is not None or number else "I looked."
        agent.messages += [user(f"Observation:\n{number}")]
    prompt = agent.bench.engine.tokenizer.decode(agent.bench.engine.prompts[-1])
    assert prompt.count(f"look()\n</code>{added or ''}{END}\n<|im_start|>user\nObservation:\n") == (
        2 if added is not None else 1
    )
    assert len(agent.end().rows) == rows


@pytest.mark.parametrize("value", ["x", 5, [], ["x"], {"format": "text"}, {"format": ["x"]}])
def test_a_form_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(RequestRefused, match="must be an object") as refused:
        responses.read_request({"input": "x", "text": value}, 1.0)
    assert refused.value.status == 400


async def test_the_settings_of_an_episode_reach_its_requests(tmp_path: Path) -> None:
    async with served(bench(tmp_path, unknown_tools="drop", forced_choice="auto")) as (client, episode):
        body = {**ASK, **GRAMMAR, "tools": [LOOK, HOSTED]}
        assert (await client.post("chat/completions", json=body)).status_code == 200
        assert (episode.counts["overruled.tools.web_search"], episode.counts["overruled.response_format"]) == (1, 1)


TEXT = [{"type": "text", "text": "d"}]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "title": "t", "source": {"type": "text", "data": "d"}}, "t\nd"),
        ({"type": "document", "source": {"type": "content", "content": TEXT}}, "d"),
        ({"type": "search_result", "source": "u", "title": "t", "content": TEXT}, "t\nu\nd"),
        ({"type": "tool_reference", "tool_name": "look"}, "look"),
        ({"type": "document", "source": {"type": "base64", "data": "JVBERg=="}}, None),
    ],
)
def test_blocks_that_are_texts_are_read(block: dict[str, Any], text: str | None) -> None:
    calls = [{"type": "redacted_thinking", "data": "x"}, {"type": "tool_use", "id": "c", "name": "look", "input": {}}]
    shown = [{"type": "tool_result", "tool_use_id": "c", "content": [block]}, block]
    body = {"messages": [user("hello"), {"role": "assistant", "content": calls}, {"role": "user", "content": shown}]}
    if text is None:
        with pytest.raises(RequestRefused, match="a document that is not a text"):
            anthropic_messages.read_request(body, 1.0)
        return
    request = anthropic_messages.read_request(body, 1.0)
    assert [message.content for message in request.messages[2:]] == [text, text]
    assert request.overruled == ("redacted_thinking",)


@pytest.mark.parametrize(
    ("requests", "forks"),
    [
        ([[user("a")]] * 5, {}),
        ([[user("a")], [user("a"), user("b")]], {"edited_history": 1}),
        ([[user("a")], [user("a"), {"role": "assistant", "content": "other"}, user("b")]], {"edited_history": 1}),
        ([[user("a")], [user("b")], [user("b")]], {"new_conversation": 1}),
        ([[system("1"), user("a")], [system("2"), user("a")]], {"system_changed": 1}),
    ],
)
async def test_a_new_root_is_counted_with_its_cause(
    tmp_path: Path, requests: list[list[dict[str, Any]]], forks: dict[str, int]
) -> None:
    agent = Agent(bench(tmp_path))
    for messages in requests:
        await agent.sample(messages)
    assert agent.forks() == forks
