"""Which test code is shown how the program changed its arguments.

Tests of functions that work in place compare an argument afterwards with a value of their own. Anywhere else the program gets
copies: tests that compare its answer with what it was passed (``f(x) == sorted(x)``, ``f(case) == case["want"]``) would
take the expected value from data that the program could have changed. The rule reads names alone: of the program and its
answers, and of its arguments and what else is the same object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)
_PASSES = 8  # through a scope, until its names do not change


def scopes_shown(
    trees: Iterable[tuple[str, ast.Module]], program: Iterable[str], modules: Iterable[str]
) -> set[tuple[str, str, int]]:
    """Return the scopes that see changes, each as its file, its name and its first line, as code objects have them.

    ``program`` are names under test, ``modules`` those that they are imported from.
    """
    trees = list(trees)
    under_test = {*program, *modules}
    nodes = [node for _, tree in trees for node in ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in under_test:
            under_test |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            under_test |= {alias.asname for alias in node.names if alias.asname and alias.name in under_test}
        elif isinstance(node, _SCOPES) and node.name == "check":
            under_test |= {argument.arg for argument in node.args.args[:1]}
    for _ in range(_PASSES):  # functions of the tests that call the program
        under_test |= {node.name for node in nodes if isinstance(node, _SCOPES) and _names(node) & under_test}
    found: set[tuple[str, str, int]] = set()
    for file, tree in trees:
        scopes = [node for node in ast.walk(tree) if isinstance(node, _SCOPES)]
        if _is_shown(list(_nodes(tree)), under_test):
            found.add((file, "<module>", 1))
        for node in scopes:
            if _is_shown(list(_nodes(node)), under_test):
                found.add((file, node.name, min([node.lineno, *(mark.lineno for mark in node.decorator_list)])))
    return found


def _nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes of a scope without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, _SCOPES):
            yield child
            yield from _nodes(child)


def _is_shown(nodes: list[ast.AST], under_test: set[str]) -> bool:
    program, passed = set(under_test), set[str]()
    for _ in range(_PASSES):
        called = [node for node in nodes if isinstance(node, ast.Call) and _names(node.func) & program]
        for call in called:
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                passed |= _root(argument)
        first = min((call.lineno for call in called if set().union(*map(_root, call.args)) & passed), default=0)
        for targets, value, line in _bindings(nodes):
            program |= targets if _names(value) & program else set()
            passed |= _root(value) if targets & passed else set()
            passed |= targets if _root(value) & passed or (line > first and _read(value, program) & passed) else set()
    shown = False
    for node in nodes:
        for left, right in _compared(node):
            for one, other in ((left, right), (right, left)):
                read = _read(one, program) & passed
                if read and _names(other) & program:
                    return False
                shown = shown or bool(read)
        whole = (
            node.test
            if isinstance(node, ast.Assert)
            else node.value
            if isinstance(node, ast.Expr | ast.Return)
            else None
        )
        shown = shown or bool(whole and _read(whole, program) & passed and not _names(whole) & program)
    return shown


def _bindings(nodes: list[ast.AST]) -> Iterator[tuple[set[str], ast.expr, int]]:
    """Return the names of every assignment and loop, what they are bound to, and where."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield set().union(*map(_names, node.targets)), node.value, node.lineno
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            yield _names(node.target), node.value, node.lineno
        elif isinstance(node, ast.For | ast.AsyncFor):
            yield _names(node.target), node.iter, node.lineno
        elif isinstance(node, ast.comprehension):
            yield _names(node.target), node.iter, node.iter.lineno


def _compared(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return the pairs that a comparison, or a call such as assertEqual, compares."""
    if isinstance(node, ast.Compare):
        return list(zip([node.left, *node.comparators[:-1]], node.comparators, strict=True))
    if isinstance(node, ast.Call) and len(node.args) > 1:
        name = (
            node.func.attr
            if isinstance(node.func, ast.Attribute)
            else node.func.id
            if isinstance(node.func, ast.Name)
            else ""
        )
        return [(node.args[0], node.args[1])] if name.startswith("assert") else []
    return []


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _root(node: ast.expr) -> set[str]:
    """Return the name of the object that an expression is, or is a part of: x of ``x``, ``*x``, ``x[0].y``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _read(node: ast.AST, program: set[str]) -> set[str]:
    """Return the names that an expression reads itself, not in a call of the program."""
    if isinstance(node, ast.Call) and _names(node.func) & program:
        return set()
    own = {node.id} if isinstance(node, ast.Name) else set()
    return own.union(*(_read(child, program) for child in ast.iter_child_nodes(node)))
