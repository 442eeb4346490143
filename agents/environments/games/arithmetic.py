"""Evaluate arithmetic in text: numbers, + - * / // % ** and parentheses, exact, with limits on size; nothing is executed."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

_LONGEST = 200  # characters of an expression; so it has at most 100 operations
_BITS = 4096  # of the numerator and the denominator of every value
_LARGEST_EXPONENT = 1024
_ALLOWED = "an expression consists of numbers, + - * / // % ** and parentheses"


def evaluate(text: str) -> Fraction:
    """Return the exact value of an expression; raises ValueError with a sentence for the policy."""
    if len(text) > _LONGEST:
        raise ValueError(f"the expression has {len(text)} characters, at most {_LONGEST} are read")
    if not set(text) <= set("0123456789.+-*/%() "):
        raise ValueError(_ALLOWED)
    text = text.strip()
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("the expression cannot be read") from None
    return _value(tree, text)


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() as number):
            return Fraction(number)
        case ast.Constant(value=float()):
            return Fraction(text[node.col_offset : node.end_col_offset])  # as it is written: 0.1 is a tenth
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _joined(_value(left, text), _OPERATORS[type(op)], _value(right, text))
        case _:
            raise ValueError(_ALLOWED)


def _joined(left: Fraction, act: Callable[[Fraction, Fraction], Fraction], right: Fraction) -> Fraction:
    try:
        value = act(left, right)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
        raise ValueError("the value is too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _LARGEST_EXPONENT:
        raise ValueError(f"an exponent is a whole number of at most {_LARGEST_EXPONENT}")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (size - 1) * abs(exponent) > _BITS:
        raise ValueError("the value is too large")
    return base ** int(exponent)


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right), ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip
