"""Diagnose work that waits for a service which does not run: nothing else would say why the run stands still.

Pure: a function of service lines, queue depths and clock readings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.console.live.run_snapshot import QueueDepths, ServiceLine
from penstock.console.report.run_summary import Diagnosis

_PATIENCE_S = 15.0  # a service that starts, or is started again, reports by then
_WORK = {"rollout": ("tasks", "generate"), "reward": ("generated", "score")}  # role: queue, what it does with a message
_NAMES = {"rollout": "rollout worker", "reward": "reward service"}
_COMMANDS = {"rollout": "penstock rollout RUN.TOML", "reward": "penstock reward service RUN.TOML"}


class AbsentServices:
    """Since when no service of a role has reported."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def fold(self, services: Iterable[ServiceLine], now: float) -> None:
        present = {line.role for line in services if line.alive}
        self._since = {role: self._since.get(role, now) for role in _WORK if role not in present}

    def diagnoses(self, queues: QueueDepths, now: float) -> Iterator[Diagnosis]:
        """Yield one diagnosis for each role that has been absent for 15 s while messages wait for it."""
        for role, since in self._since.items():
            queue, verb = _WORK[role]
            waiting = queues.waiting.get(queue, 0)
            if waiting and now - since >= _PATIENCE_S:
                yield Diagnosis(
                    key=f"no_{role}",
                    what=f"No {_NAMES[role]} is running: {waiting} messages wait for one to {verb} their groups.",
                    cause="None was started for this run, it still loads, or it has ended: its own output says which.",
                    cure=f"Start one, on any machine that reaches NATS and the object store: {_COMMANDS[role]}",
                )
