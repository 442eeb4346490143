"""A run of several sessions: its totals are those of all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.console.record import recorded_run as recorded

from penstock.console.live import run_snapshot
from penstock.console.live.panel import PlainLines
from penstock.console.live.run_view import RunView
from penstock.protocol import heartbeats
from penstock.protocol.facts import Heartbeat

START = recorded.START


def worker(at: float, tokens: int, *, cpu_s: float | None = None, **more: Any) -> Heartbeat:
    cpu_s = 1.0 + tokens / 1e4 if cpu_s is None else cpu_s
    busy_s = max(at - START, 0.0)
    return recorded.beat("rollout", "w0", at, busy_s=busy_s, idle_s=0.0, cpu_s=cpu_s, tokens_generated=tokens, **more)


@pytest.fixture
def first(tmp_path: Path) -> RunView:
    """The first session of a run, whose totals are kept."""
    view = RunView(recorded.RUN)
    view.fold_heartbeats([worker(START - 5, 0)], START - 5)  # no event tells of the start of the services
    view.fold_event(recorded.event("state", START, text="starting", total_steps=20))
    for number in range(1, 11):
        view.fold_heartbeats([worker(START + number, 1100 * number)], START + number)
        view.fold_event(recorded.step(number, START + number))
    view.note(START + 9, "killed w0 on purpose")
    run_snapshot.save_totals(tmp_path, view.totals())
    return view


def continued(totals: run_snapshot.WatchedTotals) -> RunView:
    view = RunView(recorded.RUN)
    view.restore(totals)
    return view


def resumed(folder: Path) -> RunView:
    """A view in a new process: the stream's events come again, the heartbeats are those of new processes."""
    totals = run_snapshot.load_totals(folder)
    view = RunView(recorded.RUN) if totals is None else continued(totals)
    view.fold_heartbeats([], START + 1000)
    starts = [recorded.event("state", at, text="starting", total_steps=20) for at in (START, START + 1000)]
    steps = [recorded.step(number, START + number) for number in range(1, 11)]
    recorded.folded(starts[0], *steps, starts[1], into=view)
    for number in range(11, 21):
        at = START + 990 + number
        view.fold_heartbeats([worker(at, 1100 * (number - 10), cpu_s=0.1 * number)], at)
        view.fold_event(recorded.step(number, at))
    return view


def test_totals_are_those_of_all_sessions(first: RunView, tmp_path: Path):
    """Tokens and CPU seconds of the session before a resume are added; the pause between them is not counted."""
    summary = resumed(tmp_path).summary()
    assert summary.steps == 20
    assert summary.tokens_trained == 20_000
    assert summary.tokens_generated == 11_000 + 11_000
    assert summary.cpu_s == pytest.approx(1.0 + 1.1 + 2.0)
    assert summary.wall_s == 5.0 + 10.0 + 10.0
    assert summary.workers == {}
    assert "killed w0 on purpose" in " ".join(summary.incidents)
    assert not any("back" in text or "lost" in text or "no step" in text for text in summary.incidents)


def test_the_clock_of_what_happened_leaves_pauses_out(first: RunView, tmp_path: Path):
    """An incident after a resume has the time of the run that panel and report show, in a third session too."""
    second = resumed(tmp_path)
    second.note(START + 1003, "killed w0 again")
    assert second.snapshot(START + 1004).elapsed_at(START + 1003) == pytest.approx(18.0)
    assert second.snapshot(START + 1004).elapsed_at(START + 500) == pytest.approx(15.0)
    run_snapshot.save_totals(tmp_path, second.totals())
    assert [text for text in resumed(tmp_path).summary().incidents if "again" in text] == ["0:18 killed w0 again"]


def test_a_session_is_not_blamed_for_the_steps_before_it(tmp_path: Path):
    steps = (recorded.step(number, START + number, reward_mean=0.0, reward_std=0.0) for number in range(1, 11))
    view = recorded.folded(recorded.evaluation(0, 0.5, START), *steps)
    view.fold_heartbeats([worker(START + 10, 11_000)], START + 10)
    assert view.snapshot(START + 10).diagnoses
    run_snapshot.save_totals(tmp_path, view.totals())
    later, lines = resumed(tmp_path), list[str]()
    recorded.folded(recorded.evaluation(0, 0.5, START), recorded.evaluation(20, 0.75, START + 1010), into=later)
    snapshot = later.snapshot(START + 1012)
    assert snapshot.diagnoses == ()
    PlainLines(lines.append, every=10, since=START + 500).show(snapshot)
    assert [line for line in lines if "held-out" in line] == ["0:20 held-out accuracy 0.750 after step 20"]


def test_a_third_session_adds_to_both_before(first: RunView, tmp_path: Path):
    """The sums of every session before are kept, not only those of the last one."""
    third = continued(resumed(tmp_path).totals())
    third.fold_heartbeats([worker(START + 3000, 500, cpu_s=0.5)], START + 3000)
    summary = third.summary()
    assert summary.tokens_generated == 11_000 + 11_000 + 500
    assert summary.cpu_s == pytest.approx(2.1 + 2.0 + 0.5)


def test_a_service_of_an_earlier_session_continues_or_is_not_shown(first: RunView):
    """One that kept running goes on with its own totals; one that is not started again has no line in the panel."""
    view = continued(first.totals())
    view.fold_heartbeats([], START + 60)
    assert view.snapshot(START + 60).services == ()
    assert view.summary().tokens_generated == 11_000
    view = continued(first.totals())
    view.fold_heartbeats([worker(START + 60, 15_000)], START + 60)
    view.fold_event(recorded.step(11, START + 60))
    assert view.summary().tokens_generated == 15_000


def test_a_session_that_nobody_watched_generated_at_least_what_was_trained(tmp_path: Path):
    """Without the totals of the first session the sum is not below the tokens that were trained."""
    summary = resumed(tmp_path).summary()
    assert summary.tokens_generated == summary.tokens_trained == 20_000


def test_steps_that_left_the_stream_are_read_from_the_metrics(tmp_path: Path):
    """Without its events a finished run has the steps, groups and evaluations of metrics.jsonl, not zeros."""
    recorded.write_metrics(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    view = RunView(recorded.RUN)
    view.add_recorded(rows)
    whole = recorded.whole_run().summary()
    found = view.summary()
    assert (found.steps, found.tokens_trained, found.groups.trained) == (60, 60_000, 2880)
    assert (found.accuracy_before, found.accuracy_after, found.staleness_tokens) == (0.55, 0.95, whole.staleness_tokens)
    partly = recorded.folded(*(recorded.step(number, START + number / 2) for number in range(50, 61)))
    partly.add_recorded(rows)
    assert partly.summary().tokens_trained == 60_000
    assert [point.number for point in partly.points()] == list(range(1, 61))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"until": "x"}', '{"until": 1, "services": [1]}'])
def test_totals_that_cannot_be_read_are_left_out(tmp_path: Path, text: str):
    """A damaged file of totals ends nothing."""
    (tmp_path / run_snapshot.TOTALS_FILE).write_text(text)
    assert run_snapshot.load_totals(tmp_path) is None


def test_a_worker_that_was_stopped_is_not_lost():
    view = RunView(recorded.RUN)
    view.fold_heartbeats([worker(START, 2100)], START)
    view.fold_event(recorded.step(1, START + 1))
    view.fold_heartbeats([worker(START + 2, 2300, state=heartbeats.EXITED)], START + 2)
    (line,) = view.snapshot(START + 30).services
    assert (line.alive, line.has_exited) == (False, True)
    view.fold_heartbeats([], START + 30)
    assert [i.text for i in view.incidents] == ["rollout w0 was stopped"]
    assert view.summary().tokens_generated == 2300
    view.fold_heartbeats([worker(START + 40, 1)], START + 40)
    (line,) = view.snapshot(START + 40).services
    assert (line.alive, line.has_exited, line.num_starts) == (True, False, 2)
