"""``calculate_output``: arithmetic over the scores of named graders; pure, and nothing else is evaluated."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_ONE_ARGUMENT = frozenset(_FUNCTIONS) - {"min", "max"}


def check(text: str, names: Collection[str]) -> None:
    """Raise ValueError unless the text is arithmetic over the names."""
    try:
        tree = _parsed(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"calculate_output {text[:80]!r} is not an arithmetic expression") from None
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in called and node.id not in names:
            raise ValueError(f"calculate_output: there is no grader {node.id!r}; the graders are {', '.join(names)}")
        if not _allowed(node):
            raise ValueError(
                f"calculate_output: {type(node).__name__} is not allowed; it takes graders, numbers, + - * / ^ and "
                f"{', '.join(_FUNCTIONS)}"
            )


def _parsed(text: str) -> ast.Expression:
    """Return the syntax tree; OpenAI's guide writes powers as ^, which has another precedence in Python."""
    return ast.parse(text.strip().replace("^", "**"), mode="eval")


def _allowed(node: ast.AST) -> bool:
    match node:
        case ast.Constant():
            return isinstance(node.value, int | float) and not isinstance(node.value, bool)
        case ast.Call():
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            fits = len(node.args) == 1 if name in _ONE_ARGUMENT else bool(node.args)
            return name in _FUNCTIONS and fits and not node.keywords
        case ast.BinOp():
            return type(node.op) in _BINARY
        case ast.UnaryOp():
            return isinstance(node.op, ast.USub | ast.UAdd)
        case _:
            return isinstance(node, ast.Expression | ast.Name | ast.expr_context | ast.operator | ast.unaryop)


def compute(text: str, scores: Mapping[str, float]) -> float:
    """Return the value of a checked formula; raises ValueError when it is undefined (division by zero, overflow)."""
    try:
        value = float(_value(_parsed(text).body, scores))
    except (ArithmeticError, ValueError, TypeError) as err:
        raise ValueError(f"calculate_output has no value: {err}") from None
    if not math.isfinite(value):
        raise ValueError(f"calculate_output is {value}, expected a finite number")
    return value


def _value(node: ast.expr, scores: Mapping[str, float]) -> float:
    match node:
        case ast.Constant():
            return float(node.value)  # type: ignore[arg-type]
        case ast.Name():
            return scores[node.id]
        case ast.UnaryOp():
            value = _value(node.operand, scores)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp():
            return _BINARY[type(node.op)](_value(node.left, scores), _value(node.right, scores))
        case ast.Call(func=ast.Name(id=name)):
            values = [_value(one, scores) for one in node.args]
            return _FUNCTIONS[name](values) if name not in _ONE_ARGUMENT else _FUNCTIONS[name](*values)
    raise TypeError(f"{type(node).__name__} is not arithmetic")
