"""The process that runs a data set's test code against a program in another process.

The program cannot read the test code, the expected values or this process: calls are sent to it as JSON, and only plain
values are returned (`values`). So it cannot override a comparison, catch an assertion, print a verdict or end the tests.

Descriptors: 3 the job (JSON), 4 verdicts, 5 answers of the program, 6 calls to it. A job with ``stubs`` has no program:
its tests run once with each stand-in (`program_proxy.Stub`), which shows what they accept. Those that it names as ``hidden`` do not see
how the program changes its arguments.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import symtable
import sys
import types
import unittest
from typing import Any

from penstock.sandbox.inside import pytest_api, test_collection
from penstock.sandbox.inside.program_proxy import PROGRAM_MODULES, Answers, BadTests, Program, Stub, module_of

JOB, VERDICTS, ANSWERS, CALLS = 3, 4, 5, 6
_RUNNERS = frozenset({  # what makes code of its first argument
    "eval", "exec", "compile", "__import__", "importlib.import_module", "marshal.loads", "pickle.load", "pickle.loads", "pickle.Unpickler",
    "dill.loads", "cloudpickle.loads", "runpy.run_path", "timeit.timeit", "timeit.repeat", "os.system", "subprocess.run",
})  # fmt: skip


def run() -> int:
    with os.fdopen(JOB, "rb") as pipe:
        job = json.load(pipe)
    sys.modules["pytest"] = pytest_api
    unittest.main = lambda *_, **__: None  # type: ignore[misc,assignment] the tests of a module are run in any case
    try:
        if "stubs" in job:
            for kind in job["stubs"]:
                _Session(job, Stub(kind), {"stub": kind}).run()
                _say({"stub": kind, "finished": True})
        else:
            with os.fdopen(ANSWERS, "rb") as answers, os.fdopen(CALLS, "wb", buffering=0) as calls:
                _Session(job, Program(answers, calls, _say), {}).run()
    except MemoryError:
        sys.stderr.write("MemoryError\n")
        return 1
    except BaseException as err:  # test code that does not compile or a setup that raises: an error of the tests
        _say({"broken": str(err) if isinstance(err, BadTests) else test_collection.describe(err)})
        return 1
    _say({"done": True})
    return 0


class _Session:
    def __init__(self, job: dict[str, Any], program: Answers, label: dict[str, Any]) -> None:
        self._texts: list[str] = job["tests"]
        self._setup: str = job["setup"]
        self._named: list[str] = list(job["entry_points"])
        self._program = program
        self._label = label
        self._hidden: list[list[int]] = job.get("hidden", [])
        self._number = 0  # of the test in its piece
        self._has_failed = False

    def run(self) -> None:
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        names = module.__dict__
        trees = [_parsed(text, place) for place, text in enumerate(self._texts)]
        if shared := _shared_with_program([ast.parse(self._setup), *trees]):
            raise BadTests(f"the tests use {shared} of the program's process, and it runs in another one")
        if run := [text for tree in trees for text in _runs_texts(tree)]:
            raise BadTests(f"the tests run a text as code ({run[0]}), and a program may have written it")
        self._offer_program(trees)
        setup = ast.parse(self._setup, "setup")
        lent = _called([setup]) & set(_free_names([setup])) - vars(builtins).keys()
        names.update({name: self._program.look_up(name) for name in lent})
        try:
            exec(compile(setup, "setup", "exec", dont_inherit=True), names)  # noqa: S102 the data set's code
        except Exception as err:
            if not lent:
                raise
            for place in range(len(trees)):  # it has called the program
                self._report(place, test_collection.describe(err))
            return
        functions = self._borrow(trees, names)
        count = 0
        for place, tree in enumerate(trees):
            count += self._piece(place, tree, names, functions)
        if not count:
            raise BadTests(
                "the tests test nothing: they define neither functions named test..., unittest or Test... classes nor "
                "check(), and have no statement at the top level"
            )

    def _piece(self, place: int, tree: ast.Module, names: dict[str, Any], functions: list[str]) -> int:
        before = dict(names)
        self._number = 0
        self._program.shows_changes = all(place != hidden for hidden, _ in self._hidden)
        code = compile(tree, f"test {place}", "exec", dont_inherit=True)
        why = test_collection.attempt(lambda: exec(code, names), may_exit=True)  # noqa: S102
        if why:
            self._report(place, why)
            return 1

        def candidate() -> Any:
            if len(functions) != 1 and not self._named:
                raise BadTests(
                    "the tests define check(candidate), and the row does not name the function: add the column entry_point"
                )
            return names[functions[0]]

        groups = test_collection.collect(names, before, tree, candidate)
        count = sum(group.count for group in groups)
        if not groups and test_collection.has_statements(tree):
            self._report(place, "")
            return 1
        _say({**self._label, "place": place, "planned": count})
        self._program.shows_changes = [place, 0] not in self._hidden
        for group in groups:
            group.run(lambda why: self._report(place, why))
        return count

    def _report(self, place: int, why: str) -> None:
        shown = "" if self._has_failed else why
        self._has_failed = self._has_failed or bool(why)
        _say({**self._label, "test": place, "ok": not why, "why": shown})
        self._number += 1
        self._program.shows_changes = [place, self._number] not in self._hidden

    def _offer_program(self, trees: list[ast.Module]) -> None:
        """Make the program importable under the names that data sets give it, unless tests mean another module."""
        exported = [name for name in _free_names(trees) if not hasattr(builtins, name)]
        for name in {*PROGRAM_MODULES, *self._named}:
            if name.isidentifier() and name not in sys.stdlib_module_names:
                sys.modules[name] = module_of(self._program, name, [other for other in exported if other != name])

    def _borrow(self, trees: list[ast.Module], names: dict[str, Any]) -> list[str]:
        """Give the tests the program's names that they use; return the names of functions under test.

        Without named entry points they are the names that the tests use and do not define. A module of the standard
        library is imported here, because the program could have altered the one in its process.
        """
        missing = [name for name in _free_names(trees) if name not in names and not hasattr(builtins, name)]
        called = _called(trees)
        modules = [name for name in missing if _is_module(name) and name not in called]
        functions = self._named or [name for name in missing if name not in modules]
        for name in modules:
            if name not in functions:
                names[name] = importlib.import_module(name)
        foreign = sorted(set(missing) - set(modules) - set(functions) - _starred(trees, missing))
        if foreign:
            raise BadTests(
                f"the tests use {', '.join(foreign)}, which is neither defined there, in the setup nor an entry_point"
            )
        in_setup = [name for name in _free_names([ast.parse(self._setup)]) if not hasattr(builtins, name)]
        for name in dict.fromkeys([*functions, *in_setup]):
            if name not in names:
                names[name] = self._program.look_up(name)
        return functions


def _is_module(name: str) -> bool:
    return name in sys.stdlib_module_names or name == "pytest"


def _shared_with_program(trees: list[ast.Module]) -> str:
    """Return what of their process the tests replace for the program, or read of what it printed; "" for nothing."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node) if isinstance(node.ctx, ast.Store) else node.attr)
        elif isinstance(node, ast.Name | ast.alias):
            names.add(node.id if isinstance(node, ast.Name) else node.name)
    calls = {ast.unparse(node.func) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)}
    if {call for call in calls if call.startswith("random.")} == {"random.seed"}:  # of what the program draws
        names.add("random.seed")
    output = (
        names & {"redirect_stdout", "redirect_stderr", "sys.stdout", "sys.stderr"} if "getvalue" in names else set()
    )
    return ", ".join(sorted(names & {"builtins.input", "builtins.print", "sys.stdin", "random.seed"} | output))


def _runs_texts(tree: ast.Module) -> list[str]:
    """Return the calls that make code of a value, which would run in this process; a constant is the tests' own."""
    imported: dict[str, str] = {}  # full name, by the name in this module
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported |= {name.asname or name.name: of + name.name for name in node.names}

    def makes_code(call: ast.Call) -> bool:
        first, dot, rest = ast.unparse(call.func).partition(".")
        name = (imported.get(first, first) + dot + rest).removeprefix("builtins.")
        return name in _RUNNERS and not all(isinstance(value, ast.Constant) for value in call.args[:1])

    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call)[:80] for call in calls if makes_code(call)]


def _called(trees: list[ast.Module]) -> set[str]:
    calls = [node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _parsed(text: str, place: int) -> ast.Module:
    tree = ast.parse(text, f"test {place}")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.level = 0  # from .solution import f: there is no package here
    return tree


def _starred(trees: list[ast.Module], missing: list[str]) -> set[str]:
    """Return the names that ``from solution import *`` brings: all that are missing, if tests have such a line."""
    lines = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    is_there = any(node.module in PROGRAM_MODULES and node.names[0].name == "*" for node in lines)
    return set(missing) if is_there else set()


def _free_names(trees: list[ast.Module]) -> list[str]:
    """Return the names that no scope around their use defines, nor the top level of any of the trees."""
    read: dict[str, None] = {}
    defined: set[str] = set()
    tables = [symtable.symtable(ast.unparse(tree), "tests", "exec") for tree in trees]
    while tables:
        table = tables.pop(0)
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() or table.get_type() == "module":
                read |= {symbol.get_name(): None} if symbol.is_referenced() else {}
                is_defined = symbol.is_assigned() or symbol.is_imported() or symbol.is_annotated()
                defined |= {symbol.get_name()} if is_defined else set()
    return [name for name in read if name not in defined and not name.startswith("__")]


def _say(verdict: dict[str, Any]) -> None:
    data = json.dumps(verdict).encode() + b"\n"
    while data:
        data = data[os.write(VERDICTS, data) :]
