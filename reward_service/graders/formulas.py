"""Compare what two formulas mean, as the parser of `math_grader` returns them: values, relations, and functions by cases.

Constants are compared exactly or within a relative tolerance, formulas by their values at several points (exactly, or to 60 digits: two
that agree there are the same formula), relations up to a factor.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import sympy
from math_verify import verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

_POINTS = tuple(
    tuple(sympy.Rational(n, d) for n, d in point)
    for point in (
        ((7, 5), (13, 7), (29, 11), (31, 13), (5, 3), (41, 17)), ((3, 11), (5, 13), (9, 23), (2, 17), (7, 19), (4, 29)),
        ((23, 7), (11, 9), (3, 7), (19, 5), (8, 3), (1, 7)), ((-3, 7), (5, 4), (-7, 6), (9, 8), (-11, 13), (6, 5)),
        ((-9, 4), (-5, 7), (2, 9), (-8, 11), (3, 5), (-13, 6)),
        ((101, 7), (89, 6), (71, 5), (113, 9), (59, 4), (67, 8)), ((211, 6), (17, 5), (307, 8), (23, 9), (149, 7), (31, 4)),
    )
)  # fmt: skip
_WHOLE_POINTS = (  # both orders of each two: a binomial is 0 in one of them
    (2, 5, 7, 3, 4, 6), (3, 7, 2, 5, 6, 4), (5, 2, 3, 7, 1, 4), (1, 4, 6, 2, 5, 3), (7, 3, 5, 2, 4, 1), (2, 6, 4, 5, 3, 1)
)  # fmt: skip
_WHOLE, _STEPS = (sympy.factorial, sympy.binomial), (sympy.floor, sympy.ceiling)
_AROUND = tuple(sympy.Rational(number, 1000) for number in (-1, 1, -371, 371))  # an edge between two cases
_DIGITS = sympy.Rational(1, 10**50)  # what two equal values of 60 digits may differ by


def equal_expressions(gold: sympy.Expr, answer: sympy.Expr, relative: Any) -> bool:
    if gold == answer:
        return gold not in {sympy.nan, sympy.zoo}
    heavy = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
    if not gold.has(*heavy) and not answer.has(*heavy):  # f(0) is a number without a name
        gold, answer = (
            part.subs({call: sympy.Symbol(str(call), real=True) for call in part.atoms(AppliedUndef)})
            for part in (gold, answer)
        )
    gold, answer = (part.doit() if not part.free_symbols or part.has(*heavy) else part for part in (gold, answer))
    if not gold.free_symbols and not answer.free_symbols:
        return _equal_constants(gold, answer, relative)
    ratios = _at_points([gold, answer])
    if ratios and gold.has(*_WHOLE) and all(_is_zero(one) and _is_zero(other) for one, other in ratios):
        return bool(sympy.simplify(gold - answer) == 0)
    return bool(ratios) and all(_close(one, other, _DIGITS) for one, other in ratios)


def _equal_constants(gold: sympy.Expr, answer: sympy.Expr, relative: Any) -> bool:
    if gold.is_Rational and answer.is_Rational:
        return bool(abs(gold - answer) <= relative * abs(gold))
    if gold.is_infinite or answer.is_infinite:
        return gold == answer
    wanted, value = sympy.N(gold, 60), sympy.N(answer, 60)
    is_close = _close(wanted, value, max(relative, _DIGITS))
    return is_close and (bool(relative) or _is_zero((gold - answer).evalf(15, maxn=500)))


def _close(wanted: sympy.Expr, value: sympy.Expr, relative: Any) -> bool:
    if not all(_is_finite(number) for number in (wanted, value)):
        return False
    if wanted.is_Rational and value.is_Rational:
        return wanted == value
    if _is_zero(wanted) or _is_zero(value):
        return _is_zero(wanted) and _is_zero(value)
    return bool(abs(wanted - value) <= relative * abs(wanted))


def _is_finite(number: sympy.Expr) -> bool:
    return all(isinstance(part, sympy.Number) and part.is_finite for part in number.as_real_imag())


def _is_zero(number: sympy.Expr) -> bool:
    """Return True for 0, and for a difference that vanishes to all digits that were computed."""
    return all(part == 0 or (isinstance(part, sympy.Float) and part._prec <= 10) for part in number.as_real_imag())


def _at_points(formulas: list[sympy.Expr]) -> list[tuple[sympy.Expr, ...]]:
    """Return the values of formulas at points where all are real and on the same branch; whole points for n!, (-1)^n."""
    symbols = sorted(set().union(*(formula.free_symbols for formula in formulas)), key=str)
    if len(symbols) > len(_POINTS[0]):
        return []
    powers = (power for formula in formulas for power in formula.atoms(sympy.Pow))
    has_signs = any(power.exp.free_symbols and power.base.is_negative for power in powers)  # (-1)^n
    whole = has_signs or any(formula.has(*_WHOLE) for formula in formulas)
    has_steps = any(formula.has(*_STEPS) for formula in formulas)
    points = _WHOLE_POINTS if whole else _POINTS + _WHOLE_POINTS * has_steps
    rows = []
    for point in dict.fromkeys(point[: len(symbols)] for point in points):
        at = dict(zip(symbols, point, strict=True))
        if all(_is_on_branch(formula, at) for formula in formulas):
            values = tuple(formula.subs(at) for formula in formulas)
            values = tuple(value if value.is_Rational else sympy.N(value, 60) for value in values)
            if all(_is_finite(value) for value in values):
                rows.append(values)
    return rows if len(rows) > 1 else []


def _is_on_branch(formula: sympy.Expr, at: dict[Any, Any]) -> bool:
    powers = [power.base for power in formula.atoms(sympy.Pow) if not power.exp.is_integer and power.base.free_symbols]
    arguments = [*powers, *(log.args[0] for log in formula.atoms(sympy.log) if log.free_symbols)]
    return all((value := sympy.N(argument.subs(at), 15)).is_real and value > 0 for argument in arguments)


def relations(relation: Any) -> list[Any]:
    return list(relation.args) if isinstance(relation, sympy.And) else [relation]


def equal_relations(gold: Relational, answer: Relational) -> bool:
    """Compare ``left - right`` up to a factor, of an inequality a positive one."""
    if not all(isinstance(side, sympy.Expr) for part in (gold, answer) for side in part.args):
        return verify(gold, answer, 30, 60, timeout_seconds=None)
    wanted, value = (part.reversed if isinstance(part, sympy.Gt | sympy.Ge) else part for part in (gold, answer))
    if type(wanted) is not type(value):
        return False
    differences: list[Any] = [part.args[0] - part.args[1] for part in (wanted, value)]  # pyright: ignore[reportOperatorIssue] both are Expr
    rows = [row for row in _at_points(differences) if not _is_zero(row[0])]
    if len(rows) < 2 or any(_is_zero(row[1]) for row in rows):
        return False
    factors = [row[1] / row[0] for row in rows]
    is_signed = isinstance(wanted, sympy.Lt | sympy.Le)
    same = all(_close(one, other, _DIGITS) for one, other in pairwise(factors))
    return same and (not is_signed or all(factor > 0 for factor in factors))


def equal_piecewise(gold: Any, answer: Any) -> bool:
    """Compare two functions of one variable at the edges of their cases, around them, and at several points."""
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return False
    symbols, conditions = gold.free_symbols | answer.free_symbols, gold.atoms(Relational) | answer.atoms(Relational)
    if len(symbols) != 1 or not conditions:
        return False
    (x,) = symbols
    if gold.has(sympy.Mod) or answer.has(sympy.Mod):
        points = [sympy.Integer(number) for number in range(1, 13)]
    else:
        edges = [root for one in conditions for root in sympy.real_roots(sympy.Poly(one.args[0] - one.args[1], x))]  # pyright: ignore[reportOperatorIssue]
        points = [*edges, *(edge + step for edge in edges for step in _AROUND), *(point[0] for point in _POINTS)]
    for point in points:
        one, other = (sympy.N(formula.subs(x, point), 60) for formula in (gold, answer))
        if _is_finite(one) != _is_finite(other) or (_is_finite(one) and not _close(one, other, _DIGITS)):
            return False
    return True
