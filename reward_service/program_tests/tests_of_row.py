"""Read a row's tests of a program from the formats of the usual data sets.

- stdin tests: ``{"inputs": [...], "outputs": [...]}`` (APPS, TACO, verl), or a list of ``{"input", "output"}``
  (LiveCodeBench, CodeContests).
- function tests: the same with ``fn_name`` (or ``func_name``); an input is a list of arguments, or a text with one
  JSON argument per line.
- test code: a text, a list of texts, ``{"test", "entry_point"}`` (HumanEval), ``{"test_list", "test_setup_code"}``
  (MBPP, also ``test_imports``).

Any of them may be a JSON text. What the ground truth leaves out is taken from the row's other columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.reward_service.errors import BadGroundTruth

LANGUAGES = ("python", "python3", "py")
_FUNCTION_NAMES = ("fn_name", "func_name")
_SETUPS = ("setup", "test_setup_code", "test_imports")
_COLUMNS = (*_FUNCTION_NAMES, *_SETUPS, "entry_point", "language", "test", "test_list", "inputs", "outputs")


@dataclass(frozen=True, slots=True)
class StdinTests:
    """Each input goes to a new process of the program, whose output is compared."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FunctionTests:
    """Each list of arguments is passed to ``function``, whose JSON result is compared."""

    function: str
    arguments: tuple[list[Any], ...]
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Assertions:
    """Python code that calls the program and asserts; ``entry_points`` are the program's names it uses."""

    pieces: tuple[str, ...]
    setup: str = ""
    entry_points: tuple[str, ...] = ()


Tests = StdinTests | FunctionTests | Assertions


def read(truth: Any, extra: Any) -> Tests:
    """Return a row's tests; raises BadGroundTruth when there are none, or in another language."""
    fields = _fields(_parsed(truth), extra if isinstance(extra, Mapping) else {})
    language = fields.get("language") or LANGUAGES[0]
    if str(language).lower() not in LANGUAGES:
        raise BadGroundTruth(f"code runs only Python programs, the row's language is {language!r}")
    code = fields.get("test") or fields.get("test_list")
    if code:
        pieces = (code,) if isinstance(code, str) else tuple(code)
        setup = "\n".join(_text(fields.get(name)) for name in _SETUPS if fields.get(name))
        named = fields.get("entry_point") or ()
        return Assertions(_texts(pieces), setup, (named,) if isinstance(named, str) else tuple(named))
    inputs, outputs = fields.get("inputs"), fields.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise BadGroundTruth(
            "code needs tests: {inputs, outputs} of equal length, {test, entry_point} or {test_list}; the row's "
            f"ground_truth is {str(truth)[:120]!r}"
        )
    function = next((fields[name] for name in _FUNCTION_NAMES if fields.get(name)), None)
    if function is None:
        printed = _texts(map(_lines, outputs))
        if not any(text.strip() for text in printed):
            raise BadGroundTruth("code: every expected output is empty, so that an empty program passes all tests")
        return StdinTests(_texts(map(_lines, inputs)), printed)
    results = tuple(map(_result, outputs))
    if all(result is None or result == [None] for result in results):
        raise BadGroundTruth("code: every expected result is null, so that a function that returns nothing passes")
    return FunctionTests(function, tuple(map(_arguments, inputs)), results)


def fields_of(truth: Any, extra: Any, *, extra_columns: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a row says about its tests, by the column's name; never raises."""
    columns = extra if isinstance(extra, Mapping) else {}
    try:
        fields = _fields(_parsed(truth), columns)
    except BadGroundTruth:
        fields = {}
    return {name: columns[name] for name in extra_columns if columns.get(name) is not None} | fields


def _parsed(truth: Any) -> Any:
    if isinstance(truth, str):
        try:
            return json.loads(truth)
        except (ValueError, RecursionError):
            return truth
    return truth


def _fields(truth: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: extra[name] for name in _COLUMNS if extra.get(name) is not None}
    if isinstance(truth, Mapping):
        fields |= {str(name): value for name, value in truth.items() if value is not None}
    elif isinstance(truth, str) and truth.strip():
        fields["test"] = truth
    elif isinstance(truth, list) and truth and all(isinstance(piece, str) for piece in truth):
        fields["test_list"] = truth
    elif isinstance(truth, list) and truth and all(isinstance(case, Mapping) for case in truth):
        if not all("input" in case and "output" in case for case in truth):
            raise BadGroundTruth("code: every test of the row's list needs input and output")
        fields |= {"inputs": [case["input"] for case in truth], "outputs": [case["output"] for case in truth]}
    return fields


def _texts(values: Any) -> tuple[str, ...]:
    values = tuple(values)
    if not values or not all(isinstance(value, str) for value in values):
        raise BadGroundTruth("code: tests must be texts")
    return values


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(value: Any) -> Any:
    """APPS keeps some inputs and outputs as lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else value


def _arguments(value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            return [json.loads(line) for line in value.split("\n") if line.strip()]
        except ValueError:
            raise BadGroundTruth(f"code: arguments must be one JSON value per line, got {value[:80]!r}") from None
    if not isinstance(value, list):
        raise BadGroundTruth(f"code: an input of a function test must be a list of arguments, got {str(value)[:80]!r}")
    return value


def _result(value: Any) -> Any:
    """Return an expected result; a text is parsed as JSON if it is valid (LiveCodeBench)."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
