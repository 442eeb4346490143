r"""Rewrite a mathematical answer in one notation; pure. What it consists of is told by `structure`.

Nothing that has a meaning is dropped: signs, operators, brackets, bases, the case of letters and text inside a formula stay.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from penstock.reward_service.rewards.parsing import latex, structure

MULTIPLES = {
    "one": 1, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
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
    return _components(structure.ungrouped(latex.with_counts(_INSIDE_SPACE.sub("", re.sub(r"[ \t]{2,}", " ", text)))))


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
