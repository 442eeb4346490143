"""Which text of an episode is scored: the main conversation's last answer, whatever an agent asks beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.agents.proxy.agent_model import bench
from tests.agents.proxy.conversation import LOOK, Agent, system, user
from tests.rigs.fuzz_agents.model import store

from penstock.agents.proxy.api import chat_completions
from penstock.agents.proxy.messages import RetryMark
from penstock.agents.proxy.server import _conversation

END = "<|im_end|>"
TASK = "Sort the digits 3 2 1."
AGENT = "You are a coding agent."
TITLE = "You are a title generator. You output ONLY a thread title. Nothing else."
BEHIND = (
    "[SUGGESTION MODE: Suggest what the user might naturally type next into the agent.] Reply with ONLY the suggestion",
    "Analyze *only* your preceding response. Determine who should logically speak next: the 'user' or the 'model'",
    "Summarize the conversation so far for memory.",
    "Summarize this thread",
    "What is a good title for this chat?",
    "Look at our session and give it a title",
    "Reply with a title of 3-7 words for the conversation",
    "The user stepped away and is coming back. Recap in under 40 words, 1-2 plain sentences, no markdown.",
    "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM that will resume the task.",
    "Please analyze the conversation history to determine whether the conversation is stuck in a repetitive, non-productive state.",
)
OBSERVED = (
    "1 failed: the session title is None",
    "x.py:\n    message = title",
    "Add a title to each conversation of the page",
    "Give me a summary of my order history",
    "<output>title == chat.title</output>",
)
SUMMARY = "This session is being continued from a previous conversation. The conversation is summarized below: 1"
TOOLS = {"tools": [LOOK]}
NONE: dict[str, Any] = {}
GIVEN = "Find where the digits come from"


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "given", "content": text}


Request = tuple[
    list[Any], dict[str, Any]
]  # messages, a number is the answer of that request; tools, and what is declared


@pytest.mark.parametrize(
    ("requests", "scored"),
    [
        ([([TASK], NONE), (["title: " + TASK], NONE)], 0),
        ([([TASK], NONE), (["Summarise this conversation: sort"], NONE)], 0),
        ([([TASK], NONE), (["What is the topic of: sort"], NONE)], 0),
        ([([TASK], NONE), (["Come up with a succinct name for this chat: sort"], NONE)], 0),
        ([([TASK], NONE), (["Reply with one emoji for this chat"], NONE)], 0),
        ([([TASK], NONE), (["Is this answer safe? Reply yes or no: 1 2 3"], NONE)], 0),
        ([([TASK], NONE), (["Does the text above violate our policy? 1 2 3"], NONE)], 0),
        ([([TASK], NONE), ([system("Provide a concise description of this session in 4 words or less."), "sort"], NONE)], 0),
        ([([TASK], NONE), (["Generate a short git branch name for this task: sort"], NONE)], 0),
        ([([TASK], NONE), (["Read the following conversation. Then select the next role from [a, b] to play."], NONE)], 0),
        ([([TASK], NONE), ([system("You are a Memory Writing Agent."), "user: sort"], NONE)], 0),
        ([([system(AGENT), TASK], TOOLS), ([system("Your task is to process Bash commands"), "Command: ls"], NONE)], 0),
        *(([([TASK], tools), ([TASK, 0, aside], tools)], 0) for tools in (TOOLS, NONE) for aside in BEHIND),
        ([([TASK], TOOLS), ([TASK, 0, BEHIND[1]], NONE)], 0),
        # an observation, or a user's next wish, in which such words stand
        *(([([TASK], tools), ([TASK, 0, text], tools)], 1) for tools in (TOOLS, NONE) for text in OBSERVED),
        ([([BEHIND[2]], NONE), ([BEHIND[2], 0, BEHIND[2]], NONE)], 1),
        # every prompt is built anew
        *(([([f"{TASK} Step {n}"], fields) for n in range(3)], 2) for fields in (NONE, TOOLS)),
        ([([system(f"Step {n} of 3"), f"Observation {n}"], NONE) for n in range(3)], 2),
        ([([system(f"Time {n}"), f"Observation {n}"], TOOLS) for n in range(3)], 2),
        ([([f"Question: what is the title of the chat? Thought {n}"], NONE) for n in range(3)], 2),
        ([(["Make a plan for: sort"], NONE), (["Carry out the plan: answer 0"], NONE)], 1),
        ([([system("Pick math or code."), TASK], NONE), ([system("You do math."), TASK], NONE)], 1),
        ([(["Summarize part 1"], NONE), (["Summarize part 2"], NONE), (["Combine: answer 0, answer 1"], NONE)], 2),
        ([(["Think about the review"], NONE), (["Which label fits the review? answer 0"], NONE)], 1),
        ([([system("Plan."), "plan?"], NONE), ([system("Plan."), "plan?", 0, "ok?"], NONE), ([system(AGENT), "do answer 1"], TOOLS)], 2),
        # a summary of a history, and what goes on from it
        *(([([*first, TASK], tools), ([*first, TASK, 0, ask], tools), ([*then, text], tools)], 2)
          for tools in (TOOLS, NONE) for ask in ("Summarize the conversation so far", BEHIND[4])
          for first, then in (([], []), ([system("Time 1")], [system("Time 2")]), ([system(AGENT)], [system(AGENT)]))
          for text in ("Summary: answer 1. Go on.", SUMMARY)),
        *(([([system(AGENT), TASK], tools), ([system("You summarize conversations."), f"{TASK} answer 0"], NONE), ([system(AGENT), "Summary: answer 1. Go on."], tools)], 2)
          for tools in (TOOLS, NONE)),
        ([([system(TITLE), TASK], NONE), ([system(AGENT), TASK], NONE)], 1),
        ([([system(TITLE), TASK], NONE), ([system(AGENT), TASK], TOOLS), ([system(TITLE), "sort"], NONE)], 1),
        ([(["quota"], NONE), ([system(AGENT), TASK], TOOLS), ([system(AGENT), TASK, 1, "more"], TOOLS), (["names of files?"], NONE)], 2),
        ([([system(AGENT), TASK], NONE), ([system(AGENT), f"Generate a concise title for: {TASK}"], NONE)], 0),
        ([([TASK], TOOLS), ([TASK, 0, "Generate a concise title for this conversation, without a full stop"], NONE)], 0),
        ([([TASK], NONE), ([TASK, 0, "Write a short title for this chat"], NONE)], 0),
        ([([TASK], NONE), ([TASK, 0, "and again"], NONE), (["title: sort"], NONE), ([TASK, 0, "and again", 1, "go on"], NONE)], 3),
        # what carries the main conversation on
        ([([system(AGENT), TASK], TOOLS), ([system(AGENT), SUMMARY], TOOLS)], 1),
        ([([system(AGENT), TASK], NONE), ([system(AGENT), SUMMARY], NONE)], 1),
        ([([TASK], TOOLS), ([TASK, 0, "Give the final answer."], NONE)], 1),
        ([([system("time 1"), TASK], NONE), ([system("time 2"), TASK, 0, "more"], NONE)], 1),
        ([([TASK], NONE), ([TASK, {"role": "assistant", "content": "edited"}, "more"], NONE)], 1),
        ([(["Write a title for this poem."], NONE), (["title: poem"], NONE)], 0),
        # a sub-agent, whose answer the main conversation reads or not
        ([([system(AGENT), TASK], TOOLS), ([system("You search."), "look"], TOOLS), ([system("You search."), "look", 1, "on"], TOOLS), ([system(AGENT), TASK, 0, "more"], TOOLS)], 3),
        # a sub-agent that comes last: a call gave it its task
        ([([system(AGENT), TASK], TOOLS), ([system("You search."), GIVEN], TOOLS)], 0),
        ([([system(AGENT), TASK], TOOLS), ([system("You search."), GIVEN], TOOLS), ([system("You search."), GIVEN, 1, "on"], TOOLS)], 0),
        ([([system(AGENT), TASK], TOOLS), ([system("You search."), "<reminder/>" + GIVEN], NONE)], 0),
        ([([system(AGENT), TASK], TOOLS), ([system("You search."), GIVEN], TOOLS), ([system(AGENT), TASK, 0, tool("found")], TOOLS)], 2),
        ([([system(AGENT), TASK], TOOLS), ([system(AGENT), TASK, 0, tool("started")], TOOLS), ([system("You search."), GIVEN], TOOLS)], 1),
        ([([system(AGENT), TASK], TOOLS), ([system("You search."), "another text"], TOOLS)], 1),
        ([([system(AGENT), TASK], TOOLS), ([system(AGENT), "Before: " + GIVEN], TOOLS)], 1),
        ([([system(AGENT), TASK], TOOLS), ([system("You do math."), TASK, 0, tool("handed over")], TOOLS)], 1),
        # declared
        ([([TASK], NONE), (["the one that counts"], {"declared": "main"}), ([TASK, 0, "more"], NONE)], 1),
        ([([TASK], {"declared": "side"}), (["other"], NONE)], 1),
        ([([TASK], NONE), ([TASK, 0, "aside"], {"declared": "side"})], 0),
        ([([TASK], NONE), ([TASK, 0, "aside"], {"declared": "side"}), ([TASK, 0, "aside", 1, "more"], NONE)], 2),
        ([([TASK], {"declared": "side"}), (["other"], {"declared": "side"})], 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("trained", ["all", "main"])
async def test_the_last_answer_of_the_main_conversation_is_scored(
    tmp_path: Path, requests: list[Request], scored: int, trained: str
) -> None:
    gives = "\n<tool_call>" + json.dumps({"name": "look", "arguments": {"task": GIVEN}}) + "</tool_call>"
    calls = GIVEN in str(requests)
    script = [f"answer {n}{gives * (calls and not n)}{END}" for n in range(len(requests))]
    agent = Agent(bench(tmp_path, script=script, trained_conversations=trained))
    for messages, fields in requests:
        sent = [user(one) if isinstance(one, str) else agent.replies[one]["choices"][0]["message"] if isinstance(one, int) else one
                for one in messages]  # fmt: skip
        body = {"messages": sent, "tools": fields.get("tools", [])}
        request = replace(chat_completions.read_request(body, 1.0), conversation=fields.get("declared", ""))
        turn = await agent.episode.answer(request, RetryMark(b""))
        turn.delivered = True
        agent.replies.append(chat_completions.reply(turn, "policy", 0, "x"))
    made = agent.end()
    episode = store(agent.episode, made)
    assert episode.rows[0].trajectory.completion_text.startswith(f"answer {scored}")
    messages = json.loads(episode.messages)
    assert messages[-1]["content"] == f"answer {scored}"
    assert len(messages) == len(requests[scored][0]) + 1
    assert dict(episode.counts).get("last_answer_not_scored", 0) == (made.last != scored)
    is_declared = any("declared" in fields for _, fields in requests)
    assert (
        is_declared
        or trained == "all"
        or dict(episode.counts).get("recognised_side_requests", 0) == made.orphaned_turns["side_request"]
    )
    left_out = made.orphaned_turns["side_request"]
    assert len(episode.turns) + left_out == len(requests)
    assert (left_out == 0) if trained == "all" else (made.last == scored)


async def test_a_conversation_is_declared_by_a_header() -> None:
    assert _conversation([(b"x-penstock-conversation", b"side")]) == "side"
    with pytest.raises(Exception, match="expected main or side"):
        _conversation([(b"x-penstock-conversation", b"other")])
