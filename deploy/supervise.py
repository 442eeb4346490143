"""Notices at once when a child dies, starts it again with back-off, and writes down what happened."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog

from penstock.deploy.child import Child, DeployError, describe_exit, end_orphans
from penstock.protocol.errors import PenstockError

log = structlog.get_logger("deploy")


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """Something that happened to a process; ``at`` is Unix time in seconds."""

    at: float
    name: str
    kind: Literal["started", "died", "restarted", "gave_up", "ended"]
    detail: str = ""

    @property
    def as_incident(self) -> str:
        """The event in words for people; empty for what belongs to every run."""
        match self.kind:
            case "died":
                return f"{self.name} died ({self.detail}); it is started again"
            case "restarted":
                return f"{self.name} is started again ({self.detail})"
            case "gave_up":
                return f"{self.name} keeps dying and is given up {self.detail}"
            case _:
                return ""


@dataclass(frozen=True, slots=True)
class RestartRule:
    """When to start again: pauses double from ``first_delay_s``; too many deaths in a row end it."""

    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    max_deaths: int = 5
    window_s: float = 60.0

    def delay_s(self, deaths: Sequence[float], now: float) -> float | None:
        """Return the pause before the next start, None to give up; ``deaths`` are times of this child's deaths."""
        recent = sum(1 for at in deaths if now - at <= self.window_s)
        if recent > self.max_deaths:
            return None
        return min(self.max_delay_s, self.first_delay_s * 2 ** max(0, recent - 1))


@dataclass(slots=True)
class _Watched:
    child: Child
    again: Callable[[], Child] | None  # None: its end is an end
    is_death: Callable[[int], bool]  # which exit codes are mended
    deaths: list[float]


class Supervisor:
    """Watches children in a thread of its own. ``events`` grows; ``failure`` is set when it gave up on one."""

    def __init__(
        self, *, rule: RestartRule | None = None, on_event: Callable[[ProcessEvent], None] | None = None
    ) -> None:
        """``on_event`` is called on the supervisor's thread."""
        self.events: list[ProcessEvent] = []
        self.failure: DeployError | None = None
        self._rule = rule or RestartRule()
        self._on_event = on_event
        self._watched: dict[str, _Watched] = {}
        self._due: list[tuple[float, int, str]] = []  # heap of restarts: when, tie-breaker, name
        self._ties = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def watch(
        self,
        child: Child,
        again: Callable[[], Child] | None = None,
        *,
        is_death: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Watch a started child; ``again`` starts it anew after a death (None: it is not restarted).

        ``is_death`` says which exit codes are one; with any other the child has ended, and stays so.
        """
        with self._lock:
            self._watched[child.name] = _Watched(child, again, is_death, [])
            self._note(ProcessEvent(time.time(), child.name, "started", f"pid {child.pid}"))
            self._register(child)
        os.write(self._wake_writer, b"w")

    def child(self, name: str) -> Child:
        """Return the current process of a name; raises DeployError for a name that is not watched."""
        with self._lock:
            if name not in self._watched:
                raise DeployError(f"no process {name!r}; there are {', '.join(self._watched) or 'none'}")
            return self._watched[name].child

    def processes(self) -> dict[str, Child]:
        """Return the current process of every name."""
        with self._lock:
            return {name: watched.child for name, watched in self._watched.items()}

    def wait_for(self, condition: Callable[[], bool], deadline_s: float | None = None) -> bool:
        """Wait until ``condition()``, checked at every event, is true; False when ``deadline_s`` passed first."""
        with self._changed:
            return self._changed.wait_for(condition, deadline_s)

    def close(self) -> None:
        """Stop watching: from here on nothing is restarted. The children go on; idempotent."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake_writer, b"c")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._wake_writer)

    def _register(self, child: Child) -> None:
        self._selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, child)

    def _run(self) -> None:
        while not self._closing:
            pause = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for key, _ in self._selector.select(pause):
                if key.data is None:
                    os.read(self._wake_reader, 64)
                elif not self._closing:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    with self._lock:
                        self._died(key.data)
            with self._lock:
                while not self._closing and self._due and self._due[0][0] <= time.monotonic():
                    self._start_again(heapq.heappop(self._due)[2])

    def _died(self, child: Child) -> None:
        code = child.returncode
        child.reap_group()
        end_orphans()
        watched = self._watched[child.name]
        how = describe_exit(code) if code is not None else "unknown"
        if watched.again is None or (code is not None and not watched.is_death(code)):
            self._note(ProcessEvent(time.time(), child.name, "ended", how))
            return
        log.warning("a process died", process=child.name, exit=how, log=str(child.log))
        self._note(ProcessEvent(time.time(), child.name, "died", how))
        self._schedule(watched)

    def _schedule(self, watched: _Watched) -> None:
        now = time.monotonic()
        watched.deaths.append(now)
        delay_s = self._rule.delay_s(watched.deaths, now)
        name = watched.child.name
        if delay_s is None:
            self.failure = watched.child.failure(f"died {len(watched.deaths)} times, now given up")
            self._note(ProcessEvent(time.time(), name, "gave_up", f"after {len(watched.deaths)} deaths"))
        else:
            heapq.heappush(self._due, (now + delay_s, next(self._ties), name))

    def _start_again(self, name: str) -> None:
        watched = self._watched[name]
        assert watched.again is not None
        try:
            watched.child = watched.again()
        except (PenstockError, OSError) as err:
            log.warning("could not restart", process=name, error=str(err))
            self._schedule(watched)
            return
        self._register(watched.child)
        self._note(ProcessEvent(time.time(), name, "restarted", f"pid {watched.child.pid}"))

    def _note(self, event: ProcessEvent) -> None:
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)
        self._changed.notify_all()


def stop_all(children: Sequence[Child], grace_s: float = 10.0) -> None:
    """End children at the same time: ask all, then wait for each, then insist."""
    for child in children:
        child.ask_to_stop()
    deadline = time.monotonic() + grace_s
    for child in children:
        child.stop(max(0.0, deadline - time.monotonic()))
