"""The processes beside a run: the console that serves its live page, and one for each tracker that its metrics are written to.

Nothing of a run waits for them, and whatever happens to them ends nothing else. The console is stopped with the run; `penstock
console` shows the run's folder afterwards. A tracker that fails is started again, and what it had not written when the run
ended is written by `penstock track RUN`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.console import launch
from penstock.console.tracking import trackers
from penstock.console.tracking.consumer import read_marker
from penstock.deploy.processes.child import Child, wait_until
from penstock.deploy.processes.supervise import RestartRule, Supervisor, stop_all
from penstock.protocol.errors import ConfigError

_LIBRARY = "uvicorn"  # of the extra `console`
_PAGE_START_S = 3.0  # until the link is there; the run is not held up for longer
_PAGE_STOP_S = 3.0
_TRACKER_RULE = RestartRule(first_delay_s=1.0, max_delay_s=30.0, max_crashes=20, window_s=600.0)
_READ_S = 5.0  # from the trainer's end until they have read the last events
_TRACKERS_STOP_S = 5.0


class PageProcess:
    """The console of one run's folder of runs; none when it is not wanted. Use it as a context manager, which stops it."""

    def __init__(self, run_folder: Path, *, is_wanted: bool | None, as_json: bool) -> None:
        """Start nothing yet.

        Args:
            run_folder: Folder of the run, ``runs/<id>``.
            is_wanted: None: where stdout is a terminal and the extra `console` is installed.
            as_json: A program reads stdout; then the page is served only when it is wanted.

        Raises:
            ConfigError: It is wanted, and the extra `console` is not installed.
        """
        is_installed = importlib.util.find_spec(_LIBRARY) is not None
        if is_wanted and not is_installed:
            raise ConfigError(f"--page: {_LIBRARY} is not installed; run: pip install 'penstock[console]'")
        self._is_wanted = is_installed and not as_json and sys.stdout.isatty() if is_wanted is None else is_wanted
        self._again = launch.page_command(run_folder.parent)
        command = launch.module("penstock.console.web", f"run.dir={run_folder.parent}")
        self._child = Child("console", command, log=run_folder / "logs" / "console.log")
        self._is_reported = False

    def __enter__(self) -> PageProcess:
        return self

    def __exit__(self, *_: object) -> None:
        stop_all([self._child], _PAGE_STOP_S)

    @property
    def pid(self) -> int:
        return self._child.pid

    def start(self) -> None:
        """Start the process; its log holds the link that opens the page, and is readable for this user alone."""
        if not self._is_wanted:
            return
        log = self._child.log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)  # the link of an earlier session
        os.close(os.open(log, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        self._child.start()

    def notice(self) -> str:
        if not self._is_wanted:
            return f"{self._again}   (in another terminal)"
        wait_until(lambda: self._link() or not self._child.alive, _PAGE_START_S)
        if link := self._link():
            return f"{link}   (opens once, in one browser; after the run: {self._again})"
        return f"starting; its link will be in {self._child.log}   (after the run: {self._again})"

    def new_problem(self) -> str:
        if not self.pid or self._child.alive or self._is_reported:
            return ""
        self._is_reported = True
        return (
            f"the live page has ended with exit code {self._child.returncode} (see {self._child.log}); "
            f"the run goes on, and {self._again} opens it again"
        )

    def _link(self) -> str:
        lines = self._child.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((json.loads(line)["link"] for line in lines if line.startswith('{"url"')), "")


class TrackerProcesses:
    """The processes of the trackers that a run file sets; none when it sets none. Use it as a context manager."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self._arguments = list(arguments)
        self._settings = trackers.load_settings(None, arguments, environ)
        trackers.check(self._settings)
        self._folder = self._settings.run.folder.absolute()
        self._labels = [tracker.label for tracker in self._settings.tracker]
        self._children: list[Child] = []
        self._supervisor = Supervisor(rule=_TRACKER_RULE, on_event=lambda _: None)

    def __enter__(self) -> TrackerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._supervisor.close()
        stop_all(self._children, _TRACKERS_STOP_S)

    def start(self, connection: Mapping[str, str] | None = None) -> None:
        if not self._labels:
            return
        trackers.store(self._settings)
        for label in self._labels:
            read_marker(self._folder, label).unlink(missing_ok=True)
            child = Child(
                f"tracker-{label}",
                trackers.command(self._settings.run.id, label, self._arguments, "--await-report"),
                log=self._folder / "logs" / f"tracker-{label}.log",
                environ={**os.environ, **(connection or {})},
            )
            self._supervisor.start(child, is_crash=lambda code: code not in (0, trackers.EXPLAINED_CODE))
            self._children.append(child)

    def on_incident(self, note: Callable[[str], object]) -> None:
        """Call ``note`` for every crash and restart from now on, on a separate thread."""
        self._supervisor.on_incident(note)

    def wait_until_read(self) -> None:
        """Return when the run's servers may stop: every process has read the run to its end, or takes too long."""
        markers = {child: read_marker(self._folder, child.name.removeprefix("tracker-")) for child in self._children}
        wait_until(lambda: all(not child.alive or marker.exists() for child, marker in markers.items()), _READ_S)

    def finish(self) -> list[str]:
        """Wait until all have written everything, at most ``tracking.finish_s``; return a line for each that has not."""
        self._supervisor.on_event = lambda _: None  # the panel has ended
        wait_until(lambda: not any(child.alive for child in self._children), self._settings.tracking.finish_s)
        return [
            f"{child.name} has not written everything (see {child.log}); the rest: penstock track {self._settings.run.id}"
            for child in self._children
            if child.alive or child.returncode != 0
        ]
