r"""Read boxes, labels, prose, equations and numbers of answers exactly; answers are never compared as floats.

Of an equation the final side is the answer, unless its other sides contradict it: ``x = 42``, ``6 \cdot 7 = 42`` and ``\pi \approx
3.14`` are answers; ``41 = 42`` contradicts itself. Sides with letters (``a + b = 42``) name what the value is of, and are not compared.
"""

from __future__ import annotations

import math
import re
import unicodedata
from fractions import Fraction
from itertools import permutations
from typing import NamedTuple

MAX_NUMBER_CHARS = 200  # longer than real answers; bounds the cost of conversion

_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
NUMBER_WORDS: dict[str, str] = {word: str(number) for number, word in enumerate(_WORDS.split())} | {
    word: f"{number}0"
    for number, word in enumerate(("thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"), 3)
}
# -1,234.50  .5  3/4  1e3  (digits are ASCII on purpose: no other script's digits are in the data sets)
_WITHOUT_COMMAS = "[0-9]+"
_DIGITS = rf"(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|{_WITHOUT_COMMAS})"
NUMBER = rf"[-+−]?(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9])|\s?/\s?[0-9]+)?"
PLAIN_NUMBER = NUMBER.replace(_DIGITS, _WITHOUT_COMMAS)  # without separators of thousands
_WHOLE = re.compile(rf"\s*(?P<sign>[-+−]?)\s?\$?\s?(?P<number>{NUMBER})\s?%?\$?\s*")
_MIXED = re.compile(r"\s*(?P<sign>[-+−]?)\s?(?P<whole>[0-9]+)\s+(?P<part>[0-9]+\s?/\s?[0-9]+)\s*")
# One pass, each alternative linear: a box, a box without braces (\boxed 5), an escaped character, a brace.
_TOKEN = re.compile(r"\\(?:boxed|fbox)(?:\s*(?P<open>\{)|\s+(?P<bare>[^\s{}$\\]+))|\\.|(?P<brace>[{}])", re.DOTALL)
_SPACING = re.compile(r"\\[,;:!> ]|~|\\(?:left|right|displaystyle|quad|qquad|bigl?|bigr|Bigl?|Bigr)(?![A-Za-z])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|textnormal|textsf|emph)\s*\{([^{}]*)\}")
_ONLY_TEXT = re.compile(rf"\s*{_TEXT.pattern}\s*")
_GAP = r"(?:\s|~|\\[ ,;:]|\\quad)"
_LABEL = re.compile(
    rf"\A\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{{\s*\(?(?P<marked>[A-E])\)?[.:]?\s*\}}{_GAP}*(?=[^\s_^+*/=<>,.-])"
    rf"|\((?P<bracketed>[A-E])\){_GAP}+(?=[^\s_^+*/=<>,.-])|(?P<plain>[A-E])(?:\){_GAP}*|[.:]{_GAP}+|\.)(?=-?(?:[0-9$(]|\\(?!text))))"
)
_CHOICE = re.compile(r"(?:(?:option|choice)\s)?(?:\((?P<letter>[A-E])\)|(?P<plain>[A-E])[).:]?)", re.IGNORECASE)
OTHER_CHOICE = re.compile(
    r"\([A-E]\)|(?<![A-Za-z])[A-E][).:]|(?:\bor|\band|\bnor|[,/])\s*[A-E](?![A-Za-z])|^\s*(?:is )?not\b|^\W*(?:or|and)\b"
)
_COUNTED = re.compile(r"[-+−]?[0-9][0-9.,]*\s*(?:[A-Za-z/^23 ]+|[一-龥]{1,4}(?:/[一-龥]{1,2})?)")  # 5 cm, 12元
_SIGNS = str.maketrans({"−": "-", "–": "-", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∞": r"\infty "})
_LONG_SIGN = re.compile(r"\\(le|ge|ne)(?:q|qslant)(?![A-Za-z])")
_OTHER_SCRIPT = re.compile(r"[À-ÖØ-öø-ʯЀ-῿぀-ヿ㐀-鿿가-힯]")
_PROSE = re.compile(r"[A-Za-z]{2,}(?:[\s,.'-]+[A-Za-z]{2,})+[.!?]?")
_ABOUT = r"\\(?:approx|simeq|sim|doteq|thickapprox)(?![A-Za-z])|≈|≃|≅"
_EQUATION_TOKEN = re.compile(
    rf"(?P<open>[{{(\[])|(?P<close>[}})\]])|(?P<about>{_ABOUT})|(?P<other>\\[A-Za-z]+|\\.|[<>!:]=|==)|(?P<equal>=)|(?P<comma>,(?![0-9]{{3}}))"
)
_ARITHMETIC = re.compile(r"\\(?:[dtc]?frac|cdot|times|div|sqrt|left|right|[,;:! ])|[0-9.,{}()\[\]+\-−*/^!%\s]")
_NAME = re.compile(r"\s*\\?[A-Za-z]+(?:_\{?[0-9A-Za-z]+\}?)?\s*")
_SEGMENT = re.compile(r"(?:\\overline\s*\{|\|)([A-Z]{2})(?:\}|\|)")  # its length has its name
_JOINED = re.compile(
    r"(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|\\(?:lor|land|vee|wedge)(?![A-Za-z])|"
    r"\\(?:begin|text\s*\{\s*(?:or|and)|R?rightarrow|Rightarrow|implies|iff|to|quad|pm|mp)(?![A-Za-z])|;|\n"
)

_DATE = re.compile(r"^\\text\s*\{\s*([A-Z][a-z]{2,})\s*\}[\s~]*([0-9]{1,2})$")
_SUBJECT = "(?:statement|claim|assertion|series|sequence|integral|limit|function|graph|it)"
_SAID = (  # an ellipse; June 20th; there are no solutions
    (re.compile(r"^\s*(?:an?|the)\s+(?=[a-z]{2})"), ""),
    (re.compile(r"(?<=[0-9])(?:st|nd|rd|th)\b"), ""),
    (re.compile(r"^([0-9]{1,2}) ([a-z]{3,9}),? ([0-9]{4})$"), r"\2 \1 \3"),
    (re.compile(r"^(yes|no)[,.;:](?: \w+){3}(?!.*\b(?:yes|no|but|if|unless|maybe|perhaps)\b).*", re.DOTALL), r"\1"),
    (re.compile(rf"^(?:(?:the|this) )?{_SUBJECT} (?:is )?(?=\w+\W*$)"), ""),
    (re.compile(r"^(?:is )?(di|con)vergent\W*$"), r"\1verges"),
    (re.compile(r"^(?:[a-z] ?\\in ?)?\\(?:emptyset|varnothing)$|^∅$"), "no solution"),
    (re.compile(r"^\s*(?:there (?:is|are|exists?) )?(no(?: \w+)?) solutions?(?: exists?)?(?=\W*$)"), r"\1 solution"),
)
_DIVISORS = re.compile(r"\\(gcd|lcm) ?\(([0-9]+),([0-9]+)\)")
_CHOSEN = re.compile(r"(?<![A-Za-z\\])([CAP])_\{?([3-9]|[1-9][0-9]|n)\}?\^\{?([0-9]{1,2}|k)\}?(?![0-9A-Za-z_^])")
_INTEGER = re.compile(r"([a-z])\\in ?\\mathbb\{Z\}")
_TOKENS = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]")
_BOUND = (  # what must be the same, the letter
    re.compile(r"()([a-z])\\in ?\\mathbb\{Z\}$"),
    re.compile(r"^([a-zA-Z])\(([a-z])\)="),
    re.compile(r"^()(?!.*[abAB](?![A-Za-z])).*\+([cCK]|C_\{?1\}?)$"),
)
_SOLUTION = re.compile(r"^(?:y|[a-z]\([a-z]\))=")  # of a differential equation
_NUMBERED = re.compile(r"(?<![A-Za-z0-9\\])[cC]_(?:\{[1-3]\}|[1-3](?![0-9]))")
_ARBITRARY = re.compile(r"(?<=y=)C|(?<=[a-z]\([a-z]\)=)[Cc](?=[a-z\\])")
_CONSTANT = re.compile(
    r"(?<![A-Za-z\\_{])[A-DKckab](?:_\{?[1-3]\}?)?(?![A-Za-z]*_|[A-Za-z]*[({])|(?<=[=+\-])[A-DKck](?=[a-z])"
)


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


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` (or ``\fbox{}``) whose braces balance, else None.

    Of nested boxes the inner one counts, because it begins last. One pass, linear in the text.
    """
    open_boxes: list[int | None] = []  # where a box's content starts, None for any other brace
    best: tuple[int, str] | None = None
    for match in _TOKEN.finditer(text):
        if match["open"]:
            open_boxes.append(match.end())
        elif match["bare"]:
            best = (match.start("bare"), match["bare"])
        elif match["brace"] == "{":
            open_boxes.append(None)
        elif match["brace"] == "}" and open_boxes:
            start = open_boxes.pop()
            if start is not None and (best is None or start > best[0]):
                best = (start, text[start : match.start()])
    return None if best is None else best[1].strip()


def is_shallow(text: str, most: int) -> bool:
    """Return True unless brackets are nested deeper than ``most``."""
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth > most:
            return False
    return True


def plain_text(answer: str) -> str:
    return _SPACING.sub(" ", _TEXT.sub(r"\1", answer)).strip().strip("$").strip()


def label(answer: str) -> str:
    r"""Return the letter of a choice before its text, ``\textbf{(D)}\ 9``, ``D. 9``; empty if there is none."""
    match = _LABEL.match(answer)
    return match[match.lastgroup or 0] if match else ""


def choice(answer: str) -> str:
    """Return the letter that an answer is, ``(D)``, ``Option D``; empty if it is something else."""
    match = _CHOICE.fullmatch(plain_text(answer))
    return match[match.lastgroup or 0] if match else ""


def without_label(answer: str) -> str:
    r"""Return what follows the letter of a choice, ``\textbf{(D)}\ 9``; an answer that is the letter alone as it is."""
    return _LABEL.sub("", answer) or answer


def is_prose(truth: str) -> bool:
    """Return True for a truth in words: one ``\\text{}``, several words, one of four letters, or another script's letters."""
    text = truth.strip().strip("$").strip()
    if _COUNTED.fullmatch(_TEXT.sub(r"\1", text)) or (
        "或" in text and not _OTHER_SCRIPT.search(text.replace("或", ""))
    ):
        return False
    whole = _ONLY_TEXT.fullmatch(text)
    if whole is not None:
        is_choice = re.fullmatch(r"\W*[A-Z]\W*", whole[1]) is not None
        return (is_choice or len(re.findall(r"[^\W\d_]", whole[1])) > 1) and not re.search(r"[\\^_=+*/<>|]", whole[1])
    text = _DATE.sub(r"\1 \2", text)
    if _OTHER_SCRIPT.search(_TEXT.sub(r"\1", text)) or _PROSE.fullmatch(text):
        return True
    return re.fullmatch(
        r"[A-Z][a-z]{2,} [0-9]{1,4}(?:, [0-9]{4})?|[A-Za-z]{4,}[.!?]?|yes|no|odd|Yes|No|YES|NO|Odd", text
    ) is not None and text.casefold() not in {"infinity", "infty"}


def said(text: str) -> str:
    """Reduce prose to its words in small letters, ``(B)`` and ``B.`` to the same choice; operators stay."""
    plain = unicodedata.normalize("NFKC", _SPACING.sub(" ", _TEXT.sub(r"\1", text.translate(_SIGNS))).strip("$ "))
    plain = _LONG_SIGN.sub(r"\\\1 ", plain.replace("<=", r"\le ").replace(">=", r"\ge ")).casefold()
    for pattern, into in _SAID:
        plain = pattern.sub(into, plain)
    signs = "".join(letter for letter in {*plain} if unicodedata.category(letter) == "Sm")
    return " ".join(
        NUMBER_WORDS.get(str(word), str(word))
        for word in re.findall(rf"\w+|[\\^*/%{re.escape(signs)}]|(?<!\w)-(?=\w)", plain)
    )


def with_counts(text: str) -> str:
    """Return a text with ``C_5^2`` as a binomial, ``A_5^2`` as its arrangements, and gcd and lcm as numbers."""
    text = _CHOSEN.sub(_chosen, text)
    return _DIVISORS.sub(lambda found: str(getattr(math, found[1])(int(found[2]), int(found[3]))), text)


def _chosen(found: re.Match[str]) -> str:
    kind, total, chosen = found.groups()
    if total.isdigit() and (not chosen.isdigit() or int(chosen) > int(total)):
        return found[0]
    return f"\\binom{{{total}}}{{{chosen}}}" + ("" if kind == "C" else f"\\cdot {chosen}!")


def with_letters_of(gold: str, answer: str) -> list[str]:
    r"""Return an answer with the truth's bound letter: n \in \mathbb{Z} for k, f(t) for f(x); and its constants in every order."""
    for bound in _BOUND:
        ours, theirs = bound.search(gold), bound.search(answer)
        if ours and theirs and ours[1] == theirs[1] and ours[2] not in _TOKENS.findall(answer):
            answer = _with(answer, theirs[2], ours[2])
    if not _SOLUTION.match(gold):
        return [answer]
    wanted = sorted({*(_NUMBERED if _NUMBERED.search(gold) else _ARBITRARY).findall(gold)})
    given = sorted({*_CONSTANT.findall(answer)} - ({*_CONSTANT.findall(gold)} - {*wanted}))
    if not 0 < len(wanted) == len(given) <= 3:
        return [answer]
    orders = [dict(zip(given, order, strict=True)) for order in permutations(wanted)]
    return [_CONSTANT.sub(lambda found, names=names: names.get(found[0], found[0]), answer) for names in orders]


def shifted(text: str, domain: str) -> list[str]:
    r"""Return a family over k \in \mathbb{Z} as it is, and with k - 1, k + 1 and -k for k: the same family."""
    found = _INTEGER.fullmatch(domain)
    if found is None:
        return [text]
    k = found[1]
    return [text, *(_with(text, k, f"{{({other})}}") for other in (f"{k}-1", f"{k}+1", f"-{k}", f"-{k}-1", f"1-{k}"))]


def _with(text: str, letter: str, other: str) -> str:
    return _TOKENS.sub(lambda found: other if found[0] == letter else found[0], text)


class Equation(NamedTuple):
    """The final side, the numeric sides that must equal it, the plain numbers that it rounds, its names (sides that are no numbers), the side it rounds."""

    value: str
    equal: tuple[str, ...]
    rounded: tuple[Fraction, ...]
    names: frozenset[str] = frozenset()
    exact: str = ""


def read(answer: str) -> Equation:
    """Split an answer at its equality signs; an answer without them, or one that is a list, is the value itself."""
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
    lettered = ("".join(re.sub(r"_\{(\w+)\}", r"_\1", side).split()) for side in before if not _is_numeric(side))
    names = frozenset(_SEGMENT.sub(r"\1", side) for side in lettered)
    exact = before[-1].strip() if before and signs[-1] != "=" and read_number(value) is not None else ""
    return Equation(value.strip(), equal, tuple(number for number in about if number is not None), names, exact)


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
    for token in _EQUATION_TOKEN.finditer(answer):
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


def exactly(text: str) -> str:
    """Return a formula whose decimals are fractions, so that a parser has no float to round."""
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"(?<![0-9])([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\{([0-9]+)\}", _repeating, text)
    return re.sub(r"(?<![0-9])([0-9]*)\.([0-9]+)|(?<![0-9])([0-9]+)\.(?![0-9.])", _as_fraction, text)


def _as_fraction(found: re.Match[str]) -> str:
    if found[3]:
        return found[3]
    number = Fraction(f"{found[1] or 0}.{found[2]}")
    return str(number) if number.denominator == 1 else f"\\frac{{{number.numerator}}}{{{number.denominator}}}"


def _repeating(found: re.Match[str]) -> str:
    number = Fraction(int(found[1] + found[2] + found[3]) - int(found[1] + found[2] or 0))
    number /= 10 ** (len(found[2]) + len(found[3])) - 10 ** len(found[2])
    return f"\\frac{{{number.numerator}}}{{{number.denominator}}}"
