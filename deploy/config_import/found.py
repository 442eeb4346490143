"""What a configuration file holds: keys with values, and what could not be read of them; files of YAML and JSON are read here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from penstock.protocol.config.sources import leaves
from penstock.protocol.errors import ConfigError

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


_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # YAML 1.1 reads 1e-6 as a text
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MAX_ROUNDS = 20  # references to references


def read_json(name: str, text: str) -> Found:
    try:
        return _flat(name, json.loads(text))
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{name}: not valid JSON: {err}") from None


def read_yaml(name: str, text: str) -> Found:
    """Read a YAML mapping with the safe loader, which builds plain values only; raises ConfigError."""
    try:
        return _flat(name, yaml.safe_load(text))
    except (yaml.YAMLError, RecursionError, ValueError) as err:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(err).split())}") from None


def _flat(name: str, content: Any) -> Found:
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: expected keys with values, got {type(content).__name__}")
    found = Found()
    for path, value in leaves(content):
        found.add(".".join(map(str, path)), value)
    raw = dict(found.values)
    for key, value in raw.items():
        found.values[key] = _resolved(value, key, raw)
    return found


def _resolved(value: Any, key: str, values: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_resolved(item, key, values) for item in value]
    for _ in range(_MAX_ROUNDS):
        if not isinstance(value, str) or not (reference := _REFERENCE.search(value)):
            break
        inner = _looked_up(reference[1].strip(), key, values)
        value = inner if reference[0] == value else value.replace(reference[0], str(inner))
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        return float(value)
    return value


def _looked_up(name: str, key: str, values: dict[str, Any]) -> Any:
    default: Any = None
    if name.startswith(("oc.select:", "oc.env:", "oc.decode:")):
        name, has_default, text = name.partition(":")[2].partition(",")
        default = text.strip().strip("\"'") if has_default else None
    if name.startswith("."):
        name = f"{key.rpartition('.')[0]}{name}".lstrip(".")
    found = values.get(name.replace("-", "_"), default)
    return marked(name) if found is None else found
