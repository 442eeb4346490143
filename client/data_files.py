"""The rows of a call as a file of the run: a path as it is, rows of Python as JSON lines named by their digest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.protocol import files
from penstock.protocol.errors import ConfigError

Rows = Iterable[Mapping[str, Any]]
Data = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Rows

_DIGEST_CHARS = 12


def is_named(data: Any) -> bool:
    """Return True for a path or a list of paths, False for rows."""
    if isinstance(data, str | os.PathLike):
        return True
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(path, str | os.PathLike) for path in data)


def named(data: Any) -> str | list[str]:
    """Return the text of a path, or of each: absolute where the file exists, else unchanged, as the name on a hub is."""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        return str(path.absolute()) if path.exists() else os.fspath(data)
    return [str(named(path)) for path in data]


def stored(data: Any, folder: Path, name: str) -> str | list[str]:
    """Return what a run file names: the paths of `named`, or that of a file into which rows are written."""
    return named(data) if is_named(data) else str(write_rows(data, folder, name))


def write_rows(data: Any, folder: Path, name: str) -> Path:
    """Write rows to ``folder/<name>-<sha256>.jsonl`` and return it; the same rows give the same file.

    ``data`` is an iterable of dictionaries, such as a list or a `datasets.Dataset`, or a `pandas.DataFrame`. Raises
    ConfigError, and leaves no file, when there is no row or one is not a dictionary of JSON values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{name}.{os.getpid()}.partial"
    digest = hashlib.sha256()
    num_rows = 0
    try:
        with partial.open("wb") as file:
            for line in _lines(data, name):
                digest.update(line)
                file.write(line)
                num_rows += 1
        if not num_rows:
            raise ConfigError(f"{name}: there is no row; expected a path, or at least one dictionary")
        return files.replace(partial, folder / f"{name}-{digest.hexdigest()[:_DIGEST_CHARS]}.jsonl")
    finally:
        partial.unlink(missing_ok=True)


def _lines(data: Any, name: str) -> Iterator[bytes]:
    for number, row in enumerate(_rows(data, name)):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{name}: row {number}: expected a dictionary, got {type(row).__name__}")
        try:
            text = json.dumps(dict(row), default=_json_value, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as err:
            raise ConfigError(f"{name}: row {number} is not JSON: {err}; convert its values first") from None
        yield text.encode("utf-8", "surrogatepass") + b"\n"


def _rows(data: Any, name: str) -> Iterable[Any]:
    if callable(getattr(data, "iterrows", None)):  # pandas, whose iterator yields the names of columns
        return data.to_dict("records")
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise ConfigError(f"{name}: expected a path or an iterable of dictionaries, got {type(data).__name__}")
    return data


def _json_value(value: Any) -> Any:
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")
