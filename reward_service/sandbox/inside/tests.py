"""The process that runs a data set's test code against a program in another process.

The program cannot read the test code, the expected values or this process: calls are sent to it as JSON, and only plain
values are returned (`values`). So it cannot override a comparison, catch an assertion, print a verdict or end the tests.

Descriptors: 3 the job (JSON), 4 verdicts, 5 answers of the program, 6 calls to it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import os
import sys
import unittest
from collections.abc import Iterator
from typing import Any

from penstock.reward_service.sandbox.inside import values

JOB, VERDICTS, ANSWERS, CALLS = 3, 4, 5, 6
_MAX_ANSWER = 4 * 1024 * 1024  # bytes of one answer
_LARGE = 16 * 1024  # a larger answer may exhaust this process, which then counts as the program's failure
# If a called function raises one of these, it would end a loop or the tests instead of failing them.
_SILENT = (StopIteration, StopAsyncIteration, GeneratorExit)


class ProgramFailed(Exception):
    """The program raised an exception that tests do not catch, sent an invalid answer, or exited."""


class Unsendable(Exception):
    """A test passes the program a value that cannot be sent to another process; an error of the tests."""


def run() -> int:
    """Run the tests of the job read from descriptor 3; return the exit code."""
    with os.fdopen(JOB, "rb") as pipe:
        job = json.load(pipe)
    with os.fdopen(ANSWERS, "rb") as answers, os.fdopen(CALLS, "wb", buffering=0) as calls:
        program = _Program(answers, calls)
        try:
            for verdict in _verdicts(job, program):
                if program.unsendable:
                    raise Unsendable(program.unsendable)
                _say(verdict)
        except BaseException as err:  # test code that does not compile or a setup that raises: an error of the tests
            _say({"broken": f"{type(err).__name__}: {err}"[:1000]})
            return 1
    _say({"done": True})
    return 0


def _verdicts(job: dict[str, Any], program: _Program) -> Iterator[dict[str, Any]]:
    """Run each piece of test code, in one namespace after ``setup``; yields the result of every test."""
    names: dict[str, Any] = {"__name__": "tests"}
    pieces = [compile(text, f"test {place}", "exec", dont_inherit=True) for place, text in enumerate(job["tests"])]
    exec(compile(job["setup"], "setup", "exec", dont_inherit=True), names)  # noqa: S102 the data set's code
    entry_points = _borrow(job, names, program)
    for place, piece in enumerate(pieces):
        before = dict(names)
        error = _attempt(lambda piece=piece: exec(piece, names))  # noqa: S102
        if error:
            yield {"test": place, "ok": False, "why": error}
            continue
        check = names.get("check")
        suites = [thing for name, thing in names.items() if _is_suite(thing) and before.get(name) is not thing]
        if suites:
            yield from _unittests(place, suites)
        elif callable(check) and before.get("check") is not check and entry_points:
            error = _attempt(lambda check=check: check(names[entry_points[0]]))
            yield {"test": place, "ok": not error, "why": error}
        else:
            yield {"test": place, "ok": True, "why": ""}


def _borrow(job: dict[str, Any], names: dict[str, Any], program: _Program) -> list[str]:
    """Give the tests the program's functions that they use; returns their names.

    Without named entry points they are the names that the tests use and do not define. A module of the standard library
    is imported here, because the program could have altered its own.
    """
    missing = [name for name in _free_names(job["tests"]) if name not in names and not hasattr(builtins, name)]
    modules = [name for name in missing if name in sys.stdlib_module_names]
    entry_points = list(job["entry_points"]) or [name for name in missing if name not in modules]
    for name in modules:
        if name not in entry_points:
            names[name] = importlib.import_module(name)
    foreign = sorted(set(missing) - set(modules) - set(entry_points))
    if foreign:
        raise Unsendable(
            f"the tests use {', '.join(foreign)}, which is neither defined there, in the setup nor an entry_point"
        )
    for name in entry_points:
        names[name] = _Remote(program, name=name)
    return entry_points


def _free_names(tests: list[str]) -> list[str]:
    """Return the names that test code reads and does not define, in order of appearance."""
    read: dict[str, None] = {}
    defined: set[str] = set()
    for text in tests:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load):
                    read[node.id] = None
                else:
                    defined.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                defined.add(node.name)
    return [name for name in read if name not in defined]


def _attempt(test: Any) -> str:
    """Run one test; return why it failed, "" if it passed."""
    try:
        test()
    except BaseException as err:
        return f"{type(err).__name__}: {err}"[:500]
    return ""


def _is_suite(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, unittest.TestCase) and thing is not unittest.TestCase


def _unittests(place: int, suites: list[Any]) -> Iterator[dict[str, Any]]:
    for suite in suites:
        for case in unittest.defaultTestLoader.loadTestsFromTestCase(suite):
            result = unittest.TestResult()
            result.stream = io.StringIO()  # type: ignore[attr-defined]
            case.run(result)
            failed = [text for _, text in [*result.errors, *result.failures]]
            ok = result.testsRun == 1 and not failed and not result.skipped and not result.unexpectedSuccesses
            yield {"test": place, "ok": ok, "why": (failed or ["skipped"])[0][-500:] if not ok else ""}


class _Program:
    """The channel to the program in the other process: one line for a call, one for its answer."""

    def __init__(self, answers: io.BufferedReader, calls: Any) -> None:
        self._answers = answers
        self._calls = calls
        self._said_large = False
        self.unsendable = ""

    def ask(self, where: dict[str, Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        sent = values.encode(list(arguments), self._handle_of)
        answer = self._exchange({**where, "arguments": sent, "named": values.encode(named, self._handle_of)})
        value = self._value(answer)
        changed = answer.get("changed")
        if isinstance(changed, list) and len(changed) == len(arguments):
            for argument, form in zip(arguments, changed, strict=True):
                _update(argument, self._decode(form))
        return value

    def attribute(self, handle: int, name: str) -> Any:
        return self._value(self._exchange({"handle": handle, "attribute": name}))

    def _handle_of(self, thing: Any) -> int:
        if isinstance(thing, _Remote) and thing._handle >= 0:
            return thing._handle
        self.unsendable = f"a test passes the program a {type(thing).__name__}, which cannot be sent to another process"
        raise Unsendable(self.unsendable)

    def _exchange(self, call: dict[str, Any]) -> dict[str, Any]:
        try:
            text = json.dumps(call).encode() + b"\n"
            while text:
                text = text[self._calls.write(text) :]
            line = self._answers.readline(_MAX_ANSWER)
        except OSError as err:
            raise ProgramFailed(f"the program exited ({err.strerror})") from None
        if not line.endswith(b"\n"):
            raise ProgramFailed("the program exited, or its answer is too long")
        if len(line) > _LARGE and not self._said_large:
            self._said_large = True
            _say({"large": True})
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ProgramFailed("the program wrote to the descriptor of its answers")
        return answer

    def _value(self, answer: dict[str, Any]) -> Any:
        if "raised" in answer:
            raise _exception(str(answer["raised"]), str(answer.get("text", "")))
        return self._decode(answer.get("value"))

    def _decode(self, form: Any) -> Any:
        try:
            return values.decode(form, lambda number: _Remote(self, handle=number))
        except (ValueError, KeyError, TypeError, IndexError, ArithmeticError, RecursionError, AttributeError) as err:
            raise ProgramFailed(f"the program's answer is not a value: {type(err).__name__}") from None


class _Remote:
    """A proxy of an object in the program's process: call it, or read its attributes. Equal only to itself."""

    def __init__(self, program: _Program, *, name: str = "", handle: int = -1) -> None:
        self.__dict__.update(_program=program, _where={"name": name} if name else {"handle": handle}, _handle=handle)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.ask(self._where, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._handle < 0:
            raise AttributeError(name)
        return self._program.attribute(self._handle, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Remote) and self._where == other._where

    def __hash__(self) -> int:
        return hash(str(self._where))


def _update(argument: Any, now: Any) -> None:
    """Copy a function's changes of its arguments into the tests' objects."""
    if type(argument) is not type(now):
        return
    if isinstance(argument, list):
        argument[:] = now
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(now)


def _exception(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _SILENT):
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError requires five arguments
            pass
    return ProgramFailed(f"{name}: {text}")


def _say(verdict: dict[str, Any]) -> None:
    data = json.dumps(verdict).encode() + b"\n"
    while data:
        data = data[os.write(VERDICTS, data) :]
