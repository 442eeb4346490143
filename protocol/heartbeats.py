"""Heartbeats of services: how often they are written, when one is lost, and what they say of busy time and CPU.

A heartbeat announces its period, and readers decide by it. All workers of a run together write about
`TOTAL_PER_S` heartbeats a second: the more there are, the longer the period of each. A reader reports a service as lost
after `lost_after_s`, unless its last state is `EXITED`; after `expires_after_s` its key is gone: it does not count.

A role is *busy* while at least one piece of its work is under way (a request in the engine, a group being scored, an
optimizer step) and *idle* while it waits for another role. The idle shares of a run show which role is the bottleneck.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from penstock.protocol.errors import WireError
from penstock.protocol.facts import Heartbeat, decode

THREAD_CPU = "thread_cpu_s:"  # prefix of a heartbeat's figures: CPU seconds of the threads of one name
ENGINE_CPU = "engine_cpu_s"  # a worker's figure: CPU seconds of the engine processes that it started
# What a worker does with a version, one after the other: fetch and verify it, or the changes to it; find values that
# are not finite; prepare the changes for the engine; wait for a permit to pause; pause, which includes the wait for
# running completions; write and verify its copy, if only the changes were fetched; ask for the engine's checksum.
APPLY_STAGES = ("fetch", "check", "stage", "permit", "pause", "copy", "checksum")
_NUMBERED = re.compile(r"(?:[-_]\d+)+$")
_MAX_NAMES = 16
EXITED = "exited"  # the state in the last heartbeat of a service that was asked to stop, or has finished
EXITED_TTL_S = 5.0  # of that heartbeat: readers that poll once a second get its totals
PERIOD_S = 1.0  # unless there are many workers
TOTAL_PER_S = 100.0
LIVE_TTL_S = 60.0  # of the bucket: the longest that a key may last
_LOST_PERIODS = 4
_EXPIRY_PERIODS = 6
_LEAST_EXPIRY_S = 10.0  # a service that is suspended for seconds still counts


def apply_figure(stage: str) -> str:
    """Return the name of a worker's figure: the seconds of a stage, of all versions that its process applied."""
    return f"weights_{stage}_s"


def apply_means(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the mean seconds of a version by stage, from a worker's figures; empty where it reports none."""
    num = figures.get("weights_applied", 0.0)
    names = {stage: apply_figure(stage) for stage in APPLY_STAGES}
    return {stage: figures[name] / num for stage, name in names.items() if num and name in figures}


class Activity:
    """Accumulates busy and idle seconds; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._num_working = 0
        self._busy_s = 0.0
        self._idle_s = 0.0
        self.state = "starting"

    @contextlib.contextmanager
    def working(self, state: str = "working") -> Iterator[None]:
        """Count the block as busy; blocks may overlap."""
        self._turn(+1, state)
        try:
            yield
        finally:
            self._turn(-1, "waiting")

    def restart(self) -> None:
        with self._lock:
            self._since = time.monotonic()
            self._busy_s = self._idle_s = 0.0

    def totals(self) -> tuple[float, float]:
        with self._lock:
            self._account()
            return self._busy_s, self._idle_s

    def _turn(self, change: int, state: str) -> None:
        with self._lock:
            self._account()
            self._num_working += change
            if self._num_working == 0 or change > 0:
                self.state = state

    def _account(self) -> None:
        now = time.monotonic()
        if self._num_working:
            self._busy_s += now - self._since
        else:
            self._idle_s += now - self._since
        self._since = now


def cpu_seconds() -> float:
    """Return user and system seconds of this process and of its children that have exited."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def thread_cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process's running threads as figures, ``thread_cpu_s:NAME``; empty without /proc.

    Numbered threads of one name are one figure, and threads of libraries have the name that the system knows. What an
    ended thread used is in no figure, only in `cpu_seconds`.
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: dict[str, float] = {}
    for folder in Path("/proc/self/task").glob("[0-9]*"):
        try:
            head, _, rest = (folder / "stat").read_text().rpartition(")")
        except OSError:  # it has just ended
            continue
        name = names.get(int(folder.name)) or head.partition("(")[2]
        fields = rest.split()
        name, used = _NUMBERED.sub("", name), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        seconds[name] = seconds.get(name, 0.0) + used
    largest = sorted(seconds, key=lambda name: seconds[name], reverse=True)[:_MAX_NAMES]
    return {THREAD_CPU + name: seconds[name] for name in largest if seconds[name] > 0.0}


def readable(values: Iterable[bytes]) -> list[Heartbeat]:
    """Return the heartbeats among the values of a bucket; any service may have written another value there."""
    beats = []
    for value in values:
        with contextlib.suppress(WireError):
            beats.append(decode(value, Heartbeat))
    return beats


def worker_period_s(num_services: int, bucket_ttl_s: float) -> float:
    longest = max(PERIOD_S, bucket_ttl_s / _EXPIRY_PERIODS)
    return min(max(PERIOD_S, num_services / TOTAL_PER_S), longest)


def lost_after_s(beat: Heartbeat) -> float:
    return _LOST_PERIODS * (beat.period_s or PERIOD_S)


def expires_after_s(period_s: float) -> float:
    return max(_LEAST_EXPIRY_S, _EXPIRY_PERIODS * period_s)
