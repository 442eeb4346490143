"""Evaluate arithmetic in text: whole numbers, + - * / and parentheses, exact, with limits on size; nothing is executed."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_LONGEST = 200  # characters of an expression; so it has at most 100 operations
_BITS = 4096  # of the numerator and the denominator of every value


def evaluate(text: str) -> Fraction:
    """Return the exact value of an expression; raises ValueError with a sentence for the policy."""
    if len(text) > _LONGEST:
        raise ValueError(f"the expression has {len(text)} characters, at most {_LONGEST} are read")
    if not set(text) <= set("0123456789+-*/() "):
        raise ValueError("an expression consists of whole numbers, + - * / and parentheses")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("the expression cannot be read") from None
    return _value(tree)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() as number):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _joined(_value(left), type(op), _value(right))
        case _:
            raise ValueError("an expression consists of whole numbers, + - * / and parentheses")


def _joined(left: Fraction, kind: type[ast.operator], right: Fraction) -> Fraction:
    try:
        value = _OPERATORS[kind](left, right)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
        raise ValueError("the value is too large")
    return value
