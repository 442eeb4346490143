"""Find the tests that a piece of test code defines, and run them: unittest, pytest's functions and classes, ``check``.

Tests that the code calls itself, at its top level or under ``if __name__ == "__main__"``, are not run again.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.sandbox.inside import pytest_api
from penstock.sandbox.inside.program_proxy import BadTests, is_of_program

Report = Callable[[str], None]  # takes why a test failed, "" if it passed
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SILENT_STATEMENTS = (*_DEFINITIONS, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
_CHARS = 500


@dataclass(frozen=True, slots=True)
class Found:
    count: int
    run: Callable[[Report], None]


def attempt(test: Callable[[], Any], *, may_exit: bool = False) -> str:
    """Run a test; return why it failed, "" if it passed. Raises BadTests when the tests are the cause.

    With ``may_exit`` a SystemExit with success is no failure: scripts end in ``sys.exit(main())``.
    """
    try:
        test()
    except BaseException as err:
        if may_exit and isinstance(err, SystemExit) and not err.code and not is_of_program(err):
            return ""
        raise_if_bad(err)
        return describe(err)
    return ""


def raise_if_bad(err: BaseException) -> None:
    """Raise BadTests if an exception shows that the tests cannot be run: a module is missing, a feature not supported."""
    if isinstance(err, BadTests):
        raise err
    if isinstance(err, ImportError) and not is_of_program(err):
        raise BadTests(
            f"{describe(err)}; tests may import the standard library and pytest, and the program from solution"
        ) from None


def describe(err: BaseException) -> str:
    try:
        text = str(err)
    except BaseException as other:
        text = f"(its text cannot be shown: {type(other).__name__})"
    return f"{type(err).__name__}: {text[:_CHARS]}"


def has_statements(tree: ast.Module) -> bool:
    """Return True if code does something at its top level besides imports, definitions and assignments."""
    return any(
        not isinstance(node, _SILENT_STATEMENTS)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in tree.body
    )


def collect(
    names: dict[str, Any], before: dict[str, Any], tree: ast.Module, candidate: Callable[[], Any]
) -> list[Found]:
    """Return the tests among the names that a piece of code has defined, from the namespace after and before it ran, and its syntax.

    ``candidate`` returns the function that ``check(candidate)`` gets; it raises BadTests when the row does not name it.
    """
    new = {name: thing for name, thing in names.items() if before.get(name) is not thing}
    used = _used_at_top_level(tree)
    tests: list[Found] = []
    for name, thing in new.items():
        if _is_suite(thing):
            tests.append(_suite(thing))
        elif _is_test_class(name, thing):
            tests += _methods(thing, names)
        elif name.startswith("test") and isinstance(thing, types.FunctionType) and name not in used:
            tests += _cases(thing, names, lambda thing=thing: thing, None)
    check = new.get("check")
    if isinstance(check, types.FunctionType) and "check" not in used:
        tests.append(_check(check, candidate))
    return [test for test in tests if test.count]


def _used_at_top_level(tree: ast.Module) -> set[str]:
    return {
        part.id
        for node in tree.body
        if not isinstance(node, _DEFINITIONS)
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }


def _check(check: types.FunctionType, candidate: Callable[[], Any]) -> Found:
    required = [
        parameter for parameter in inspect.signature(check).parameters.values() if parameter.default is parameter.empty
    ]
    if len(required) > 1:
        raise BadTests("check takes several arguments; it gets one, the function under test")
    arguments = [candidate()] if required else []
    return Found(1, lambda report: report(attempt(lambda: _finish(check(*arguments)))))


# ----- unittest -----------------------------------------------------------------------------------------------------


def _is_suite(thing: Any) -> bool:
    return (
        isinstance(thing, type)
        and issubclass(thing, unittest.TestCase)
        and thing.__module__ == "__main__"
        and not getattr(thing, "__unittest_skip__", False)
    )


def _suite(kind: type[unittest.TestCase]) -> Found:
    names = unittest.defaultTestLoader.getTestCaseNames(kind)
    cases = [kind(name) for name in names if not getattr(getattr(kind, name), "__unittest_skip__", False)]

    def run(report: Report) -> None:
        results = _Results(report)
        unittest.TestSuite(cases).run(results)
        if results.bad is not None:
            raise results.bad

    return Found(len(cases), run)


class _Results(unittest.TestResult):
    def __init__(self, report: Report) -> None:
        super().__init__()
        self.bad: BadTests | None = None
        self._report = report
        self._why: str | None = None

    def startTest(self, test: Any) -> None:  # noqa: N802 unittest's name
        super().startTest(test)
        self._why = ""

    def stopTest(self, test: Any) -> None:  # noqa: N802
        super().stopTest(test)
        self._report(self._why or "")
        self._why = None

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        self._failed(err[1])

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self._failed(err[1])

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
        if err is not None:
            self._failed(err[1])

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._failed(None, f"skipped: {reason}")

    def addUnexpectedSuccess(self, test: Any) -> None:  # noqa: N802
        self._failed(None, "an expected failure did not happen")

    def _failed(self, err: BaseException | None, text: str = "") -> None:
        if err is not None:
            text = describe(err)
            try:
                raise_if_bad(err)
            except BadTests as bad:
                self.bad = self.bad or bad
                self.shouldStop = True
        if self._why is None:  # outside of a test: in setUpClass, tearDownClass or setUpModule
            self._report(text)
        self._why = self._why or text


# ----- pytest -------------------------------------------------------------------------------------------------------


def _is_test_class(name: str, thing: Any) -> bool:
    return (
        name.startswith("Test")
        and isinstance(thing, type)
        and not issubclass(thing, unittest.TestCase)
        and thing.__module__ == "__main__"
        and thing.__init__ is object.__init__
        and thing.__new__ is object.__new__
    )


def _methods(kind: type, names: dict[str, Any]) -> list[Found]:
    if any(pytest_api.is_left_out(mark) for mark in getattr(kind, pytest_api.MARKS, [])):
        return []
    tests: list[Found] = []
    for name in dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base)):
        method = getattr(kind, name)
        if name.startswith("test") and inspect.isroutine(method):
            tests += _cases(method, names, lambda name=name: getattr(kind(), name), kind)
    return tests


def _cases(
    function: Any, names: dict[str, Any], bind: Callable[[], Callable[..., Any]], kind: type | None
) -> list[Found]:
    marks = [*getattr(kind, pytest_api.MARKS, []), *getattr(function, pytest_api.MARKS, [])]
    if any(pytest_api.is_left_out(mark) for mark in marks):
        return []

    def run(arguments: dict[str, Any], report: Report) -> None:
        report(attempt(lambda: _with_fixtures(bind(), names, arguments, marks)))

    return [Found(1, lambda report, case=case: run(case, report)) for case in pytest_api.each(marks)]


def _with_fixtures(
    test: Callable[..., Any], names: dict[str, Any], arguments: dict[str, Any], marks: list[pytest_api.Mark]
) -> None:
    owner = getattr(test, "__self__", None)
    fixtures = {
        thing.__dict__[pytest_api.FIXTURE]["name"]: thing
        for thing in [*names.values(), *(getattr(owner, name) for name in dir(owner))]
        if pytest_api.FIXTURE in getattr(thing, "__dict__", {})
    }
    with contextlib.ExitStack() as ending:
        _set_up(names, owner, test, ending)
        made = dict(arguments)
        wanted = [name for name, fixture in fixtures.items() if fixture.__dict__[pytest_api.FIXTURE]["autouse"]]
        wanted += [name for mark in marks if mark.name == "usefixtures" for name in mark.args]
        for name in wanted:
            _make(name, fixtures, made, ending)
        fixture_values = {name: _make(name, fixtures, made, ending) for name in _required(test)}
        _finish(test(**{**arguments, **fixture_values}))


def _set_up(names: dict[str, Any], owner: Any, test: Any, ending: contextlib.ExitStack) -> None:
    for place, scope in ((names, "module"), (names, "function"), (owner, "class"), (owner, "method")):
        for prefix in ("setup", "teardown"):
            name = f"{prefix}_{scope}"
            function = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
            if callable(function) and (owner is None or scope != "function"):
                arguments = [test] if len(inspect.signature(function).parameters) else []
                ending.callback(function, *arguments) if prefix == "teardown" else function(*arguments)


def _make(name: str, fixtures: dict[str, Any], made: dict[str, Any], ending: contextlib.ExitStack) -> Any:
    if name not in made:
        if name not in fixtures:
            raise BadTests(f"a test takes the argument {name}, for which the tests have no fixture and no parameter")
        function = fixtures[name]
        arguments = {argument: _make(argument, fixtures, made, ending) for argument in _required(function)}
        made[name] = result = function(**arguments)
        if isinstance(result, Iterator) and inspect.isgeneratorfunction(inspect.unwrap(function)):
            made[name] = next(result)
            ending.callback(next, result, None)
    return made[name]


def _required(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.name for parameter in parameters if parameter.kind in kinds and parameter.default is parameter.empty
    ]


def _finish(result: Any) -> None:
    if inspect.iscoroutine(result):
        asyncio.run(result)
