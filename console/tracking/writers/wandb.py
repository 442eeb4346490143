"""Weights & Biases. What a server holds is asked when a run is resumed: every row is there exactly once.

Offline (``WANDB_MODE=offline``) the library has no way to ask or to flush: each session writes a separate folder, and
rows that were on their way when all of its processes were killed are missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.console.tracking.interface import Destination, Row, TrackerKind, TrackerWriter, library

_ID_CHARS = 64


class WandbWriter(TrackerWriter):
    """Writes one W&B run, whose history has the numbers of events as its steps: they rise, those of evaluations do not."""

    def __init__(self, destination: Destination) -> None:
        """Begin or resume the run; waits until the server has answered."""
        self._wandb = library("wandb")
        destination.folder.mkdir(parents=True, exist_ok=True)
        options = destination.arguments(team="entity", dir=str(destination.folder))
        options |= {"id": f"{destination.run_id[: _ID_CHARS - 17]}-{destination.key}", "resume": "allow"}
        settings = self._wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True
        )
        self._run = self._wandb.init(**options, settings=settings)
        self._run.define_metric("*", step_metric="step")
        self._run_id = destination.run_id

    @property
    def last_event(self) -> int | None:
        """The number of the newest row on the server; None offline."""
        return None if self._run.offline else max(0, self._run.starting_step - 1)

    def write(self, row: Row) -> None:
        self._run.log({"step": row.step, **row.values}, step=row.event, commit=True)

    def flush(self) -> None:
        """Do nothing: rows are with the library's process, which survives this one's kill."""

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
        """Store a table as an artifact; a row of history for it would take the number of an event."""
        artifact = self._wandb.Artifact(f"{self._run_id}-{name}", type=name, metadata={"step": step})
        artifact.add(self._wandb.Table(columns=list(columns), data=[list(row) for row in rows]), name)
        self._run.log_artifact(artifact)

    def file(self, path: Path) -> None:
        artifact = self._wandb.Artifact(f"{self._run_id}-{path.stem}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def configure(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def summarise(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(values))

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title=title, text=text)

    def close(self, *, finished: bool) -> None:
        """Send what is left; the run is marked as finished or, when it will be continued, as crashed."""
        self._run.finish(exit_code=0 if finished else 1)


KIND = TrackerKind("wandb", "wandb", "penstock[wandb]", WandbWriter)
