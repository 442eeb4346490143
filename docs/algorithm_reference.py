"""`python -m docs.algorithm_reference [--check] [PAGE]`: the tables of docs/algorithms.md.

Writes the tables of all built-in losses, estimators, filters, corrections and their options between the markers of the
page; with ``--check`` writes nothing and exits with 1 when the page is not up to date.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from penstock.protocol.extensions import Registry
from penstock.trainer.algorithm.chosen_parts import (
    ALL,
    CORRECTIONS,
    ESTIMATORS,
    FILTERS,
    GROUP_FILTERS,
    LOSSES,
    option_fields,
)

START = "<!-- made by python -m docs.algorithm_reference; edit the files of the parts instead -->"
_SHAPE = re.compile(r", \[[A-Z]\](?: bool)?")  # of a result; of no use in a table
END = "<!-- end of what is made -->"
PAGE = Path("docs/algorithms.md")


def with_reference(page: str) -> str:
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"the page has no {START!r} with {END!r} after it; put the two lines where the tables go")
    return f"{before}{START}\n\n{reference()}\n{END}{after}"


def reference() -> str:
    chosen = {
        LOSSES: "loss", ESTIMATORS: "advantage", FILTERS: "filters", GROUP_FILTERS: "group_filters",
        CORRECTIONS: "corrections",
    }  # fmt: skip
    tables = [_parts(registry, key) for registry, key in chosen.items()]
    return "\n".join([*tables, _options()])


def _parts(registry: Registry[Any], key: str) -> str:
    has_switches = any(hasattr(part, "switch") for part in registry.built_in.values())
    rows = [
        (
            f"`{name}`",
            _SHAPE.sub("", part.summary),
            part.source,
            *([f"`{part.switch}`" if part.switch else f"`{key}`"] if has_switches else []),
        )
        for name, part in registry.built_in.items()
    ]
    title = (f"`{key}`", "what it does", "source", *(["turned on by"] if has_switches else []))
    return _table(title, rows)


def _options() -> str:
    readers: dict[str, list[str]] = {}
    for registry in ALL:
        for part in registry.built_in.values():
            for option in part.option_names:
                readers.setdefault(option, []).append(f"`{part.name}`")
    rows = [
        (f"`{name}`", f"{info.description} {_values(info)}", ", ".join(readers[name]))
        for name, info in sorted(option_fields().items())
    ]
    return _table(("setting", "what it is", "read by"), rows)


def _values(info: FieldInfo) -> str:
    default = f"Default {_written(info.default)}"
    choices = [_written(choice) for choice in _choices(info.annotation)]
    return f"{default}, of {', '.join(choices)}." if choices else f"{default}."


def _choices(annotation: Any) -> Iterable[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _choices(member)


def _written(value: Any) -> str:
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`"


def _table(title: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [title, ["---"] * len(title), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def main(arguments: Sequence[str]) -> int:
    names = [argument for argument in arguments if argument != "--check"]
    page = Path(names[0]) if names else PAGE
    old = page.read_text()
    new = with_reference(old)
    if "--check" not in arguments:
        page.write_text(new)
        return 0
    missing = [line for line in new.splitlines() if line not in old.splitlines()]
    if new != old:
        command = "python -m docs.algorithm_reference"
        sys.stderr.write("\n".join([f"{page} is not up to date; run {command}", *missing]) + "\n")
    return int(new != old)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
