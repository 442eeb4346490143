"""The processes that write a run's metrics to its trackers, one for each, beside the run.

Nothing of a run waits for them, and whatever happens to them ends nothing else: one that fails is started again, and what
it had not written when the run ended is written by `penstock track RUN`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from penstock.console.tracking import trackers
from penstock.console.tracking.consumer import read_marker
from penstock.deploy.processes.child import Child, wait_until
from penstock.deploy.processes.supervise import ProcessEvent, RestartRule, Supervisor, stop_all

_RULE = RestartRule(first_delay_s=1.0, max_delay_s=30.0, max_crashes=20, window_s=600.0)
_READ_S = 5.0  # from the trainer's end until they have read the last events
_STOP_GRACE_S = 5.0
_EXPLAINED = 2  # exit code of an error that another start does not resolve


class TrackerProcesses:
    """The processes of the trackers that a run file sets; none when it sets none. Use it as a context manager."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self._arguments = list(arguments)
        self._settings = trackers.load_settings(None, arguments, environ)
        trackers.check(self._settings)
        self._folder = self._settings.run.folder.absolute()
        self._labels = [one.label for one in self._settings.tracker]
        self._children: list[Child] = []
        self._supervisor: Supervisor | None = None
        self._note: Callable[[str], object] = lambda _: None

    def __enter__(self) -> TrackerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
            stop_all(self._children, _STOP_GRACE_S)

    def start(self, connection: Mapping[str, str] | None = None) -> None:
        if not self._labels:
            return
        trackers.store(self._settings)
        self._supervisor = Supervisor(rule=_RULE, on_event=self._on_event)
        for label in self._labels:
            read_marker(self._folder, label).unlink(missing_ok=True)
            child = Child(
                f"tracker-{label}",
                trackers.command(self._settings.run.id, label, self._arguments, "--await-report"),
                log=self._folder / "logs" / f"tracker-{label}.log",
                environ={**os.environ, **(connection or {})},
            )
            child.start()
            self._children.append(child)
            self._supervisor.watch(child, child.relaunch, is_crash=lambda code: code not in (0, _EXPLAINED))

    def on_incident(self, note: Callable[[str], object]) -> None:
        """Call ``note`` for every crash and restart from now on, on a thread of its own."""
        self._note = note

    def wait_until_read(self) -> None:
        """Return when the run's servers may stop: every process has read the run to its end, or takes too long."""
        wait_until(lambda: all(self._has_read(child) for child in self._children), _READ_S)

    def finish(self) -> list[str]:
        """Wait until all have written everything, at most ``tracking.finish_s``; return a line for each that has not."""
        self._note = lambda _: None  # the panel has ended
        wait_until(lambda: not any(child.alive for child in self._children), self._settings.tracking.finish_s)
        return [
            f"{child.name} has not written everything (see {child.log}); the rest: penstock track {self._settings.run.id}"
            for child in self._children
            if child.alive or child.returncode != 0
        ]

    def _has_read(self, child: Child) -> bool:
        return not child.alive or read_marker(self._folder, child.name.removeprefix("tracker-")).exists()

    def _on_event(self, event: ProcessEvent) -> None:
        if event.as_incident:
            self._note(event.as_incident)
