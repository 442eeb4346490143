"""Read a row's tests of a program from the formats of the usual data sets.

- stdin tests: ``{"inputs": [...], "outputs": [...]}`` (APPS, TACO, verl), or a list of ``{"input", "output"}``
  (LiveCodeBench, CodeContests).
- function tests: the same with ``fn_name`` (or ``func_name``); an input is a list of arguments, or a text with one
  JSON argument per line.
- test code: a text, a list of texts, ``{"test", "entry_point"}`` (HumanEval), ``{"test_list", "test_setup_code"}``
  (MBPP, also ``test_imports``).

Any of them may be a JSON text. What the ground truth leaves out is taken from the row's other columns.
Pure, as are the rules that find the program in a completion and compare outputs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import Any

from penstock.reward_service.errors import BadGroundTruth

LANGUAGES = ("python", "python3", "py")
_FUNCTION_NAMES = ("fn_name", "func_name")
_SETUPS = ("setup", "test_setup_code", "test_imports")
_COLUMNS = (*_FUNCTION_NAMES, *_SETUPS, "entry_point", "language", "test", "test_list", "inputs", "outputs")
MAX_PROGRAM_CHARS = 256 * 1024
_TOLERANCE = 1e-6  # relative and absolute
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
# Digits are ASCII: float() and \d also take those of other scripts. Bounded, because conversion is quadratic.
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,4})?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_EXACT_FLOATS = 1e9  # up to here the error of a float is far below the tolerance


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


def program(completion: str) -> str | None:
    """Return the last fenced block marked as Python, else the last without a language, else the whole text.

    None when there is no program: nothing but white space, only blocks in other languages, or too long a text.
    A block that is never closed reaches to the end.
    """
    blocks = _blocks(completion)
    if not blocks:
        found: str | None = completion
    else:
        python = [text for language, text in blocks if language in LANGUAGES]
        unnamed = [text for language, text in blocks if not language]
        found = next(iter([*python[-1:], *unnamed[-1:]]), None)
    return found if found is not None and found.strip() and len(found) <= MAX_PROGRAM_CHARS else None


def _blocks(text: str) -> list[tuple[str, str]]:
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1][0] == opened[1][0] and len(fence[1]) >= len(opened[1]) and not fence[2]:
            blocks.append((opened[2].lower(), text[opened.end() + 1 : fence.start()]))
            opened = None
    if opened is not None:
        blocks.append((opened[2].lower(), text[opened.end() + 1 :]))
    return blocks


def same_output(printed: str, expected: str) -> bool:
    """Compare outputs line by line and word by word, ignoring white space and empty lines at the end.

    Two words are equal as texts or as numbers: integers exactly, another number equals an expected integer within 1e-6
    and any other expected number within 1e-6, relative or absolute.
    """
    for ours, theirs in zip_longest(printed.rstrip().splitlines(), expected.rstrip().splitlines()):
        if ours is None or theirs is None:
            return False
        if ours.strip() == theirs.strip():
            continue
        mine, wanted = ours.split(), theirs.split()
        if len(mine) != len(wanted) or not all(_same_word(a, b) for a, b in zip(mine, wanted, strict=True)):
            return False
    return True


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(word) and _INTEGER.fullmatch(expected):
        return int(word) == int(expected)
    mine, wanted = float(word), float(expected)
    if math.isinf(mine) or math.isinf(wanted):
        return Fraction(word) == Fraction(expected)
    if not _close(mine, wanted):
        return False
    return _INTEGER.fullmatch(expected) is None or _is_integer(mine, lambda: Fraction(word), int(expected))


def same_result(result: Any, expected: Any) -> bool:
    """Compare JSON results: numbers as in `same_output`, sequences item by item.

    APPS wraps some expected results in a list of one item; that item alone is accepted too.
    """
    if _same(result, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same(result, expected[0])


def _same(result: Any, expected: Any) -> bool:
    if isinstance(result, bool) or isinstance(expected, bool):
        return result is expected
    if isinstance(result, int | float) and isinstance(expected, int | float):
        if isinstance(result, int) and isinstance(expected, int):
            return result == expected
        if isinstance(expected, int):
            return math.isfinite(result) and _is_integer(result, lambda: Fraction(result), expected)
        return _close(result, expected) or (result != result and expected != expected)  # noqa: PLR0124 both are NaN
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(_same(a, b) for a, b in zip(result, expected, strict=True))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(_same(result[key], expected[key]) for key in expected)
    return type(result) is type(expected) and result == expected


def _is_integer(number: float, exact: Callable[[], Fraction], expected: int) -> bool:
    """Return True if a number is an expected integer: within the tolerance, which is not relative to large ones."""
    if abs(expected) <= _EXACT_FLOATS:
        return abs(number - expected) <= _TOLERANCE
    return abs(exact() - expected) <= _TOLERANCE


def _close(a: float, b: float) -> bool:
    try:
        return a == b or math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:  # an int too large for a float
        return False
