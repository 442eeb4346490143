"""Parse a number as people write it, exactly (answers are never compared as floats); and split a text into words."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 200  # longer than real answers; bounds the cost of conversion

# -1,234.50  .5  3/4  1e3  (digits are ASCII on purpose: no other script's digits are in the data sets)
_WITHOUT_COMMAS = "[0-9]+"
_DIGITS = rf"(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|{_WITHOUT_COMMAS})"
NUMBER = rf"[-+−]?(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9])|\s?/\s?[0-9]+)?"
PLAIN_NUMBER = NUMBER.replace(_DIGITS, _WITHOUT_COMMAS)  # without separators of thousands
_WHOLE = re.compile(rf"\s*(?P<sign>[-+−]?)\s?\$?\s?(?P<number>{NUMBER})\s?%?\$?\s*")
_MIXED = re.compile(r"\s*(?P<sign>[-+−]?)\s?(?P<whole>[0-9]+)\s+(?P<part>[0-9]+\s?/\s?[0-9]+)\s*")


def read_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number, else None.

    Separators of thousands, ``$`` before, ``%`` after and a trailing dot are ignored; ``3/4`` is three quarters and
    ``3 1/2`` three and a half.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    plain = text.replace("\\$", "$").replace("\\%", "%")
    match, mixed = _WHOLE.fullmatch(plain), _MIXED.fullmatch(plain)
    try:
        if mixed is not None:
            number = int(mixed["whole"]) + _fraction(mixed["part"])
            return -number if mixed["sign"] in ("-", "−") else number
        if match is None:
            return None
        number = _fraction(match["number"])
        return -number if match["sign"] in ("-", "−") else number
    except (ValueError, ZeroDivisionError):
        return None


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace("−", "-").replace(",", "").replace(" ", "").rstrip("."))


_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


def words(text: str) -> list[str]:
    """Split a text, in order, at white space and around every character that is a word by itself."""
    return _WORD.findall(text)
