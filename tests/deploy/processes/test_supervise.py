"""Exits of services are detected, recorded and followed by a restart within bounds."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers import wait_for

from penstock.deploy.processes.child import Child, full_disk
from penstock.deploy.processes.supervise import RestartRule, Supervisor, stop_all

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
QUICK = RestartRule(first_delay_s=0.01, max_delay_s=0.02, max_crashes=3)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    watching = Supervisor(rule=QUICK)
    yield watching
    watching.close()
    stop_all(list(watching.processes().values()))


def kinds(supervisor: Supervisor, name: str) -> list[str]:
    return [event.kind for event in supervisor.events if event.name == name]


def test_a_killed_child_is_restarted(supervisor: Supervisor, tmp_path: Path) -> None:
    """SIGKILL is detected immediately and recorded; another process is started."""
    child = Child("worker", SLEEP, log=tmp_path / "log")
    child.start()
    supervisor.watch(child, child.relaunch)
    first = child.pid
    child.crash()
    assert supervisor.wait_for(lambda: kinds(supervisor, "worker") == ["started", "crashed", "restarted"], 60.0)
    assert child.alive
    assert child.pid != first
    assert [e.detail for e in supervisor.events if e.kind == "crashed"] == ["SIGKILL"]


def test_a_child_without_restart_is_only_recorded(supervisor: Supervisor, tmp_path: Path) -> None:
    child = Child("once", [sys.executable, "-c", "raise SystemExit(5)"], log=tmp_path / "log")
    child.start()
    supervisor.watch(child)
    assert supervisor.wait_for(lambda: kinds(supervisor, "once") == ["started", "exited"], 60.0)
    assert supervisor.events[-1].detail == "exit code 5"
    assert supervisor.failure is None


def test_only_exit_codes_of_crashes_cause_a_restart(supervisor: Supervisor, tmp_path: Path) -> None:
    stop_file = tmp_path / "end"
    code = f"import os, time\nwhile not os.path.exists({str(stop_file)!r}): time.sleep(0.01)\nraise SystemExit(2)"
    child = Child("leader", [sys.executable, "-c", code], log=tmp_path / "log")
    child.start()
    supervisor.watch(child, child.relaunch, is_crash=lambda code: code < 0)
    child.crash()
    assert supervisor.wait_for(lambda: kinds(supervisor, "leader") == ["started", "crashed", "restarted"], 60.0)
    stop_file.touch()
    assert supervisor.wait_for(lambda: kinds(supervisor, "leader")[3:] == ["exited"], 60.0)
    assert supervisor.events[-1].detail == "exit code 2"
    words = [event.as_incident for event in supervisor.events]
    assert words == ["", "leader exited (SIGKILL); restarting it", f"leader was restarted (pid {child.pid})", ""]


def test_a_child_that_keeps_exiting_is_given_up_with_the_end_of_its_log(supervisor: Supervisor, tmp_path: Path) -> None:
    """After too many crashes in a row there is an error with the log, and no further start."""
    child = Child("faulty", [sys.executable, "-c", "print('no such model'); raise SystemExit(1)"], log=tmp_path / "log")
    child.start()
    supervisor.watch(child, child.relaunch)
    assert supervisor.wait_for(lambda: supervisor.failure is not None, 60.0)
    assert "faulty exited 4 times and is not restarted any more; it ended with exit code 1" in str(supervisor.failure)
    assert "no such model" in str(supervisor.failure)
    assert kinds(supervisor, "faulty") == ["started", "crashed", *["restarted", "crashed"] * 3, "gave_up"]


def test_a_crash_names_what_the_process_wrote_last(supervisor: Supervisor, tmp_path: Path) -> None:
    """The line for people has the last line of the log that is not a log entry; a signal has none."""
    code = "print('no room for version 3'); print('{\"event\": \"stopped\"}'); raise SystemExit(1)"
    child = Child("worker", [sys.executable, "-c", code], log=tmp_path / "log")
    child.start()
    supervisor.watch(child, lambda: Child("worker", SLEEP, log=tmp_path / "log").relaunch())
    assert supervisor.wait_for(lambda: kinds(supervisor, "worker") == ["started", "crashed", "restarted"], 60.0)
    supervisor.child("worker").crash()
    assert supervisor.wait_for(lambda: kinds(supervisor, "worker").count("crashed") == 2, 60.0)
    crashes = [event.as_incident for event in supervisor.events if event.kind == "crashed"]
    assert crashes == [
        "worker exited (exit code 1: no room for version 3); restarting it", "worker exited (SIGKILL); restarting it"
    ]  # fmt: skip


ENDS = {
    "raise SystemExit(0)": (False, ""),
    "print('[rank1]: RuntimeError: [pair.cc:547] Connection closed by peer [::1]:9'); raise SystemExit(2)": (
        True,
        "[rank1]",
    ),
    "print('(exitcode: -9) local_rank: 1 (pid: 7)\\n' + 80 * '='); raise SystemExit(1)": (
        True,
        "a process was killed: SIGKILL",
    ),
    "print('CUDA out of memory'); raise SystemExit(2)": (False, "CUDA out of memory"),
    "print('no such setting'); raise SystemExit(2)": (False, "no such setting"),
    "import os; os.abort()": (True, ""),
}


@pytest.mark.parametrize(("code", "expected"), ENDS.items())
def test_what_may_continue_is_what_a_signal_or_another_rank_ended(
    tmp_path: Path, code: str, expected: tuple[bool, str]
) -> None:
    child = Child("trainer", [sys.executable, "-c", code], log=tmp_path / "log")
    child.start()
    child.wait(60.0)
    may_continue, reason = expected
    assert child.may_continue is may_continue
    assert child.reason().startswith(reason)
    assert bool(child.reason()) is bool(reason)


def test_a_process_that_the_kernel_killed_for_memory_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel's own count, since nothing is written to a log; a SIGKILL without it has no reason."""
    child = Child("trainer", SLEEP, log=tmp_path / "log")
    child.start()
    child.kill()
    assert (child.may_continue, child.reason()) == (True, "")
    monkeypatch.setattr("penstock.deploy.processes.child._oom_kills", lambda: child._oom_kills + 1)
    assert child.reason() == "a process was killed: SIGKILL by the kernel if memory ran out, SIGABRT by NCCL's watchdog"


def test_a_full_disk_is_named_with_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logs cannot say it, because they cannot be written either."""
    child = Child("worker", [sys.executable, "-c", "raise SystemExit(1)"], log=tmp_path / "log")
    child.start()
    child.wait(60.0)
    assert child.reason() == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    expected = f"the disk of {tmp_path} is full (1.0 MB free): free disk space"
    assert child.reason() == full_disk(tmp_path) == expected
    assert expected in str(child.failure("failed"))


def test_a_worker_that_keeps_exiting_ends_the_run_only_without_the_others(tmp_path: Path) -> None:
    """While a replica is alive it is restarted after a pause; when that one keeps exiting too, the supervisor fails."""
    supervisor = Supervisor(rule=RestartRule(first_delay_s=0.01, max_delay_s=0.02, max_crashes=1, window_s=0.3))
    others = ("faulty", "steady")
    faulty = Child("faulty", [sys.executable, "-S", "-c", "raise SystemExit(1)"], log=tmp_path / "log")
    steady = Child("steady", SLEEP, log=tmp_path / "log")
    try:
        steady.start()
        supervisor.watch(
            steady, lambda: Child("steady", faulty.command, log=tmp_path / "log").relaunch(), replicas=others
        )
        faulty.start()
        supervisor.watch(faulty, faulty.relaunch, replicas=others)
        assert supervisor.wait_for(lambda: kinds(supervisor, "faulty").count("delayed") == 2, 60.0)
        assert supervisor.failure is None
        delayed = next(event for event in supervisor.events if event.kind == "delayed")
        assert delayed.as_incident == "faulty keeps exiting; the run continues without it, it is restarted in 0 s"
        steady.crash()
        assert supervisor.wait_for(lambda: supervisor.failure is not None, 60.0)
        assert "is not restarted any more" in str(supervisor.failure)
    finally:
        supervisor.close()
        stop_all([*supervisor.processes().values(), steady])


def test_a_closed_supervisor_restarts_nothing(tmp_path: Path) -> None:
    supervisor = Supervisor(rule=QUICK)
    child = Child("worker", SLEEP, log=tmp_path / "log")
    child.start()
    supervisor.watch(child, child.relaunch)
    supervisor.close()
    supervisor.close()
    child.kill()
    assert not child.alive
    assert kinds(supervisor, "worker") == ["started"]


@pytest.mark.parametrize("has_listener", [True, False])
def test_a_crash_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], has_listener: bool) -> None:
    told: list[str] = []
    supervisor = Supervisor(
        rule=QUICK, on_event=(lambda event: told.append(event.as_incident)) if has_listener else None
    )
    child = Child("worker", [sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "log")
    child.start()
    supervisor.watch(child, child.relaunch)
    child.crash()
    wait_for(lambda: kinds(supervisor, "worker")[-1] == "restarted", "the restart")
    supervisor.close()
    supervisor.child("worker").kill()
    logged = "worker exited (SIGKILL" in "".join(capsys.readouterr())
    assert (logged, [text for text in told if "exited (SIGKILL" in text] != []) == (not has_listener, has_listener)


@given(st.lists(st.floats(0, 1000)), st.floats(0, 1000))
def test_pauses_grow_to_their_bound_and_end(crashes: list[float], now: float) -> None:
    """A pause is between the first and the longest one; beyond the allowed crashes there is none."""
    rule = RestartRule()
    recent = [at for at in crashes if now - at <= rule.window_s]
    delay = rule.delay_s(crashes, now)
    if len(recent) > rule.max_crashes:
        assert delay is None
    else:
        assert delay is not None
        assert rule.first_delay_s <= delay <= rule.max_delay_s
        more = rule.delay_s([*crashes, now], now)
        assert more is None or more >= delay
