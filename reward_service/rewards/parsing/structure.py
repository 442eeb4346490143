r"""Take a mathematical answer apart that `notation` has rewritten: lists, sets, intervals, cases, names, residues and numerals; pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.reward_service.rewards.parsing import latex

_OPEN, _CLOSE = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}, (")", "]", "}", "\\}")
_TOKEN = re.compile(
    r"\\begin\{[a-z]+\}|\\end\{[a-z]+\}|\\[{}]|\\[A-Za-z]+|\\.|[()\[\]{}]|,(?![0-9]{3}(?![0-9]))|,(?P<digits>[0-9]{3})|;|\n"
)
_JOINED = re.compile(
    r"(?:,\s*)?\\text\{(?:or|and|,)\}|(?<![A-Za-z\\])(?:,\s*)?(?:or|and)(?![A-Za-z])|\\cup(?![A-Za-z])"
)
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_BASE = re.compile(
    r"\(?(?P<digits>(?=[A-Z]*[0-9])(?:[0-9A-Z]+|[0-9a-f]+(?=\)?_\{?16\}?$))(?:\.[0-9A-Z]+)?)\)?_\{?\(?(?:\\text\{)?(?:base)?\s?(?P<base>[0-9]+|[a-z]+)\}?\)?\}?"
)
_NAME = re.compile(
    r"\(?(?:(?:\\nabla)?(?:(?:\\(?:vec|overrightarrow))?\{[A-Za-z]+\}|\\?[A-Za-z]++)(?:_\{?[0-9A-Za-z]++\}?)?(?:\^\{-1\})?'*+"
    r"(?:\([A-Za-z0-9,=]*+\))?[,:]?)++\)?|\\lim_\{[^{}]*\}.*"
)
_IS = re.compile(
    r"\\[{}]|\\(?:begin|end)|[{}()\[\]]|=|\\in(?![A-Za-z])|(?P<relation>\\(?:neq|le|ge|equiv|notin)(?![A-Za-z])|[<>]|:=)"
)
_CASES = re.compile(r"\\begin\{cases\}((?:(?!\\begin).)*)\\end\{cases\}", re.DOTALL)
_IF = re.compile(r"^\\text\{(?:if|when|for)\}|^(?:if|when|for)(?![A-Za-z])|,$")


_CONGRUENCE = re.compile(r"(?:([a-z])\s?\\equiv\s?)?([^=]*?),?\s?\\pmod\s?\{([0-9]{1,9})\}")
_PROGRESSION = re.compile(
    r"([a-z])=(?:([0-9]{1,9})([a-z])([-+][0-9]{1,9})?|(-?[0-9]{1,9})\+([0-9]{1,9})([a-z])),\s?([a-z])\s?\\in\s?\\mathbb\{Z\}"
)


class Residues(NamedTuple):
    name: str
    modulus: int
    values: frozenset[int]


def residues(text: str) -> Residues | None:
    r"""Return what ``x \equiv 1, 3 \pmod 7`` and ``x = 7k + 1, k \in \mathbb{Z}`` are; None for any other text."""
    if found := _PROGRESSION.fullmatch(text):
        modulus, value = int(found[2] or found[6]), int(found[4] or found[5] or 0)
        is_one = modulus and (found[3] or found[7]) == found[8]
        return Residues(found[1], modulus, frozenset({value % modulus})) if is_one else None
    if not (found := _CONGRUENCE.fullmatch(text)) or not (modulus := int(found[3])):
        return None
    items = re.split(r",|\\text\{(?:or|and)\}|(?:or|and)", found[2].replace(" ", ""))
    values = [value for item in items for value in (with_both_signs(item) or (item,))]
    whole = all(re.fullmatch("-?[0-9]{1,9}", value) for value in values)
    return Residues(found[1] or "", modulus, frozenset(int(value) % modulus for value in values)) if whole else None


class Collection(NamedTuple):
    """Several values: ``kind`` is their brackets, "" for a list without any, "u" for a union."""

    kind: str
    items: tuple[str, ...]

    @property
    def is_ordered(self) -> bool:
        return self.kind not in {"", "u", "\\{\\}"}


def ungrouped(text: str) -> str:
    while text.startswith("{") and _end_of_bracket(text) == len(text):
        text = text[1:-1].strip()
    return text


def _end_of_bracket(text: str) -> int:
    """Return where the bracket that a text begins with is closed, 0 if it is not."""
    depth = 0
    for token in _TOKEN.finditer(text):
        if token[0] in _OPEN:
            depth += 1
        elif token[0] in _CLOSE:
            depth -= 1
            if depth == 0:
                return token.end()
    return 0


def _pieces(text: str) -> tuple[list[str], bool]:
    """Split a text at the commas, semicolons and words for "or" outside its brackets; also return True for a union."""
    items, start, depth, is_union = [], 0, 0, False
    tokens = [(token.start(), token.end(), token[0]) for token in _TOKEN.finditer(text)]
    tokens += [(mark.start(), mark.end(), "or") for mark in _JOINED.finditer(text)]
    for begin, end, token in sorted(tokens, key=lambda token: (token[0], -token[1])):
        if begin < start:
            continue
        if token in _OPEN or token.startswith("\\begin"):
            depth += 1
        elif token in _CLOSE or token.startswith("\\end"):
            depth -= 1
        elif depth == 0 and (token in {",", ";", "\n", "or"}):
            is_union |= text[begin:end] == "\\cup"
            items.append(text[start:begin])
            start = end
    return [item.strip() for item in [*items, text[start:]]], is_union


def joined(text: str) -> set[str]:
    """Return the words between the values of an answer: "or", "and"."""
    return {word for mark in _JOINED.findall(text) for word in ("or", "and") if word in mark}


def names(values: Collection) -> set[str]:
    """Return what values are called: x and y in ``x = 1, y = 2``."""
    return {named(item)[0] for item in values.items} - {""}


def are_of_different_names(text: str) -> bool:
    """Return True for values that each have another name, ``x = 1 or y = 2``, not x_1 and x_2."""
    values = collection(text)
    named_values = [re.sub(r"_\{?[0-9]\}?$", "", named(item)[0]) for item in values.items] if values else []
    return all(named_values) and 1 < len({*named_values}) == len(named_values)


def names_of_both(wanted: Collection, values: Collection) -> tuple[list[str], list[str]]:
    """Return the names of two texts' values; where one of them numbers the values of one name, ``x_1 = 1, x_2 = 2``, that name."""
    names, theirs = ([named(item)[0] for item in part.items] for part in (wanted, values))
    plain, others = ([re.sub(r"(?<=[a-z])_\{?[0-9]\}?$", "", name) for name in part] for part in (names, theirs))
    is_numbered = (len({*names}) == 1) != (len({*theirs}) == 1) and {*plain} == {*others}
    return (plain, others) if is_numbered else (names, theirs)


def collection(text: str) -> Collection | None:
    """Return the values of a list, set, tuple, interval or union; None for one value."""
    if text in {"\\{\\}", "\\emptyset", "\\text{empty set}"}:
        return Collection("\\{\\}", ())
    if cases := _CASES.fullmatch(text):
        return Collection("", tuple(_case(row) for row in cases[1].split("\\\\") if row.strip()))
    opening = "\\{" if text.startswith("\\{") else text[:1]
    if opening in {"(", "[", "]", "\\{"}:
        inner = text[len(opening) :]
        closing = "\\}" if inner.endswith("\\}") else inner[-1:]
        body = inner[: -len(closing)] if closing else ""
        is_whole = opening == "]" or closing == "[" or _end_of_bracket(text) == len(text)
        if is_whole and closing in {")", "]", "[", "\\}"}:
            is_set = opening == "\\{"
            items = _pieces(body if is_set else body.replace(",", ", "))[0]  # (1,234) are two numbers
            if is_set or len(items) > 1:
                kind = {"]": "("}.get(opening, opening) + {"[": ")"}.get(closing, closing)
                return None if is_set and "|" in body else Collection(kind, tuple(items))
    items, is_union = _pieces(text)
    if len(items) < 2 or not all(items) or _THOUSANDS.fullmatch(text):
        return None
    return Collection("u" if is_union else "", tuple(items))


def _case(row: str) -> str:
    value, _, condition = row.partition("&")
    value, condition = (_IF.sub("", part.strip().strip(",;.")).strip() for part in (value, condition))
    return f"({value};{condition})" if condition else value


def with_both_signs(text: str) -> tuple[str, str] | None:
    r"""Return the two values of a text with one ``\pm``; ``\mp`` has the opposite sign."""
    if not re.search(r"\\pm(?![A-Za-z])", text):
        return None
    plus = re.sub(r"\\pm(?![A-Za-z])\s*", "+", re.sub(r"\\mp(?![A-Za-z])\s*", "-", text))
    minus = re.sub(r"\\pm(?![A-Za-z])\s*", "-", re.sub(r"\\mp(?![A-Za-z])\s*", "+", text))
    return plus.removeprefix("+"), minus


def numeral(text: str) -> tuple[str, str] | None:
    """Return the digits and the base of a numeral with a base."""
    match = _BASE.fullmatch(text.replace("\\,", ""))
    if match is None:
        return None
    base = latex.NUMBER_WORDS.get(match["base"], match["base"])
    return (match["digits"].upper().lstrip("0") or "0", base) if base.isdigit() else None


def holds_numeral(text: str) -> bool:
    return re.search(r"[0-9)]\s*_", text) is not None


def named(text: str) -> tuple[str, str]:
    """Split ``x = 5`` and ``x \\in A`` into name and value; the name is empty for any other text."""
    depth, sign = 0, None
    for token in _IS.finditer(text):
        depth += (token[0] in {*_OPEN, "\\begin"}) - (token[0] in {*_CLOSE, "\\end"})
        if token["relation"] and depth == 0:
            return "", text
        if sign is None and depth == 0 and token[0] in {"=", "\\in"}:
            sign = token
    if sign is None or not text[sign.end() :].strip():
        return "", text
    name = text[: sign.start()].replace(" ", "").strip()
    is_name = _NAME.fullmatch(name)
    name = re.sub(r"(?:\\(?:vec|overrightarrow)|^)\{([a-z])\}", r"\1", name)
    return (name, text[sign.end() :].strip()) if is_name else ("", text)
