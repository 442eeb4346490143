r"""Read an answer that is an equation: its final side, and whether its other sides contradict it.

``x = 42``, ``6 \cdot 7 = 42`` and ``\pi \approx 3.14`` are answers; ``41 = 42`` contradicts itself. Sides with letters
(``a + b = 42``) name what the value is of, and are not compared.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from penstock.reward_service.rewards.parsing.number import read_number

_ABOUT = r"\\(?:approx|simeq|sim|doteq|thickapprox)(?![A-Za-z])|≈|≃|≅"
_TOKEN = re.compile(
    rf"(?P<open>[{{(\[])|(?P<close>[}})\]])|(?P<about>{_ABOUT})|(?P<other>\\[A-Za-z]+|\\.|[<>!:]=|==)|(?P<equal>=)|(?P<comma>,(?![0-9]{{3}}))"
)
_ARITHMETIC = re.compile(r"\\(?:[dtc]?frac|cdot|times|div|sqrt|left|right|[,;:! ])|[0-9.,{}()\[\]+\-−*/^!%\s]")
_NAME = re.compile(r"\s*\\?[A-Za-z]+(?:_\{?[0-9A-Za-z]+\}?)?\s*")
_JOINED = re.compile(
    r"\\(?:begin|text\s*\{\s*(?:or|and)|R?rightarrow|Rightarrow|implies|iff|to|quad|pm|mp)(?![A-Za-z])|;|\n"
)


class Equation(NamedTuple):
    """The final side, the numeric sides that must equal it, and the plain numbers that it rounds."""

    value: str
    equal: tuple[str, ...]
    rounded: tuple[Fraction, ...]


def read(answer: str) -> Equation:
    """Split an answer at its equality signs; an answer without them, or one that is a list, is its own value."""
    sides, signs = _split(answer)
    if not signs or _JOINED.search(answer):
        return Equation(answer, (), ())
    if sides[0].strip() == "" and signs[0] != "=":  # "\approx 42"
        sides, signs = sides[1:], signs[1:]
    if any(not side.strip() for side in sides):
        return Equation(answer, (), ())
    if len(sides) == 2 and signs == ["="] and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
        sides.reverse()  # 42 = x
    value, before = sides[-1], sides[:-1]
    equal = tuple(side for side, sign in zip(before, signs, strict=True) if sign == "=" and _is_numeric(side))
    about = (read_number(side) for side, sign in zip(before, signs, strict=True) if sign != "=")
    return Equation(value.strip(), equal, tuple(number for number in about if number is not None))


def without_name(truth: str) -> str:
    """Return the number of a truth such as ``x = 42``; any other truth as it is."""
    sides, signs = _split(truth)
    named = signs == ["="] and _NAME.fullmatch(sides[0]) is not None and _is_numeric(sides[1])
    return sides[1].strip() if named else truth


def is_rounding(number: Fraction, value: str) -> bool:
    """Return True if a plain value is a number rounded to its digits; also if the value is not a plain number."""
    wanted = read_number(value)
    if wanted is None:
        return True
    digits = len(value.strip().rstrip("%").partition(".")[2])
    return abs(number - wanted) <= Fraction(1, 2 * 10**digits)


def _split(answer: str) -> tuple[list[str], list[str]]:
    """Return the sides and the signs between them; no signs for an answer with a comma or sign of order beside them."""
    sides: list[str] = []
    signs: list[str] = []
    start = depth = 0
    for token in _TOKEN.finditer(answer):
        if token["open"] or token[0] == "\\{":
            depth += 1
        elif token["close"] or token[0] == "\\}":
            depth -= 1
        elif depth == 0 and (
            token["comma"] or token["other"] in ("<=", ">=", "!=", ":=", "==", "\\neq", "\\ne", "\\pmod", "\\equiv")
        ):
            return [answer], []
        elif depth == 0 and (token["equal"] or token["about"]):
            sides.append(answer[start : token.start()])
            signs.append(token[0])
            start = token.end()
    return [*sides, answer[start:]], signs


def _is_numeric(side: str) -> bool:
    return any(letter.isdigit() for letter in side) and not _ARITHMETIC.sub("", side)
