"""Parse a number with its unit, exactly: thousands, mixed fractions, powers of ten, percent, other spellings; convert units.

Refused on purpose: a decimal comma (``1,5`` may be a list), digits of other scripts than Latin and full width, powers other than of ten
(``9**9**9`` is not written as an answer), and numbers beyond `MAX_EXPONENT` digits. Values are never compared as floats.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

from penstock.reward_service.rewards.parsing import latex, notation
from penstock.reward_service.rewards.parsing.latex import MAX_NUMBER_CHARS

_TABLE: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("units.toml").read_text(encoding="utf-8"))
FOLDED = 4  # letters of the shortest name of a unit whose case does not count: mW is not MW
MAX_EXPONENT = 400
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_FRACTION = r"[0-9]+\s?/\s?[0-9]+"
_TEN = r"\s?(?:[x×*·]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?[({]?\s?(?P<power>[-+]?[0-9]{1,4})\s?[)}]?"
_NUMBER = (
    rf"(?P<sign>[-+−]\s?)?(?P<money>[$€£¥]\s?)?(?P<minus>[-−])?"
    rf"(?:10\s?(?:\^|\*\*)\s?[({{]?\s?(?P<ten>[-+]?[0-9]{{1,4}})\s?[)}}]?|(?P<whole>[0-9]+)\s(?P<mixed>{_FRACTION})|(?P<fraction>{_FRACTION})"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]{{1,4}})(?![0-9])|{_TEN})?)"
)
_AT_START = re.compile(_NUMBER)
_ANYWHERE = re.compile(rf"(?<![0-9.,A-Za-z_]){_NUMBER}")
_LEAD = re.compile(r"(?:[A-Za-z]{1,3}|[xyz]_?[0-9])\s?=\s?|(?:about|approximately|roughly|≈|~|=)\s{0,4}", re.IGNORECASE)
_TEX_FRACTION = re.compile(r"(?P<whole>[0-9])?\\frac\{\s?(?P<top>-?[0-9]+)\s?\}\{\s?(?P<bottom>[0-9]+)\s?\}")
_GOES_ON = re.compile(  # with a second number, or as an expression: then the first number is not the value
    r"\s?,\s?[A-Za-z]\s?=|\s?[A-Z]_|\s+[-+−$]?[0-9]|_[0-9]|\s?[=<>≤≥≠π]|\s+([A-Za-z]+),?\s+(?:or|vs)\s+[-+−$]?[0-9.,]+(?:\s+\1(?![A-Za-z])|\W*\Z)|\((?![A-Za-z]{2})|\s?[A-Za-z]\s?[-+=*]\s?[0-9(]|\s?(?![ghmtdls])[b-z](?![A-Za-z'’])|"
    r"\s?\\(?!text|mathrm|mathbf|mbox|operatorname|quad|qquad|circ|degree|approx|rm)[A-Za-z]|"
    r"\s?(?:\^|\*\*(?=\s?[-+({0-9])|!|\\(?:sqrt|pi|cdot|times|[dtc]?frac)|[+*×·−]\s?[0-9]|[/.][0-9]|[eE][-+]?[0-9])"
    r"|\s?[(]?\s?(?:,|;|:|\bor\b|\band\b|\bto\b|\bvs\b|\bmod\b|-|–|±|\\pm|\\text\s?[{]\s?(?:or|and|to)\s?[}])\s?[-+−$]?\s?(?:[0-9]|\\frac)"
)
_COMPOUND = re.compile(  # 5 feet 10 inches
    r"\s{0,4}(?!(?:in|of|for|per|at|on|with|from|by|after|over|within|every|each|out)\s)[A-Za-z]{1,12}\s{1,4}[0-9.]{1,12}\s{0,4}[A-Za-z]{1,12}[.]?\s*$"
)
_AND_MORE = re.compile(  # 42 apples and 5 pears, 42 but maybe 43, 42 and a half
    r"(?:\s{0,4}(?!(?:because|since|as|so|which|if|when|and|or|but|plus|minus|times|maybe)\b)[A-Za-z]{1,12}){0,3}(?:\s{0,4}[,|]\s{0,4}|\s{1,4}half\b|"
    r"\s{1,4}(?:(?:and|plus|minus|times|or|but|maybe|perhaps)\s{1,4}){1,2})(?:[-+$]?[0-9]|(?:(?:a|one) )?(?:half|quarter|third)\b|(?<=half))",
    re.IGNORECASE,
)
_MULTIPLE = re.compile(rf"({'|'.join(notation.MULTIPLES)})s?\b", re.IGNORECASE)
_VULGAR = re.compile("[¼-¾⅐-⅞]")


_TEXT_UNIT = r"\\text\s*\{[^{}]*\}(?:\^\{?-?[0-9]\}?|\^\{-[0-9]\})?"
_UNIT_AT_END = re.compile(
    rf"(?P<value>.*?[0-9A-Za-z)}}\]!%])\s*"
    rf"(?P<unit>(?:(?:{_TEXT_UNIT}|\^\\circ\s*(?:[CF](?![A-Za-z]))?)(?:\\cdot|[/·*\s])*)+(?:[0-9]|[A-Za-z](?![A-Za-z]))?)",
    re.DOTALL,
)
_PLAIN_UNIT = re.compile(
    r"(?P<value>[-+]?[0-9][0-9.,/]*(?:\\times\s*10\^\{-?[0-9]+\})?)(?:\s+|(?<=\}))"
    r"(?P<unit>[A-Za-z][-A-Za-z .°/^{}0-9]*)|(?P<number>[-+]?[0-9][0-9.,]*)(?P<short>(?:km|cm|mm|kg|mi|ft)(?:\^\{?[23]\}?)?)"
)
_NO_UNIT = re.compile(
    r"(?:^|\W)(?:not|no|or|and|if|mod|than|base|to|plus|minus|times\W+\w+|where|for|is|are|but|more|less|over|factorial)(?:\W|$)|[0-9=<>+]"
    rf"|^(?:squared|cubed|half|halves|thirds|tenths|hundredths|{'|'.join(notation.MULTIPLES)})(?:\W|$)|^(?:[万亿百十多余成折半]|千(?![米克瓦帕焦升]))|次方|分之|平方$",
    re.IGNORECASE,
)
_POWER = re.compile(
    r"\^\{?-?[0-9]\}?|(?<=[A-Za-z])[0-9]|(?<=m\})[23]"
)  # any other digit of a unit is a second number: 5 choose 2
_NUMBER_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)")
_SEVERAL_UNITS = re.compile(rf"{_NUMBER_UNIT.pattern}(?:,?\s*(?:and)?\s*{_NUMBER_UNIT.pattern})+")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_UNIT_TOKEN = re.compile(r"([A-Za-z$¢°Ωμ一-龥]+)\s*(?:\^?\{?(-?[0-9])\}?)?|(/)|(\\cdot|[·*])")
_UNIT_WORDS = ((r"\bper\b", "/"), (r"\b(?:square|sq\.?)\s+([a-z]+)", r"\1^2"),
    (r"\b(?:cubic|cu\.?)\s+([a-z]+)", r"\1^3"), (r"\b([a-z]+)\s+squared", r"\1^2"), (r"\b([a-z]+)\s+cubed", r"\1^3"))  # fmt: skip


class Unit(NamedTuple):
    dimension: dict[str, int]
    factor: Fraction


_UNNAMED = frozenset({"unit", "units", "square units", "sq units", "cubic units"})


def read_units(text: str) -> Unit | None:
    """Return the unit that a text consists of; None for one that is not in the table."""
    plain = text.strip().rstrip(".")
    folded = plain.casefold()
    names = (plain, folded, folded.removesuffix("s")) if len(plain) >= FOLDED else (plain,)
    return next((_UNITS[name] for name in names if name in _UNITS), None)


class Quantity(NamedTuple):
    number: Fraction
    is_percent: bool
    unit: str


def read(text: str) -> Quantity | None:
    plain = _plain(text)
    lead = _LEAD.match(plain)
    plain = plain[lead.end() :] if lead else plain
    match = _AT_START.match(plain)
    return None if match is None else _quantity(match, plain[match.end() :])


def last(text: str) -> Quantity | None:
    last_match = None
    for match in _ANYWHERE.finditer(text):
        last_match = match
    if last_match is None:
        return None
    after = text[last_match.end() : last_match.end() + 24]
    if not after[:1].isspace() and _GOES_ON.match(after):
        return None
    return _quantity(last_match, after.split("\n")[0].rstrip(".") if after.lstrip().startswith(("%", "\\%")) else "")


def begins(text: str) -> bool:
    """Return True if a text begins with a number, whether or not that is its value."""
    plain = _plain(text)
    lead = _LEAD.match(plain)
    return _AT_START.match(plain, lead.end() if lead else 0) is not None


def goes_on(after: str) -> bool:
    """Return True if the text after a number belongs to its value: another number, an operator, a compound unit."""
    return any(rule.match(after) for rule in (_GOES_ON, _COMPOUND, _AND_MORE))


def _plain(text: str) -> str:
    """Return a number in one spelling. Superscripts become powers first, so that they are not read as digits."""
    text = notation.with_powers(text.strip()[: 4 * MAX_NUMBER_CHARS], "^%s")  # as units are written
    text = _VULGAR.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]), text).replace("⁄", "/")
    text = unicodedata.normalize("NFKC", text).replace("{,}", ",").replace(",\\!", ",").replace("\\,", " ")
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[()]", "", re.sub(r"\^\{?\\circ(?![A-Za-z])\}?", "°", text))
    text = notation.with_braces(text)
    text = _TEX_FRACTION.sub(_spelt_fraction, text)
    text = re.sub(r"\\text\{([-+−–$\\0-9.,]*)\}", r"\1", re.sub(r"^\((-?[0-9./]+)\)$", r"\1", text))
    return text.replace("\\$", "$").replace("\\%", "%").strip("*_` \t\n").removeprefix("$$").strip()


def _spelt_fraction(match: re.Match[str]) -> str:
    return f"{match['whole'] + ' ' if match['whole'] else ''}{match['top']}/{match['bottom']}"


def _quantity(match: re.Match[str], after: str) -> Quantity | None:
    if match.end() - match.start() > MAX_NUMBER_CHARS or after[:1].isdecimal():
        return None
    number = _value(match)
    if number is None or goes_on(after):
        return None
    if match["sign"] and match["sign"][0] in "-−":
        number = -number
    if match["minus"]:
        number = -number
    after = latex.plain_text(after).strip(" .;*_`$")
    multiple = _MULTIPLE.match(after)
    if multiple is not None:
        number, after = number * notation.MULTIPLES[multiple[1].casefold()], after[multiple.end() :].strip()
    is_percent = after.casefold().startswith(("%", "percent", "per cent"))
    return Quantity(number, is_percent, "" if is_percent else after)


def _value(match: re.Match[str]) -> Fraction | None:
    exponent = int(match["power"] or match["exponent"] or match["ten"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    try:
        if match["ten"]:
            return Fraction(10) ** exponent
        if match["whole"]:
            return int(match["whole"]) + Fraction(match["mixed"].replace(" ", ""))
        if match["fraction"]:
            return Fraction(match["fraction"].replace(" ", ""))
        return Fraction(match["decimal"].replace(",", "").rstrip(".") or "0") * Fraction(10) ** exponent
    except (ValueError, ZeroDivisionError):
        return None


def in_one_unit(text: str) -> str:
    r"""Return ``2 hours 20 minutes`` in the last of its units; any other text, and units that do not get smaller, as it is."""
    if not _SEVERAL_UNITS.fullmatch(plain := _without_text(text)):
        return text
    parts = [(Fraction(number), name, read_units(name)) for number, name in _NUMBER_UNIT.findall(plain)]
    units = [unit for _, _, unit in parts if unit is not None]
    falls = all(one.dimension == other.dimension and one.factor > other.factor for one, other in pairwise(units))
    if len(units) < len(parts) or not falls:
        return text
    total = sum(number * unit.factor for (number, _, _), unit in zip(parts, units, strict=True)) / units[-1].factor
    return f"\\frac{{{total.numerator}}}{{{total.denominator}}}\\text{{{parts[-1][1]}}}"


def split_unit(text: str, other: str = "") -> tuple[str, str]:
    r"""Return a value and its unit: ``42\text{km/h}``, ``90^\circ``, ``5 cm``; the unit is empty where there is none.

    Letters without ``\text`` are a unit if they are known or a word; single letters only if the other text to compare has a unit.
    """
    match = _UNIT_AT_END.fullmatch(text) or _PLAIN_UNIT.fullmatch(text)
    if match is None or (match.re is _PLAIN_UNIT and match["unit"] and not _is_unit(match["unit"], other)):
        return text, ""
    groups = match.groupdict()
    value, unit = groups.get("value") or groups.get("number") or "", groups.get("unit") or groups.get("short") or ""
    plain, powerless = _without_text(unit), _without_text(_POWER.sub("", unit))
    if _NO_UNIT.search(powerless) or ("°" in plain and _TRIGONOMETRY.search(value)) or "\\text" in value:
        return text, ""
    return value.strip(), "" if plain.casefold() in _UNNAMED else plain


def _without_text(unit: str) -> str:
    plain = re.sub(r"\\text\s*\{([^{}]*)\}(?=\\text)", r"\1 ", unit)  # m s is not ms
    return re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", plain).replace("^\\circ", "°").strip()


def _is_unit(plain: str, other: str) -> bool:
    if _UNIT_AT_END.fullmatch(other):
        return True
    names = re.findall(r"[A-Za-z]+", plain)
    if any(len(name) > 1 and read_units(name) for name in names) or (
        read_units(re.sub(r"[{}]", "", plain.strip())) and "/" in plain
    ):
        return True
    if any(len(name) > 2 and name not in "abcdefghijklmnopqrstuvwxyz" for name in names):
        return True
    return all(read_units(name) for name in names) and split_unit(other)[1] != ""


def unit_factor(unit: str, into: str) -> Fraction | None:
    """Return the factor from a unit to another; None if their dimensions differ. Words that are no units are dimensions."""
    (given, dimension), (wanted, other) = _dimension(unit), _dimension(into)
    return given / wanted if dimension == other else None


def _dimension(text: str) -> tuple[Fraction, dict[str, int]]:
    known = read_units(text)
    if known is not None:
        return known.factor, known.dimension
    for pattern, into in _UNIT_WORDS:
        text = re.sub(pattern, into, text, flags=re.IGNORECASE)
    size, dimension, sign = Fraction(1), dict[str, int](), 1
    for name, power, slash, _ in _UNIT_TOKEN.findall(text.replace("\\cdot", "*")):
        if slash or not name:
            sign = -1 if slash else sign
            continue
        exponent = sign * int(power or 1)
        token = read_units(name) or Unit({_unit_word(name): 1}, Fraction(1))
        size *= token.factor**exponent
        for base, count in token.dimension.items():
            dimension[base] = dimension.get(base, 0) + count * exponent
    return size, {base: count for base, count in dimension.items() if count}


def _unit_word(name: str) -> str:
    return name if len(name) < FOLDED else name.casefold().rstrip("s")


def _fill(units: dict[str, Unit]) -> None:
    for names, amount in [*_TABLE["prefixed"].items(), *_TABLE["others"].items()]:
        number, _, of = amount.partition(" ")
        size, dimension = _dimension(of)
        units.update(dict.fromkeys(names.split(), Unit(dimension, size * Fraction(number))))
    for prefixes, factor in _TABLE["prefixes"].items():
        for prefix, name in product(prefixes.split(), " ".join(_TABLE["prefixed"]).split()):
            if (prefix > "一", len(prefix) > 3) == (name > "一", len(name) > 3):
                units.setdefault(prefix + name, Unit(units[name].dimension, units[name].factor * Fraction(factor)))


_UNITS: dict[str, Unit] = {}
_fill(_UNITS)
