"""SwanLab. Its library can neither be asked what it holds nor flushed.

A figure with the name and step of an earlier one is ignored by the server, so a row that is written again after a kill
stays one row there; offline (``SWANLAB_MODE=offline``) each session writes a separate folder, and a row may be in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.console.tracking.interface import Destination, Row, TrackerKind, TrackerWriter, as_markdown, library


class SwanlabWriter(TrackerWriter):
    def __init__(self, destination: Destination) -> None:
        self._swanlab = library("swanlab")
        destination.folder.mkdir(parents=True, exist_ok=True)
        options = destination.arguments(team="workspace", log_dir=str(destination.folder))
        self._run = self._swanlab.init(**options, id=destination.key, resume="allow")
        self._step = 0

    def write(self, row: Row) -> None:
        self._step = max(self._step, row.step)
        self._run.log(dict(row.values), step=row.step)

    def flush(self) -> None:
        """Do nothing: the library offers no flush."""

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
        self._run.log({name: self._swanlab.Text(as_markdown(columns, rows))}, step=step)

    def file(self, path: Path) -> None:
        """Write Markdown as text; other files are left out."""
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8", errors="replace")
            self._run.log({path.stem: self._swanlab.Text(text)}, step=self._step)

    def close(self, *, finished: bool) -> None:
        self._run.finish()


KIND = TrackerKind("swanlab", "swanlab", "penstock[swanlab]", SwanlabWriter)
