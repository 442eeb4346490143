"""How an episode ends: each row of the table in docs/environments.md, and that a crash after the last answer is never a reward."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.agents.proxy.agent_model import bench
from tests.agents.proxy.conversation import Agent, user

from penstock.agents.environments.episode_end import Happened, Spender, Verdict, end_of, spender_of
from penstock.agents.environments.program import outcome
from penstock.agents.environments.program_process import Ended
from penstock.agents.proxy.calls import Clock, Pace, Spent
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
        ({"over_time": "engine", "report": "given"}, "failed", "requeued"),
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
    fields: tuple[tuple[Any, ...], ...] = (
        (True, False), ("", *LIMITS), codes, (None, *get_args(Spender)), (0, 1, 137, -9), get_args(Verdict),
        ("given", "missing", "wrong", "not_needed"),
    )  # fmt: skip
    ends = {end_of(Happened(*values)) for values in itertools.product(*fields)}
    assert {end.status for end in ends} == set(get_args(EndStatus)) - {"expired"}  # of records of earlier versions
    table = _DOCS.read_text().partition("## How an episode ends")[2].partition("\n## ")[0]
    for end in ends:
        assert any(f"| `{end.cause}` | `{end.status}` |" in line and end.then in line for line in table.splitlines()), (
            end
        )


# Seconds of a deadline of 100: A answered at the usual pace of 100 tokens in 10 s, L late by far, F failed, W waits for
# at most 100 tokens when it passes, T the program alone.
_DEADLINES = {
    "trained": (
        "A90T10 A95W5 A50T40W10 A40T50W10 A80F10A10 A60W40 A90L10 A50T20A20W10 A50T5A20T5A20 A85T15 F10A90 T45A55 T50A50 "
        "A10T5A10T5A10T5A10T5A10T5A10W15 F5A40F5A40W10 A30T15A30T15A10 A20T15A20F15A30 A99T1 A81T19"
    ),
    "restarted": (
        "A60T40 A30T60W10 T100 A10T90 A10F10T80 A10L30T60 A70T30 A75T25 A5T95 T60A40 A30T45F15A10 A25T25A25T25 "
        "A1T1A1T97 A79T21 A60F19T21 A10T5A10T5A10T5A10T5A10T30"
    ),
    "requeued": (
        "A40F50A10 A70F20A10 A10W90 A40W60 A20L70A10 A30L50A20 A30F40T30 A20T20L60 A20T20F60 F90A10 F30A70 A20L60A20 "
        "F10A20F10A60 L50A50 A40L60 A45T10L45 T40A30F30 A30T40F20A10 A40W60 A25F25A25F25 A20T15A20L45 L100 W100 "
        "A20T15A20F20A25 F100 A1T1A1T1A1W95 A55T25F20 A60F21T19"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("sequence", "then"), [(one, then) for then, texts in _DEADLINES.items() for one in texts.split()]
)
def test_a_deadline_is_the_policys_where_nothing_else_lost_the_time(sequence: str, then: str) -> None:
    now, pace = [0.0], Pace()
    for _ in range(99):
        pace.measure(100, 10.0)
    clock = Clock(pace, lambda: now[0])
    for number, (event, seconds) in enumerate(re.findall(r"([A-Z])([0-9]+)", sequence)):
        if event != "T":
            clock.begin(number, 100)
        now[0] += int(seconds)
        if event in "ALF":
            tokens = 100 if event == "L" else int(seconds) * 10
            clock.end(number, None if event == "F" else tokens, has_failed=event == "F")
    assert end_of(Happened(over_time=spender_of(clock.spent(), now[0]))).then == then


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
            Ended(status, ""),
            result,
            agent.episode,
            last_turn=last,
            needs_result=needs_result,
            spent=Spent(),
            total_s=1.0,
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


@pytest.mark.parametrize("is_cancelled", [True, False])
@pytest.mark.parametrize(
    ("text", "waited_s", "answered", "failed"),
    [("more", 90, False, "engine_timeout"), ("more", 9, False, ""), ("more", 90, True, ""), (TITLE, 90, False, "")],
)
async def test_a_request_that_is_given_up_has_failed_if_the_engine_stalled(
    tmp_path: Path, text: str, waited_s: float, answered: bool, failed: str, is_cancelled: bool
) -> None:
    agent, now, pace = Agent(bench(tmp_path, retry_grace_s=0)), [0.0], Pace()
    for _ in range(9):
        pace.measure(64, 3.0)
    agent.episode.clock = Clock(pace, lambda: now[0])
    await agent.sample([user("hello")])
    agent.bench.engine.before = asyncio.Event().wait
    running = asyncio.create_task(agent.turn([user(text)]))
    await asyncio.sleep(0.05)
    now[0] += waited_s
    agent.bench.engine.before = None
    if is_cancelled:
        running.cancel()
        await asyncio.sleep(0.05)
    if answered:
        await agent.sample([user("again")])
    agent.end()
    await asyncio.gather(running, return_exceptions=True)
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
    ended = outcome(Ended(1, ""), None, agent.episode, last_turn=0, needs_result=True, spent=Spent(), total_s=1.0)
    assert ended.status == "failed"
    with pytest.raises(RequestRefused):
        await running
