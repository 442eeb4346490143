"""A run or a training of this machine: its process, and what it writes into the run's folder.

The process of a run is `penstock train --local`, that of a training on given answers `penstock sft` or `dpo`.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.client import events
from penstock.client.events import Event
from penstock.client.processes import GOING_ON, POLL_S, LocalProcess, RunFailed, State
from penstock.client.rewards import RegisteredReward, ServedFunction
from penstock.console import connections, launch
from penstock.console.report import curves
from penstock.console.tools.runs import is_finished
from penstock.deploy.processes.child import wait_until
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.record import run_folder

_LOG = "client.log"
_REWARD_S = 120.0  # until the run's reward service listens, on a busy machine
_VERB_S = 600.0  # of `penstock weights`, which may start the run's servers and read a large model


class LocalBackend:
    def __init__(
        self, run_id: str, folder: Path, *, workers: int | None, reward: ServedFunction | RegisteredReward | None = None
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
            if not (run_file := connections.run_file_of(self.folder)):
                raise ConfigError(
                    f"run {self.run_id} has no {connections.RUN_FILE} in {self.folder}: start it as it was started before"
                )
            self._reward_port.unlink(missing_ok=True)
            run_folder.withdraw_pause(self.folder)
            number = () if self._workers is None else ("--workers", str(self._workers))
            command = launch.module("penstock", "train", *run_file, "--local", *number)
            self._process = LocalProcess(f"run {self.run_id}", command, self.folder / "logs" / _LOG)
        if self._reward is not None:
            try:
                self._register(self._reward)
            except BaseException:
                self.close()
                raise

    @property
    def state(self) -> State:
        run_state = self._process.state if self._process is not None else self._state_of_folder()
        is_paused = run_state in {"running", "finished"} and run_folder.is_pause_requested(self.folder)
        if is_paused and not is_finished(self.folder):
            return "pausing" if run_state == "running" else "paused"
        return run_state

    def _state_of_folder(self) -> State:
        if run_folder.is_lock_held(self.folder):
            return "running"
        return "finished" if is_finished(self.folder) or run_folder.is_pause_requested(self.folder) else "stopped"

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def wait(self, timeout_s: float | None) -> bool:
        if self._process is not None:
            return self._process.wait(timeout_s)
        return wait_until(lambda: not run_folder.is_lock_held(self.folder), timeout_s, POLL_S)

    def failure(self) -> RunFailed:
        assert self._process is not None, "not started"
        return self._process.failure(f"run {self.run_id}")

    def rows(self) -> Iterator[Mapping[str, Any]]:
        return curves.rows(self.folder)

    def events(self) -> Iterator[Event | None]:
        """Yield the events from NATS while the run is going on, else those in the folder."""
        if self._is_over():
            return events.recorded(self.rows())
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
        return json.loads(self._verb("weights", self.run_id, "--json"))

    def export(self, version: int | None, to: Path) -> None:
        which = ("--best",) if version is None else ("--version", str(version))
        self._verb("weights", "export", self.run_id, *which, "--to", str(to))

    def close(self) -> None:
        if self._process is not None:
            self._process.stop()
        if self._reward is not None:
            self._reward.close()

    @property
    def _reward_port(self) -> Path:
        return self.folder / launch.REWARD_PORT_FILE

    def _is_over(self) -> bool:
        return self.state not in GOING_ON

    def _register(self, reward: ServedFunction | RegisteredReward) -> None:
        wait_until(lambda: self.reward_port() is not None or self._is_over(), _REWARD_S, POLL_S)
        port = self.reward_port()
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
        try:
            return int(self._reward_port.read_text())
        except (OSError, ValueError):
            return None

    def _verb(self, *words: str) -> str:
        """Return the standard output of a verb; raises PenstockError with its last line of stderr when it fails."""
        command = launch.module("penstock", *words, f"run.dir={self.folder.parent}")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_VERB_S, check=False, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise PenstockError(f"penstock {command[-1]} did not end within {_VERB_S:.0f} s") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise PenstockError(lines[-1].removeprefix("penstock: ") if lines else f"exit code {done.returncode}")
        return done.stdout


class LocalTraining:
    """One training of this machine; it ends with this Python process."""

    def __init__(self, verb: str, folder: Path, output: Path, process: LocalProcess) -> None:
        self.run_id = folder.name
        self.folder = folder
        self.output = output
        self._verb = verb
        self._process = process

    @property
    def state(self) -> State:
        return self._process.state

    def wait(self, timeout_s: float | None) -> bool:
        return self._process.wait(timeout_s)

    def failure(self) -> RunFailed:
        return self._process.failure(f"{self._verb} {self.run_id}")

    def rows(self) -> Iterator[Mapping[str, Any]]:
        return curves.rows(curves.training_folder(self.folder, self._verb))

    def stop(self) -> None:
        self._process.stop()

    def close(self) -> None:
        self.stop()
