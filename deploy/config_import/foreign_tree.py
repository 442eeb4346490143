"""The keys that a file of another system has, and how those of YAML and JSON are read: after Hydra's ``defaults`` and references ``${…}`` are resolved."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from penstock.protocol.config.sources import leaves
from penstock.protocol.errors import ConfigError

UNASSIGNED = "\ue001"  # stands around the name of a variable that the file does not assign
OUTSIDE = {"HOME": str(Path.home()), "PWD": "."}  # variables of the environment that are the same here
_MAX_CHARS = 1024**2  # that variables and references become
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # YAML 1.1 reads 1e-6 as a text
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MAX_DEFAULTS = 128  # files that a configuration of Hydra and those in its defaults name
_MAX_ROUNDS = 20  # references to references
_MAX_VALUES = 100_000  # of a YAML file, those of an alias counted at each use


@dataclass(slots=True)
class Found:
    """The keys of a file, dotted and spelt with underscores, and the words of the commands in it."""

    values: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    variables: set[str] = field(
        default_factory=set
    )  # keys, and tables with a dot at their end, that other keys refer to
    inherited: set[str] = field(default_factory=set)  # keys of the files that it names, and not of itself

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


def readable(value: Any) -> Any:
    if isinstance(value, list):
        return [readable(item) for item in value]
    if not isinstance(value, str):
        return value
    parts = value.split(UNASSIGNED)
    parts[1::2] = [name if name.startswith("$") else f"${{{name}}}" for name in parts[1::2]]
    return "".join(parts)


class Budget:
    """The characters that variables and references of a file may still become."""

    _left = _MAX_CHARS

    def take(self, text: str, times: int = 1) -> str:
        self._left -= len(text) * times
        if self._left < 0:
            raise ValueError(f"its variables become more than {_MAX_CHARS} characters")
        return text


def read_json(name: str, text: str) -> Found:
    try:
        return _flat(name, json.loads(text))
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{name}: not valid JSON: {err}") from None


def read_yaml(name: str, text: str, beside: Callable[[str], str | None] = lambda _: None) -> Found:
    """Read a YAML mapping with the safe loader, which builds plain values only; raises ConfigError.

    ``beside`` returns the text of another file by its name in Hydra's ``defaults``, relative to this one; None: it is not there, and stays in them.
    """
    try:
        content = _loaded(text)
        composed = _flat(name, _with_defaults(content, beside, []))
    except (yaml.YAMLError, RecursionError, ValueError, AttributeError, TypeError, LookupError) as err:  # !!timestamp x
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(err).split())}") from None
    own = {".".join(map(str, path)).replace("-", "_") for path, _ in leaves(content)}
    composed.inherited = {
        key for key in composed.values if not any(key[: dot.start()] in own for dot in re.finditer(r"\.|$", key))
    }
    return composed


def _with_defaults(
    content: Any, beside: Callable[[str], str | None], read: list[str], within: tuple[str, ...] = ()
) -> Any:
    """Compose a configuration with the files of Hydra's ``defaults``, and theirs, in their order, as Hydra 1.1 does; ``_self_`` is last.

    ``read``: files so far; ``within``: those that name one another down to this one. What is not read stays in ``defaults``.
    """
    listed = content.get("defaults") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        return content
    composed: dict[str, Any] = {}
    missing = []
    for item in listed if "_self_" in listed else [*listed, "_self_"]:
        if item == "_self_":
            composed = _merged(composed, {key: value for key, value in content.items() if key != "defaults"})
            continue
        path, package = _named(item)
        file = posixpath.join(posixpath.dirname(within[-1]) if within else "", f"{path}.yaml")
        text = beside(file) if path and file not in within and len(read) < _MAX_DEFAULTS else None
        if text is None:
            missing.append(item)
            continue
        read.append(file)
        part = _with_defaults(_loaded(text), beside, read, (*within, file)) or {}
        if not isinstance(part, dict):
            raise ConfigError(f"{file} of its defaults: expected keys with values, got {type(part).__name__}")
        for name in reversed(package):
            part = {name: part}
        composed = _merged(composed, part)
    return _merged({"defaults": missing} if missing else {}, composed)


def _named(item: Any) -> tuple[str, list[str]]:
    """Return the path without ``.yaml``, and the package, of FOLDER/FILE@PACKAGE or {FOLDER@PACKAGE: FILE}; else an empty path."""
    if isinstance(item, dict) and len(item) == 1:
        [(folder, name)] = item.items()
        folder, _, package = str(folder).removeprefix("optional ").partition("@")
        path = f"{folder}/{name}" if isinstance(name, str) else ""
    else:
        path, _, package = item.partition("@") if isinstance(item, str) else ("", "", "")
        folder = posixpath.dirname(path)
    if not package and ".." not in folder.split("/"):
        package = folder.replace("/", ".")
    return path.removesuffix(".yaml"), [] if package in ("", "_here_", "_global_") else package.split(".")


def _merged(lower: Any, upper: Any) -> Any:
    if not (isinstance(lower, dict) and isinstance(upper, dict)):
        return upper
    return lower | {key: _merged(lower[key], value) if key in lower else value for key, value in upper.items()}


def _loaded(text: str) -> Any:
    """Return what a YAML text holds; raises ValueError where there or by aliases are more than `_MAX_VALUES` values, or one holds itself."""
    if text.count(",") + text.count("\n") > _MAX_VALUES:  # each takes 50 µs to read
        raise ValueError(f"it has more than {_MAX_VALUES} values")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is not None and _expanded(node, {}) > _MAX_VALUES:
            raise ValueError(f"its aliases repeat more than {_MAX_VALUES} values")
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _expanded(node: yaml.Node, sizes: dict[int, int]) -> int:
    if id(node) not in sizes:
        sizes[id(node)] = _MAX_VALUES + 1  # while it is counted: what holds itself has no end
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        sizes[id(node)] = 1 if isinstance(node, yaml.ScalarNode) else 1 + sum(_expanded(part, sizes) for part in parts)
    return sizes[id(node)]


def _flat(name: str, content: Any) -> Found:
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: expected keys with values, got {type(content).__name__}")
    foreign_config = Found()
    for path, value in leaves(content):
        foreign_config.add(".".join(map(str, path)), value)
    budget = Budget()
    try:
        foreign_config.values = raw = _with_tables(foreign_config)
        foreign_config.values = dict(raw)
        foreign_config.values.update({key: _resolved(value, key, raw, budget) for key, value in raw.items()})
    except ValueError as err:
        raise ConfigError(f"{name}: {err}") from None
    return foreign_config


def _with_tables(found: Found) -> dict[str, Any]:
    """Put the keys of a table in the place of ``${its.name}``, but not within itself; raises ValueError above `_MAX_VALUES`."""
    values = found.values
    for _ in range(_MAX_ROUNDS):
        tables: dict[str, str] = {}
        for key, value in values.items():
            names = (
                [one.strip().replace("-", "_") for one in _REFERENCE.findall(value)] if isinstance(value, str) else []
            )
            found.variables |= {*names, *(f"{name}." for name in names)}
            if names and _REFERENCE.fullmatch(value) and not f"{key}.".startswith(f"{names[0]}."):
                tables[key] = names[0]
        parts: dict[str, list[tuple[str, Any]]] = {name: [] for name in tables.values()}
        for key, value in values.items():
            for dot in re.finditer(r"\.", key):
                if key[: dot.start()] in parts:
                    parts[key[: dot.start()]].append((key[dot.start() :], value))
        expanded: dict[str, Any] = {}
        for key, value in values.items():
            expanded |= {key + rest: part for rest, part in parts.get(tables.get(key, "\0"), ())} or {key: value}
            if len(expanded) > _MAX_VALUES:
                raise ValueError(f"its references repeat more than {_MAX_VALUES} values")
        if expanded == values:
            break
        values = expanded
    return values


def _resolved(value: Any, key: str, values: dict[str, Any], budget: Budget) -> Any:
    if isinstance(value, list):
        return [_resolved(item, key, values, budget) for item in value]
    for _ in range(_MAX_ROUNDS):
        if not isinstance(value, str) or not (reference := _REFERENCE.search(value)):
            break
        inner = _looked_up(reference[1].strip(), key, values)
        text = budget.take(str(inner), value.count(reference[0]))
        value = inner if reference[0] == value else value.replace(reference[0], text)
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
    spelt = name.replace("-", "_")
    if name in OUTSIDE and spelt not in values:
        return OUTSIDE[name]
    return values[spelt] if spelt in values else marked(name) if default is None else default
