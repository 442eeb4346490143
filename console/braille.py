"""Draw a curve with braille characters, each two columns and four rows of dots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column][row from the top]


def curve(values: Sequence[float], *, width: int, height: int, low: float, high: float) -> list[str]:
    """Draw values from left to right over the whole width, as ``height`` lines of ``width`` characters.

    More values than columns are averaged, fewer are joined by straight lines. Values outside
    ``[low, high]`` are drawn at the border. No value gives blank lines.
    """
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for column, value in enumerate(_resample(values, columns)):
        share = (value - low) / (high - low) if high > low else 0.5
        row = round((1.0 - min(max(share, 0.0), 1.0)) * (rows - 1))
        for dot in _between(previous, row):
            cells[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        previous = row
    return ["".join(chr(_BLANK + cell) for cell in line) for line in cells]


def _between(previous: int | None, row: int) -> range:
    """Return the rows to set so that a steep curve stays connected."""
    if previous is None or abs(previous - row) <= 1:
        return range(row, row + 1)
    return range(previous + 1, row + 1) if row > previous else range(row, previous)


def _resample(values: Sequence[float], columns: int) -> list[float]:
    if not values:
        return []
    if len(values) >= columns:
        edges = [i * len(values) // columns for i in range(columns + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if len(values) == 1:
        return [values[0]]
    found = []
    for column in range(columns):
        position = column * (len(values) - 1) / (columns - 1)
        left = min(int(position), len(values) - 2)
        found.append(values[left] + (values[left + 1] - values[left]) * (position - left))
    return found
