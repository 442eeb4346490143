r"""Rewrite a mathematical answer in one notation, and take it apart: lists, sets, intervals, names, bases and units; pure.

Nothing that has a meaning is dropped: signs, operators, brackets, bases, the case of letters and text inside a formula stay.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from penstock.reward_service.rewards.parsing import latex

MULTIPLES = {
    "one": 1,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SIGNS = {
    "−–": "-", "×": r"\times ", "·⋅∙": r"\cdot ", "÷": r"\div ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ",
    "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "Δ": r"\Delta ",
    "Ω": r"\Omega ", "′’": "'", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∖": r"\setminus ",
    "¢": r"\text{cents}", "∶": ":", "⁄∕": "/", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "⟨": "(", "⟩": ")", "≡": r"\equiv ",
    "ℝℤℕℚℂ": r"\mathbb{%s}", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ",
    "μ": r"\mu ", "ω": r"\omega ", "φ": r"\phi ", "σ": r"\sigma ", "或": " or ", "和且": " and ",
}  # fmt: skip
_UNICODE = {
    ord(one): tex.replace("%s", unicodedata.normalize("NFKC", one)) for signs, tex in _SIGNS.items() for one in signs
}
_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴-⁹]+")
_SUBSCRIPT = re.compile("[₀-₉]+")
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|([0-9A-Za-z]+))")
_ROOTS = {"√": "", "∛": "[3]", "∜": "[4]"}
_FONT = r"\\(?:boldsymbol|bm|pmb|mathbf|mathit|mathsf|mathtt|mathnormal|underline|displaystyle|bf|it|rm|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])"
_UNIT_VECTOR = re.compile(r"\\(?:hat|mathbf|boldsymbol|bm|overrightarrow)\s*\{\\?([ijk])(?:math)?\}")
_FONT_ARGUMENT = re.compile(_FONT + r"\s*\{(?P<inner>[^{}]*)\}")
_FONT_SWITCH = re.compile(_FONT)
_TEXTS = r"\\(?:text|textrm|textbf|textit|emph|textnormal|textup|mathrm|mbox|hbox|operatorname\*?)\s*"
_TEXT = re.compile(_TEXTS + r"\{([^{}]*)\}")
_TEXT_POWERS = re.compile(_TEXTS + r"\{(?:[^{}]|\^\{-?[0-9]\})*\}")
_UNIT = r"\{\\text\{([^{}]*)\}(?:(\^)\{?([0-9])\}?)?\}"
_TEXT_FRACTION = re.compile(rf"\\frac{_UNIT}{_UNIT}")
_FUNCTIONS = [
    "arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "coth", "sin", "cos", "tan", "cot", "sec", "csc",
    "ln", "log", "lg", "exp", "max", "min", "gcd", "det", "arg", "deg", "lim", "sup", "inf",
]  # fmt: skip
_NAMES = {name: f"\\{name} " for name in [*_FUNCTIONS, "pi", "theta", "alpha", "beta", "infty"]} | {
    "arcsec": r"\arcsec ", "arccsc": r"\arccsc ", "infinity": r"\infty ", "lcm": r"\lcm ", "e": "e", "i": "i", "d": "d",
    "tg": r"\tan ", "ctg": r"\cot ", "arctg": r"\arctan ", "arcctg": r"\arccot ", "sh": r"\sinh ", "ch": r"\cosh ",
}  # fmt: skip
_BARE_NAME = re.compile(
    rf"(?<![\\A-Za-z{{])(?:{'|'.join([*_FUNCTIONS[:19], 'pi', 'theta', 'infinity', 'sqrt'])})(?![A-Za-z])"
)
_SPELT_ROOT = re.compile(r"\\?sqrt\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_RELATION = re.compile(r"[<>=]|\\(?:le|ge|neq|in)(?![A-Za-z])")
_LOG_BASE = re.compile(r"\\log\s*_\s*([0-9A-Za-z])\s*")
_E_NOTATION = re.compile(
    r"(?<![A-Za-z0-9.\\{])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]|\\text\{E\})\{?([-+]?[0-9]{1,4})\}?(?![A-Za-z0-9.{])"
)
_TIMES_TEN = re.compile(r"([0-9.])\s*(?:[xX*]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*")
_LONG_EXPONENT = re.compile(r"\^\s*([-+]?[0-9]+(?:\.[0-9]+)?)(?![0-9}])")
_NEGATIVE_EXPONENT = re.compile(r"\^\s*\(([^(){}]*)\)")
_MONEY = re.compile(
    r"(?P<sign>\\\$|[€£¥])\s*(?P<number>[0-9][0-9.,]*(?:\\frac\{[0-9]+\}\{[0-9]+\})?)|(?P<after>[0-9])\s*(?P<behind>\\\$|[€£¥])"
)
_CURRENCIES = {"\\$": "dollars", "€": "euros", "£": "pounds", "¥": "yuan"}
_REPLACED: list[list[str]] = tomllib.loads(Path(__file__).with_name("notation.toml").read_text(encoding="utf-8"))[
    "rewrites"
]
_FRACTIONS = tuple((re.compile(pattern), into) for pattern, into in _REPLACED if "frac" in into)
_REWRITES = tuple((re.compile(pattern), into) for pattern, into in _REPLACED)
_PERCENT = re.compile(
    r"\s*(?:\\text\s*\{\s*(?:percent(?:age)?|per\s?cent|pct)\s*\}|(?<![A-Za-z])(?:percent(?:age)?|per\s?cent|pct))\s*$",
    re.IGNORECASE,
)
_VULGAR = re.compile("([0-9]?)([¼-¾⅐-⅞])")
_SPELT_NUMBER = re.compile(
    rf"^(?:\\text\s*\{{\s*)?(minus |negative )?\s*(?:({'|'.join(latex.NUMBER_WORDS)})(?:\s+({'|'.join(MULTIPLES)}))?\s*\}}?$|(?<= )\s*\}}?\s*(?=[0-9\\]))",
    re.IGNORECASE,
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}|\\text")
_MULTIPLE = re.compile(
    rf"(?<![0-9A-Za-z.,/_^{{}}])(?P<number>[0-9][0-9,]*(?:\.[0-9]+)?)\s*(?P<marked>\\text\s*\{{\s*)?(?P<word>{'|'.join(MULTIPLES)})s?\b"
    r"(?(marked)\s*(?P<rest>[^{}]*)\})"
)
_BASE_TEN = re.compile(
    r"(?<![A-Za-z0-9_.}])([0-9]+)_(?:10(?![0-9])|\{\s*\(?(?:10|\\text\{(?:base\s)?(?:10|ten)\})\)?\s*\}|\\text\{(?:base\s)?(?:10|ten)\})"
)
_SPELT_BASE = re.compile(r"(?<=[0-9A-F])\s*\\text\{\(?(?:in\s)?base\s?(?=[^{}]|\}\s*[0-9])([a-z0-9]*)\)?\}\s*([0-9]*)")
_TEXT_NUMERAL = re.compile(r"(?<![0-9A-F}])((?:(?:[0-9A-F]|\\text\{[0-9A-F]+\}))+)_")
_TEXT_QUANTITY = re.compile(r"\\text\{(?P<number>[-+]?[0-9][0-9.,]*)\s*(?P<unit>[A-Za-z/^23 ]+)\}")
_COUNTED = re.compile(r"(?<=[0-9])\s*([一-龥]{1,4}(?:/[一-龥]{1,2})?)$")
_FRACTION = re.compile(r"(?P<sign>[-+]?)(?P<whole>[0-9]*)\\frac\{(?P<top>[-+]?[0-9]+)\}\{(?P<bottom>[-+]?[0-9]+)\}")
_POWER_OF_TEN = re.compile(r"(?P<number>-?[0-9]+\.?[0-9]*)\\(?:times|cdot) ?10\^\{?(?P<power>-?[0-9]{1,3})\}?")
_PLAIN_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_PLAIN_NUMBER = re.compile(latex.PLAIN_NUMBER)
_SPACED_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:\s[0-9]{3})+(?:\.[0-9]*)?")
_SPACED_DIGITS = re.compile(r"[0-9]\s+[0-9]")
_MAX_DIGITS = 200
_COLUMN = re.compile(r"\\begin\{pmatrix\}([^&]*\\\\[^&]*)\\end\{pmatrix\}")
_TRANSPOSED = re.compile(r"[(\[]([^()\[\]]*)[)\]]\^(?:\{?T\}?|\{?\\top\}?)")
_VECTOR_TERM = re.compile(r"([-+]?)((?:[0-9A-Za-z./]|\\(?:frac|sqrt)|\{[^{}]*\})*)\\vec\{([ijk])\}")
_VECTOR_SUM = re.compile(rf"(?:{_VECTOR_TERM.pattern})+")
_DEGREES = re.compile(r"([0-9]+)\^\\circ\s*([0-9]{1,2})'(?:\s*([0-9]{1,2})'')?")
_INSIDE_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")


def rewrite(answer: str) -> str:
    """Return an answer in one notation of LaTeX; two answers in the same notation are equal."""
    text = re.sub(r"^\*\*(.+)\*\*$|^=\s*(?=.)", r"\1", answer.strip().strip("`"))
    text = re.sub(r"(?<!\\)\\$|(?<=[ \t])[ \t]+", "", text)
    if not text.isascii():
        text = _VULGAR.sub(_vulgar, with_powers(text))
        text = _SUBSCRIPT.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found[0])}}}", text)
        text = unicodedata.normalize("NFKC", text.translate(_UNICODE)).translate(_UNICODE)
        text = _ROOT.sub(lambda found: f"\\sqrt{_ROOTS[found[1]]}{{{found[2] or found[3]}}}", text)
    text = re.sub(r",\\!\s*", ",", text.replace("{,}", ",")).replace("\\\\ ", "\\\\").replace("**", "^")
    text = re.sub(r"(?<=[0-9]),\s+(?=[0-9]{3}(?![0-9]))", ";", text)  # 32, 349 are two numbers
    text = _SPELT_NUMBER.sub(_as_digits, text)
    text = _COUNTED.sub(r"\\text{\1}", _MULTIPLE.sub(_multiplied, text))
    for pattern, into in _REWRITES:
        text = pattern.sub(into, text)
    if _RELATION.search(text):  # no formula of logic
        text = text.replace("\\land ", "\\text{and}").replace("\\lor ", "\\text{or}")
    text = _MONEY.sub(
        lambda found: f"{found['number'] or found['after']}\\text{{{_CURRENCIES[found['sign'] or found['behind']]}}}",
        text,
    )
    if {"j", "k"} & {*_UNIT_VECTOR.findall(text)}:  # i alone is the imaginary unit
        text = _UNIT_VECTOR.sub(r"\\vec{\1}", text)
    text = _FONT_SWITCH.sub("", _FONT_ARGUMENT.sub(r"{\g<inner>}", text))
    text = _TEXT_POWERS.sub(lambda found: re.sub(r"\^\{([-0-9]+)\}", r"^\1", found[0]), text)
    text = _TEXT.sub(_spelt, text)
    text = _SPELT_BASE.sub(r"_{\1\2}", _TEXT_FRACTION.sub(r"\\text{\1\2\3/\4\5\6}", text))
    text = _BASE_TEN.sub(r"\1", _TEXT_NUMERAL.sub(lambda found: re.sub(r"\\text\{|\}", "", found[0]), text))
    text = _TEXT_QUANTITY.sub(r"\g<number>\\text{\g<unit>}", text)
    text = _E_NOTATION.sub(r"\1\\times 10^{\2}", _TIMES_TEN.sub(r"\1\\times 10^", text))
    text = _LOG_BASE.sub(r"\\log_{\1}", _SPELT_ROOT.sub(r"\\sqrt{\1}", text))
    if not _WORD.search(_BARE_NAME.sub("", text)):  # a formula, no prose
        text = _BARE_NAME.sub(lambda found: f"\\{found[0]} ".replace("infinity", "infty"), text)
        text = text.replace("*", "\\cdot ")
    text = _LONG_EXPONENT.sub(r"^{\1}", _NEGATIVE_EXPONENT.sub(r"^{\1}", text))
    text = _DEGREES.sub(lambda found: f"\\frac{{{_seconds(found)}}}{{3600}}^\\circ", _PERCENT.sub("%", text)).strip()
    text = text.rstrip(".;,") if not text.endswith(("\\,", "\\;")) else text
    return _components(ungrouped(latex.with_counts(_INSIDE_SPACE.sub("", re.sub(r"[ \t]{2,}", " ", text)))))


def _components(text: str) -> str:
    r"""Return a column, a row with ``^T`` and a sum of unit vectors as a tuple; any other text as it is."""
    if column := _COLUMN.fullmatch(text):
        return "(" + column[1].strip().removesuffix("\\\\").replace("\\\\", ",") + ")"
    if row := _TRANSPOSED.fullmatch(text):
        return f"({row[1]})"
    name, equals, total = text.rpartition("=")
    terms = {axis: sign + (size or "1") for sign, size, axis in _VECTOR_TERM.findall(total)}
    if not _VECTOR_SUM.fullmatch(total) or len(terms) < total.count("\\vec"):
        return text
    axes = "ijk" if "k" in terms else "ij"
    return f"{name}{equals}({','.join(terms.get(axis, '0').lstrip('+') for axis in axes)})"


def _seconds(found: re.Match[str]) -> int:
    return 3600 * int(found[1]) + 60 * int(found[2]) + int(found[3] or 0)


def with_powers(text: str, form: str = "^{%s}") -> str:
    """Return a text with its superscripts as exponents, so that they are not read as digits."""
    return _SUPERSCRIPT.sub(
        lambda found: form % unicodedata.normalize("NFKC", found[0]).replace("+", "").replace("−", "-"), text
    )


def with_braces(text: str) -> str:
    """Return a text whose fractions have braces."""
    for pattern, into in _FRACTIONS:
        text = pattern.sub(into, text)
    return text


class Value(NamedTuple):
    number: Fraction
    is_percent: bool


def plain_value(text: str) -> Value | None:
    """Return the number that a rewritten answer is, else None. Digits with spaces are thousands or a mixed number: ``4 2`` is not 42."""
    digits = text.removesuffix("%")
    if len(digits) > _MAX_DIGITS:
        return None
    number: Fraction | None = None
    if _SPACED_DIGITS.search(text):
        number = latex.read_number(re.sub(r"\s", "", text) if _SPACED_THOUSANDS.fullmatch(text) else text)
        return None if number is None else Value(number, False)
    fraction, power = _FRACTION.fullmatch(digits), _POWER_OF_TEN.fullmatch(digits)
    if fraction is not None and int(fraction["bottom"]):
        number = int(fraction["whole"] or 0) + Fraction(int(fraction["top"]), int(fraction["bottom"]))
        number = -number if fraction["sign"] == "-" else number
    elif power is not None:
        number = Fraction(power["number"].rstrip(".")) * Fraction(10) ** int(power["power"])
    elif _PLAIN_THOUSANDS.fullmatch(digits) or _PLAIN_NUMBER.fullmatch(digits):
        number = latex.read_number(digits)
    return None if number is None else Value(number, digits != text)


def _multiplied(found: re.Match[str]) -> str:
    number = str(Fraction(found["number"].replace(",", "")) * MULTIPLES[found["word"]])
    return number + (f"\\text{{{found['rest']}}}" if found["rest"] else "")


def _as_digits(found: re.Match[str]) -> str:
    sign, word, multiple = found.groups()
    if word is None:
        return "-" if sign else found[0]
    number = int(latex.NUMBER_WORDS[word.casefold()]) * MULTIPLES[(multiple or "one").casefold()]
    return f"-{number}" if sign else str(number)


def _vulgar(found: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", found[2]).partition("⁄")
    return f"{found[1]}\\frac{{{top}}}{{{bottom}}}"


def _spelt(found: re.Match[str]) -> str:
    word = found[1].strip()
    is_unit = word in {"min", "sec", "deg", "d"} and found.string[: found.start()].rstrip()[-1:].isdigit()
    if word in _NAMES and not is_unit:
        return _NAMES[word]
    if re.fullmatch(r"[ap]\.?\s?m\.?", word, re.IGNORECASE):
        word = f"{word[0].lower()}m"
    elif re.fullmatch(r"[A-Z](?:\s*(?:,\s*and|,|and)\s*[A-Z])+", word):  # the letters of several choices
        return re.sub(r"\s*(?:,\s*and|,|and)\s*", ",", word)
    return word if re.fullmatch(r"[-+]?[0-9.,]+|[-+]", word) else f"\\text{{{word}}}"


# Taking apart

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
