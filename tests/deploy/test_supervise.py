"""Deaths are noticed, written down, and mended within bounds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers import wait_for

from penstock.deploy.child import Child
from penstock.deploy.supervise import RestartRule, Supervisor, stop_all

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
QUICK = RestartRule(first_delay_s=0.01, max_delay_s=0.02, max_deaths=3)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    watching = Supervisor(rule=QUICK)
    yield watching
    watching.close()
    stop_all(list(watching.processes().values()))


def kinds(supervisor: Supervisor, name: str) -> list[str]:
    return [event.kind for event in supervisor.events if event.name == name]


def test_a_killed_child_is_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    """SIGKILL is noticed at once and written down; another process takes the place."""
    child = Child("worker", SLEEP, log=tmp_path / "log")
    child.start()
    supervisor.watch(child, child.relaunch)
    first = child.pid
    child.crash()
    assert supervisor.wait_for(lambda: kinds(supervisor, "worker") == ["started", "died", "restarted"], 20.0)
    assert child.alive
    assert child.pid != first
    assert [e.detail for e in supervisor.events if e.kind == "died"] == ["SIGKILL"]


def test_an_end_that_is_an_end_is_only_noted(supervisor: Supervisor, tmp_path: Path) -> None:
    """A child without a way back is not started again."""
    child = Child("once", [sys.executable, "-c", "raise SystemExit(5)"], log=tmp_path / "log")
    child.start()
    supervisor.watch(child)
    assert supervisor.wait_for(lambda: kinds(supervisor, "once") == ["started", "ended"], 20.0)
    assert supervisor.events[-1].detail == "exit code 5"
    assert supervisor.failure is None


def test_only_the_ends_that_count_as_deaths_are_mended(supervisor: Supervisor, tmp_path: Path) -> None:
    """Killed, the child is started again; when it then ends by itself, that is its end, and no incident."""
    told_to_end = tmp_path / "end"
    code = f"import os, time\nwhile not os.path.exists({str(told_to_end)!r}): time.sleep(0.01)\nraise SystemExit(2)"
    child = Child("leader", [sys.executable, "-c", code], log=tmp_path / "log")
    child.start()
    supervisor.watch(child, child.relaunch, is_death=lambda code: code < 0)
    child.crash()
    assert supervisor.wait_for(lambda: kinds(supervisor, "leader") == ["started", "died", "restarted"], 20.0)
    told_to_end.touch()
    assert supervisor.wait_for(lambda: kinds(supervisor, "leader")[3:] == ["ended"], 20.0)
    assert supervisor.events[-1].detail == "exit code 2"
    words = [event.as_incident for event in supervisor.events]
    assert words == ["", "leader died (SIGKILL); it is started again", f"leader is started again (pid {child.pid})", ""]


def test_a_child_that_cannot_live_is_given_up_with_its_last_words(supervisor: Supervisor, tmp_path: Path) -> None:
    """After too many deaths in a row there is an error with the log, and no further start."""
    child = Child("faulty", [sys.executable, "-c", "print('no such model'); raise SystemExit(1)"], log=tmp_path / "log")
    child.start()
    supervisor.watch(child, child.relaunch)
    assert supervisor.wait_for(lambda: supervisor.failure is not None, 20.0)
    assert "faulty died 4 times, now given up; it ended with exit code 1" in str(supervisor.failure)
    assert "no such model" in str(supervisor.failure)
    assert kinds(supervisor, "faulty") == ["started", "died", *["restarted", "died"] * 3, "gave_up"]


def test_a_closed_supervisor_restarts_nothing(tmp_path: Path) -> None:
    """After closing, a death is nobody's business."""
    supervisor = Supervisor(rule=QUICK)
    child = Child("worker", SLEEP, log=tmp_path / "log")
    child.start()
    supervisor.watch(child, child.relaunch)
    supervisor.close()
    supervisor.close()
    child.kill()
    assert not child.alive
    assert kinds(supervisor, "worker") == ["started"]


def test_events_are_told_as_they_happen(tmp_path: Path) -> None:
    """Every event reaches the listener."""
    told: list[str] = []
    supervisor = Supervisor(rule=QUICK, on_event=lambda event: told.append(event.kind))
    child = Child("once", [sys.executable, "-c", "pass"], log=tmp_path / "log")
    child.start()
    supervisor.watch(child)
    wait_for(lambda: told == ["started", "ended"], "both events")
    supervisor.close()


@given(st.lists(st.floats(0, 1000)), st.floats(0, 1000))
def test_pauses_grow_to_their_bound_and_end(deaths: list[float], now: float) -> None:
    """A pause lies between the first and the longest one; beyond the allowed deaths there is none."""
    rule = RestartRule()
    recent = [at for at in deaths if now - at <= rule.window_s]
    delay = rule.delay_s(deaths, now)
    if len(recent) > rule.max_deaths:
        assert delay is None
    else:
        assert delay is not None
        assert rule.first_delay_s <= delay <= rule.max_delay_s
        more = rule.delay_s([*deaths, now], now)
        assert more is None or more >= delay
