"""The report of an import, as text: what needs a decision first."""

from __future__ import annotations

import json
from typing import Any

from penstock.deploy.config_import.translation import Kind, Translation

_TITLES: dict[Kind, str] = {
    "decide": "needs a decision",
    "unknown": "unknown",
    "silent": "not in the file: what its system does then, and the run file does not (it has them as comments)",
    "translated": "translated",
    "taken": "taken",
    "ignored": "ignored",
}


def as_text(done: Translation) -> str:
    """Return one line for each key, by what became of it."""
    blocks = []
    for kind, title in _TITLES.items():
        lines = [line for line in done.lines if line.kind == kind]
        if lines:
            rows = [f"  {_written(line.key, line.value)}  →  {line.text}" for line in lines]
            blocks.append("\n".join([f"{title} ({len(lines)})", *rows]))
    return "\n\n".join(blocks) + "\n" if blocks else "no key was found\n"


def as_document(done: Translation) -> dict[str, Any]:
    """Return the settings and the report as plain JSON values."""
    return {
        "system": done.system,
        "settings": done.settings,
        "needs_decision": done.needs_decision,
        "keys": [{"kind": one.kind, "key": one.key, "value": one.value, "text": one.text} for one in done.lines],
    }


def _written(key: str, value: Any) -> str:
    if value in ("", None):
        return key
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"{key}={text if len(text) <= 60 else text[:57] + '...'}"
