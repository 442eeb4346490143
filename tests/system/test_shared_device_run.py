"""A whole run whose engine and trainer share one device, and have room for one of them: processes are killed in each of their turns."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from penstock.deploy.local_run import TRAINER, LocalRun, worker_name
from tests import forked
from tests.servers import wait_for
from tests.small_run import report_of, steps_of, write_small_run
from tests.system import accounted_device

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
# Whose turn it is, and who is killed in it; make test-more NAME=turns sets PENSTOCK_TEST_TURNS for all of them.
_KILLS = [("engine", "engine"), ("trainer", "trainer")]
if "PENSTOCK_TEST_TURNS" in os.environ:
    _KILLS += [("trainer", "worker"), ("engine", "trainer"), ("engine", "worker")]
_STEPS = 1 + 3 * len(_KILLS)


class _Turns:
    def __init__(self, locks: Path) -> None:
        self._locks = locks

    def holder(self, role: str) -> int | None:
        """Return the process id of the worker or trainer that has the device."""
        for path in self._locks.glob("card.*.json"):
            try:
                record = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if record["role"] == role and Path(f"/proc/{record['pid']}").exists():
                return int(record["pid"])
        return None


def _children(pid: int, word: str) -> list[int]:
    """Return the children of a process whose command line has a word."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children = thread.read_text().split()
            found += [int(child) for child in children if word in Path(f"/proc/{child}/cmdline").read_text()]
    return found


def _kill(turn: str, who: str, turns: _Turns, run: LocalRun) -> None:
    wait_for(lambda: turns.holder(turn), f"a turn of the {turn}", deadline_s=500)
    if who != "engine":
        run.kill({"trainer": TRAINER, "worker": worker_name(0)}[who])
        return
    (worker,) = [child.pid for child in run.processes() if child.name == worker_name(0)]

    def kill() -> bool:
        with contextlib.suppress(ProcessLookupError):
            for pid in (found := _children(worker, "accounted_device")):
                os.kill(pid, signal.SIGKILL)
            return bool(found)
        return False

    wait_for(kill, f"the engine in a turn of the {turn}", deadline_s=200)


def test_never_are_both_on_the_device_whatever_is_killed(tmp_path: Path) -> None:
    """Every step is made once, of groups that are accounted for."""
    locks, account = tmp_path / "locks", tmp_path / "account.json"
    file = write_small_run(
        tmp_path, "card", worker={"engine": f"{accounted_device.__file__}:ACCOUNTED"},
        algorithm={"loss": f"{accounted_device.__file__}:accounted", "advantage": "grpo"},
        placement={"shared": "turns", "devices": ["card"], "lock_dir": str(locks), "turn_deadline_s": 300.0},
        trainer={"steps": _STEPS, "checkpoint_every": 2, "lr": 1e-4},
    )  # fmt: skip
    environ = {**os.environ, accounted_device.VARIABLE: str(account), "OMP_NUM_THREADS": "1"}
    turns = _Turns(locks)
    with forked.children(), LocalRun([str(file)], num_workers=1, environ=environ) as run:
        run.start()
        for turn, who in _KILLS:
            _kill(turn, who, turns, run)
        assert run.wait(900) == 0, run.log_tail(TRAINER)
    accounts = json.loads(account.read_text())
    assert accounts["refused"] == []
    assert steps_of(tmp_path / "runs", "card") == list(range(1, _STEPS + 1))
    totals = json.loads((tmp_path / "runs" / "card" / "trainer.json").read_text())
    assert totals["groups"]["trained"] == 4 * _STEPS
    assert report_of("audit", "card", tmp_path / "runs")["exit_code"] == 0
