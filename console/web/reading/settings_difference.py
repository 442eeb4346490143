"""In which settings runs differ; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_VALUE = 500  # characters of one value
_MISSING = "(not set)"


def flat(settings: Any, prefix: str = "") -> dict[str, str]:
    """Return every setting as ``section.key`` and its value as JSON; a list is one value."""
    if isinstance(settings, Mapping) and settings:
        found: dict[str, str] = {}
        for key, value in settings.items():
            found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
        return found
    return {prefix: json.dumps(settings, ensure_ascii=False)[:MAX_VALUE]} if prefix else {}


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings in which runs differ, with the value of each run; ``configs`` are the documents by run."""
    values = {run: flat(config.get("settings", config)) for run, config in configs.items()}
    keys = sorted({key for one in values.values() for key in one})
    rows = [{"key": key, "values": [one.get(key, _MISSING) for one in values.values()]} for key in keys]
    differing = [row for row in rows if len(set(row["values"])) > 1]
    return {"runs": list(values), "differing": differing, "num_equal": len(rows) - len(differing)}
