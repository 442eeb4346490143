"""Count groups without a reward by reason, and whether they wait or were dead-lettered (`penstock reward errors RUN`)."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.text import Text

from penstock.console.connections import NamedRun
from penstock.console.report import event_fields
from penstock.console.report.event_fields import RewardErrorFields, UnreadableEvent
from penstock.console.terminal import console, one_line, table
from penstock.protocol import logs, subjects
from penstock.protocol.facts import DeadLetter, RunEvent
from penstock.protocol.transport.bus import Bus

_QUIET_S = 0.7  # stored messages arrive at once; after so long without one, all have arrived
_DEADLINE_S = 20.0


@dataclass(slots=True)
class ErrorLine:
    """One reason: how often groups waited, how many were dead-lettered, and the newest message.

    The field names are keys of `--json`.
    """

    reason: str
    waited: int = 0
    dead: int = 0
    newest: str = ""


class ErrorCount:
    def __init__(self) -> None:
        self._lines: dict[str, ErrorLine] = {}
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self.num_unreadable = 0

    def waited(self, event: RunEvent) -> None:
        try:
            fields = event_fields.read(RewardErrorFields, event.data)
        except UnreadableEvent as err:
            self.unreadable(err)
            return
        self._add(fields.reason or "unknown", fields.detail, waited=max(len(fields.group_ids), 1))

    def dead_lettered(self, letter: DeadLetter) -> None:
        self._add(letter.reason, letter.detail, dead=max(len(letter.group_ids), 1))

    def unreadable(self, _: Exception) -> None:
        with self._lock:
            self.num_unreadable += 1
            self._last = time.monotonic()

    def lines(self) -> list[ErrorLine]:
        with self._lock:
            return sorted(self._lines.values(), key=lambda line: (-line.dead, -line.waited))

    def wait_until_quiet(self) -> None:
        """Wait until all stored messages have arrived, at most the deadline: new errors may keep arriving."""
        started = time.monotonic()
        while time.monotonic() - max(self._last, started) < _QUIET_S and time.monotonic() - started < _DEADLINE_S:
            time.sleep(0.05)

    def _add(self, reason: str, detail: str, *, waited: int = 0, dead: int = 0) -> None:
        with self._lock:
            line = self._lines.setdefault(reason, ErrorLine(reason))
            line.waited += waited
            line.dead += dead
            line.newest = detail
            self._last = time.monotonic()


def print_errors(run: NamedRun, *, as_json: bool) -> int:
    """Print a run's reward errors; return 1 when groups were dead-lettered. Raises ConfigError, BusUnreachable or MissingStream."""
    settings = run.settings
    logs.configure("reward-errors", level="error")
    count = ErrorCount()
    with Bus.connect(settings.nats, name="reward-errors", deadline_s=5.0) as bus:
        retried = bus.tail(
            f"{run}-events", subjects.events(run.id, "reward_error"), RunEvent, count.waited,
            from_start=True, on_unreadable=count.unreadable,
        )  # fmt: skip
        given_up = bus.tail(
            f"{run}-dead", subjects.dead(run.id, "generated"), DeadLetter, count.dead_lettered,
            from_start=True, on_unreadable=count.unreadable,
        )  # fmt: skip
        retried.wait()
        given_up.wait()
        count.wait_until_quiet()
    lines = count.lines()
    if count.num_unreadable:
        print(f"penstock: {count.num_unreadable} messages cannot be read and are left out", file=sys.stderr)
    if as_json:
        print(json.dumps([asdict(line) for line in lines]))
    elif not lines:
        print(f"run {run} has no reward errors")
    else:
        _print(lines)
    return 1 if any(line.dead for line in lines) else 0


def _print(lines: Sequence[ErrorLine]) -> None:
    right = ("waited", "dead letters")
    rows = table("reason", *right, "newest message", right=right, wide=("newest message",))
    for line in lines:
        rows.add_row(Text(one_line(line.reason)), str(line.waited), str(line.dead), Text(one_line(line.newest)))
    console().print(rows)
    print("\nwaited: times that groups were returned to the queue; dead letters: groups that were given up")
