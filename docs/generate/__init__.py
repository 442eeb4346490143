"""Text of the reference pages, written from the code: one module for each ``<!-- generated: NAME -->`` of a page.

A module ``docs/generate/NAME.py`` has a function ``text()`` that returns Markdown. To add a reference, add a module and a
page with its mark. ``python -m docs.generate NAME`` prints one.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

NAMES = tuple(sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py")))


def text(name: str) -> str:
    """Return the Markdown of one reference; raises ValueError for a name without a module."""
    if name not in NAMES:
        raise ValueError(f"no docs/generate/{name}.py; there are {', '.join(NAMES)}")
    return import_module(f"docs.generate.{name}").text()


def cell(value: object) -> str:
    """Return a text as the content of one table cell."""
    return str(value).replace("|", "\\|").replace("\n", " ").replace("<", "\\<").strip()


def table(*header: str, rows: list[tuple[object, ...]]) -> str:
    """Return a Markdown table; cells are escaped."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(cell(value) for value in row)} |" for row in rows]
    return "\n".join(lines) + "\n"
