"""The figures of a step that panel and report show, and the reasons for which groups are dropped."""

from __future__ import annotations

from docs.generate import table
from penstock.console.report.diagnoses import MEANINGS
from penstock.console.report.learning import _NESTED, LABELS


def text() -> str:
    figures: list[tuple[object, ...]] = [(f"`{_key(name)}`", label) for name, label in LABELS.items()]
    reasons: list[tuple[object, ...]] = [(f"`{name}`", meaning) for name, meaning in MEANINGS.items()]
    return (
        "## Figures of a step\n\n"
        + table("key in `metrics.jsonl`", "is", rows=figures)
        + "\n## Why a group is dropped\n\n"
        + table("reason", "means", rows=reasons)
    )


def _key(name: str) -> str:
    return ".".join(_NESTED.get(name, (name,)))
