"""The episode that is stored: rows with their turns, what they share, and what was counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.agents.proxy.agent_model import bench
from tests.agents.proxy.conversation import LOOK, Agent, result, system, user
from tests.rigs.fuzz_agents.model import store

from penstock.agents.proxy.messages import AgentRequest, Message
from penstock.protocol.episode import MAIN
from penstock.protocol.groups import RouterShape
from penstock.rollout_service.errors import ReplyRefused

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


@pytest.mark.parametrize("template", ["qwen25", "glm", "qwen3", "repeats"])
async def test_every_token_has_the_experts_of_the_request_that_brought_it(tmp_path: Path, template: str) -> None:
    """In rows that fork, go back, begin anew or lose a stop token: where rows share tokens they share their experts."""
    shape = RouterShape(num_layers=2, num_experts=300, top_k=3)
    agent = Agent(bench(tmp_path, template, routers=shape, seed=1), user("hello"))
    agent.bench.engine.other_ends = 0.5
    await agent.ask()
    kept = list(agent.messages)
    for text in ("left", "further"):
        await agent.ask(user(text))
    agent.messages = kept
    await agent.ask(user("right"))
    await agent.sample([user("a summary")])
    stored = store(agent.episode, agent.end())  # whose rows `check_rows` compares with what the engine said
    for row in stored.rows:
        assert row.trajectory.experts is not None
        assert len(row.trajectory.experts.ids) == len(row.trajectory.token_ids) - 1
        if row.parent is not None:
            theirs = stored.rows[row.parent].trajectory.experts
            assert theirs is not None
            shared = row.prefix_len - 1
            assert np.array_equal(row.trajectory.experts.ids[:shared], theirs.ids[:shared])
    assert len(stored.rows) > 1


async def test_experts_of_another_sequence_are_refused(tmp_path: Path) -> None:
    """An engine that names too few or too many for the prompt that it was given."""
    agent = Agent(bench(tmp_path, routers=RouterShape(num_layers=1, num_experts=8, top_k=2)), user("hello"))
    turn = await agent.turn(agent.messages)
    assert turn.experts is not None
    tree, plan = agent.episode.tree, await agent.episode._plan(AgentRequest((Message("user", "other"),)))
    ((answer,),) = await agent.bench.engine.generate([plan.prompt_ids.tolist()], agent.bench.sampling, 1)
    assert answer.experts is not None
    short = replace(answer, experts=replace(answer.experts, ids=answer.experts.ids[:-1]))
    with pytest.raises(
        ReplyRefused, match=r"experts of \d+ tokens for an answer that ends with token \d+ of its conversation"
    ):
        tree.commit(plan, short, turn.answer)


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
