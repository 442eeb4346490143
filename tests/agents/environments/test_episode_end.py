"""How an episode ends: each row of the table in docs/environments.md, and that a crash after the last answer is never a reward."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.agents.proxy.agent_model import bench
from tests.agents.proxy.conversation import Agent, user

from penstock.agents.environments.episode_end import Happened, Verdict, end_of
from penstock.agents.environments.program import outcome
from penstock.agents.environments.program_process import Ended
from penstock.agents.proxy.messages import RequestRefused
from penstock.protocol.episode import EndStatus
from penstock.rollout_service.errors import EngineError

LIMITS = ("context", "max_turns", "max_stored_tokens")
_DOCS = Path(__file__).parents[3] / "docs" / "environments.md"


@pytest.mark.parametrize(
    ("happened", "status", "then"),
    [
        ({"failed_by": "engine_error", "exit_status": 1}, "failed", "requeued"),
        ({"failed_by": "engine_timeout", "report": "given"}, "failed", "requeued"),
        ({"failed_by": "engine_error", "over_time": "policy"}, "failed", "requeued"),
        ({"failed_by": "answer_refused", "report": "given"}, "failed", "restarted"),
        ({"over_time": "tools", "report": "given"}, "timeout", "restarted"),
        ({"over_time": "tools", "limit": "max_turns"}, "timeout", "restarted"),
        *[({"limit": one, "exit_status": n, "report": "given"}, "failed", "restarted") for one in ("", *LIMITS) for n in (-9, -11, 137)],
        ({"exit_status": 1, "report": "given"}, "failed", "restarted"),
        ({"verdict": "failed"}, "failed", "restarted"),
        ({"is_answered": False}, "failed", "restarted"),
        ({"is_answered": False, "limit": "context"}, "failed", "restarted"),
        ({"is_answered": False, "over_time": "policy"}, "failed", "restarted"),
        ({"report": "wrong"}, "failed", "restarted"),
        ({"report": "wrong", "limit": "max_turns"}, "failed", "restarted"),
        ({"over_time": "policy"}, "timeout", "trained"),
        ({"over_time": "policy", "limit": "context", "report": "missing"}, "timeout", "trained"),
        *[({"limit": one, "exit_status": n, "report": "missing"}, "truncated", "trained") for one in LIMITS for n in (0, 1, 255)],
        ({"verdict": "truncated"}, "truncated", "trained"),
        ({"report": "missing"}, "failed", "restarted"),
        ({"report": "given"}, "done", "trained"), ({}, "done", "trained"),
    ],
)  # fmt: skip
def test_each_row_of_the_table(happened: dict[str, Any], status: str, then: str) -> None:
    end = end_of(Happened(**happened))
    assert (end.status, end.then) == (status, then)


def test_the_documented_table_says_what_every_combination_becomes() -> None:
    codes = ("", "engine_error", "answer_refused")
    fields = ((True, False), ("", *LIMITS), codes, (None, "policy", "tools"), (0, 1, 137, -9), get_args(Verdict),
              ("given", "missing", "wrong", "not_needed"))  # fmt: skip
    ends = {end_of(Happened(*values)) for values in itertools.product(*fields)}
    assert {end.status for end in ends} == set(get_args(EndStatus)) - {"expired"}  # of records of earlier versions
    table = _DOCS.read_text().partition("## How an episode ends")[2].partition("\n## ")[0]
    for end in ends:
        assert any(f"| `{end.cause}` | `{end.status}` |" in line and end.then in line for line in table.splitlines()), (
            end
        )


EVENTS = st.lists(st.sampled_from(["answered", "too_long", "engine_fails", "invalid"]), max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(EVENTS, st.sampled_from([1, 2, 255, 137, -9, -11]), st.sampled_from([b'{"reward": 1}', None]), st.booleans())
def test_a_crash_after_the_last_answer_is_never_a_reward(
    tmp_path: Path, events: list[str], status: int, result: bytes | None, needs_result: bool
) -> None:
    agent = Agent(bench(tmp_path, context_tokens=200, max_turns=4))
    refused = asyncio.run(play(agent, events))
    made = agent.end()
    last = max((span.turn for row in made.rows for span in row.spans), default=None)
    try:
        played = outcome(
            Ended(status, ""), result, agent.episode, last_turn=last, needs_result=needs_result, seconds=(1, 1)
        )
    except EngineError:
        assert "engine_error" in refused
        return
    rewarded = played.status != "failed"
    assert not (
        rewarded and (status < 0 or status == 137 or refused[-1] not in ("context_length_exceeded", "max_turns"))
    )
    assert rewarded or not played.rewards


TITLE = "Generate a title for this conversation: "


@pytest.mark.parametrize(
    ("requests", "limit", "failed"),
    [
        (["hello", TITLE + "hello " * 300], "", ""),
        (["hello", "hello " * 300], "context", ""),
        (["hello", "hello " * 300, TITLE], "context", ""),
        (["hello", "hello " * 300, "so far: hello"], "", ""),
        (["hello", "fails: " + TITLE], "", ""),
        (["hello", "fails"], "", "engine_error"),
        (["hello", "fails", TITLE], "", "engine_error"),
        (["hello", "fails", "hello " * 300], "context", "engine_error"),
        (["hello", "fails", "again"], "", ""),
        (["fails: " + TITLE], "", "engine_error"),
        (["hello", "more", "even more", TITLE], "", ""),
        (["hello", "more", "even more", "once more"], "max_turns", ""),
    ],
)
async def test_a_side_request_never_decides_the_end(
    tmp_path: Path, requests: list[str], limit: str, failed: str
) -> None:
    agent = Agent(bench(tmp_path, context_tokens=200, max_turns=3))

    async def fail() -> None:
        raise EngineError("the engine is gone")

    for text in requests:
        agent.bench.engine.before = fail if text.startswith("fails") else None
        with contextlib.suppress(RequestRefused):
            await agent.sample([user(text)])
    assert (agent.episode.truncated_by, agent.episode.failed_by) == (limit, failed)


@pytest.mark.parametrize(("fails", "failed"), [(0, ""), (1, "engine_error")])
async def test_a_failure_begun_before_a_later_answer_does_not_count(tmp_path: Path, fails: int, failed: str) -> None:
    agent = Agent(bench(tmp_path))
    order = iter(range(2))

    async def fail() -> None:
        if next(order) == fails:
            while not agent.episode.tree.turns:  # noqa: ASYNC110 the other answer: there is no event of it
                await asyncio.sleep(0.005)
            raise EngineError("the engine is gone")

    agent.bench.engine.before = fail
    sent = (agent.sample([user(text)]) for text in ("left", "right"))
    await asyncio.gather(*sent, return_exceptions=True)
    assert agent.episode.failed_by == failed


async def play(agent: Agent, events: list[str]) -> list[str]:
    """Send requests; return what became of each, without those that change nothing."""

    async def fail() -> None:
        raise EngineError("the engine is gone")

    became = [""]
    for event in events:
        agent.bench.engine.before = fail if event == "engine_fails" else None
        sent = {"too_long": [user("hello " * 300)], "invalid": [{**user("x"), "name": 3}]}.get(event, [user("hello")])
        try:
            await agent.sample(sent)
            became.append("answered")
        except RequestRefused as err:
            became += [err.code] * (err.code != "invalid_request")
    return became


async def test_a_crash_while_a_request_runs_that_was_begun_after_a_refusal_has_failed(tmp_path: Path) -> None:
    agent = Agent(bench(tmp_path, context_tokens=200))
    await play(agent, ["answered", "too_long"])
    assert agent.episode.truncated_by == "context"
    agent.bench.engine.before = asyncio.Event().wait
    running = asyncio.create_task(agent.turn([user("so far: hello")]))
    await asyncio.sleep(0.05)
    agent.end()
    ended = outcome(Ended(1, ""), None, agent.episode, last_turn=0, needs_result=True, seconds=(1, 1))
    assert ended.status == "failed"
    with pytest.raises(RequestRefused):
        await running
