"""Restart child processes that exit, with back-off, and record every event."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog

from penstock.deploy.processes.child import Child, DeployError, describe_exit, end_orphans
from penstock.protocol.errors import PenstockError

log = structlog.get_logger("deploy")


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    at: float
    name: str
    kind: Literal["started", "crashed", "restarted", "delayed", "gave_up", "exited"]
    detail: str = ""
    reason: str = ""  # of a crash: what the process wrote last

    @property
    def as_incident(self) -> str:
        """The event as a line for people; empty for events of every run."""
        match self.kind:
            case "crashed":
                return f"{self.name} exited ({self.detail}{f': {self.reason}' if self.reason else ''}); restarting it"
            case "restarted":
                return f"{self.name} was restarted ({self.detail})"
            case "delayed":
                return f"{self.name} keeps exiting; the run continues without it, {self.detail}"
            case "gave_up":
                return f"{self.name} keeps exiting; not restarted {self.detail}"
            case _:
                return ""


@dataclass(frozen=True, slots=True)
class RestartRule:
    """When to restart: pauses double from ``first_delay_s``; more than ``max_crashes`` within ``window_s`` end it.

    A process that others replace is then restarted after ``window_s`` instead.
    """

    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    max_crashes: int = 5
    window_s: float = 60.0

    def delay_s(self, crashes: Sequence[float], now: float) -> float | None:
        """Return the pause before the next start, None to give up; ``crashes`` are the times of this child's crashes."""
        recent = sum(1 for at in crashes if now - at <= self.window_s)
        if recent > self.max_crashes:
            return None
        return min(self.max_delay_s, self.first_delay_s * 2 ** max(0, recent - 1))


@dataclass(slots=True)
class _Watched:
    child: Child
    restart: Callable[[], Child] | None  # None: it is not restarted
    is_crash: Callable[[int], bool]  # by exit code
    crashes: list[float]
    replicas: frozenset[str]  # names of the processes that do the same work, this one included
    is_delayed: bool = False  # it keeps exiting, and its replicas do its work


class Supervisor:
    """Watch child processes in a separate thread. ``events`` grows; ``failure`` is set when one is not restarted any more."""

    def __init__(
        self, *, rule: RestartRule | None = None, on_event: Callable[[ProcessEvent], object] | None = None
    ) -> None:
        """``on_event`` is called on the supervisor's thread and may be set later; without it, crashes and restarts are logged."""
        self.events: list[ProcessEvent] = []
        self.failure: DeployError | None = None
        self._rule = rule or RestartRule()
        self.on_event = on_event or log_event
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

    def on_incident(self, note: Callable[[str], object]) -> None:
        """Call ``note`` with a line for every crash and restart from now on, on the supervisor's thread."""
        self.on_event = lambda event: event.as_incident and note(event.as_incident)

    def start(
        self,
        child: Child,
        restart: Callable[[], Child] | None = None,
        *,
        is_crash: Callable[[int], bool] = lambda _: True,
        replicas: Iterable[str] = (),
    ) -> None:
        """Start a child unless it runs, and `watch` it; after a crash it is relaunched, or replaced by ``restart``."""
        if not child.alive:
            child.start()
        self.watch(child, restart or child.relaunch, is_crash=is_crash, replicas=replicas)

    def watch(
        self,
        child: Child,
        restart: Callable[[], Child] | None = None,
        *,
        is_crash: Callable[[int], bool] = lambda _: True,
        replicas: Iterable[str] = (),
    ) -> None:
        """Watch a started child; ``restart`` starts it again after a crash (None: it is not restarted).

        ``is_crash`` returns True for the exit codes that are crashes; after any other the child is not restarted.
        ``replicas`` are the names of all children that do the same work: one that keeps exiting is a failure only when
        none of the others runs.
        """
        with self._lock:
            self._watched[child.name] = _Watched(child, restart, is_crash, [], frozenset(replicas))
            self._note(ProcessEvent(time.time(), child.name, "started", f"pid {child.pid}"))
            self._register(child)
        os.write(self._wake_writer, b"w")

    def child(self, name: str) -> Child:
        with self._lock:
            if name not in self._watched:
                raise DeployError(f"no process {name!r}; there are {', '.join(self._watched) or 'none'}")
            return self._watched[name].child

    def processes(self) -> dict[str, Child]:
        with self._lock:
            return {name: watched.child for name, watched in self._watched.items()}

    def wait_for(self, condition: Callable[[], bool], deadline_s: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, deadline_s)

    def wait_exit(self, deadline_s: float | None = None) -> Child | None:
        """Wait until a process has exited that is not restarted, and return it; None after ``deadline_s``.

        Raises DeployError when a process crashed so often that it is not restarted any more.
        """

        def exited() -> str | None:
            return next((event.name for event in self.events if event.kind == "exited"), None)

        self.wait_for(lambda: self.failure is not None or exited() is not None, deadline_s)
        if self.failure is not None:
            raise self.failure
        name = exited()
        return None if name is None else self.child(name)

    def close(self) -> None:
        """Stop watching and restarting; the children keep running. Idempotent."""
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
                        self._exited(key.data)
            with self._lock:
                while not self._closing and self._due and self._due[0][0] <= time.monotonic():
                    self._restart(heapq.heappop(self._due)[2])

    def _exited(self, child: Child) -> None:
        code = child.returncode
        child.reap_group()
        end_orphans()
        watched = self._watched[child.name]
        how = describe_exit(code) if code is not None else "unknown"
        if watched.restart is None or (code is not None and not watched.is_crash(code)):
            self._note(ProcessEvent(time.time(), child.name, "exited", how))
            return
        self._note(ProcessEvent(time.time(), child.name, "crashed", how, child.reason()))
        self._schedule(watched)

    def _schedule(self, watched: _Watched) -> None:
        now = time.monotonic()
        watched.crashes.append(now)
        delay_s = self._rule.delay_s(watched.crashes, now)
        name = watched.child.name
        if delay_s is None and self._is_replaced(watched):
            watched.is_delayed = True
            detail = f"it is restarted in {self._rule.window_s:.0f} s"
            self._note(ProcessEvent(time.time(), name, "delayed", detail))
            heapq.heappush(self._due, (now + self._rule.window_s, next(self._ties), name))
        elif delay_s is None:
            self.failure = watched.child.failure(f"exited {len(watched.crashes)} times and is not restarted any more")
            self._note(ProcessEvent(time.time(), name, "gave_up", f"after {len(watched.crashes)} times"))
        else:
            heapq.heappush(self._due, (now + delay_s, next(self._ties), name))

    def _is_replaced(self, watched: _Watched) -> bool:
        """Return True if another process that does the same work runs and does not keep exiting."""
        others = [self._watched[name] for name in watched.replicas - {watched.child.name} if name in self._watched]
        return any(other.child.alive and not other.is_delayed for other in others)

    def _restart(self, name: str) -> None:
        watched = self._watched[name]
        watched.is_delayed = False
        assert watched.restart is not None
        try:
            watched.child = watched.restart()
        except (PenstockError, OSError) as err:
            log.warning("could not restart", process=name, error=str(err))
            self._schedule(watched)
            return
        self._register(watched.child)
        self._note(ProcessEvent(time.time(), name, "restarted", f"pid {watched.child.pid}"))

    def _note(self, event: ProcessEvent) -> None:
        self.events.append(event)
        self.on_event(event)
        self._changed.notify_all()


def log_event(event: ProcessEvent) -> None:
    if event.as_incident:
        log.warning(event.as_incident, process=event.name)


def stop_all(children: Sequence[Child], grace_s: float = 10.0) -> None:
    """Stop child processes at the same time: SIGTERM to all, then SIGKILL to what still runs after ``grace_s``."""
    for child in children:
        child.ask_to_stop()
    deadline = time.monotonic() + grace_s
    for child in children:
        child.stop(max(0.0, deadline - time.monotonic()))
