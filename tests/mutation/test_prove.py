"""The prover of guards: what counts as proof, what is swapped without an import, and the table."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.mutation import prove
from tests.mutation.guards import Guard, read_table
from tests.mutation.prove import Result, Verdict, page, result_of
from tests.mutation.swap_code import swap
from tests.mutation.tree_copy import Ran, names_of

SOURCE = '''
import contextlib, functools

LIMIT = 3


def plain(value):
    if value > LIMIT:
        raise ValueError
    return value


@contextlib.contextmanager
def wrapped(value):
    plain(value)
    yield value


def outer(limit):
    def inner(value):
        return value <= limit
    return inner


class Box:
    size: int = 2

    @classmethod
    def made(cls, value=1):
        """Doc."""
        return cls if value < 9 else None

    @property
    def fits(self):
        return self.size < 3

    later = staticmethod(lambda value: value > 5)
'''


def imported(path: Path, source: str = SOURCE) -> ModuleType:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("guarded", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new", "expression", "expected"),
    [
        ("if value > LIMIT:", "if False:", "was(9)", 9),
        ("    if value > LIMIT:\n        raise ValueError\n", "    pass\n", "was(9)", 9),
        ("    plain(value)\n    yield value", "    yield value", "held(9).__enter__()", 9),
        ("return value <= limit", "return True", "m.outer(1)(5)", True),
        ("cls if value < 9 else None", "cls", "m.Box.made(9) is m.Box", True),
        ("self.size < 3", "self.size < 0", "m.Box().fits", False),
        ("lambda value: value > 5", "lambda value: True", "m.Box.later(1)", True),
    ],
)
def test_a_changed_function_is_swapped_wherever_it_is_held(
    tmp_path: Path, old: str, new: str, expression: str, expected: object
) -> None:
    path = tmp_path / "guarded.py"
    module = imported(path)
    was, held = module.plain, module.wrapped
    gc.freeze()  # as after the collection of tests
    assert swap(SOURCE, SOURCE.replace(old, new), str(path)) is True
    assert eval(expression, {"m": module, "was": was, "held": held}) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 30"),
        ("@contextlib.contextmanager\n", ""),
        ("value=1", "value=2"),
        ("size: int = 2", "size: int = 3"),
        ("    @property\n", ""),
        ("def outer(limit)", "def other(limit)"),
        ("LIMIT = 3", "LIMIT = 3\nOTHER = [one for one in range(3)]"),
    ],
)
def test_what_runs_at_import_is_not_swapped(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "guarded.py"
    module = imported(path)
    assert swap(SOURCE, SOURCE.replace(old, new), str(path)) is False
    with pytest.raises(ValueError):  # noqa: PT011 it has no text
        module.plain(9)


def test_a_function_that_a_changed_one_made_at_import_is_not_swapped(tmp_path: Path) -> None:
    """As by a decorator: the code of what it returned stays, so the tests need another import."""
    path = tmp_path / "guarded.py"
    source = f"{SOURCE}\nkept = outer(3)\n"
    module = imported(path, source)
    assert swap(source, source.replace("return value <= limit", "return True"), str(path)) is False
    assert module.kept(9) is False


def test_every_module_of_the_trees_is_forgotten_whatever_its_name(tmp_path: Path) -> None:
    """Pytest calls `tests/agents/proxy/test_tree.py` `proxy.test_tree`; what is installed in an environment stays."""
    files = {
        "penstock.protocol": "/elsewhere/protocol/__init__.py", "proxy.test_tree": str(tmp_path / "tests" / "test_tree.py"),
        "conftest": str(prove.ROOT / "tests" / "conftest.py"), "__main__": str(prove.ROOT / "tests" / "mutation" / "prove.py"), "json": json.__file__, "pytest": pytest.__file__, "sys": None,
    }  # fmt: skip
    modules = {name: SimpleNamespace(__file__=file) for name, file in files.items()}
    assert names_of(modules, [prove.ROOT, tmp_path]) == ["penstock.protocol", "proxy.test_tree", "conftest"]


GUARD = Guard("a pack: its size", "a.py", "x", "y", ("tests/test_a.py::test_it",))


@pytest.mark.parametrize(
    ("ran", "verdict"),
    [
        (Ran(1, "tests/test_a.py::test_it", "AssertionError", 1.0), "proven"),
        (Ran(0, "", "", 1.0), "passes"),
        (Ran(None, "", "no end within 90 s", 90.0), "no end"),
        (Ran(1, "", "error at setup", 1.0), "broken"),
        (Ran(2, "", "cannot be collected", 1.0), "broken"),
        (Ran(5, "", "no tests", 1.0), "broken"),
    ],
)
def test_only_a_test_that_fails_is_a_proof(ran: Ran, verdict: Verdict) -> None:
    assert result_of(GUARD, "digest", ran, 1.0).verdict == verdict


def test_the_table_keeps_what_was_not_tried_here() -> None:
    """The line of another guard stays, what failed loses its test, and a guard without a line is named."""
    others = [Guard(name, "b.py", "x", "y", ("tests/test_b.py::test_b",)) for name in ("known", "hole", "new")]
    before = "| known | `b.py` | `test_b.py` test_b |\n| hole | `b.py` | `test_b.py` test_b |\n| gone | `c.py` | `test_c.py` test_c |"
    results = {
        GUARD.check: Result(GUARD.check, "", "proven", "tests/test_a.py::test_it[x]", "", 1.0, 1.0),
        "hole": Result("hole", "", "passes", "", "", 1.0, 1.0),
    }
    assert page([GUARD, *others], results, before).splitlines()[2:] == [
        "| a pack: its size | `a.py` | `test_a.py` test_it |",
        "| known | `b.py` | `test_b.py` test_b |",
        "| hole | `b.py` | **no test** |",
        "| new | `b.py` | **not tried** |",
    ]


@pytest.mark.parametrize("digest", ["current", "of another file"])
def test_a_result_of_an_earlier_run_is_no_proof_of_this_one(
    digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the processes end before a guard is tried again, it is not proven, and the command fails."""
    guard = read_table()[0]
    results = tmp_path / "mutation.jsonl"
    known = Result(guard.check, guard.digest() if digest == "current" else digest, "proven", "a::b", "", 1.0, 1.0)
    results.write_text(json.dumps(asdict(known)) + "\n")
    monkeypatch.setattr(prove, "RESULTS", results)
    monkeypatch.setattr(prove, "_try_all", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["prove", guard.check, "--again", "--copies", "0"])
    assert prove.main() == 1
    assert f"not proven: {guard.check} (its process ended)" in capsys.readouterr().out


def test_what_a_process_said_before_it_failed_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Fails:
        folder = tmp_path

        def collect(self, *_: object) -> int:
            os.write(1, b"cannot fork\n")
            return 3

    prove._try_all([GUARD], [Fails()], 1.0)  # type: ignore[list-item]
    assert "a process ended with 3:\n    cannot fork" in capfd.readouterr().err


def test_a_guard_that_has_moved_is_broken_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "build" / "mutation.jsonl"
    monkeypatch.setattr(prove, "RESULTS", results)
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("")

    class Copy:
        folder = tmp_path

        def run(self, *_: object, **__: object) -> Ran:
            return Ran(0, "", "", 0.1)

        def run_without(self, guard: Guard, **_: object) -> Ran:
            guard.without((tmp_path / guard.file).read_text())
            return Ran(1, "tests/test_a.py::test_it", "AssertionError", 0.1)

    moved = Guard("moved", "a.py", "y", "z", GUARD.tests)
    prove._try_files(Copy(), [[moved, GUARD]], 1.0, os.open(os.devnull, os.O_WRONLY))  # type: ignore[arg-type]
    found = prove.kept_results()
    assert {check: one.verdict for check, one in found.items()} == {"moved": "broken", GUARD.check: "proven"}
    assert "there 0 times" in found["moved"].error
