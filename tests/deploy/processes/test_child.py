"""A child process is stopped when its parent exits, however the parent exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import wait_for

from penstock.deploy.processes.child import Child, DeployError, describe_exit, end_orphans

SLEEP = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"]


def started(name: str, command: list[str], log: Path) -> Child:
    child = Child(name, command, log=log)
    child.start()
    wait_for(lambda: "ready" in child.log_tail(), "the child to run")
    return child


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
        timeout=300,
    )


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Child]:
    child = started("sleeper", SLEEP, tmp_path / "log")
    yield child
    child.kill()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_the_tail_of_a_log_is_of_the_last_process(tmp_path: Path) -> None:
    """What an earlier session or process wrote to the same file explains nothing."""
    log = tmp_path / "log"
    log.write_text("an error of yesterday\n")
    child = Child("short", [sys.executable, "-c", "print('today')"], log=log)
    child.start()
    assert child.wait(60.0) == 0
    assert child.log_tail() == "    today"


def test_a_stopped_child_has_exited(sleeper: Child) -> None:
    sleeper.stop()
    assert not sleeper.alive
    assert sleeper.returncode == -signal.SIGTERM
    assert is_gone(sleeper.pid)


def test_a_child_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    """A process that ignores SIGTERM gets SIGKILL after the grace period."""
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP[2]}"
    child = started("deaf", [sys.executable, "-c", deaf], tmp_path / "log")
    child.stop(grace_s=0.1)
    assert child.returncode == -signal.SIGKILL


def test_a_killed_child_is_killed_with_its_descendants(tmp_path: Path) -> None:
    code = f"import subprocess, time; p = subprocess.Popen({SLEEP!r}); print('pid', p.pid, flush=True); time.sleep(600)"
    child = started("parent", [sys.executable, "-c", code], tmp_path / "log")
    grandchild = int(child.log.read_text().split("pid ")[1].split()[0])
    child.kill()
    wait_for(lambda: is_gone(grandchild), "the grandchild's end")


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_a_child_ends_when_its_parent_ends(tmp_path: Path, end: str) -> None:
    """However the parent exits, SIGKILL included, and whichever thread started it, the child is stopped too."""
    code = f"""
        import os, sys, threading
        from pathlib import Path
        from penstock.deploy.processes.child import Child, wait_until
        child = Child("c", {SLEEP!r}, log=Path({str(tmp_path / "log")!r}))
        starter = threading.Thread(target=child.start)
        starter.start()
        starter.join()
        assert wait_until(lambda: "ready" in child.log_tail(), 20)
        assert child.alive, "it must outlive the thread that started it"
        print(child.pid, flush=True)
        {end}
    """
    pid = int(run_python(code).stdout)
    wait_for(lambda: is_gone(pid), "the child's end")


def test_orphans_in_sessions_of_their_own_are_adopted_and_ended(tmp_path: Path) -> None:
    """An orphan of a killed child in another session is adopted and killed, and its CPU time is counted."""
    code = f"""
        import resource, sys
        def cpu_s():
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            return used.ru_utime + used.ru_stime
        from pathlib import Path
        from penstock.deploy.processes.child import Child, adopt_orphans, end_orphans, wait_until
        adopt_orphans()
        busy = "import time\\nwhile time.process_time() < 0.3: pass\\nprint('ready', flush=True); time.sleep(600)"
        start = f"subprocess.Popen([sys.executable, '-c', {{busy!r}}], start_new_session=True)"
        parent = f"import subprocess, sys, time; {{start}}; time.sleep(600)"
        child = Child("c", [sys.executable, "-c", parent], log=Path({str(tmp_path / "log")!r}))
        child.start()
        assert wait_until(lambda: "ready" in child.log_tail(), 30)
        child.kill()
        before = cpu_s()
        assert end_orphans() == 1
        assert cpu_s() - before >= 0.29
        assert end_orphans() == 0
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_processes_that_other_code_started_are_no_orphans(sleeper: Child) -> None:
    other = subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL)
    try:
        assert end_orphans() == 0
        assert other.poll() is None
        assert sleeper.alive
    finally:
        other.kill()
        other.wait()


def test_a_failure_shows_exit_and_log(tmp_path: Path) -> None:
    child = Child("talker", [sys.executable, "-c", "print('last words'); raise SystemExit(3)"], log=tmp_path / "log")
    child.start()
    assert child.wait(60.0) == 3
    assert "talker gave up; it ended with exit code 3" in str(child.failure("gave up"))
    assert "    last words" in str(child.failure("gave up"))


def test_a_child_cannot_be_started_twice(sleeper: Child) -> None:
    """Starting a running child is refused with its process id."""
    with pytest.raises(DeployError, match=f"sleeper is already running .pid {sleeper.pid}"):
        sleeper.start()


def test_a_wait_has_a_deadline(sleeper: Child) -> None:
    """Waiting for a child that does not exit raises an error that names it."""
    with pytest.raises(DeployError, match=r"sleeper .* did not exit within 0 s"):
        sleeper.wait(0.05)


def test_exit_codes_are_described_in_words() -> None:
    assert [describe_exit(code) for code in (0, 3, -9, -15)] == ["exit code 0", "exit code 3", "SIGKILL", "SIGTERM"]


def test_ctrl_c_does_not_reach_the_child(sleeper: Child) -> None:
    """The child has a separate session, so a terminal's signals reach only the parent."""
    assert os.getsid(sleeper.pid) == sleeper.pid != os.getsid(0)


def test_a_child_that_waits_begins_when_it_is_told(tmp_path: Path) -> None:
    child = Child("waits", [sys.executable, "-c", "print(repr(input()))"], log=tmp_path / "log", waits=True)
    child.start()
    assert child.begin()
    assert child.wait(60.0) == 0
    assert child.log_tail().strip() == "''"
    assert not child.begin()
