"""Test code of rows: what proves nothing is an error of the row, what is usual is run, and exhaustion has its cause."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from tests.reward_service.program_tests.conftest import LIMITS, descendants, run
from tests.servers import wait_for

from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.program_tests import tests_of_row
from penstock.reward_service.program_tests.grade import Proof, Slot, _num_tests, _verdict, grade
from penstock.sandbox.zygote_command import SandboxError
from penstock.sandbox.zygote_process import Reason, Run, Watch, Zygote

ADD = "def add(a, b): return a + b"
CLASS = "import unittest\nclass T(unittest.TestCase):\n"


PROVES_NOTHING: dict[str, dict[str, Any]] = {  # by what the error says
    "assert nothing": {
        "a bare comparison": "add(1, 2) == 3",
        "a printed comparison": "print(add(1, 2) == 3)",
        "a returned comparison": "def test_add():\n    return add(1, 2) == 3",
        "a smoke test alone": "def test_add():\n    add(1, 2)",
        "an assertion on a tuple": "assert (add(1, 2) == 3, 'sum')",
        "a swallowed assertion": "try:\n    assert add(1, 2) == 3\nexcept Exception:\n    pass",
        "an assertion in a thread": "import threading\ndef look():\n    assert add(1, 2) == 3\n"
        "threading.excepthook = print\nt = threading.Thread(target=look)\nt.start()\nt.join()",
        "an assertion in an inner function": "def test_add():\n    def inner():\n        assert add(1, 2) == 3",
        "an assertion in a generator": "def test_add():\n    assert add(1, 2) == 3\n    yield",
        "an expected failure": CLASS + "    @unittest.expectedFailure\n    def test_it(self): assert add(1, 2) == 3",
    },
    "returns anything empty": {
        "a zip with the answer": "assert all(a == b for a, b in zip(add(1, 2), [3, 4]))",
        "a loop over the answer": "def test_add():\n    for item in add(1, 2):\n        assert item == 3",
        "a subset": "assert set(add([1], [2])) <= {1, 2}",
    },
    "a program may have written it": {
        "an evaluated answer": "assert eval(add(1, 2)) == 3",
        "an executed answer": "answer, names = add(1, 2), {}\nexec(answer, names)\nassert names['x'] == 3",
        "a pickled answer": "import pickle\nassert pickle.loads(add(1, 2)) == 3",
        "by another name": "from pickle import loads as read\nassert read(add(1, 2)) == 3",
        "by the module's name": "import builtins as b\nassert b.eval(add(1, 2)) == 3",
    },
    "test 0 of piece 1": {"an assertion about the tests themselves": ["assert add(1, 2) == 3", "assert 1 + 2 == 3"]},
    "test 1 of piece 0": {
        "one of two methods": "class TestIt:\n    def test_a(self): assert add(1, 2) == 3\n    def test_b(self): ..."
    },
    "test nothing": {
        "a function with another name": "def verify():\n    assert add(1, 2) == 3",
        "methods with other names": CLASS + "    def check(self): self.assertEqual(add(1, 2), 3)",
        "a class with a constructor": "class TestAdd:\n    def __init__(self): pass\n"
        "    def test_it(self): assert add(1, 2) == 3",
        "skipped tests": CLASS + "    @unittest.skip('later')\n    def test_it(self): self.assertEqual(add(1, 2), 3)",
        "a comment": "# assert add(1, 2) == 3",
    },
    "entry_point": {"check() without entry_point": "def check(candidate):\n    assert candidate(1, 2) == 3"},
    "numpy": {
        "a missing module": "import numpy\nassert add(1, 2) == 3",
        "a missing module in a test": "def test_add():\n    import numpy\n    assert add(1, 2) == 3",
    },
    "pandas": {"a missing module in the setup": {"test": "assert add(1, 2) == 3", "setup": "import pandas"}},
    "capsys": {"a missing fixture": "def test_add(capsys):\n    assert add(1, 2) == 3"},
    "pytest.warns": {"a part of pytest that is not there": "import pytest\npytest.warns(None)\nassert add(1, 2) == 3"},
    "exceed their limits": {"tests that never end": "while True: pass\nassert add(1, 2) == 3"},
    "SyntaxError": {"code that does not compile": "assert add("},
    "passes the program a function": {"an argument that is a function": "assert add(lambda x: x, 1)"},
    "use g, which is neither": {"a name that is not defined": {"test": "assert g(add(1, 2))", "entry_point": "add"}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("why", "name"), [(why, name) for why, tests in PROVES_NOTHING.items() for name in tests], ids=lambda text: text
)
def test_tests_that_prove_nothing_are_an_error_of_the_row(slot: Slot, why: str, name: str) -> None:
    """No program gets a reward from tests that would accept any program, or that cannot be run: right or wrong."""
    with pytest.raises(BadGroundTruth, match=why):
        run(slot, ADD, PROVES_NOTHING[why][name])


VALUES = "(x, {x: {x}}, None, b'x', 2 ** 3000, float('inf'))"
USUAL: dict[str, tuple[str, Any, int]] = {  # program, tests, their number
    "functions": (ADD, "def test_a():\n    assert add(1, 2) == 3\ndef test_b():\n    assert add(0, 0) == 0", 2),
    "a class": (
        ADD,
        "class TestAdd:\n    def setup_method(self): self.one = 1\n    def test_a(self): assert add(self.one, 2) == 3\n"
        "    def test_b(self): assert add(1, 1) == 2",
        2,
    ),
    "pytest": (
        ADD,
        "import pytest\nfrom solution import add\n@pytest.fixture\ndef three():\n    yield 3\n"
        "@pytest.mark.parametrize('a, b', [(1, 2), (2, 1), pytest.param(0, 3)])\n"
        "def test_add(a, b, three):\n    assert add(a, b) == pytest.approx(three)\n"
        "def test_error():\n    with pytest.raises(TypeError, match='argument'):\n        add(1)",
        4,
    ),
    "a guard": (ADD, "if __name__ == '__main__':\n    assert add(1, 2) == 3", 1),
    "a guard with unittest.main": (
        ADD,
        CLASS + "    @classmethod\n    def setUpClass(cls): cls.three = 3\n"
        "    def test_it(self): self.assertEqual(add(1, 2), self.three)\n"
        "if __name__ == '__main__':\n    unittest.main()",
        1,
    ),
    "a script that exits": (
        ADD,
        "import sys\ndef main():\n    assert add(1, 2) == 3\n    return 0\nsys.exit(main())",
        1,
    ),
    "check() with entry_point": (ADD, {"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"}, 1),
    "check() that is called": (ADD, "def check(f):\n    assert f(1, 2) == 3\ncheck(add)", 1),
    "check() of the only function": (ADD, "def check(f):\n    assert f(1, 2) == 3 == add(2, 1)", 1),
    "import *": (ADD, "from solution import *\nassert add(1, 2) == 3", 1),
    "a module and its values": (ADD + "\nTOP = 5", "import solution as s\nassert s.add(1, s.TOP) == 6", 1),
    "a relative import": (ADD, "from .solution import add\nassert add(1, 2) == 3", 1),
    "exceptions of the program": (
        "class Empty(LookupError): pass\ndef f(x): raise Empty('no items')",
        "from solution import Empty, f\nimport pytest\ndef test_a():\n    with pytest.raises(Empty, match='items'):\n"
        "        f(1)\ndef test_b():\n    with pytest.raises(LookupError):\n        f(1)\n"
        "def test_c():\n    try:\n        f(1)\n    except Empty:\n        return\n    assert False",
        3,
    ),
    "coroutines": ("async def f(x): return x + 1", "async def test_f():\n    assert await f(1) == 2", 1),
    "a helper in the setup": (ADD, {"test": "assert two(1) == 3", "setup": "def two(x): return add(x, 2)"}, 1),
    "a line of imports": (ADD, ["import math", "assert add(1, 2) == math.floor(3.5)"], 1),
    "a smoke test beside another": (ADD, ["add(1, 2)", "assert add(1, 2) == 3"], 2),
    "falsehood": ("def f(x): return False", ["assert not f(1)"], 1),
    "None": ("def f(x): return None", ["assert f(1) is None"], 1),
    "an optional module": (ADD, "try:\n    import numpy\nexcept ImportError:\n    pass\nassert add(1, 2) == 3", 1),
    "plain values": (f"def f(x): return {VALUES}", f"x = 1\nassert f(x) == {VALUES}", 1),
    "a generator": ("def f(x):\n    for i in range(x): yield i", "assert list(f(3)) == [0, 1, 2]", 1),
    "an error that is caught": (
        "def f(x): raise KeyError(x)",
        "try:\n    f(1)\n    assert False\nexcept KeyError: pass",
        1,
    ),
    "objects": (
        "class P:\n    def __init__(s, a): s.a = a\n    def get(s): return s.a\ndef f(p): return p.a",
        ["assert f(P(3)) == 3", "assert P(4).get() == 4", "assert P(5).a == 5"],
        3,
    ),
    "a float": ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2), 2 ** 0.5)", 1),
    "a Counter": ("from collections import Counter as f", "assert f('aab') == {'a': 2, 'b': 1}", 1),
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_tests_are_run(slot: Slot, name: str) -> None:
    """A right program passes every test; an empty one, and one that returns a wrong value, none."""
    program, tests, number = USUAL[name]
    graded = run(slot, program, tests)
    assert (graded.passed, graded.total, graded.reason) == (number, number, None), graded
    empty = run(slot, "pass", tests)
    assert (empty.passed, empty.reason) == (0, Reason.WRONG), empty


def test_a_program_that_stops_the_tests_does_not_pass_the_rest(slot: Slot) -> None:
    tests = CLASS + "".join(f"    def test_{n}(self): self.assertEqual(f({n}), {n})\n" for n in (1, 2, 3))
    waits = "import time\ndef f(x):\n    if x == 2: time.sleep(60)\n    return x"
    short = replace(LIMITS, wall_factor=0.0, wall_min_s=3.0)  # ends program and tests together
    graded = grade(slot, waits, tests_of_row.read(tests, {}), short, stop_early=False)
    assert (graded.passed, graded.total, graded.reason) == (1, 3, Reason.WALL_TIME)


OUT_OF_TIME = {Reason.CPU_TIME, Reason.WALL_TIME}
RANGE = "def f(x): return range(10**12)"
EXHAUSTING = {  # program, test code, reasons
    "a huge range is summed": (RANGE, "assert sum(f(3)) == 6", OUT_OF_TIME),
    "a huge integer is tested for primality": (
        "def f(x): return 2**61 - 1",
        "n = f(3)\nassert all(n % d for d in range(2, int(n ** 0.5) + 1)) and n < 100",
        OUT_OF_TIME,
    ),
    "a huge range is printed": (RANGE, "for i in f(3): print('x' * 4096)", {Reason.OUTPUT, *OUT_OF_TIME}),
    "a huge range is listed": (RANGE, "assert list(f(3)) == [3]", {Reason.WRONG, Reason.MEMORY}),
    "a huge power": ("def f(x): return 10**9", "assert 3 ** f(3) == 27", {Reason.WRONG, Reason.MEMORY, *OUT_OF_TIME}),
    "a huge decimal": (
        "from decimal import Decimal\ndef f(x): return Decimal('1e999999')",
        "assert str(int(f(3))) == '3'",
        {Reason.WRONG, Reason.MEMORY, *OUT_OF_TIME},
    ),
    "an error whose text is too long": ("def f(x): return 10**6000", "assert {3: 3}[f(3)] == 3", {Reason.WRONG}),
    "a deep list": (
        "def f(x):\n    y = []\n    for _ in range(400): y = [y]\n    return y",
        "assert repr(f(3)) == '[]' and f(3) == 3",
        {Reason.WRONG},
    ),
    "a program that never ends": ("while True: pass", "assert f(3)", OUT_OF_TIME),
    "a program that is no Python": ("x = 1\ndef f(", "assert f(3)", {Reason.RAISED}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXHAUSTING)
def test_what_a_programs_answer_exhausts_is_its_failure(slot: Slot, name: str) -> None:
    """A program whose answer burns the tests' CPU time, memory or output fails with the reason; the group is scored."""
    program, tests, reasons = EXHAUSTING[name]
    graded = run(slot, program, tests + "\nassert f(3) == 3")
    assert (graded.passed, graded.reason in reasons) == (0, True), graded


def test_tests_that_were_not_reached_are_counted() -> None:
    """A test program that is cut short has as many tests as it announced; a piece that was not reached has one."""
    cut = [{"place": 0, "planned": 3}, {"test": 0, "ok": True}]
    assert _num_tests(cut, 1) == (3,)
    assert _num_tests(cut, 2) == (3, 1)
    assert _num_tests([*cut, *cut[1:] * 4], 1) == (5,), "more were reported than announced"
    assert _num_tests([{"place": 0, "planned": 0}], 1) == (0,)
    served, tested = (
        Run(status=0),
        Run(status=0, answer=bytearray(b"".join(json.dumps(m).encode() + b"\n" for m in cut))),
    )
    tested.answer += b'{"done": true}\n'
    graded = _verdict(served, tested, Proof("", (3,), has_finished=True), LIMITS)
    assert (graded.passed, graded.total, graded.reason) == (1, 3, Reason.WRONG)


def test_a_program_that_leaves_fewer_tests_has_not_passed_all() -> None:
    """The tests count as many as with an empty program, although the answer made them announce fewer."""
    said = [{"place": 0, "planned": 1}, {"test": 0, "ok": True}, {"done": True}]
    tested = Run(status=0, answer=bytearray(b"".join(json.dumps(m).encode() + b"\n" for m in said)))
    graded = _verdict(Run(status=0), tested, Proof("", (3,), has_finished=True), LIMITS)
    assert (graded.passed, graded.total, graded.reason) == (1, 3, Reason.WRONG)


@pytest.mark.parametrize("number", [1, 2])
def test_a_proof_that_the_machine_ended_is_made_again(slot: Slot, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A SIGKILL while stand-ins run is an error: a proof that is cut would pay programs that change arguments."""
    tests = tests_of_row.read(
        ["x = [3, 1, 2]\nassert f(x) == sorted(x)"], {"test_setup_code": f"import time\ntime.sleep(0.{number + 3})"}
    )
    cheat, start, jobs = "def f(a):\n    a.clear()\n    return []", Watch.start, 0

    def killed(self: Watch, zygote: Zygote, *arguments: Any, **named: Any) -> Run:
        nonlocal jobs
        before = {*descendants(zygote.pid)}
        run, jobs = start(self, zygote, *arguments, **named), jobs + 1
        if jobs == number:
            wait_for(lambda: {*descendants(zygote.pid)} - before, "the tests to begin")
            for child in {*descendants(zygote.pid)} - before:
                os.kill(child, signal.SIGKILL)
        return run

    assert grade(slot, cheat, tests_of_row.read(["assert f([]) == []"], {}), LIMITS, stop_early=False).passed == 1
    with monkeypatch.context() as patched:
        patched.setattr(Watch, "start", killed)
        with pytest.raises(SandboxError, match="killed by another process"):
            grade(slot, cheat, tests, LIMITS, stop_early=False)
    assert grade(slot, cheat, tests, LIMITS, stop_early=False).passed == 0
