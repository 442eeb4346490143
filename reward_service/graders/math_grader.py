r"""A grader process of the math reward (`grader_process`): ``python -m penstock.reward_service.graders.math_grader``.

Answers are rewritten (`notation`) and taken apart (`structure`), and their values are compared: formulas by `formulas`, what is left by
math-verify. math-verify's own time-outs (SIGALRM, wall clock) are off: a tower of powers ends in a MemoryError or the CPU limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import sympy
from latex2sympy2_extended import latex2sympy
from math_verify import verify
from sympy.core.relational import Relational

from penstock.reward_service.graders import formulas, grader_process
from penstock.reward_service.rewards.parsing import latex, notation, quantity, structure

_KNOWN = 512
_MAX_ITEMS = 100
_MAX_DEPTH = 40  # of brackets; the parser's time grows with it
# What the parser misreads in silence: primes, double factorials, transposes, congruences, names with a hat it drops.
_MISREAD = re.compile(
    r"\\(?:dots|text|pmod|bmod|mod|equiv|notin|gcd|lcm|nmid|parallel|perp|"
    r"angle|triangle|cong|sim|prime|circ|to|mapsto|Rightarrow|cup\\cup)(?![A-Za-z])"
    r"|'|!!|(?<![0-9e])\^\{?T\}?(?![A-Za-z])|::|[0-9)](?:\^\{[^{}]*\})?\s*_|:[^:]*:|[0-9]\s+[0-9]|(?<![\\A-Za-z])[A-Za-z]{3,}\s+[0-9]"
    r"|\\(?:vec|hat|overrightarrow)(?![A-Za-z]).*\\times ?\\(?:vec|hat|overrightarrow)(?![A-Za-z])"
)
_LETTER = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_LIMIT = re.compile(r"(\\lim\s*_\s*\{[^{}\\]*)\\to(?![A-Za-z])")
_RESTRICTION = re.compile(r"^(?!.*neq.*neq)([^<>]*([a-z])[^<>]*?),?\s*\(?\2\s?\\neq[^,()]*\)?$")
_REALS = "(-\\infty,\\infty)"
_FUNCTION = re.compile(r"[A-Za-z](?:\^\{-1\})?\([A-Za-z]\)")


class Gold(NamedTuple):
    text: str
    relative: Any  # the tolerance


@lru_cache(_KNOWN)
def read_gold(text: str) -> Gold | None:
    r"""Read a truth, after a tab its relative tolerance; compare it with 0 once: its own cost must not count for an answer.

    A truth that the parser cannot read is equal to its own text alone; one whose brackets do not close is refused.
    """
    truth, _, relative = text.partition("\t")
    gold = Gold(quantity.in_one_unit(notation.rewrite(truth)), sympy.Rational(relative or "0"))
    if not latex.is_shallow(truth, _MAX_DEPTH) or not gold.text:
        return None
    balanced = sum(gold.text.count(mark) for mark in "([{") == sum(gold.text.count(mark) for mark in ")]}")
    if not balanced and not all(_readable(part) for part in _leaves(gold.text)):
        return None
    _equal(gold.text, "0", gold.relative)
    return gold


def is_equal(gold: Gold, answer: str) -> bool:
    if not latex.is_shallow(answer, _MAX_DEPTH):
        return False
    wanted, text = gold.text, quantity.in_one_unit(notation.rewrite(answer))
    if ("\\neq" in wanted) != ("\\neq" in text):  # x + 2, x \neq 2 against x + 2
        wanted, text = (_RESTRICTION.sub(r"\1", part) for part in (wanted, text))
    texts = latex.with_letters_of(wanted, text)
    return bool(answer) and any(_equal(wanted, text, gold.relative) for text in texts)


def _leaves(text: str) -> Iterator[str]:
    values = _values(text)
    if values is None:
        yield quantity.split_unit(structure.named(text)[1])[0]
    else:
        for item in values.items:
            yield from _leaves(structure.named(item)[1] if _values(item) is None else item)


def _readable(leaf: str) -> bool:
    leaf = leaf.removesuffix("%")
    if structure.numeral(leaf) is not None or "\\text" in leaf:
        return True
    return _parse(leaf) is not None or _values(leaf) is not None


def _values(text: str) -> structure.Collection | None:
    values = structure.collection(text)
    if values is None:
        both = structure.with_both_signs(text)
        return None if both is None or _SIGNS.search(text) else structure.Collection("", both)
    if values.is_ordered or "\\pm" not in text:
        return values
    items = [value for item in values.items for value in (structure.with_both_signs(item) or (item,))]
    return structure.Collection(values.kind, tuple(items))


_CLOCK = re.compile(r"([0-9]{1,2}):([0-5][0-9])(?:\\text\{([ap])m\})?")
_SIGNS = re.compile(r"[<>]|\\(?:le|ge|neq)(?![A-Za-z])")
_FORMULA = re.compile(rf"{_SIGNS.pattern}|\\setminus|\\begin\{{cases\}}")


def _equal(gold: str, answer: str, relative: Any) -> bool:
    if not gold or not answer or _are_joined_otherwise(gold, answer):
        return False
    gold, answer = (_REALS if text == "\\mathbb{R}" else text for text in (gold, answer))
    if (known := _equal_texts(gold, answer)) is not None:
        return known
    wanted, values = _values(gold), _values(answer)
    if wanted is None and values is None:
        return _equal_values(gold, answer, relative)
    if wanted is None or values is None:
        other, single = (wanted or values), (answer if values is None else gold)
        assert other is not None
        name, value = structure.named(single)
        # (x, y) = (1, 2), x \in [1, 2)
        if name and (value == "\\mathbb{R}" or structure.collection(value) is not None):
            if (given := structure.names(other)) and name.startswith("(") and given != {*name.strip("()").split(",")}:
                return False  # (x, y) = (1, 2) against a = 1, b = 2
            return _equal(gold, value, relative) if values is None else _equal(value, answer, relative)
        if other.kind == "\\{\\}" and len(other.items) == 1:
            return _equal(other.items[0], single, relative) if wanted else _equal(single, other.items[0], relative)
        return bool(_FORMULA.search(gold + answer)) and _equal_parsed(gold, answer, relative)
    is_formula = "u" in {wanted.kind, values.kind} or _FORMULA.search(gold + answer)
    return _equal_collections(wanted, values, relative) or (bool(is_formula) and _equal_parsed(gold, answer, relative))


def _equal_texts(gold: str, answer: str) -> bool | None:
    """Compare residues and clock times; None for other texts that differ."""
    residues, theirs = structure.residues(gold), structure.residues(answer)
    if residues and theirs:
        return residues[1:] == theirs[1:] and (residues.name == theirs.name or "" in {residues.name, theirs.name})
    if residues and re.fullmatch("[0-9]{1,9}", answer):
        return residues.name == "" and residues.values == {int(answer)}
    time, other = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(answer)
    if gold != answer and time and other:
        return _are_one_time((time[1], time[2], time[3]), (other[1], other[2], other[3]))
    return True if gold == answer else None


def _are_one_time(*times: tuple[str, str, str | None]) -> bool:
    """Compare clock times: 3:30 p.m. is 15:30 and 3:30, but 3:30 is not 15:30."""
    (hour, minute), (other, minutes) = ((int(time[0]), int(time[1])) for time in times)
    if all(time[2] or int(time[0]) > 12 for time in times):
        hour, other = (12 * (time[2] == "p") + int(time[0]) % 12 if time[2] else int(time[0]) for time in times)
    return (hour, minute) == (other, minutes)


def _are_joined_otherwise(gold: str, answer: str) -> bool:
    """Return True for what holds together in one text and apart in the other: x > 1 and x < 2, x > 1 or x < 2."""
    words, others = structure.joined(gold), structure.joined(answer)
    if "or" in words ^ others and structure.are_of_different_names(gold if "or" in words else answer):  # x = 1 or y = 2
        return True
    are_inequalities = _SIGNS.search(gold) is not None and _SIGNS.search(answer) is not None
    return are_inequalities and words ^ others == {"and", "or"}


def _equal_collections(wanted: structure.Collection, values: structure.Collection, relative: Any) -> bool:
    if len(wanted.items) != len(values.items) or len(wanted.items) > _MAX_ITEMS:
        return False
    shared = wanted.items[1:]  # k\pi, k \in \mathbb{Z}
    if len(shared) == 1 and not wanted.kind + values.kind and shared == values.items[1:] and "\\in" in shared[0]:
        return any(_equal(wanted.items[0], item, relative) for item in latex.shifted(values.items[0], shared[0]))
    names, theirs = structure.names_of_both(wanted, values)
    several, others = len({*names} - {""}) > 1, len({*theirs} - {""}) > 1
    if wanted.is_ordered or values.is_ordered:  # (1, 2), also as x = 1, y = 2
        if wanted.kind != values.kind and (wanted.kind or values.kind) == "()" and "" in {wanted.kind, values.kind}:
            listed, given = (theirs, values) if wanted.kind else (names, wanted)
            if several + others == 1 and listed == sorted({*listed}):
                stripped = [structure.named(item)[1] for item in given.items]
                return _all_equal(*((wanted.items, stripped) if wanted.kind else (stripped, values.items)), relative)
        return wanted.kind == values.kind and _all_equal(wanted.items, values.items, relative)
    if several and others:
        return _matched(wanted.items, values.items, lambda one, other: _equal(one, other, relative))
    plain, given = ([structure.named(item)[1] for item in part.items] for part in (wanted, values))
    if several or others:  # x = 1, y = 2 against 1, 2
        return not (any(theirs) if several else any(names)) and _all_equal(plain, given, relative)
    if any(names) and any(theirs) and {*names} - {""} != {*theirs} - {""}:
        return False
    return _matched(plain, given, lambda one, other: _equal(one, other, relative))


def _all_equal(wanted: Iterable[str], values: Iterable[str], relative: Any) -> bool:
    return all(_equal(one, other, relative) for one, other in zip(wanted, values, strict=True))


def _matched(wanted: Iterable[Any], values: Iterable[Any], equal: Callable[[Any, Any], bool]) -> bool:
    left = list(values)
    for one in wanted:
        place = next((number for number, other in enumerate(left) if equal(one, other)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _equal_values(gold: str, answer: str, relative: Any) -> bool:
    (name, wanted), (theirs, value) = structure.named(gold), structure.named(answer)
    is_y = "y" in {name, theirs} and _FUNCTION.fullmatch(name if theirs == "y" else theirs)
    if name and theirs and (name == theirs or is_y):
        return _equal(wanted, value, relative)
    if name and "=" not in gold and _SIGNS.search(answer):  # x \\in (0, 1) against 0 < x < 1
        return _equal(wanted, answer, relative)
    if theirs and "=" not in answer and _SIGNS.search(gold):
        return _equal(gold, value, relative)
    if name and not theirs and "=" not in answer and not _SIGNS.search(answer):
        stands_alone = (
            "(" in name or "'" in name or ":" in name or re.search("_.*[a-z]", name) is not None or "=" not in gold
        )
        return (stands_alone or not _letters(wanted)) and _equal(wanted, answer, relative)
    if theirs and not name and "=" not in gold and not _SIGNS.search(gold):
        return _equal(gold, value, relative)
    if "%" in {gold[-1], answer[-1]}:
        has_unit = any(quantity.split_unit(text)[1] for text in (gold, answer))  # 20 cm is not 20%
        return not has_unit and _equal_percentages(gold, answer, relative)
    numerals = structure.numeral(gold), structure.numeral(answer)
    if any(numerals) or structure.holds_numeral(gold) or structure.holds_numeral(answer):
        return None not in numerals and numerals[0] == numerals[1]
    return _equal_quantities(quantity.split_unit(gold, answer), quantity.split_unit(answer, gold), relative)


def _equal_quantities(gold: tuple[str, str], answer: tuple[str, str], relative: Any) -> bool:
    """Compare values with units: converted when both have one, ignored when one has none."""
    (wanted, unit), (value, given) = gold, answer
    if unit and given:
        factor = quantity.unit_factor(given, unit)
        if factor is None:
            return False
        value = value if factor == 1 else f"\\frac{{{factor.numerator}}}{{{factor.denominator}}}\\cdot({value})"
    if "\\text" in wanted or "\\text" in value:
        return _words(wanted) == _words(value)
    return wanted == value or _equal_parsed(wanted, value, relative)


def _equal_percentages(gold: str, answer: str, relative: Any) -> bool:
    """A percentage equals the fraction it denotes, and the same number without the sign if it is the truth that has one."""
    wanted, value = gold.removesuffix("%"), answer.removesuffix("%")
    if gold.endswith("%") and (answer.endswith("%") or _equal(wanted, value, relative)):
        return _equal(wanted, value, relative)
    fraction = "\\frac{{1}}{{100}}\\cdot({0})".format
    return _equal(fraction(wanted), value, relative) if wanted != gold else _equal(wanted, fraction(value), relative)


def _words(text: str) -> str:
    return re.sub(r"\s", "", re.sub(r"\\text\{([A-Za-z])\}", r"\1", text))


def _letters(text: str) -> set[str]:
    found = {letter for letter in _LETTER.findall(text) if letter[0] != "\\" or _GREEK.fullmatch(letter[1:].casefold())}
    return found - {"e", "i"}


_GREEK = re.compile(
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi|omega"
)


def _equal_parsed(gold: str, answer: str, relative: Any) -> bool:
    """Compare what two formulas mean; what cannot be computed, such as ``1 < i`` or a sum that diverges, equals nothing."""
    try:
        return _equal_meanings(*_apart(gold, answer), relative)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 sympy raises whatever it likes
        return False


def _equal_meanings(gold: str, answer: str, relative: Any) -> bool:
    wanted, value = _parse(gold), _parse(answer)
    if "\\begin{cases}" in gold + answer:
        return formulas.equal_piecewise(_piecewise(gold), _piecewise(answer))
    if wanted is None or value is None:
        letters = set[str]().union(*(_letters(re.sub(r"\\text\{[a-z]*\}", "", text)) for text in (gold, answer)))
        sets = (_as_set(gold), _as_set(answer)) if len(letters) == 1 else (None, None)
        return None not in sets and sets[0] == sets[1]
    wanted, value = (part.doit() if isinstance(part, sympy.MatrixExpr) else part for part in (wanted, value))
    if isinstance(wanted, sympy.MatrixBase) and isinstance(value, sympy.MatrixBase):
        pairs = zip(wanted.flat(), value.flat(), strict=False)
        return wanted.shape == value.shape and all(
            formulas.equal_expressions(one, other, relative) for one, other in pairs
        )
    if isinstance(wanted, sympy.Expr) and isinstance(value, sympy.Expr):
        return formulas.equal_expressions(wanted, value, relative)
    if isinstance(wanted, Relational | sympy.And) and isinstance(value, Relational | sympy.And):
        return _matched(formulas.relations(wanted), formulas.relations(value), formulas.equal_relations)
    if isinstance(wanted, sympy.MatrixBase) or isinstance(value, sympy.MatrixBase):
        return False
    return bool(wanted == value) or verify(wanted, value, 30, 60, timeout_seconds=None, allow_set_relation_comp=True)


def _as_set(text: str) -> Any:
    """Return the real numbers that an interval, inequalities joined by a word, or a union are; None for anything else."""
    values, words = structure.collection(structure.named(text)[1]), structure.joined(text)
    if values is None:
        return relation.as_set() if isinstance(relation := _parse(text), Relational | sympy.And) else None
    if values.is_ordered and len(values.items) == 2:
        return sympy.Interval(*map(_parse, values.items), *(mark in "()" for mark in values.kind))
    if values.is_ordered or (values.kind == "" and len(words) != 1):
        return None
    parts = [_as_set(item) for item in values.items]
    return None if None in parts else (sympy.Intersection if words == {"and"} else sympy.Union)(*parts)


def _piecewise(text: str) -> Any:
    """Return what a formula or its cases mean; None if a case has no condition, or one that cannot be read."""
    if not text.startswith("\\begin{cases}"):
        return _parse(text)
    values, pairs = structure.collection(text), []
    for value, _, condition in (item[1:-1].partition(";") for item in (values.items if values else ())):
        parity = _PARITY.fullmatch(condition)
        holds = _OTHERWISE.fullmatch(condition) or (_parse(condition) if not parity else None)
        if parity:
            holds = sympy.Eq(sympy.Mod(_parse(parity[1]), 2), int(parity[2] == "odd"))
        if not isinstance(meant := _parse(value), sympy.Expr) or not isinstance(
            holds, re.Match | Relational | sympy.And
        ):
            return None
        pairs.append((meant, True if isinstance(holds, re.Match) else holds))
    return sympy.Piecewise(*pairs, evaluate=False) if pairs else None


_PARITY, _OTHERWISE = (
    re.compile(r"([a-z])\s*\\text\{(?:is )?(even|odd)\}"),
    re.compile(r"\\text\{(?:otherwise|else)\}|otherwise"),
)


def _apart(gold: str, answer: str) -> tuple[str, str]:
    """Rename capital letters whose small letter occurs too: the parser makes all letters small."""
    used = {*_LETTER.findall(gold), *_LETTER.findall(answer)}
    free = [letter for letter in "abcghjkmnprstxyzuvwq" if not {letter, letter.upper()} & used]
    capitals = sorted(letter for letter in used if letter != letter.lower() and letter.lower() in used)
    renamed = dict(zip(capitals, reversed(free), strict=False))
    if not renamed:
        return gold, answer
    gold, answer = (_LETTER.sub(lambda found: f"{renamed.get(found[0], found[0])} ", text) for text in (gold, answer))
    return gold, answer


@lru_cache(_KNOWN)
def _parse(text: str) -> Any:
    """Return what a formula means to the parser; None for one that it cannot read, or misreads."""
    if _MISREAD.search(_LIMIT.sub(r"\1", re.sub(r"\^\\circ(?![A-Za-z])", "", text))):
        return None
    text = re.sub(r"(?<=[0-9e])\^\{?T\}?(?![A-Za-z])", "^{t}", text)  # the parser makes letters small, but drops ^T
    formula = latex.exactly(text).lstrip("+").replace("^\\circ", "\\cdot\\frac{\\pi}{180}")
    try:
        parsed = latex2sympy(formula, is_real=True, convert_degrees=False, normalization_config=None)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 the parser raises whatever it likes
        return None
    if isinstance(parsed, sympy.Basic):
        if any(not one.expr.has(*one.variables) for one in parsed.atoms(sympy.Derivative)):
            return None  # dy/dx is not 0
        parsed = parsed.subs({symbol: sympy.I for symbol in parsed.free_symbols if str(symbol) == "i"})
    return parsed if isinstance(parsed, sympy.Basic | sympy.MatrixBase) else None


if __name__ == "__main__":
    grader_process.serve(read_gold, is_equal, example=("x+\\frac{1}{2}", "\\frac{1}{2}+x"))
