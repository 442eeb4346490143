"""YAML and JSON files → keys; hydra's references to other keys of the file are resolved."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from penstock.deploy.config_import.found import Found, marked
from penstock.protocol.config.sources import leaves
from penstock.protocol.errors import ConfigError

_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # YAML 1.1 reads 1e-6 as a text
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MAX_ROUNDS = 20  # references to references


def read_json(name: str, text: str) -> Found:
    """Read a JSON object; raises ConfigError."""
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
    """Return a value in which every ${other.key} is the value of that key."""
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
