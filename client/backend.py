"""What the handle of a run or a training needs of the place where that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.client.errors import RunFailed
from penstock.client.events import Event
from penstock.client.processes import State


class TrainingBackend(Protocol):
    """One training on given answers, on this machine or behind a Runs API."""

    @property
    def run_id(self) -> str: ...

    @property
    def state(self) -> State: ...

    @property
    def folder(self) -> Path | None: ...

    @property
    def output(self) -> Path:
        """The model folder that it writes at its end."""
        ...

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; returns False when ``timeout_s`` passed first."""
        ...

    def failure(self) -> RunFailed: ...

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of its metrics: ``kind`` is "step" or "eval"."""
        ...

    def stop(self) -> None:
        """Stop it after a checkpoint."""
        ...

    def close(self) -> None: ...


class RunBackend(Protocol):
    """One run, on this machine or behind a Runs API."""

    @property
    def run_id(self) -> str: ...

    @property
    def state(self) -> State: ...

    @property
    def folder(self) -> Path | None: ...

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; returns False when ``timeout_s`` passed first."""
        ...

    def failure(self) -> RunFailed: ...

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of its metrics: ``kind`` is "step" or "eval"."""
        ...

    def events(self) -> Iterator[Event | None]:
        """Yield its events until it is over, and None several times a second while none arrives."""
        ...

    def pause(self) -> None:
        """Have the trainer stop issuing work."""
        ...

    def resume(self) -> None:
        """Have a paused or stopped run go on."""
        ...

    def stop(self) -> None:
        """Stop it; it can be resumed."""
        ...

    def versions(self) -> list[dict[str, Any]]:
        """Return its stored versions, oldest first."""
        ...

    def export(self, version: int | None, to: Path) -> None:
        """Write a version as a model folder; without a ``version`` the one with the best evaluation."""
        ...

    def close(self) -> None: ...
