"""The console beside a local run: the live page, in a process of its own.

Nothing of a run waits for it, and whatever happens to it ends nothing else. It is stopped with the run; `penstock console`
shows the run's folder afterwards.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

from penstock.console import launch
from penstock.deploy.processes.child import Child, wait_until
from penstock.deploy.processes.supervise import stop_all
from penstock.protocol.errors import ConfigError

_LIBRARY = "uvicorn"  # of the extra `console`
_START_S = 3.0  # until the link is there; the run is not held up for longer
_STOP_GRACE_S = 3.0


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
        stop_all([self._child], _STOP_GRACE_S)

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
        wait_until(lambda: self._link() or not self._child.alive, _START_S)
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
