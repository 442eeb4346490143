"""The result of an import: settings, and one line of the report for each key of the file; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["taken", "translated", "ignored", "decide", "unknown", "silent"]


@dataclass(frozen=True, slots=True)
class Line:
    kind: Kind
    key: str
    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass(slots=True)
class Translation:
    system: str
    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    offered: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Settings that the run file holds as comments: the value, and why someone might want it."""

    @property
    def needs_decision(self) -> bool:
        return any(line.kind in ("decide", "unknown") for line in self.lines)


def set_to(text: str = "", /, **settings: Any) -> Outcome:
    return Outcome("translated", {key.replace("__", "."): value for key, value in settings.items()}, text)


def ignored(text: str) -> Outcome:
    return Outcome("ignored", text=text)


def decide(text: str) -> Outcome:
    return Outcome("decide", text=text)


_TITLES: dict[Kind, str] = {
    "decide": "needs a decision",
    "unknown": "unknown",
    "silent": "not in the file: what its system does then, and the run file does not (it has them as comments)",
    "translated": "translated",
    "taken": "taken",
    "ignored": "ignored",
}


def as_text(done: Translation) -> str:
    blocks = []
    for kind, title in _TITLES.items():
        lines = [line for line in done.lines if line.kind == kind]
        if lines:
            rows = [f"  {_written(line.key, line.value)}  →  {line.text}" for line in lines]
            blocks.append("\n".join([f"{title} ({len(lines)})", *rows]))
    return "\n\n".join(blocks) + "\n" if blocks else "no key was found\n"


def as_document(done: Translation) -> dict[str, Any]:
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
