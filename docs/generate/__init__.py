"""Text of the reference pages, written from the code for each ``<!-- generated: NAME -->`` of a page.

A short one is the function of that name in ``tables.py``, a longer one the function ``text()`` of ``docs/generate/NAME.py``; each
returns Markdown. To add a reference, add one of the two, its name here, and a page with its mark. ``python -m docs.generate
NAME`` prints one.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

_TABLES = ("alerts", "data_forms", "errors", "facts", "metrics", "prometheus")
NAMES = (*_TABLES, "commands", "diagnoses", "http_apis", "settings")


def text(name: str) -> str:
    """Return the Markdown of one reference; raises ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"no generated reference {name}; there are {', '.join(NAMES)}")
    if name in _TABLES:
        return getattr(import_module("docs.generate.tables"), name)()
    return import_module(f"docs.generate.{name}").text()


def cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ").replace("<", "\\<").strip()


def table(*header: str, rows: Sequence[tuple[object, ...]]) -> str:
    """Return a Markdown table; cells are escaped."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(cell(value) for value in row)} |" for row in rows]
    return "\n".join(lines) + "\n"
