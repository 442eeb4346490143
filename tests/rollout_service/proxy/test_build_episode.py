"""The episode that is stored: rows with their turns, what they share, and what was counted."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.fuzz_agents.check import store

from penstock.protocol.episode import MAIN
from tests.rollout_service.proxy.agent_model import bench
from tests.rollout_service.proxy.conversation import LOOK, Agent, result, system, user

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "sun"}}\n</tool_call>' + END


async def test_rows_name_what_they_share_and_turns_are_numbered_once(tmp_path: Path) -> None:
    agent = Agent(bench(tmp_path), system("s"), user("hello"))
    await agent.ask()
    kept = list(agent.messages)
    await agent.ask(user("left"))
    agent.messages = kept
    await agent.ask(user("right"))
    await agent.sample([system("sub"), user("look")])
    await agent.ask(user("on"))
    stored = store(agent.episode, agent.end())
    assert [[turn.number for turn in row.turns] for row in stored.rows] == [[0, 1], [3], [2, 4]]
    assert [row.root for row in stored.rows] == [MAIN, "root:3", MAIN]
    turns = agent.episode.tree.turns
    assert [(row.parent, row.prefix_len) for row in stored.rows] == [(None, 0), (None, 0), (0, turns[0].num_tokens)]
    assert stored.num_sampled_tokens == agent.episode.counts["sampled_tokens"]
    assert [bool(row.trajectory.completion_text) for row in stored.rows] == [True, False, False]


async def test_the_conversation_and_the_counts_are_stored(tmp_path: Path) -> None:
    agent = Agent(bench(tmp_path, script=[CALL, "star" + END]), tools=[LOOK])
    answer = await agent.ask(temperature=0.5)
    await agent.sample(agent.messages[:1])  # never went on from
    await agent.ask(result(answer["tool_calls"][0], "star"))
    stored = store(agent.episode, agent.end())
    messages = json.loads(stored.messages)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == {"word": "sun"}
    counts = dict(stored.counts)
    assert counts["overruled.temperature"] == 1
    assert counts["orphaned_turns.superseded"] == 1
    assert counts["orphaned_tokens.superseded"] == len(agent.episode.tree.turns[1].token_ids)
