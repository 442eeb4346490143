"""Parse a number as people write it, exactly; answers are never compared as floats."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 200  # longer than real answers; bounds the cost of conversion

# -1,234.50  .5  3/4  1e3  (digits are ASCII on purpose: no other script's digits are in the data sets)
NUMBER = r"[-+−]?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9])|\s?/\s?[0-9]+)?"
_WHOLE = re.compile(rf"\s*(?P<number>{NUMBER})\s*")
_ORNAMENTS = str.maketrans("", "", "$%,")


def read_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number, else None.

    Thousands separators, ``$``, ``%`` and a trailing dot are ignored; ``3/4`` is three quarters.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    match = _WHOLE.fullmatch(text.replace("\\$", "$").replace("\\%", "%").translate(_ORNAMENTS))
    if match is None:
        return None
    digits = match["number"].replace("−", "-").replace(" ", "").rstrip(".")
    try:
        return Fraction(digits)
    except (ValueError, ZeroDivisionError):
        return None
