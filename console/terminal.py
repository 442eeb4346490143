"""Print to a terminal: tables, durations, curves in braille characters, and texts of others, there and in Markdown."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.protocol.secret_values import scrub

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNBOUNDED = 100_000  # columns
_KEPT = frozenset("\n\t\u200c\u200d")  # the last two join letters of Persian and parts of emoji
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0e\U000e0000-\U000e0fff]"
)  # though letters or marks by their category
_MARKDOWN = re.compile(  # of "_" one within a word, of ":" and "." those that make an address a link
    r"[\\`*\[\]|&<~$]|(?<!\w)@|@(?=[\w-]+\.\w)|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=(?i:www))\."
)
_BLOCK = re.compile(
    r"\d{0,9}[.)](?=\s|$)|[#>=]|[-+](?=[\s-]|$)"
)  # at its beginning they make a text a heading, a quotation or a list
_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column][row from the top]


def console() -> Console:
    """Return a console for stdout; in a pipe or a file no cell is cut off."""
    from rich.console import Console  # noqa: PLC0415  not every process that formats a duration prints a table

    return Console() if sys.stdout.isatty() else Console(width=_UNBOUNDED)


def table(*columns: str, right: Collection[str] = (), wide: Collection[str] = ()) -> Table:
    """Return an empty table without lines: columns in ``right`` are right-aligned, and only those in ``wide`` are wrapped."""
    from rich.table import Table  # noqa: PLC0415  as for the console

    empty = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    for name in columns:
        justify, is_wide = "right" if name in right else "left", name in wide
        empty.add_column(name, justify=justify, no_wrap=not is_wide, overflow="fold" if is_wide else "ellipsis")
    return empty


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Collection[str] = (), wide: Collection[str] = ()
) -> None:
    """Print a table of `table`; every cell that is no Text of rich is shown as `one_line`."""
    from rich.text import Text  # noqa: PLC0415  as for the console

    shown = table(*columns, right=right, wide=wide)
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in row))
    console().print(shown)


def printable(text: object) -> str:
    """Return a text with control characters as their escapes: printed, they could change what a terminal shows.

    So are marks of direction, characters without a width, tag characters and U+2028. Line feeds and tabs are kept, except a carriage
    return, which would overwrite the line.
    """
    shown = str(text)
    if shown.isprintable() and not _INVISIBLE.search(shown):
        return shown
    return "".join(c if c in _KEPT or not _is_control(c) else c.encode("unicode_escape").decode() for c in shown)


def error_text(text: object) -> str:
    """Return a `printable` text without what is known as secret, for the error of a command: it may quote a file of others."""
    return printable(scrub(str(text)))


def one_line(text: object) -> str:
    """Return a `printable` text as one line: a line feed in a text of others would begin a line that looks like ours."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")


def indented(text: object, width: int) -> str:
    """Return a `printable` text of several lines, which begin at the column ``width`` from the second one on."""
    return printable(text).replace("\n", "\n" + " " * width)


def markdown(text: object) -> str:
    """Return a text as one line of Markdown that shows it: no link, image, markup, HTML, or further cell of a table."""
    shown = _MARKDOWN.sub(
        lambda match: {"&": "&amp;", "<": "&lt;"}.get(match[0], f"\\{match[0]}"), one_line(text).strip()
    )
    begins = _BLOCK.match(shown)
    return shown if begins is None else f"{shown[: begins.end() - 1]}\\{shown[begins.end() - 1 :]}"


def _is_control(letter: str) -> bool:
    return unicodedata.category(letter) in {"Cc", "Cf", "Cs", "Zl", "Zp"} or _INVISIBLE.match(letter) is not None


def clock(seconds: float) -> str:
    """Return seconds as ``m:ss``, or ``h:mm:ss`` from one hour."""
    whole = max(int(seconds), 0)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
    samples = []
    for column in range(columns):
        position = column * (len(values) - 1) / (columns - 1)
        left = min(int(position), len(values) - 2)
        samples.append(values[left] + (values[left + 1] - values[left]) * (position - left))
    return samples
