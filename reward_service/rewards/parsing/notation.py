r"""Rewrite a mathematical answer in one notation, and take it apart: lists, sets, intervals, names, bases and units; pure.

Nothing that has a meaning is dropped: signs, operators, brackets, bases, the case of letters and text inside a formula stay.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from penstock.reward_service.rewards.parsing import latex

MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
        "°": r"^\circ ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "μ": r"\mu ", "ω": r"\omega ",
        "φ": r"\phi ", "σ": r"\sigma ", "Δ": r"\Delta ", "ℝ": r"\mathbb{R}", "′": "'", "’": "'", "，": ",", "（": "(", "）": ")",
        "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∖": r"\setminus ", "¢": r"\text{cents}",
    }
)  # fmt: skip
_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴-⁹]+")
_SCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|([0-9A-Za-z]+))")
_FONT = r"\\(?:boldsymbol|bm|pmb|mathbf|mathit|mathsf|mathtt|mathnormal|underline|displaystyle|bf|it|rm|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])"
_UNIT_VECTOR = re.compile(r"\\(?:hat|mathbf|boldsymbol|bm|overrightarrow)\s*\{\\?([ijk])(?:math)?\}")
_FONT_ARGUMENT = re.compile(_FONT + r"\s*\{(?P<inner>[^{}]*)\}")
_FONT_SWITCH = re.compile(_FONT)
_TEXTS = r"\\(?:text|textrm|textbf|textit|emph|textnormal|textup|mathrm|mbox|hbox|operatorname\*?)\s*"
_TEXT = re.compile(_TEXTS + r"\{([^{}]*)\}")
_TEXT_POWER = re.compile(rf"({_TEXTS}\{{[^{{}}]*)\^\{{(-?[0-9])\}}")
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
_E_NOTATION = re.compile(r"(?<![A-Za-z0-9.\\{])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+]?[0-9]{1,4})(?![A-Za-z0-9.{])")
_TIMES_TEN = re.compile(r"([0-9.])\s*(?:[xX*]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*")
_LONG_EXPONENT = re.compile(r"\^\s*([-+]?[0-9]+(?:\.[0-9]+)?)(?![0-9}])")
_NEGATIVE_EXPONENT = re.compile(r"\^\s*\(([^(){}]*)\)")
_MONEY = re.compile(r"\\\$\s*(?P<number>[0-9][0-9.,]*)|(?P<after>[0-9])\s*\\\$")
_REPLACED = (
    (r"\\(?:text)?color\s*\{[^{}]*\}|\\[hv]?phantom\s*\{[^{}]*\}|(?<=\S)(?<![}\]\\])(?<!\^[0-9])\{\}|(?<=\\circ)\{\}", ""),
    (r"\\text\s*\{\s*\\\$\s*([^{}]*)\}", r"\\$\1"),
    (r"\\\\\s*\[[0-9.]+(?:pt|em|ex|mm|cm)\]", r"\\\\"),
    (r"\\!|\\left(?![A-Za-z])\.?|\\right(?![A-Za-z])\.?|\\(?:[bB]igg?[lr]?|limits|nolimits)(?![A-Za-z])", ""),
    (r"\\[,;: >]|~|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])|\\hspace\*?\{[^{}]*\}", " "),
    (r"\\[()]|\\\[|\\\]|(?<!\\)\$", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\var(epsilon|phi|theta|rho|sigma|kappa)(?![A-Za-z])", r"\\\1"),
    (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
    (r"(?<=:[0-9]{2})\s*[pP]\.?\s?[mM]\.?$", r"\\text{pm}"),
    (r"(?<=:[0-9]{2})\s*[aA]\.?\s?[mM]\.?$", r"\\text{am}"),
    (r"(?<=[0-9])\s*([aApP])\.\s?[mM]\.?$", r"\\text{\1m}"),
    (r"\\(?:leqslant|leqq|leq|le)(?![A-Za-z])|<=|⩽", r"\\le "),
    (r"\\(?:geqslant|geqq|geq|ge)(?![A-Za-z])|>=|⩾", r"\\ge "),
    (r"\\(?:neq|ne)(?![A-Za-z])|!=|\\not\s*=", r"\\neq "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\langle(?![A-Za-z])", "("),
    (r"\\rangle(?![A-Za-z])", ")"),
    (r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}"),
    (r"(^|\\in\s*)(?:\\math(?:bf|rm)\{([NQRZ])\}|(?<=\\in)\s+([NQRZ])(?![A-Za-z]))", r"\1\\mathbb{\2\3}"),
    (r"^(?:\\text\s*\{)?\s*all (?:reals|real numbers)\s*\}?$", r"\\mathbb{R}"),
    (r"(?<=[^\s,(])\s*\(\s*([a-z])\s*\\in(?![A-Za-z])([^()]*)\)$", r",\1\\in\2"),
    (r"\\(vec|hat|bar|overline)\s+([A-Za-z])(?![A-Za-z])", r"\\\1{\2}"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\(?:[lr]vert|vert|mid)(?![A-Za-z])", "|"),
    (r"\\(?:varnothing|empty)(?![A-Za-z])", r"\\emptyset"),
    (r"\\(?:[lcd]?dots[cbm]?|hdots)(?![A-Za-z])|…|\.\.\.", r"\\dots "),
    (r"\\(?:colon|ratio)(?![A-Za-z])", ":"),
    (r"\\(?:land|wedge)(?![A-Za-z])", r"\\land "),
    (r"\\(?:lor|vee)(?![A-Za-z])", r"\\lor "),
    (r"\\(?:ldotp|cdotp)(?![A-Za-z])", "."),
    (r"^\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?[|:](?=.*\1)([^|]*)\\\}$", r"\2"),
    (r"\\frac\s*([0-9]|(?<=\s)[A-Za-z])\s*([0-9A-Za-z])", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac\1{\2}"),
    (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
    (r"\\(?:sqrt)\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degrees?(?![A-Za-z])", r"^\\circ "),
    (r"\^\s*\{\s*\\prime\s*\}|\^\s*\\prime", "'"),
    (r"\\[dt]?binom\s*([0-9A-Za-z])\s*([0-9A-Za-z])", r"\\binom{\1}{\2}"),
    (r"\\pmod\s*([0-9A-Za-z])", r"\\pmod{\1}"),
    (r"\\(arc)?tg(?![A-Za-z])", r"\\\1tan "),
    (r"\\(arc)?ctg(?![A-Za-z])", r"\\\1cot "),
    (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\\%", "%"),
    (r"\\root\s*([0-9n])\s*\\of\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))", r"\\sqrt[\1]{\2\3}"),
    (r"\\backslash(?![A-Za-z])|(?<=\\mathbb\{[RCQZN]\})\s*[-\\](?=\s*\\\{)", r"\\setminus "),
    (r"(\.[0-9]{0,12}?)([0-9]{1,9}?)\2{2,}\s*\\dots ", r"\1\\overline{\2}"),  # not e = 2.718281828...
    (r"^([0-9]+)\s*(?:\\text\s*\{\s*to\s*\}|to)\s*([0-9]+)$", r"\1:\2"),
    (r"^\|([a-vxy])\|\s*(<|\\le )\s*([0-9.]+|\\frac\{[0-9]+\}\{[0-9]+\}|\\sqrt\{[0-9]+\})$", r"-\3\2\1\2\3"),
    (r"(?<![A-Za-z_^}\]])\{(\\[a-z]+|[A-Za-z])\}(?=[_^])", r"\1"),
    (r"\\operatorname\s*\{th\}", r"\\tanh "),
    (r"^\\\{([^|:]*)[|:]\s*([a-z]\s*\\in\s*\\mathbb\{Z\}\s*)\\\}$", r"\1,\2"),
    (r",?\s*\\text\s*\{\s*(?:where|for|for (?:any|all|every|some)|with)\s*\}\s*(?=[a-z]\s*\\in)", ","),
    (r",?\s*\\text\s*\{\s*(?:where|for)? ?(?:any|all|every|some)? ?integers?\s*\}\s*([a-z])$", r",\1\\in\\mathbb{Z}"),
    (r"(?:,\s*)?\\text\s*\{\s*(?:where|for) (?:(?:some|any|an?|arbitrary|real) )*constants?\s*\}\s*[A-Za-z]$", ""),
    (r"^\\\{\s*\\begin\s*\{array\}\s*(?:\{[^{}]*\})?(.*)\\end\s*\{array\}$", r"\\begin{cases}\1\\end{cases}"),
    (r"\\begin\s*\{[bB]matrix\}|\[\s*\\begin\s*\{array\}\s*(?:\{[^{}]*\})?|\(\s*\\begin\s*\{array\}\s*(?:\{[^{}]*\})?", r"\\begin{pmatrix}"),
    (r"\\end\s*\{[bB]matrix\}|\\end\s*\{array\}\s*[\])]", r"\\end{pmatrix}"),
)  # fmt: skip
_FRACTIONS = tuple((re.compile(pattern), into) for pattern, into in _REPLACED if "frac" in into)
_REWRITES = tuple((re.compile(pattern), into) for pattern, into in _REPLACED)
_PERCENT = re.compile(
    r"\s*(?:\\text\s*\{\s*(?:percent|per\s?cent|pct)\s*\}|(?<![A-Za-z])(?:percent|per\s?cent|pct))\s*$", re.IGNORECASE
)
_VULGAR = re.compile("([0-9]?)([¼-¾⅐-⅞])")
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
_COUNTED = re.compile(r"(?<=[0-9])\s*([一-龥]{1,4})$")
_FRACTION = re.compile(r"(?P<sign>[-+]?)(?P<whole>[0-9]*)\\frac\{(?P<top>[-+]?[0-9]+)\}\{(?P<bottom>[-+]?[0-9]+)\}")
_POWER_OF_TEN = re.compile(r"(?P<number>-?[0-9]+\.?[0-9]*)\\(?:times|cdot) ?10\^\{?(?P<power>-?[0-9]{1,3})\}?")
_PLAIN_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_PLAIN_NUMBER = re.compile(latex.PLAIN_NUMBER)
_SPACED_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:\s[0-9]{3})+(?:\.[0-9]*)?")
_SPACED_DIGITS = re.compile(r"[0-9]\s+[0-9]")
_MAX_DIGITS = 200
_INSIDE_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")


def rewrite(answer: str) -> str:
    """Return an answer in one notation of LaTeX; two answers in the same notation are equal."""
    text = re.sub(r"^\*\*(.+)\*\*$|^=\s*(?=.)", r"\1", answer.strip().strip("`"))
    text = re.sub(r"(?<!\\)\\$|(?<=[ \t])[ \t]+", "", text).translate(_UNICODE)
    text = with_powers(text)
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = _VULGAR.sub(_vulgar, text)
    text = re.sub(r",\\!\s*", ",", text.replace("{,}", ",")).replace("\\\\ ", "\\\\").replace("**", "^")
    text = re.sub(r"(?<=[0-9]),\s+(?=[0-9]{3}(?![0-9]))", ";", text)  # 32, 349 are two numbers
    text = _COUNTED.sub(r"\\text{\1}", _MULTIPLE.sub(_multiplied, text))
    for pattern, into in _REWRITES:
        text = pattern.sub(into, text)
    if _RELATION.search(text):  # no formula of logic
        text = text.replace("\\land ", "\\text{and}").replace("\\lor ", "\\text{or}")
    text = _MONEY.sub(lambda found: f"{found['number'] or found['after']}\\text{{dollars}}", text)
    if {"j", "k"} & {*_UNIT_VECTOR.findall(text)}:  # i alone is the imaginary unit
        text = _UNIT_VECTOR.sub(r"\\vec{\1}", text)
    text = _FONT_SWITCH.sub("", _FONT_ARGUMENT.sub(r"{\g<inner>}", text))
    text = _TEXT.sub(_spelt, _TEXT_POWER.sub(r"\1^\2", _TEXT_POWER.sub(r"\1^\2", text)))
    text = _SPELT_BASE.sub(r"_{\1\2}", _TEXT_FRACTION.sub(r"\\text{\1\2\3/\4\5\6}", text))
    text = _BASE_TEN.sub(r"\1", _TEXT_NUMERAL.sub(lambda found: re.sub(r"\\text\{|\}", "", found[0]), text))
    text = _TEXT_QUANTITY.sub(r"\g<number>\\text{\g<unit>}", text)
    text = _E_NOTATION.sub(r"\1\\times 10^{\2}", _TIMES_TEN.sub(r"\1\\times 10^", text))
    text = _LOG_BASE.sub(r"\\log_{\1}", _SPELT_ROOT.sub(r"\\sqrt{\1}", text))
    if not _WORD.search(_BARE_NAME.sub("", text)):  # a formula, no prose
        text = _BARE_NAME.sub(lambda found: f"\\{found[0]} ".replace("infinity", "infty"), text)
        text = text.replace("*", "\\cdot ")
    text = _LONG_EXPONENT.sub(r"^{\1}", _NEGATIVE_EXPONENT.sub(r"^{\1}", text))
    text = _PERCENT.sub("%", text).strip()
    text = text.rstrip(".;,") if not text.endswith(("\\,", "\\;")) else text
    return ungrouped(latex.with_counts(_INSIDE_SPACE.sub("", re.sub(r"[ \t]{2,}", " ", text))))


def with_powers(text: str, form: str = "^{%s}") -> str:
    """Return a text with its superscripts as exponents, so that they are not read as digits."""
    return _SUPERSCRIPT.sub(lambda found: form % found[0].translate(_SCRIPT).replace("+", ""), text)


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
_BASE_NAMES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen")  # fmt: skip
_BASE_WORDS = {name: str(number) for number, name in enumerate(_BASE_NAMES, 2)}
_NAME = re.compile(r"\(?(?:\\?[A-Za-z]++(?:_\{?[0-9A-Za-z]++\}?)?'*+(?:\([A-Za-z0-9,]*+\))?[,:]?)++\)?")
_IS = re.compile(r"\\[{}]|[{}()\[\]]|=|\\in(?![A-Za-z])|(?P<relation>\\(?:neq|le|ge|equiv|notin)(?![A-Za-z])|[<>]|:=)")
_CASES = re.compile(r"\\begin\{cases\}((?:(?!\\begin).)*)\\end\{cases\}", re.DOTALL)
_IF = re.compile(r"^\\text\{(?:if|when|for)\}|^(?:if|when|for)(?![A-Za-z])|,$")


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
    value, condition = (_IF.sub("", part.strip().strip(",;")).strip() for part in (value, condition))
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
    base = _BASE_WORDS.get(match["base"], match["base"])
    return (match["digits"].upper().lstrip("0") or "0", base) if base.isdigit() else None


def holds_numeral(text: str) -> bool:
    return re.search(r"[0-9)]\s*_", text) is not None


def named(text: str) -> tuple[str, str]:
    """Split ``x = 5`` and ``x \\in A`` into name and value; the name is empty for any other text."""
    depth, sign = 0, None
    for token in _IS.finditer(text):
        depth += (token[0] in _OPEN) - (token[0] in _CLOSE)
        if token["relation"] and depth == 0:
            return "", text
        if sign is None and depth == 0 and token[0] in {"=", "\\in"}:
            sign = token
    if sign is None or not text[sign.end() :].strip():
        return "", text
    name = text[: sign.start()].replace(" ", "").strip()
    return (name, text[sign.end() :].strip()) if _NAME.fullmatch(name) else ("", text)
