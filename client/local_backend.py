"""A run of this machine: the process of `penstock train --local`, and what it writes into the run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.client import events
from penstock.client.errors import RunFailed
from penstock.client.events import RUN_FILE, Event
from penstock.client.processes import GOING_ON, LocalProcess, State, wait_until
from penstock.client.registered_reward import RegisteredReward
from penstock.client.served_function import ServedFunction
from penstock.console import launch
from penstock.console.report import curves
from penstock.console.tools.runs import is_finished
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.record import run_folder

_LOG = "client.log"
_REWARD_S = 120.0  # until the run's reward service listens, on a busy machine
_VERB_S = 600.0  # of `penstock weights`, which may start the run's servers and read a large model
_POLL_S = 0.05


class LocalBackend:
    """One run of this machine."""

    def __init__(
        self, run_id: str, folder: Path, *, workers: int, reward: ServedFunction | RegisteredReward | None = None
    ) -> None:
        """Describe the run whose run file is in ``folder``; `start` starts it."""
        self.run_id = run_id
        self.folder = folder
        self._workers = workers
        self._reward = reward
        self._lock = threading.Lock()
        self._process: LocalProcess | None = None

    def start(self) -> None:
        """Start all processes, and register the reward once the run's reward service listens.

        Raises RunFailed when the run ends before, PenstockError when it is running already; no process is left then.
        """
        with self._lock:
            if run_folder.is_lock_held(self.folder):
                raise PenstockError(
                    f"run {self.run_id} is running already, in {self.folder}; stop it, or choose another run_id"
                )
            if not (self.folder / RUN_FILE).exists():
                raise ConfigError(
                    f"run {self.run_id} has no {RUN_FILE} in {self.folder}: start it as it was started before"
                )
            self._reward_port.unlink(missing_ok=True)
            run_folder.withdraw_pause(self.folder)
            local = ("--local", "--workers", str(self._workers))
            command = launch.module("penstock", "train", str(self.folder / RUN_FILE), *local)
            self._process = LocalProcess(f"run {self.run_id}", command, self.folder / "logs" / _LOG)
        if self._reward is not None:
            try:
                self._register(self._reward)
            except BaseException:
                self.close()
                raise

    @property
    def state(self) -> State:
        """How the process is; of a run that was not started here, what its folder says."""
        found = self._process.state if self._process is not None else self._state_of_folder()
        is_paused = found in {"running", "finished"} and run_folder.is_pause_requested(self.folder)
        if is_paused and not is_finished(self.folder):
            return "pausing" if found == "running" else "paused"
        return found

    def _state_of_folder(self) -> State:
        if run_folder.is_lock_held(self.folder):
            return "running"
        return "finished" if is_finished(self.folder) or run_folder.is_pause_requested(self.folder) else "stopped"

    @property
    def pid(self) -> int:
        """Process id of what starts and watches the run's services."""
        return 0 if self._process is None else self._process.pid

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the run's processes have exited; returns False when ``timeout_s`` passed first."""
        if self._process is not None:
            return self._process.wait(timeout_s)
        return wait_until(lambda: not run_folder.is_lock_held(self.folder), timeout_s)

    def failure(self) -> RunFailed:
        """Return the error with the last lines of the process."""
        assert self._process is not None, "not started"
        return self._process.failure(f"run {self.run_id}")

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of metrics.jsonl."""
        return curves.rows(self.folder)

    def events(self) -> Iterator[Event | None]:
        """Yield the events from NATS while the run is going on, else those in the folder."""
        if self._is_over():
            return events.recorded(self.folder)
        return events.published(self.run_id, self.folder, self._is_over)

    def pause(self) -> None:
        """Ask the trainer to train what is under way, write a checkpoint and exit; the processes exit then."""
        if self._is_over():
            raise PenstockError(f"run {self.run_id} is {self.state}: only one that is running can be paused")
        run_folder.request_pause(self.folder)

    def resume(self) -> None:
        """Start the processes again; nothing happens while they run. Raises PenstockError while they end."""
        if self.state == "pausing":
            raise PenstockError(f"run {self.run_id} is pausing: wait() until it is paused")
        if self._is_over():
            self.start()

    def stop(self) -> None:
        """Stop the processes in order; raises PenstockError for those that another program has started."""
        if self._process is not None:
            self._process.stop()
        elif run_folder.is_lock_held(self.folder):
            raise PenstockError(f"run {self.run_id} was started by another program: stop it there")

    def versions(self) -> list[dict[str, Any]]:
        """Return what `penstock weights RUN --json` prints."""
        return json.loads(self._verb("weights", self.run_id, "--json"))

    def export(self, version: int | None, to: Path) -> None:
        """Write a version by `penstock weights export`."""
        which = ("--best",) if version is None else ("--version", str(version))
        self._verb("weights", "export", self.run_id, *which, "--to", str(to))

    def close(self) -> None:
        """Stop the run if it was started here and is going on, and what serves its reward."""
        if self._process is not None:
            self._process.stop()
        if self._reward is not None:
            self._reward.close()

    @property
    def _reward_port(self) -> Path:
        return self.folder / "reward.port"  # written by the reward service (deploy/local_run.py)

    def _is_over(self) -> bool:
        return self.state not in GOING_ON

    def _register(self, reward: ServedFunction | RegisteredReward) -> None:
        port = _wait_for(self.reward_port, _REWARD_S, self._is_over)
        if port is None and self.state == "finished":  # it was finished before: there is nothing to score
            return
        if port is None and self._is_over():
            raise self.failure()
        if port is None:
            raise PenstockError(
                f"run {self.run_id}: its reward service did not listen within {_REWARD_S:.0f} s; see {self.folder / 'logs'}"
            )
        reward.register(f"http://127.0.0.1:{port}")

    def reward_port(self) -> int | None:
        """Return the port of the run's reward service once it listens."""
        try:
            return int(self._reward_port.read_text())
        except (OSError, ValueError):
            return None

    def _verb(self, *words: str) -> str:
        """Return what a verb of `penstock` prints about this run; raises PenstockError with what it says."""
        command = launch.module("penstock", *words, f"run.dir={self.folder.parent}")
        return output_of(command, environ=os.environ)


def output_of(command: Sequence[str], *, environ: Mapping[str, str]) -> str:
    """Return the standard output of a command; raises PenstockError with its last line of stderr when it fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_VERB_S,
            check=False,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise PenstockError(f"penstock {command[-1]} did not end within {_VERB_S:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise PenstockError(lines[-1].removeprefix("penstock: ") if lines else f"exit code {done.returncode}")
    return done.stdout


def _wait_for(find: Callable[[], int | None], deadline_s: float, give_up: Callable[[], bool]) -> int | None:
    deadline = time.monotonic() + deadline_s
    while (found := find()) is None and time.monotonic() < deadline and not give_up():
        time.sleep(_POLL_S)
    return found
