"""Guess which columns hold the prompt and the ground truth, by the names that public data sets use; pure.

A guess is only ever shown, or written into a run file that people read: rows are read by what `data.map` says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_NAMES: Mapping[str, Sequence[str]] = {  # the likeliest first
    "prompt": (
        "problem", "question", "query", "user_prompt", "prompt_text", "input_text", "task", "user", "source", "text_input", "context",
    ),
    "ground_truth": (
        "final_answer", "expected_answer", "expected_output", "expected", "reference_answer", "gold", "gold_answer", "target", "answer",
        "label", "solution", "reference", "answers", "output",
    ),
}  # fmt: skip


def suggest(columns: Collection[str]) -> dict[str, str]:
    """Return the file's column for each of prompt and ground_truth that is missing and has a likely name."""
    found: dict[str, str] = {}
    by_name = {_plain(name): name for name in sorted(columns, reverse=True)}
    for column, names in _NAMES.items():
        if column not in columns and (likely := next((by_name[name] for name in names if name in by_name), None)):
            found[column] = likely
    return found


def as_setting(mapping: Mapping[str, str]) -> str:
    """Return the settings that read the columns, as a run file has them."""
    return " and ".join(f'data.map.{column} = "{name}"' for column, name in mapping.items())


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")
