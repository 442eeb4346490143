"""What a tracker implements; `TRACKERS` finds it by the ``type`` of a [[tracker]].

A new tracker is one file with a `TrackerKind` at its top level: in `writers/`, in an installed package with an entry
point in the group ``penstock.trackers``, or any file that a run names as ``my_tracker.py:kind``.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.console.terminal import markdown
from penstock.protocol.errors import ConfigError
from penstock.protocol.extensions import Registry

EVENT = "penstock/event"  # number of the event, written with every row: what a tracker holds is read back by it


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one event. ``values`` are finite and named ``train/loss``, ``eval/accuracy``."""

    event: int  # number in the run's stream of events: rises from row to row
    step: int  # optimizer step; an evaluation's may be below that of the row before
    at: float  # seconds since the epoch
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Destination:
    run_id: str
    project: str
    name: str
    folder: Path  # for the files of a tracker that writes files
    key: str = (
        ""  # 16 hex digits, made when the run was first tracked: names the run in the tracker, also after a restart
    )
    is_folder_chosen: bool = False  # by the user; a library with a default place keeps to it otherwise
    group: str = ""
    entity: str = ""  # team, workspace
    tags: Sequence[str] = ()
    options: Mapping[str, Any] | None = None  # further arguments of the library's function that begins a run
    config: Mapping[str, Any] | None = None  # the run's settings, dotted key to value

    def arguments(self, *, team: str, **more: object) -> dict[str, Any]:
        """Return the arguments of a library's function that begins a run; ``team`` is its word for the entity."""
        own = {"project": self.project, "name": self.name, team: self.entity or None, "group": self.group or None}
        own |= {"tags": list(self.tags) or None, "config": dict(self.config or {})}
        return {**own, **more, **(self.options or {})}


class TrackerWriter(ABC):
    """One open tracker. Used by one thread; any exception ends the process, which is started again and resumes."""

    @property
    def last_event(self) -> int | None:
        """The number of the newest row that the tracker holds, 0 for none; None when the library cannot tell."""
        return None

    @abstractmethod
    def write(self, row: Row) -> None:
        """Write one row; rows come in the order of their events."""

    @abstractmethod
    def flush(self) -> None:
        """Return when the rows written so far survive a kill of this process, as far as the library can tell."""

    @abstractmethod
    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
        """Write a table of samples."""

    @abstractmethod
    def file(self, path: Path) -> None:
        """Store a file of the run's folder, such as its report."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """End the tracker's run; ``finished`` is False when it will be continued."""


@dataclass(frozen=True, slots=True)
class TrackerKind:
    name: str
    module: str  # that is imported, to say at once when it is not installed
    install: str  # what pip installs
    open: Callable[[Destination], TrackerWriter]

    def require_installed(self) -> None:
        """Raise ConfigError when the library is missing."""
        if importlib.util.find_spec(self.module) is None:
            raise ConfigError(
                f"tracker {self.name} needs the package {self.module}, which is not installed: pip install '{self.install}'"
            )


def library(module: str) -> Any:
    """Import a tracker's library, which need not be installed where this code is checked."""
    return importlib.import_module(module)


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> str:
    """Return a table as Markdown, for a tracker without tables."""
    lines = [columns, ["---"] * len(columns), *rows]
    return (
        "\n".join(
            f"| {' | '.join(markdown(f'{value:g}' if isinstance(value, float) else value) for value in line)} |"
            for line in lines
        )
        + "\n"
    )


TRACKERS = Registry("tracker", TrackerKind, package="penstock.console.tracking.writers", group="penstock.trackers")
