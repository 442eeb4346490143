"""An agent for tests: a list of messages and the chat completions API, without HTTP."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.agents.proxy.agent_model import Bench, chosen_by, logprobs_of

from penstock.agents.proxy.api import chat_completions
from penstock.agents.proxy.messages import RetryMark
from penstock.agents.proxy.rows import TreeRows
from penstock.agents.proxy.session import EpisodeSession
from penstock.agents.proxy.tree import SampledTurn

LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look up.", "parameters": {"type": "object", "properties": {}}},
}


class Agent:
    """One episode's agent; ``messages`` may be edited between two requests."""

    def __init__(self, bench: Bench, *messages: dict[str, Any], tools: Sequence[dict[str, Any]] = ()) -> None:
        self.bench = bench
        self.episode: EpisodeSession = bench.begin()
        self.messages: list[dict[str, Any]] = list(messages) or [user("hello")]
        self.tools = list(tools)
        self.replies: list[dict[str, Any]] = []

    async def ask(self, *new: dict[str, Any], mark: RetryMark | None = None, **fields: Any) -> dict[str, Any]:
        """Send the messages; append and return the answer's message."""
        self.messages += new
        reply = await self.sample(self.messages, mark=mark, **fields)
        self.messages.append(copy.deepcopy(reply))
        return self.messages[-1]

    async def sample(
        self, messages: Sequence[dict[str, Any]], mark: RetryMark | None = None, **fields: Any
    ) -> dict[str, Any]:
        turn = await self.turn(messages, mark, **fields)
        turn.delivered = True
        self.replies.append(chat_completions.reply(turn, "policy", 0, "chatcmpl-0"))
        return self.replies[-1]["choices"][0]["message"]

    async def turn(
        self, messages: Sequence[dict[str, Any]], mark: RetryMark | None = None, **fields: Any
    ) -> SampledTurn:
        body = json.loads(json.dumps({"model": "policy", "messages": list(messages), "tools": self.tools, **fields}))
        return await self.episode.answer(chat_completions.read_request(body, 1.0), mark or RetryMark(b""))

    def end(self) -> TreeRows:
        """End the episode; its rows are checked against what the engine returned."""
        made = self.bench.proxy.end(self.episode)
        check_rows(self.episode, made)
        return made

    def forks(self) -> dict[str, int]:
        return {
            name.removeprefix("forks."): count
            for name, count in self.episode.counts.items()
            if name.startswith("forks.")
        }


def check_rows(episode: EpisodeSession, made: TreeRows) -> None:
    """Check what holds for the rows of every episode: only sampled tokens are trained, each once, under its own context."""
    seen: dict[int, int] = {}
    for row in made.rows:
        ids = row.trajectory.token_ids.tolist()
        for span in row.spans:
            turn = episode.tree.turns[span.turn]
            offset = span.start - turn.prompt_tokens
            assert ids[span.start : span.end] == turn.token_ids[offset : offset + span.end - span.start].tolist()
            if span.is_trained:
                assert row.trajectory.loss_mask[span.start : span.end].all()
                expected = logprobs_of(ids[: span.start], ids[span.start : span.end])
                assert np.allclose(row.trajectory.behaviour_logprobs[span.start : span.end], expected, atol=1e-5)
                assert seen.get(span.turn, 0) == offset
                seen[span.turn] = offset + span.end - span.start
        assert np.count_nonzero(row.trajectory.loss_mask) == sum(s.end - s.start for s in row.spans if s.is_trained)
        assert not row.trajectory.behaviour_logprobs[~row.trajectory.loss_mask].any()
        assert sum(run.end - run.start for run in row.trajectory.version_runs) == np.count_nonzero(
            row.trajectory.loss_mask
        )
        assert row.trajectory.loss_mask.any()
        if (
            row.trajectory.experts is not None
        ):  # each token has those of the request that computed it first: its own, where it is trained
            chain, number = episode.tree.turns[row.spans[-1].turn].chain(), len(ids) - 1
            firsts = [next(turn.number for turn in chain if turn.num_tokens - 1 > at) for at in range(number)]
            choices = {turn: chosen_by(row.trajectory.experts.shape, turn, number).ids for turn in set(firsts)}
            assert np.array_equal(row.trajectory.experts.ids, [choices[turn][at] for at, turn in enumerate(firsts)])
    orphaned = (made.orphaned_tokens + episode.orphaned_tokens).total()
    assert sum(seen.values()) == made.num_trained
    assert made.num_trained + orphaned == episode.counts["sampled_tokens"]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def result(call: dict[str, Any], content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": content}
