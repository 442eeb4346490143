"""Compare the last answer of an episode with the row's ground truth; pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

Scoring = Literal["none", "text", "number"]

_NUMBER = re.compile(r"[+-]?([0-9]{1,100}(\.[0-9]{0,100})?|\.[0-9]{1,100})")
_TOLERANCE = Fraction(1, 10**6)  # relative, of numbers that are not whole


def is_right(answer: str, truth: Any, scoring: Scoring) -> bool:
    """Return True if an answer is the ground truth, or one of a list of them.

    ``text``: equal texts, whatever the case and the white space. ``number``: equal numbers; one that is not whole within 1e-6 of it.

    Raises ValueError for a ground truth that no answer can be compared with.
    """
    wanted = truth if isinstance(truth, list) else [truth]
    if not wanted or any(isinstance(one, (dict, list)) or one is None for one in wanted):
        raise ValueError(f"ground_truth is {str(truth)[:100]!r}, expected a text, a number, or a list of such")
    return any(_EQUAL[scoring](answer, str(one)) for one in wanted)


def _same_text(answer: str, truth: str) -> bool:
    return " ".join(answer.split()).casefold() == " ".join(truth.split()).casefold()


def _same_number(answer: str, truth: str) -> bool:
    wanted, given = _number(truth), _number(answer)
    if wanted is None:
        raise ValueError(f"ground_truth is {truth[:100]!r}, expected a number")
    if given is None:
        return False
    return given == wanted if wanted.denominator == 1 else abs(given - wanted) <= _TOLERANCE * abs(wanted)


def _number(text: str) -> Fraction | None:
    plain = text.strip().replace(",", "").rstrip(".")
    return Fraction(plain) if _NUMBER.fullmatch(plain) else None


_EQUAL: Mapping[str, Callable[[str, str], bool]] = {"text": _same_text, "number": _same_number}
