"""What a configuration file holds: keys with values, and what could not be read of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

UNASSIGNED = "\ue001"  # stands around the name of a variable that the file does not assign


@dataclass(slots=True)
class Found:
    """The keys of a file, dotted and spelt with underscores, and the words of the commands in it."""

    values: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    def add(self, key: str, value: Any) -> None:
        """Set a key; a later value replaces an earlier one. hydra's +key sets, ~key removes."""
        spelt = key.strip().lstrip("+").replace("-", "_")
        if spelt.startswith("~"):
            self.values.pop(spelt[1:], None)
            return
        spelt = spelt.lower() if spelt.isupper() else spelt
        self.values.pop(spelt, None)
        self.values[spelt] = value


def marked(name: str) -> str:
    """Return the text that stands for a variable without a value."""
    return f"{UNASSIGNED}{name}{UNASSIGNED}"


def unassigned(value: Any) -> list[str]:
    """Return the names of the variables in a value that the file does not assign."""
    return list(dict.fromkeys(_names(value)))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _names(item)
    elif isinstance(value, str):
        yield from value.split(UNASSIGNED)[1::2]


def _as_written(name: str) -> str:
    return name if name.startswith("$") else f"${{{name}}}"


def readable(value: Any) -> Any:
    """Return a value with its unassigned variables as a shell writes them."""
    if isinstance(value, list):
        return [readable(item) for item in value]
    if not isinstance(value, str):
        return value
    parts = value.split(UNASSIGNED)
    return "".join(_as_written(part) if number % 2 else part for number, part in enumerate(parts))
