"""``{{ item.answer }}`` and ``{{ sample.output_text }}``: the variables of a grader's texts; pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_VARIABLE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
_PATH = re.compile(r"(item|sample)((?:\.[A-Za-z_][A-Za-z0-9_-]*|\[\d+\])+)")
_STEP = re.compile(r"\.([A-Za-z_][A-Za-z0-9_-]*)|\[(\d+)\]")
_SAMPLE = ("output_text", "output_json")
_NO_VALUE = object()


class NoSuchVariable(Exception):
    """The row lacks a column that the grader uses."""


class SampleUnfit(Exception):
    """The answer is not JSON, or lacks a key that the grader reads; caused by the policy."""


def check(text: str) -> None:
    """Raise ValueError for a variable that cannot exist in any row."""
    for name in _VARIABLE.findall(text):
        path = _PATH.fullmatch(name)
        if path is None:
            raise ValueError(
                f"{{{{{name}}}}} is not a variable; write item.COLUMN, sample.output_text or sample.output_json.KEY"
            )
        first = _STEP.match(path.group(2))
        if path.group(1) == "sample" and (first is None or first.group(1) not in _SAMPLE):
            raise ValueError(f"{{{{{name}}}}}: a sample has {' and '.join(_SAMPLE)} here")


def fill(text: str, item: Mapping[str, Any], answer: str) -> str:
    """Return a text with its variables replaced; values that are not texts are inserted as JSON.

    Raises NoSuchVariable and SampleUnfit.
    """
    return _VARIABLE.sub(lambda found: _text(_value(found.group(1), item, answer)), text)


def _value(name: str, item: Mapping[str, Any], answer: str) -> Any:
    space, _, _ = name.partition(".")
    steps = [key or int(index) for key, index in _STEP.findall(name.removeprefix(space))]
    if space == "item":
        value = _follow(item, steps)
        if value is _NO_VALUE:
            raise NoSuchVariable(f"the row has no {name}; its columns are {', '.join(item)[:200]}")
        return value
    if steps[0] == "output_text":
        return answer
    try:
        value = _follow(json.loads(answer), steps[1:])
    except (ValueError, RecursionError):
        raise SampleUnfit("the answer is not JSON") from None
    if value is _NO_VALUE:
        raise SampleUnfit(f"the answer has no {name}")
    return value


def _follow(value: Any, steps: list[str | int]) -> Any:
    for step in steps:
        if isinstance(step, int):
            if not isinstance(value, list) or step >= len(value):
                return _NO_VALUE
        elif not isinstance(value, Mapping) or step not in value:
            return _NO_VALUE
        value = value[step]  # type: ignore[index]
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
