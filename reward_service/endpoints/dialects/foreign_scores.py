"""Read the responses of other libraries' endpoints as scores: numbers, null, objects that hold numbers. Pure.

Libraries whose reward is a Python function let it return a number, a bool, or a dict with a number and
details. As JSON these are the shapes below; every error names the place in the response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from penstock.reward_service.endpoints.dialects.dialect import BadAnswer
from penstock.reward_service.endpoints.wire import MAX_PARTS, GroupToScore, Score
from penstock.serving import strict_json

_MAX_PART_NAME = 64


def parse(answer: bytes) -> JsonValue:
    try:
        return strict_json.loads(answer, strict_json.MAX_DEPTH)
    except strict_json.AmbiguousJson as err:
        raise BadAnswer(f"answers with a body that cannot be read: {err}") from None


def number(value: object, where: str) -> float:
    if not isinstance(value, int | float):
        raise BadAnswer(f"answers {_kind(value)} at {where}, expected a number")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        raise BadAnswer(f"answers a number at {where} that is not finite, or too large")
    return score


def score_of(value: object, where: str, *, key: str = "score") -> Score:
    """Return the score from a number, null, or an object with a number under ``key`` whose other numbers are parts.

    Null means "not scored". Raises BadAnswer for anything else.
    """
    if value is None:
        return Score(error=f"answers {where} = null: the endpoint did not score this completion")
    if not isinstance(value, Mapping):
        return Score(score=number(value, where))
    if key not in value:
        raise BadAnswer(f"answers an object without {key!r} at {where}; it has {len(value)} other keys")
    if value[key] is None:
        return Score(error=f"answers {where}.{key} = null: the endpoint did not score this completion")
    return Score(score=number(value[key], f"{where}.{key}"), parts=parts_of(value, where, without=key))


def parts_of(value: Mapping[str, Any], where: str, *, without: str = "") -> dict[str, float]:
    """Return the numbers of an object as parts, at most the first `MAX_PARTS`; texts and lists are ignored.

    Raises BadAnswer for a number that is not finite.
    """
    named = [(name, item) for name, item in value.items() if name and name != without and isinstance(item, int | float)]
    return {name[:_MAX_PART_NAME]: number(item, f"{where}.{name}") for name, item in named[:MAX_PARTS]}


def list_of(value: object, size: int, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise BadAnswer(f"answers {_kind(value)} at {where}, expected a list")
    if len(value) != size:
        raise BadAnswer(f"answers {len(value)} values at {where} for {size} completions")
    return value


def cut(scores: Sequence[Score], groups: Sequence[GroupToScore]) -> list[list[Score]]:
    """Split the scores of all completions, in order, by group."""
    rest = iter(scores)
    return [[next(rest) for _ in group.completions] for group in groups]


def _kind(value: object) -> str:
    """Name the JSON type of a value without its content."""
    names: dict[type, str] = {
        str: "a text", bool: "true or false", type(None): "null", dict: "an object", list: "a list",
    }  # fmt: skip
    return names.get(type(value), "a number")
