"""The package `openai`, unchanged, as the agent's client: what it samples through the proxy is one row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.agents.proxy.agent_model import bench
from tests.agents.proxy.conversation import LOOK, check_rows

from penstock.agents.proxy.server import serving
from penstock.agents.proxy.session import path

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "sun"}}\n</tool_call>' + END


async def test_an_agent_written_with_the_openai_package(tmp_path: Path) -> None:
    import openai  # two CPU seconds

    one = bench(tmp_path, script=[CALL, "star" + END, CALL, "moon" + END])
    episode = one.begin()
    async with (
        serving(one.proxy) as url,
        openai.AsyncOpenAI(base_url=url + path(episode), api_key="any", max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "hello"}]
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
        items: Any = [
            {"role": "user", "content": "hello"},
            made,
            {"type": "function_call_output", "call_id": made.call_id, "output": "moon"},
        ]
        async with client.responses.stream(model="policy", input=items, tools=[tool]) as responses:
            last: Any = await responses.get_final_response()
        assert last.output_text == "moon"

        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="policy", messages=messages, n=2)
        assert refused.value.code == "unsupported"
    rows = one.proxy.end(episode)
    check_rows(episode, rows)
    assert [len(row.spans) for row in rows.rows] == [2, 2]
    assert rows.num_trained == episode.counts["sampled_tokens"]
