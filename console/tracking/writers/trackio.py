"""trackio: a SQLite file where trackio keeps its files (``trackio show``), or in the folder that was chosen.

What the file holds is read back: every row is there exactly once, also after SIGKILL. With options.space_id or
options.server_url rows go to a server, which is not asked: rows that were on their way at a kill may be there twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.console.tracking.interface import EVENT, Destination, Row, TrackerKind, TrackerWriter, library
from penstock.protocol.errors import PenstockError

_FLUSH_S = 60.0
_POLL_S = 0.05


class TrackioWriter(TrackerWriter):
    """Writes one trackio run, named by the run and its key: trackio finds a run again by its name."""

    def __init__(self, destination: Destination) -> None:
        if destination.is_folder_chosen:
            os.environ["TRACKIO_DIR"] = str(destination.folder.absolute())  # read at the import
        self._trackio = library("trackio")
        self._storage = library("trackio.sqlite_storage").SQLiteStorage
        options = {
            "group": destination.group or None,
            "config": dict(destination.config or {}),
            "embed": False,
            "auto_log_gpu": False,
            "auto_log_cpu": False,
            **(destination.options or {}),
        }
        self._is_local = not {"space_id", "server_url"} & {name for name, value in options.items() if value}
        self._project, self._name = destination.project, f"{destination.name}-{destination.key[:6]}"
        self._num_rows = 0
        self._last_event: int | None = None
        if self._is_local:
            held = self._storage.get_metric_values(self._project, self._name, EVENT)
            self._last_event = max((int(row["value"]) for row in held), default=0)
            self._num_rows = self._storage.get_log_count(self._project, self._name)
        self._run = self._trackio.init(project=self._project, name=self._name, resume="allow", **options)

    @property
    def last_event(self) -> int | None:
        """The number of the newest row in the file; None with a server."""
        return self._last_event

    def write(self, row: Row) -> None:
        self._run.log(dict(row.values), step=row.step)
        self._num_rows += 1

    def flush(self) -> None:
        give_up = time.monotonic() + _FLUSH_S
        while self._is_local and self._storage.get_log_count(self._project, self._name) < self._num_rows:
            if time.monotonic() > give_up:
                raise PenstockError(f"trackio did not store the rows of {self._name} within {_FLUSH_S:.0f} s")
            time.sleep(_POLL_S)

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
        data = [dict(zip(columns, row, strict=True)) for row in rows]
        self._run.log({name: self._trackio.Table(data=data)}, step=step)
        self._num_rows += 1

    def file(self, path: Path) -> None:
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8", errors="replace")
            self._run.log({path.stem: self._trackio.Markdown(text)})
            self._num_rows += 1

    def close(self, *, finished: bool) -> None:
        self._run.finish()


KIND = TrackerKind("trackio", "trackio", "penstock[trackio]", TrackioWriter)
