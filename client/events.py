"""The events of a run: of one that runs from NATS, as they are published; of one that ended from its folder."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.console import connections
from penstock.protocol import subjects
from penstock.protocol.errors import BusError, ConfigError, UntrustedFolder
from penstock.protocol.facts import RunEvent
from penstock.protocol.transport.bus import Bus

_CONNECT_S = 2.0
_POLL_S = 0.1
_QUIET_S = 0.5  # after the end of a run: what was published before has arrived


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a run; ``at`` is Unix time in seconds, ``data`` what the service reported."""

    kind: str
    source: str
    at: float
    data: dict[str, Any]


def recorded(rows: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """Yield the steps and evaluations of rows of metrics.jsonl."""
    for row in rows:
        data = {name: value for name, value in row.items() if name not in {"kind", "at"}}
        at = row.get("at")
        yield Event(str(row.get("kind", "")), "trainer", float(at) if isinstance(at, int | float) else 0.0, data)


def published(run_id: str, folder: Path, is_over: Callable[[], bool]) -> Iterator[Event | None]:
    """Yield a run's events from its first one, each once, as they are published, and None while none arrives.

    Ends when the run is over.

    NATS may not have been started yet, and may be restarted meanwhile.
    """
    arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(event: RunEvent, _number: int, _subject: str) -> None:
        arrived.put(Event(event.kind, event.source, event.at, dict(event.data)))

    while (bus := _connected(run_id, folder)) is None:
        if is_over():
            return
        time.sleep(_POLL_S)
        yield None
    with bus:
        bus.follow(f"{run_id}-events", subjects.events(run_id), RunEvent, put, after=0).wait()
        over_since = None
        while over_since is None or time.monotonic() - over_since < _QUIET_S:
            try:
                yield arrived.get(timeout=_POLL_S)
            except queue.Empty:
                over_since = (over_since or time.monotonic()) if is_over() else None
                yield None


def _connected(run_id: str, folder: Path) -> Bus | None:
    """Return a connection if the run's stream exists. Raises UntrustedFolder."""
    try:
        # The servers that its run file names may be others than the run's own.
        arguments = [*connections.run_file_of(folder), f"run.dir={folder.parent}"]
        settings = connections.find(arguments, os.environ, run_id=run_id).settings
        bus = Bus.connect(settings.nats, name="client", deadline_s=_CONNECT_S)
    except UntrustedFolder:
        raise
    except (BusError, ConfigError):
        return None
    try:
        bus.stream_state(f"{run_id}-events").wait()
    except BusError:
        bus.close()
        return None
    return bus
