"""The figures of a run by step, as arrays."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import PenstockError

Array = npt.NDArray[Any]

_WHOLE = ("step", "version")
_TEXTS = ("split", "name")  # of evaluations: which held-out rows


class Metrics(dict[str, Array]):
    """One array for each figure, all of the same length, one element for each step; nan where a step has no such figure.

    ``step`` and ``version`` are whole numbers. A figure inside a table has a dotted name: ``groups.trained``. Evaluations
    have one element for each step and held-out source, whose ``split`` and ``name`` are arrays of texts.
    """

    def __init__(self, columns: Mapping[str, Array]) -> None:
        super().__init__(columns)

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with ``step`` as its index; raises PenstockError when pandas is not installed."""
        try:
            pandas = importlib.import_module("pandas")  # not a dependency
        except ImportError:
            raise PenstockError("pandas is not installed; install it: pip install pandas") from None
        frame = pandas.DataFrame(dict(self))
        return frame.set_index("step") if "step" in frame else frame


def metrics_of_rows(rows: Iterable[Mapping[str, Any]]) -> Metrics:
    """Return the figures of rows of `metrics.jsonl`, by step; of two rows of one step and split the later one counts."""
    latest: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        texts = tuple(str(row.get(name) or "") for name in _TEXTS)
        latest[row.get("step"), *texts] = dict(_figures(row))
    places = sorted(latest, key=lambda place: latest[place].get("step", 0.0))
    kept = [latest[place] for place in places]
    names = {"step": None} | {name: None for row in kept for name in row}
    columns = Metrics({name: np.array([row.get(name, np.nan) for row in kept], dtype=np.float64) for name in names})
    for name in _WHOLE:
        if name in columns and np.isfinite(columns[name]).all():
            columns[name] = columns[name].astype(np.int64)
    for number, name in enumerate(_TEXTS, 1):
        if any(place[number] for place in places):
            columns[name] = np.array([place[number] for place in places])
    return columns


def _figures(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", _float(value)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond the largest float
        return float("nan")
