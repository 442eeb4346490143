"""The proxy over HTTP: requests of the three APIs, what is refused, and what a client that is gone leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.agents.proxy.agent_model import Bench, bench
from tests.agents.proxy.conversation import LOOK, check_rows
from tests.rigs.fuzz_agents.wire import message_of

from penstock.agents.proxy import server
from penstock.agents.proxy.api import chat_completions
from penstock.agents.proxy.server import serving
from penstock.agents.proxy.session import EpisodeSession, path
from penstock.rollout_service.errors import EngineUnreachable

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "sun"}}\n</tool_call>' + END
THOUGHT_AND_CALL = "<think>\nhm\n</think>\n\nI look.\n" + CALL
ASK = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@contextlib.asynccontextmanager
async def served(one: Bench) -> AsyncIterator[tuple[httpx.AsyncClient, EpisodeSession]]:
    episode = one.begin()
    async with serving(one.proxy) as url, httpx.AsyncClient(base_url=url + path(episode), trust_env=False) as client:
        yield client, episode


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_an_agent_written_with_the_openai_package(folder: Path) -> None:
    """Unchanged, with two of its APIs, streamed too: what it samples in each conversation is one row."""
    import openai  # two CPU seconds

    one = bench(folder, script=[CALL, "star" + END, CALL, "moon" + END])
    async with served(one) as (http, episode):
        client = openai.AsyncOpenAI(base_url=str(http.base_url), api_key="any", max_retries=0)
        messages: list[Any] = list(ASK["messages"])
        tools: Any = [LOOK]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        assert first.choices[0].message.tool_calls
        call: Any = first.choices[0].message.tool_calls[0]
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "star"}]
        text = ""
        options: Any = {"include_usage": True}
        stream: Any = await client.chat.completions.create(
            model="policy", messages=messages, tools=tools, stream=True, stream_options=options
        )
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            else:
                assert chunk.usage.completion_tokens == len(episode.tree.turns[1].token_ids)
        assert text == "star"
        assert (await client.models.list()).data[0].id == "policy"

        tool: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
        answer = await client.responses.create(model="policy", input="hello", tools=[tool])
        made: Any = answer.output[0]
        assert (made.type, json.loads(made.arguments)) == ("function_call", {"word": "sun"})
        output = {"type": "function_call_output", "call_id": made.call_id, "output": "moon"}
        items: Any = [{"role": "user", "content": "hello"}, made, output]
        async with client.responses.stream(model="policy", input=items, tools=[tool]) as responses:
            last: Any = await responses.get_final_response()
        assert last.output_text == "moon"

        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="policy", messages=messages, n=2)
        assert refused.value.code == "unsupported"
        await client.close()
        rows = one.proxy.end(episode)
    check_rows(episode, rows)
    assert [len(row.spans) for row in rows.rows] == [2, 2]
    assert rows.num_trained == episode.counts["sampled_tokens"]


async def test_36_a_stream_is_the_answer_that_is_not_streamed(folder: Path) -> None:
    seen: list[Any] = []
    for stream in (False, True):
        async with served(bench(folder, "qwen3", script=[THOUGHT_AND_CALL])) as (client, episode):
            body = {**ASK, "tools": [LOOK], "stream": stream, "stream_options": {"include_usage": True}}
            reply = await client.post("chat/completions", json=body)
            assert reply.status_code == 200
            message = message_of("chat", reply.content)
            calls = [call["function"] for call in message["tool_calls"]]
            last = events(reply.text)[-2:] if stream else [reply.json()] * 2
            (turn,) = episode.tree.turns
            finish, usage = last[0]["choices"][0]["finish_reason"], last[1]["usage"]
            assert (message["reasoning_content"], message["content"], finish) == ("hm", "I look.", "tool_calls")
            assert [json.loads(call["arguments"]) for call in calls] == [{"word": "sun"}]
            assert (usage["prompt_tokens"], usage["total_tokens"]) == (turn.prompt_tokens, turn.num_tokens)
            assert turn.delivered
            seen.append((calls, usage, turn.token_ids.tolist()))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    assert seen[0] == seen[1]


async def test_36_an_error_before_the_first_byte_of_a_stream_keeps_its_status(folder: Path) -> None:
    one = bench(folder)

    async def fail() -> None:
        raise EngineUnreachable("no engine")

    one.engine.before = fail
    async with served(one) as (client, _):
        reply = await client.post("chat/completions", json={**ASK, "stream": True})
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "engine_error"


async def test_36_a_slow_stream_is_kept_open_and_tells_an_error(folder: Path) -> None:
    one = bench(folder, stream_wait_s=0.0, stream_comment_s=0.01)
    calls = 0

    async def slow() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.05)
        if calls == 2:
            raise EngineUnreachable("no engine")

    one.engine.before = slow
    async with served(one) as (client, episode):
        good, bad = [(await client.post("chat/completions", json={**ASK, "stream": True})) for _ in range(2)]
        assert good.status_code == bad.status_code == 200
        assert good.text.startswith(": sampling\n\n")
        assert good.text.endswith("[DONE]\n\n")
        assert events(bad.text)[-1]["error"]["code"] == "engine_error"
        assert [turn.delivered for turn in episode.tree.turns] == [True]


async def test_35_a_client_that_is_gone_ends_the_generation(folder: Path) -> None:
    one = bench(folder, retry_grace_s=0.0)
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    one.engine.before = wait
    async with served(one) as (client, episode):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("chat/completions", json=ASK, timeout=0.1)
        await asyncio.wait_for(cancelled.wait(), 60)
        assert episode.tree.turns == []


async def test_35_an_answer_whose_client_is_gone_is_not_trained_unless_a_retry_fetches_it(folder: Path) -> None:
    one = bench(folder)
    go_on, sampled = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        await go_on.wait()
        asyncio.get_running_loop().call_later(0.05, sampled.set)

    one.engine.before = wait
    async with served(one) as (client, episode):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("chat/completions", json=ASK, timeout=0.1)
        go_on.set()
        await asyncio.wait_for(sampled.wait(), 60)
        assert not episode.tree.turns[0].delivered
        again = await client.post("chat/completions", json=ASK, headers={"x-stainless-retry-count": "1"})
        assert again.status_code == 200
        assert [turn.delivered for turn in episode.tree.turns] == [True]


async def test_58_a_connection_stays_open_while_a_tool_runs() -> None:
    from penstock.serving import web_server  # the limit is uvicorn's own 5 s otherwise

    assert web_server.LONG_IDLE_S >= 600


MALFORMED: list[tuple[dict[str, Any], int, str]] = [
    ({"content": b"{"}, 400, "invalid_json"),
    ({"content": b"[1]"}, 400, "invalid_json"),
    ({"content": b"\xff{}"}, 400, "invalid_json"),
    ({"content": b"[" * 100_000}, 400, "invalid_json"),
    ({"json": {}}, 400, "invalid_request"),
    ({"json": {"messages": "hello"}}, 400, "invalid_request"),
    ({"json": {"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}}, 400, "invalid_request"),
    ({"json": {"messages": [{"role": "wizard", "content": "x"}]}}, 400, "invalid_request"),
    ({"json": {"messages": [{"role": "user", "content": 5}]}}, 400, "invalid_request"),
    ({"json": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}}, 400, "image_refused"),
    ({"json": {"messages": [{"role": "tool", "content": "x"}]}}, 400, "invalid_request"),
    ({"json": {**ASK, "max_tokens": 0}}, 400, "invalid_request"),
    ({"json": {**ASK, "stop": [""]}}, 400, "invalid_request"),
    ({"json": {**ASK, "tools": [{"type": "web_search"}]}}, 400, "unsupported"),
    ({"json": {**ASK, "logprobs": True}}, 400, "unsupported"),
    *(({"json": {**ASK, "stream": value}}, 400, "invalid_request") for value in ("true", 1)),
    *(
        ({"json": {"messages": [{"role": "assistant", key: {"id": "x"}}, *ASK["messages"]]}}, 400, "unsupported")
        for key in ("function_call", "audio")
    ),
    ({"content": b'{"messages": [{"role": "user", "content": "\\ud800"}]}'}, 400, "template_refused"),
    ({"content": b'{"messages": "' + b"x" * 200_000 + b'"}'}, 413, "request_too_large"),
]


async def test_malformed_requests_are_refused_and_sample_nothing(folder: Path) -> None:
    one = bench(folder, max_body_bytes=150_000)
    async with served(one) as (client, episode):
        for send, status, code in MALFORMED:
            reply = await client.post("chat/completions", **send)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), send
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert episode.tree.turns == []


async def test_a_failure_of_the_proxy_itself_counts_until_a_later_request_is_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room for a body beside the others, or an error behind the answer: what the agent reports then is no reward."""
    monkeypatch.setattr(server, "_MAX_BODIES", 1)
    one, go_on = bench(folder, max_body_bytes=2000), asyncio.Event()
    async with served(one) as (client, episode):
        long = {"messages": [{"role": "user", "content": "x" * 1500}]}
        one.engine.before = go_on.wait
        first = asyncio.create_task(client.post("chat/completions", json=long))
        while not one.engine.prompts:  # noqa: ASYNC110 the first body is held
            await asyncio.sleep(0.01)
        crowded = await client.post("chat/completions", json=long)
        assert (crowded.status_code, episode.failed_by) == (503, "server_busy")
        go_on.set()
        assert ((await first).status_code, episode.failed_by) == (200, "server_busy")  # it was begun before
        with monkeypatch.context() as patched:
            patched.setattr(chat_completions, "reply", lambda *_: 1 / 0)
            assert (await client.post("chat/completions", json=ASK)).status_code == 500
        assert episode.failed_by == "internal_error"
        assert ((await client.post("chat/completions", json=ASK)).status_code, episode.failed_by) == (200, "")


async def test_46_a_late_request_and_a_wrong_secret_are_refused(folder: Path) -> None:
    one = bench(folder)
    async with served(one) as (client, episode):
        one.proxy.end(episode)
        late = await client.post("chat/completions", json=ASK)
        assert (late.status_code, late.json()["error"]["code"]) == (404, "episode_ended")
        wrong = await client.post(str(client.base_url).replace(episode.secret, "guess") + "chat/completions", json=ASK)
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
        assert (await client.get("/nothing")).status_code == 404


async def test_the_tasks_sampling_overrules_the_clients_and_the_difference_is_counted(folder: Path) -> None:
    one = bench(folder)
    async with served(one) as (client, episode):
        body = {**ASK, "temperature": 0.2, "top_p": 0.9, "seed": 1, "presence_penalty": 0, "max_tokens": 3}
        body |= {"chat_template_kwargs": {"enable_thinking": False}, "min_tokens": 2, "ignore_eos": False}
        assert (await client.post("chat/completions", json=body)).status_code == 200
        overruled = {name.partition("overruled.")[2] for name in episode.counts}
        assert overruled == {"", "temperature", "top_p", "seed", "chat_template_kwargs", "min_tokens"}
        assert len(episode.tree.turns[0].token_ids) <= 3


async def test_responses_translate_items_to_one_conversation(folder: Path) -> None:
    one = bench(folder, "qwen3", script=[THOUGHT_AND_CALL, "star" + END])
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    async with served(one) as (client, episode):
        items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
        body = {"model": "m", "instructions": "be brief", "tools": [tool]}
        first = (await client.post("responses", json={**body, "input": items})).json()
        assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
        assert first["status"] == "completed"
        call_id = first["output"][2]["call_id"]
        items += [*first["output"], {"type": "function_call_output", "call_id": call_id, "output": "star"}]
        streamed = await client.post("responses", json={**body, "input": items, "stream": True})
        told = events(streamed.text)
        assert [one["sequence_number"] for one in told] == list(range(len(told)))
        assert told[-1]["response"]["output"][0]["content"][0]["text"] == "star"
        assert [len(row.spans) for row in one.proxy.end(episode).rows] == [2]


async def test_responses_refuse_what_has_no_counterpart(folder: Path) -> None:
    fields: list[dict[str, Any]] = [
        {"previous_response_id": "resp_1"}, {"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]},
        {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
    ]  # fmt: skip
    async with served(bench(folder)) as (client, _):
        for field in fields:
            reply = await client.post("responses", json={"input": "hello", **field})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported"), field


async def test_messages_translate_blocks_to_one_conversation(folder: Path) -> None:
    one = bench(folder, "qwen3", script=[THOUGHT_AND_CALL, "star" + END])
    tool = {"name": "look", "description": "Look up.", "input_schema": {"type": "object"}}
    async with served(one) as (client, episode):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
        body = {"model": "m", "max_tokens": 64, "system": [{"type": "text", "text": "be brief"}], "tools": [tool]}
        first = (await client.post("messages", json={**body, "messages": messages})).json()
        assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
        assert (first["stop_reason"], first["content"][2]["input"]) == ("tool_use", {"word": "sun"})
        result = {"type": "tool_result", "tool_use_id": first["content"][2]["id"], "content": "star"}
        messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        streamed = await client.post("messages", json={**body, "messages": messages, "stream": True})
        told = events(streamed.text)
        assert [one["type"] for one in told][:2] == ["message_start", "content_block_start"]
        assert told[-2]["delta"]["stop_reason"] == "end_turn"
        assert [len(row.spans) for row in one.proxy.end(episode).rows] == [2]
        refused = await client.post("messages", json={**body, "messages": []})
        assert refused.json()["type"] == "error"
