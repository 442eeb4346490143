"""The settings of a call as the keys of a run file: nested dictionaries and dotted names become one table; pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.protocol.config.run_file import toml_key, toml_text
from penstock.protocol.config.sources import put
from penstock.protocol.errors import ConfigError

Values = dict[tuple[str, ...], Any]

DATA = frozenset(
    {("data", "train"), ("data", "eval"), *((verb, key) for verb in ("sft", "dpo") for key in ("data", "eval_data"))}
)
REWARD = ("reward", "name")
MODEL = ("model", "path")

_HEAD = "# Written by penstock.Client. To continue this run: {command}\n"


def flat(settings: Mapping[str, Any]) -> Values:
    """Return every value with its key path: ``{"trainer": {"lr": 1e-6}}`` and ``{"trainer.lr": 1e-6}`` are the same.

    Rows of data and a reward stay as they are. Raises ConfigError for a key that is set twice and for a value that no run
    file can have.
    """
    flat_values: Values = {}
    for path, value in _leaves(settings):
        if path in flat_values:
            raise ConfigError(
                f"{'.'.join(path)} is given twice: once nested and once as a dotted name; keep one of them"
            )
        flat_values[path] = value if path in DATA or path == REWARD else _plain(path, value)
    return flat_values


def section(name: str, value: Any, main_key: str) -> Values:
    """Return the values of an argument that is either a section of the run file or the value of its main key.

    ``algorithm="grpo"`` and ``algorithm={"name": "grpo", "clip_low": 0.1}`` are both accepted.
    """
    if isinstance(value, Mapping):
        return flat({name: value})
    return flat({name: {main_key: value}})


def merged(*parts: Values) -> Values:
    merged_values: Values = {}
    for part in parts:
        if twice := sorted(merged_values.keys() & part.keys()):
            raise ConfigError(f"{'.'.join(twice[0])} is given twice: as an argument and as a setting; keep one of them")
        merged_values |= part
    return merged_values


def nested(values: Values) -> dict[str, Any]:
    """Return the values as sections, as the Runs API takes them."""
    sections: dict[str, Any] = {}
    for path, value in values.items():
        put(sections, path, value)
    return sections


def overrides(values: Values) -> list[str]:
    return [f"{toml_key(path)}={toml_text(value)}" for path, value in values.items()]


def run_file_text(values: Values, command: str) -> str:
    """Return the run file; ``command`` is the shell command that continues the run."""
    return _HEAD.format(command=command) + "".join(
        f"{toml_key(path)} = {toml_text(value)}\n" for path, value in values.items()
    )


def _leaves(value: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, item in value.items():
        if not isinstance(name, str) or not all(name.split(".")):
            raise ConfigError(f"setting {name!r}: expected a name such as 'trainer.lr'")
        path = (*prefix, *name.split("."))
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, path)
        else:
            yield path, item


def _plain(path: tuple[str, ...], value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [_plain(path, element) for element in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(path, element) for name, element in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 1) == 0:  # a number of numpy or torch
        return value.item()
    raise ConfigError(
        f"{'.'.join(path)}: expected a number, a text, True, False, None, a list or a dictionary, got {type(value).__name__}"
    )
