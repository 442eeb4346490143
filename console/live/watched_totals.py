"""Totals that only heartbeats show, kept in the run's folder: those of earlier sessions belong to the run's sums.

A heartbeat carries totals since its process started, and expires. The program that writes the report stores them here
(``watched.json``) while it watches, and continues with them when the run is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.protocol.facts import Heartbeat
from penstock.protocol.files import atomic_write, read_regular

log = structlog.get_logger("console.watched_totals")

FILE = "watched.json"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ServiceTotals(_Frozen):
    beat: Heartbeat
    num_starts: int
    earlier_cpu_s: float
    earlier: Mapping[str, float]  # counters
    busy_s: float  # from the first step on, the process of the last heartbeat included
    idle_s: float


class NotedIncident(_Frozen):
    """An incident that no stored event repeats."""

    at: float
    text: str
    kind: str


class Pause(_Frozen):
    """Time between two sessions of a run."""

    end: float  # wall-clock seconds
    seconds: float


class WatchedTotals(_Frozen):
    until: float  # wall-clock seconds: when this was the state of the run
    since: float | None = None  # when the first service of the first session was seen
    paused_s: float = 0.0  # between sessions
    pauses: tuple[Pause, ...] = ()  # the same, one by one
    both_working_s: float = 0.0
    services: tuple[ServiceTotals, ...] = ()
    incidents: tuple[NotedIncident, ...] = ()


def load(folder: Path) -> WatchedTotals | None:
    try:
        return WatchedTotals.model_validate_json(read_regular(folder / FILE))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as err:
        reason = str(err).split("\n", 1)[0]
        log.warning("totals of earlier sessions cannot be read, and are not in the sums", file=FILE, reason=reason)
        return None


def save(folder: Path, totals: WatchedTotals) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / FILE, totals.model_dump_json())
