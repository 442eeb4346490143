"""Requests as agents of other people send them: what is stripped, merged, counted, left out or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.agents.proxy.agent_model import QWEN25, TEMPLATES, bench
from tests.agents.proxy.conversation import LOOK, Agent, check_rows, result, system, user
from tests.agents.proxy.test_proxy_http import ASK, served

from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS, AnswerFormat, ParsedAnswer
from penstock.agents.proxy.api import anthropic_messages, chat_completions, responses
from penstock.agents.proxy.messages import Lenience, Message, RequestRefused
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
    read = chat_completions.read_request({"messages": [*agent.messages[:1], {**answer, "tool_calls": [{**answer["tool_calls"][0], "id": "c1"}]},
                                                       {"role": "tool", "content": "1"}]}, 1.0)  # fmt: skip
    assert read.messages[-1].tool_call_id == "c1"


GRAMMAR = {"response_format": {"type": "json_schema"}}
HOSTED, CUSTOM = {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}
FUNCTION = {"type": "function", "name": "look", "parameters": {}}
ITEMS = [
    {"role": "user", "content": "x"},
    {"type": "custom_tool_call", "call_id": "c"},
    {"type": "item_reference", "id": "i"},
]


@pytest.mark.parametrize(
    ("api", "body", "code", "counted"),
    [
        (chat_completions, {**ASK, "tool_choice": "required"}, "constrained_decoding", ["tool_choice"]),
        (chat_completions, {**ASK, "tool_choice": {"type": "function"}}, "constrained_decoding", ["tool_choice"]),
        (chat_completions, {**ASK, **GRAMMAR, "logit_bias": {"1": 2}}, "constrained_decoding", ["response_format", "logit_bias"]),
        (chat_completions, {**ASK, "tools": [LOOK, HOSTED]}, "unsupported", ["tools.web_search"]),
        (responses, {"input": "x", "tool_choice": "required"}, "constrained_decoding", ["tool_choice"]),
        (responses, {"input": "x", "text": {"format": {"type": "json_object"}}}, "constrained_decoding", ["text.format"]),
        (responses, {"input": "x", "tools": [HOSTED, CUSTOM, FUNCTION]}, "unsupported", ["tools.web_search", "tools.custom"]),
        (responses, {"input": ITEMS}, "unsupported", ["input.custom_tool_call", "input.item_reference"]),
        (anthropic_messages, {**ASK, "tool_choice": {"type": "any"}}, "constrained_decoding", ["tool_choice"]),
        (anthropic_messages, {**ASK, "output_config": {"format": {"type": "json_schema"}}}, "constrained_decoding", ["output_config", "output_config.format"]),
        (anthropic_messages, {**ASK, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "unsupported", ["tools.bash_20250124"]),
        (anthropic_messages, {**ASK, "tools": [{"type": "a b/" + "x" * 90}]}, "unsupported", ["tools.a_b_" + "x" * 36]),
    ],
)  # fmt: skip
def test_what_only_a_vendors_server_has_is_refused_or_left_out_and_counted(
    api: Any, body: dict[str, Any], code: str, counted: list[str]
) -> None:
    with pytest.raises(RequestRefused) as refused:
        api.read_request(body, 1.0)
    assert refused.value.code == code
    request = api.read_request(body, 1.0, Lenience(drops_unknown=True, ignores_constraints=True))
    assert [name for name in request.overruled if name != "temperature"] == counted
    assert request.reads_calls
    assert all(tool["function"]["name"] == "look" for tool in request.tools)


STRICT_TOOL = {"type": "function", "function": {**LOOK["function"], "strict": True}}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
SHOWN = {"type": "function_call_output", "call_id": "c", "output": [PICTURE]}


@pytest.mark.parametrize(
    ("api", "body", "counted"),
    [
        (chat_completions, {**ASK, "tools": [STRICT_TOOL], "seed": 0, "n": 1, "store": True, "stream_options": {}}, ["seed", "tools.strict"]),
        (chat_completions, {**ASK, "best_of": 3, "a b": 1, "metadata": {"a": "b"}, "stop": ["x"], "top_p": 1}, ["best_of", "a_b"]),
        (responses, {"input": "x", "context_management": [{}], "stop": ["x"], "include": ["x"], "store": False}, ["context_management", "stop"]),
        (responses, {"input": [*ITEMS[:1], SHOWN], "reasoning": {"effort": "low"}}, ["reasoning", "image_detail"]),
        (anthropic_messages, {**ASK, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ["parallel_tool_calls"]),
        (anthropic_messages, {**ASK, "context_management": {"edits": []}, "betas": ["x"], "speed": "fast"}, ["context_management", "speed"]),
    ],
)  # fmt: skip
def test_no_field_is_ignored_in_silence(api: Any, body: dict[str, Any], counted: list[str]) -> None:
    assert [name for name in api.read_request(body, 1.0).overruled if name != "temperature"] == counted


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


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}, "t\nd"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "d"}]}}, "d"),
        ({"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "d"}]}, "t\nu\nd"),
        ({"type": "tool_reference", "tool_name": "look"}, "look"),
        ({"type": "document", "source": {"type": "base64", "data": "JVBERg=="}}, None),
    ],
)  # fmt: skip
def test_blocks_that_are_texts_are_read(block: dict[str, Any], text: str | None) -> None:
    answer = {
        "role": "assistant",
        "content": [
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "c", "name": "look", "input": {}},
        ],
    }
    body = {
        "messages": [
            user("hello"),
            answer,
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block]}, block]},
        ]
    }
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


TYPED = {
    "type": "function",
    "function": {
        "name": "set",
        "parameters": {
            "type": "object",
            "$defs": {"Level": {"enum": [1, 2]}},
            "properties": {
                "text": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"}, "on": {"type": "boolean"},
                "list": {"type": "array"}, "map": {"type": "object"}, "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "level": {"$ref": "#/$defs/Level"}, "kinds": {"type": ["integer", "string"]}, "either": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "number"}]}, "enum": {"enum": ["5", "6"]}, "free": {},
            },
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", "5"), ("text", "null", "null"), ("text", '{"a": 1}', '{"a": 1}'), ("text", " a\n b ", " a\n b "), ("n", "5", 5), ("n", "-5.0", -5),
        ("n", "five", "five"), ("n", "true", "true"), ("x", "1.5", 1.5), ("x", "2", 2), ("x", "NaN", "NaN"), ("x", "1e999", "1e999"), ("on", "True", True),
        ("on", "false", False), ("on", "1", "1"), ("list", "[1, null]", [1, None]), ("list", "1, 2", "1, 2"), ("map", '{"a": 1}', {"a": 1}),
        ("map", "[1]", "[1]"), ("maybe", "null", None), ("maybe", "None", None), ("maybe", "7", 7), ("level", "2", 2), ("kinds", "7", 7), ("kinds", "a", "a"), ("kinds", "007", "007"),
        ("either", "007", "007"), ("either", "7", 7), ("either", "1e3", "1e3"), ("either", "+7", "+7"), ("either", "1.50", "1.50"), ("either", "1.5", 1.5), ("n", "007", 7),
        ("list", "['a', True, None]", ["a", True, None]), ("map", "{'a': {'b': (1, 2)}}", {"a": {"b": [1, 2]}}), ("list", "('a',)", ["a"]),
        ("list", "{'a': 1}", "{'a': 1}"), ("list", "[1e999]", "[1e999]"), ("map", "{'a': {1}}", "{'a': {1}}"), ("map", "dict(a=1)", "dict(a=1)"),
        ("n", "None", None), ("list", "null", None), ("list", "[" * 9999, "[" * 9999), ("list", "[b'a']", "[b'a']"),
        ("enum", "5", "5"), ("free", "5", "5"), ("unknown", "5", "5"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["qwen_xml", "glm", "minimax"])
def test_values_have_the_types_of_the_tools_schema(form: str, key: str, text: str, value: object) -> None:
    written = {
        "qwen_xml": f"<tool_call>\n<function=set>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "minimax": f'<minimax:tool_call>\n<invoke name="set">\n<parameter name="{key}">{text}</parameter>\n</invoke>\n</minimax:tool_call>',
        "glm": f"<tool_call>set\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }[form]
    parsed = ANSWER_FORMATS.find(form).value.parsed(f"I set it.\n{written}", [TYPED])
    assert (parsed.content, [(call.name, json.loads(call.arguments)) for call in parsed.calls]) == (
        "I set it.",
        [("set", {key: value})],
    )
    assert parsed.num_unparsed == 0


@pytest.mark.parametrize(
    ("form", "text", "names", "unparsed"),
    [
        ("qwen_xml", "<tool_call>\n<function=now>\n</function>\n</tool_call>", ["now"], 0),
        ("qwen_xml", "<function=now></function><function=set><parameter=text>a</parameter></function>", ["now", "set"], 0),
        ("qwen_xml", "<tool_call>\n<function=set>\n<parameter=text>\na</function></tool_call>", [], 1),
        ("qwen_xml", "<tool_call>\n<function=set>\n<parameter=text>\na", [], 1),
        ("qwen_xml", "<tool_call>\n<function=set>\nstray\n</function></tool_call>", [], 1),
        ("qwen_xml", "<function=set><parameter=text>a</parameter><parameter=text>b</parameter></function>", [], 1),
        ("qwen_xml", "<function=></function>", [], 1), ("qwen_xml", '<tool_call>{"name": "set", "arguments": {}}</tool_call>', [], 1),
        ("qwen_xml", "<tool_call>\n<function=\"now\">\n</function></tool_call><function='set'><parameter=\"text\">a</parameter></function>", ["now", "set"], 0),
        ("qwen_xml", "`<tool_call>` and `<function=set>` are tags.\n<tool_call>\n<function=now>\n</function>\n</tool_call>", ["now"], 2),
        ("qwen_xml", "<tool_call>\n<function=set>\n<parameter=text>\na\n<tool_call>\n<function=now>\n</function>\n</tool_call>", ["now"], 1),
        ("qwen_xml", "<function=set><parameter=text>a <function=now></function> b</parameter></function>", ["set"], 0),
        ("qwen_xml", "<function=set><parameter=text>a <function=now></function> b", [], 1),
        ("hermes", 'Between `<tool_call>` tags: <tool_call>{"name": "now"}</tool_call>', ["now"], 1),
        ("hermes", '<tool_call>{"name": "set", <tool_call>{"name": "now", "arguments": {}}</tool_call>', ["now"], 1),
        ("hermes", '<tool_call>{"name": "set", "arguments": {"text": "<tool_call>{}</tool_call> \\" x"}}</tool_call>', ["set"], 0),
        ("hermes", '<tool_call>{"name": "set", "arguments": {"text": "<tool_call>{', [], 2),
        ("glm", "Between `<tool_call>` tags: <tool_call>now</tool_call>", ["now"], 1),
        ("glm", "<tool_call>set<arg_key>text</arg_key><arg_value>a <tool_call>now</tool_call> b</arg_value></tool_call>", ["set"], 0),
        ("glm", "<tool_call>now</tool_call><tool_call>set<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", ["now", "set"], 0),
        ("glm", "<tool_call>set<arg_key>n</arg_key></tool_call>", [], 1), ("glm", "<tool_call>set\n<arg_key>n</arg_key><arg_value>1", [], 1),
        ("glm", '<tool_call>{"name": "set"}</tool_call>', [], 1), ("glm", "<tool_call></tool_call>", [], 1),
    ],
)  # fmt: skip
def test_calls_in_xml(form: str, text: str, names: list[str], unparsed: int) -> None:
    parsed = ANSWER_FORMATS.find(form).value.parsed(text, [TYPED])
    assert ([call.name for call in parsed.calls], parsed.num_unparsed) == (names, unparsed)
    assert names or parsed.content == text


class TwoParameters(AnswerFormat):
    name = "typed"

    def parse(self, text: str, tools: Sequence[Any] = ()) -> ParsedAnswer:
        return ParsedAnswer(f"{text} {len(tools)}")


def test_a_format_sees_the_tools_if_it_takes_them() -> None:
    assert TwoParameters().parsed("a", [TYPED]).content == "a 1"


async def test_calls_are_read_only_where_tools_were_offered(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"word": "sun"}}</tool_call>'
    agent = Agent(bench(tmp_path, script=[call + END, call + END, "star" + END]))
    plain = await agent.ask()
    assert (plain["content"], plain.get("tool_calls")) == (call, None)
    agent.tools = [LOOK]
    answer = await agent.ask(user("again"))
    await agent.ask(result(answer["tool_calls"][0], "star"))
    assert agent.episode.counts["unparsed_calls"] == 0
