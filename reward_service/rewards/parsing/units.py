"""Split a unit off a value, and convert units by their dimensions: products, quotients and powers of those of `quantity`; pure."""

from __future__ import annotations

import re
from fractions import Fraction

from penstock.reward_service.rewards.parsing import notation, quantity

_TEXT_UNIT = r"\\text\s*\{[^{}]*\}(?:\^\{?-?[0-9]\}?|\^\{-[0-9]\})?"
_END = re.compile(
    rf"(?P<value>.*?[0-9A-Za-z)}}\]!%])\s*"
    rf"(?P<unit>(?:(?:{_TEXT_UNIT}|\^\\circ\s*(?:[CF](?![A-Za-z]))?)(?:\\cdot|[/·*\s])*)+(?:[0-9]|[A-Za-z](?![A-Za-z]))?)",
    re.DOTALL,
)
_PLAIN = re.compile(
    r"(?P<value>[-+]?[0-9][0-9.,/]*(?:\\times\s*10\^\{-?[0-9]+\})?)(?:\s+|(?<=\}))"
    r"(?P<unit>[A-Za-z][-A-Za-z .°/^{}0-9]*)|(?P<number>[-+]?[0-9][0-9.,]*)(?P<short>(?:km|cm|mm|kg|mi|ft)(?:\^\{?[23]\}?)?)"
)
_NO_UNIT = re.compile(
    r"(?:^|\W)(?:not|no|or|and|if|mod|than|base|to|plus|minus|times\W+\w+|where|for|is|are|but|more|less|over|factorial)(?:\W|$)|[0-9=<>+]"
    rf"|^(?:squared|cubed|half|halves|thirds|tenths|hundredths|{'|'.join(notation.MULTIPLES)})(?:\W|$)|^[万亿千百十多余成折半]|次方|分之|平方$",
    re.IGNORECASE,
)
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_TOKEN = re.compile(r"([A-Za-z$¢°Ωμ一-龥]+)\s*(?:\^?\{?(-?[0-9])\}?)?|(/)|(\\cdot|[·*])")
_WORDS = ((r"\bper\b", "/"), (r"\b(?:square|sq\.?)\s+([a-z]+)", r"\1^2"),
    (r"\b(?:cubic|cu\.?)\s+([a-z]+)", r"\1^3"), (r"\b([a-z]+)\s+squared", r"\1^2"), (r"\b([a-z]+)\s+cubed", r"\1^3"))  # fmt: skip


def split(text: str, other: str = "") -> tuple[str, str]:
    r"""Return a value and its unit: ``42\text{km/h}``, ``90^\circ``, ``5 cm``; the unit is empty where there is none.

    Letters without ``\text`` are a unit if they are known or a word; single letters only if the other text to compare has a unit.
    """
    match = _END.fullmatch(text) or _PLAIN.fullmatch(text)
    if match is None or (match.re is _PLAIN and match["unit"] and not _is_unit(match["unit"], other)):
        return text, ""
    groups = match.groupdict()
    value, unit = groups.get("value") or groups.get("number") or "", groups.get("unit") or groups.get("short") or ""
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", unit).replace("^\\circ", "°").strip()
    if (
        _NO_UNIT.search(re.sub(r"\^?\{?-?[0-9]\}?", "", plain))
        or ("°" in plain and _TRIGONOMETRY.search(value))
        or "\\text" in value
    ):
        return text, ""
    return value.strip(), "" if plain.casefold() in {
        "unit",
        "units",
        "square units",
        "sq units",
        "cubic units",
    } else plain


def _is_unit(plain: str, other: str) -> bool:
    if _END.fullmatch(other):
        return True
    names = re.findall(r"[A-Za-z]+", plain)
    if any(len(name) > 1 and quantity.read_units(name) for name in names) or (
        quantity.read_units(re.sub(r"[{}]", "", plain.strip())) and "/" in plain
    ):
        return True
    if any(len(name) > 2 and name not in "abcdefghijklmnopqrstuvwxyz" for name in names):
        return True
    return all(quantity.read_units(name) for name in names) and split(other)[1] != ""


def factor(unit: str, into: str) -> Fraction | None:
    """Return the factor from a unit to another; None if their dimensions differ. Words that are no units are dimensions."""
    (given, dimension), (wanted, other) = _read(unit), _read(into)
    return given / wanted if dimension == other else None


def _read(text: str) -> tuple[Fraction, dict[str, int]]:
    known = quantity.read_units(text)
    if known is not None:
        return known.factor, _powers(known.dimension, 1)
    for pattern, into in _WORDS:
        text = re.sub(pattern, into, text, flags=re.IGNORECASE)
    size, dimension, sign = Fraction(1), dict[str, int](), 1
    for name, power, slash, _ in _TOKEN.findall(text.replace("\\cdot", "*")):
        if slash or not name:
            sign = -1 if slash else sign
            continue
        exponent = sign * int(power or 1)
        token = quantity.read_units(name)
        size *= Fraction(1) if token is None else token.factor**exponent
        for base, count in _powers(_word(name) if token is None else token.dimension, exponent).items():
            dimension[base] = dimension.get(base, 0) + count
    return size, {base: count for base, count in dimension.items() if count}


def _word(name: str) -> str:
    return name if len(name) < quantity.FOLDED else name.casefold().rstrip("s")


def _powers(dimension: str, exponent: int) -> dict[str, int]:
    parts = {
        "area": {"length": 2},
        "volume": {"length": 3},
        "speed": {"length": 1, "time": -1},
        "acceleration": {"length": 1, "time": -2},
    }
    return {base: count * exponent for base, count in parts.get(dimension, {dimension: 1}).items()}
