"""The result of an import: settings, and one line of the report for each key of the file; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["taken", "translated", "ignored", "decide", "unknown", "silent"]


@dataclass(frozen=True, slots=True)
class Line:
    """One key of the file, and what became of it."""

    kind: Kind
    key: str
    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule makes of a key: the settings, or why there are none."""

    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass(slots=True)
class Translation:
    """The settings of the run file by dotted key, and the report."""

    system: str
    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    offered: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Settings that the run file holds as comments: the value, and why someone might want it."""

    @property
    def needs_decision(self) -> bool:
        """Whether a person has to look at a key before the run is what the file describes."""
        return any(line.kind in ("decide", "unknown") for line in self.lines)


def set_to(text: str = "", /, **settings: Any) -> Outcome:
    """Return an outcome that sets ``section__key`` to values."""
    return Outcome("translated", {key.replace("__", "."): value for key, value in settings.items()}, text)


def ignored(text: str) -> Outcome:
    """Return the outcome of a key that needs no setting here."""
    return Outcome("ignored", text=text)


def decide(text: str) -> Outcome:
    """Return the outcome of a key whose setting cannot be derived from the file."""
    return Outcome("decide", text=text)
