"""Pure rules of the code reward: find the program in a completion, and compare outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import zip_longest
from typing import Any

from penstock.reward_service.program_tests.tests_of_row import LANGUAGES

MAX_PROGRAM_CHARS = 256 * 1024
_TOLERANCE = 1e-6  # relative and absolute
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
# Digits are ASCII: float() and \d also take those of other scripts. Bounded, because conversion is quadratic.
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,4})?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_EXACT_FLOATS = 1e9  # up to here the error of a float is far below the tolerance


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
