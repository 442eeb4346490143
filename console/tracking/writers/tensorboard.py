"""TensorBoard: event files, written by tensorboardX.

Each row is one record of one file, so that a kill leaves a row whole or not at all, and what the files hold is read
back: every row is there exactly once, also after SIGKILL.
"""

from __future__ import annotations

import os
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.console.tracking.interface import (
    EVENT,
    Destination,
    Row,
    TrackerKind,
    TrackerWriter,
    as_markdown,
    library,
)

_LENGTH, _HEADER, _FOOTER = struct.Struct("<Q"), 12, 4  # of a TFRecord: length and its checksum; checksum of the data
_INT64 = 9  # DT_INT64
_PNG = b"\x89PNG\r\n\x1a\n"


class TensorBoardWriter(TrackerWriter):
    """Writes a new event file beside those of earlier sessions."""

    def __init__(self, destination: Destination) -> None:
        self._proto = library("tensorboardX.proto.event_pb2")
        self._summary = library("tensorboardX.proto.summary_pb2")
        self._text = library("tensorboardX.summary").text
        folder = destination.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._last_event = self._read_back(folder)
        self._step = 0
        name = f".{os.getpid()}.{secrets.token_hex(4)}"  # a second session of the same second gets another file
        self._file = library("tensorboardX.event_file_writer").EventsWriter(str(folder / "events"), name)
        if self._last_event == 0:
            config = sorted((destination.config or {}).items())
            self._add(self._text("settings", as_markdown(("setting", "value"), [(k, str(v)) for k, v in config])), 0)

    @property
    def last_event(self) -> int | None:
        return self._last_event

    def write(self, row: Row) -> None:
        """Write one record with all figures of a row, and its number, which TensorBoard does not show."""
        values = [
            self._summary.Summary.Value(tag=name, simple_value=value)
            for name, value in row.values.items()
            if name != EVENT
        ]
        number = self._summary.Summary.Value(tag=EVENT)
        number.tensor.dtype = _INT64
        number.tensor.int64_val.append(row.event)
        self._add(self._summary.Summary(value=[*values, number]), row.step, row.at)

    def flush(self) -> None:
        self._file.flush()

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
        self._add(self._text(name, as_markdown(columns, rows)), step)

    def file(self, path: Path) -> None:
        """Write Markdown under Text and a PNG under Images; other files are left out."""
        data = path.read_bytes()
        if path.suffix == ".md":
            self._add(self._text(path.stem, data.decode("utf-8", "replace")), self._step)
        elif data.startswith(_PNG):
            width, height = struct.unpack(">II", data[16:24])
            image = self._summary.Summary.Image(encoded_image_string=data, width=width, height=height, colorspace=3)
            self._add(
                self._summary.Summary(value=[self._summary.Summary.Value(tag=path.stem, image=image)]), self._step
            )

    def close(self, *, finished: bool) -> None:
        self._file.close()

    def _add(self, summary: object, step: int, at: float | None = None) -> None:
        self._step = max(self._step, step)
        event = self._proto.Event(step=step, summary=summary)
        event.wall_time = time.time() if at is None else at
        self._file.write_event(event)

    def _read_back(self, folder: Path) -> int:
        newest = 0
        for path in folder.glob("events.out.tfevents.*"):
            for record in records(path):
                event = self._proto.Event.FromString(record)
                numbers = [
                    summary_value.tensor.int64_val
                    for summary_value in event.summary.value
                    if summary_value.tag == EVENT
                ]
                newest = max([newest, *(number[0] for number in numbers if number)])
        return newest


def records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of an event file; what a killed process wrote of the last one is left out."""
    data, at = path.read_bytes(), 0
    while at + _HEADER <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        start, end = at + _HEADER, at + _HEADER + length
        if end + _FOOTER > len(data):
            return
        yield data[start:end]
        at = end + _FOOTER


KIND = TrackerKind("tensorboard", "tensorboardX", "penstock[tensorboard]", TensorBoardWriter)
