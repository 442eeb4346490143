"""Rows in the schema of each public data set: a right program passes, a wrong one fails, another form is refused."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import pytest
from tests.reward_service.program_tests.conftest import run

from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.program_tests import code_blocks
from penstock.reward_service.program_tests.grade import Slot

DOUBLE = "n = int(input())\nprint(n * 2)"
PRINTED = {"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8\n"]}
CASES = [{"input": "1\n", "output": "2\n"}, {"input": "4\n", "output": "8\n"}]
TOTAL = (
    "class Solution:\n    def total(self, xs: List[int], k: Optional[int] = None) -> int:\n        return sum(xs) * 2"
)
FUNCTION = "def f(x): return x * 2"
PAIRS = [{"input": "[1, 2]\n3", "output": "6"}, {"input": "[5]\n0", "output": "10"}]
CALLS = [{**pair, "testtype": "functional"} for pair in PAIRS]
TEXT = json.dumps(CALLS).encode()
# As pickle writes a text, and an empty list.
PACKED, NO_TEXT = (
    base64.b64encode(zlib.compress(b"\x80\x02" + content + b".")).decode()
    for content in (b"X" + struct.pack("<I", len(TEXT)) + TEXT, b"]" * 20)
)
TYPED = [{"fn_name": None, "input": "1\n", "output": "2\n", "type": "stdin_stdout"}]
CALLED = [{"type": "function_call", "fn_name": "total", "input": [[1, 2], 3], "output": [6]}]
CHECK = "def check(candidate):\n    assert candidate([1, 2]) == 6\n    assert candidate(xs=[]) == 0\n"

# The data set: ground truth, the other columns, and a right program; its "* 2" is the error of the wrong one, "* 3".
ROWS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "codeparrot/apps, stdin": (json.dumps(PRINTED), {"starter_code": "", "difficulty": "interview"}, DOUBLE),
    "codeparrot/apps, call": (json.dumps({"fn_name": "total", "inputs": [[[1, 2]]], "outputs": [[6]]}), {}, TOTAL),
    "codeparrot/apps, lines": ({"inputs": [["1", "7"]], "outputs": [["2", ""]]}, {}, DOUBLE),
    "codeparrot/apps, numbers": ({"inputs": [1], "outputs": [2]}, {}, DOUBLE),
    "codeparrot/apps, integer keys": (
        {"fn_name": "f", "inputs": [[{"1": 5}]], "outputs": [[10]]}, {}, "def f(d): return d[1] * 2",
    ),
    "BAAI/TACO": (None, {"input_output": json.dumps(PRINTED), "starter_code": "", "raw_tags": []}, DOUBLE),
    "deepmind/code_contests": (
        None,
        {"public_tests": {"input": ["1\n"], "output": ["2\n"]}, "input_file": "", "output_file": "",
         "private_tests": {"input": ["4\r\n"], "output": ["8\r\n"]}, "generated_tests": {"input": [], "output": []}},
        DOUBLE,
    ),
    "livecodebench, public": (json.dumps(CALLS), {"metadata": '{"func_name": "total"}', "starter_code": ""}, TOTAL),
    "livecodebench, name in a column": (PAIRS, {"func_name": "total"}, TOTAL),
    "livecodebench, private": (PACKED, {"metadata": {"func_name": "total"}}, TOTAL),
    "livecodebench, columns": (
        None,
        {"public_test_cases": '[{"input": "1", "output": "2", "testtype": "stdin"}]', "private_test_cases": "[]",
         "metadata": "{}"},
        DOUBLE,
    ),
    "DeepCoder, lcbv5": (None, {"tests": json.dumps([case | {"metadata": {"func_name": "total"}} for case in CALLS])},
        TOTAL),
    "DeepCoder, primeintellect": ({"tests": json.dumps(TYPED)}, {}, DOUBLE),
    "PrimeIntellect/verifiable-coding-problems": ({"language": "python", "test_cases": TYPED}, {}, DOUBLE),
    "PrimeIntellect, calls": (json.dumps({"language": "python", "test_cases": CALLED}), {}, TOTAL),
    "PrimeIntellect, one call": (CALLED[0], {}, TOTAL),
    "PrimeIntellect/SYNTHETIC-1": (
        None, {"verification_info": json.dumps({"language": "python", "test_cases": CALLED})}, TOTAL,
    ),
    "open-r1/verifiable-coding-problems-python": (
        {"language": "python", "test_cases": [{**CALLED[0], "input": "[[1, 2], 3]", "output": "[6]"}]}, {}, TOTAL,
    ),
    "open-r1/codeforces": (
        None,
        {"official_tests": CASES, "input_mode": "stdio", "generated_checker": None, "interaction_format": None},
        DOUBLE,
    ),
    "nvidia/Nemotron-RL, competitive coding": ({"unit_tests": {**PRINTED, "fn_name": None}}, {}, DOUBLE),
    "Eurus-2-RL": (
        json.dumps({"inputs": ["[1, 2]\n3"], "outputs": ["6"], "fn_name": "total"}), {"split": "train"}, TOTAL,
    ),
    "Skywork-OR1": (
        json.dumps({"entry_point": "Solution().total", "import_prefix": "import math\n", "test_code": CHECK}),
        {}, TOTAL,
    ),
    "newfacade/LeetCodeDataset": (
        CHECK, {"entry_point": "Solution().total", "input_output": [{"input": "xs = [1]", "output": "2"}]}, TOTAL,
    ),
    "openai/openai_humaneval": ("\n\nMETADATA = {\n    'author': 'x'\n}\n\n\n" + CHECK, {"entry_point": "total"},
        "def total(xs: List[int], k: Optional[int] = None) -> int:\n    return sum(xs) * 2"),
    "google-research-datasets/mbpp": (
        ["assert f(2) == 4", "assert f(0.5) == 1"], {"test_setup_code": "", "challenge_test_list": []}, FUNCTION,
    ),
    "mbpp, sanitized": (
        None,
        {"test_list": '["assert math.isclose(f(2), 4)"]', "test_imports": '["import math", "import re"]'},
        FUNCTION,
    ),
    "KodCode/KodCode-V1": (
        None, {"test": "from solution import f\n\ndef test_f():\n    assert f(2) == 4\n", "version": "v1.0"}, FUNCTION,
    ),
    "OpenCoder-LLM/opc-sft-stage2": (
        None, {"testcase": ["assert f(2) == 4"], "entry_point": "f"}, FUNCTION,
    ),
    "microsoft/rStar-Coder": (
        None, {"inputs": '["1\\n"]', "outputs": '["2\\n"]', "is_synthesized": True, "verified": True}, DOUBLE,
    ),
    "ROLL, stdin": (
        "", {"test_cases": '[{"stdin": "1\\n", "expected_stdout": "2\\n"}]', "test_case_function": ""}, DOUBLE,
    ),
    "ROLL, check": (
        "", {"test_cases": [{"assert_code": CHECK, "entry_point": "total", "import_prefix": "import math\n"}]}, TOTAL,
    ),
    "bigcode/bigcodebench": (
        "import unittest\nclass TestCases(unittest.TestCase):\n    def test_1(self): self.assertEqual(f(2), 4)\n",
        {"entry_point": "f", "libs": "['math']"}, FUNCTION,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_right_program_scores_one_and_a_wrong_one_less(slot: Slot, name: str) -> None:
    truth, extra, program = ROWS[name]
    assert "* 2" in program
    right = run(slot, program, truth, extra)
    assert (right.passed, right.reason) == (right.total, None), right
    wrong = run(slot, program.replace("* 2", "* 3 + 1"), truth, extra)
    assert wrong.passed == 0, wrong


# They need the program in the process of the tests.
OF_ONE_PROCESS = (
    "from contextlib import redirect_stdout as to\nout = io.StringIO()\nwith to(out): f()\nassert out.getvalue() == 'a'",
    "from unittest.mock import patch\nwith patch('builtins.input', return_value='3'):\n    assert f() == 3",
    "sys.stdin = io.StringIO('3')\nassert f() == 3",
)


@pytest.mark.parametrize(
    ("truth", "extra", "name"),
    [
        ([{"input": "1", "output": "2", "type": "interactive"}], {}, "interactive"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], {}, "fn_name"),
        ([{"input": "1", "output": "2", "checker": "int main() {}"}], {}, "checker"),
        ([{"input": "1", "accepted_outputs": ["2"]}], {}, "accepted_outputs"),
        ([{"input": "1", "output": "2", "args": ["-v"]}], {}, "args"),
        ([*TYPED, *CALLED], {}, "several forms: function total, stdin"),
        ([*CALLED, {**CALLED[0], "fn_name": "other"}], {}, "several forms"),
        (PRINTED, {"generated_checker": "print(1)"}, "generated_checker"),
        (PRINTED, {"input_mode": "file"}, "input_mode"),
        (PRINTED, {"input_file": "a.in"}, "input_file"),
        (PRINTED, {"interaction_format": "ask"}, "interaction_format"),
        ({"language": "cpp", "test_cases": TYPED}, {}, "cpp"),
        ({**PRINTED, "fn_name": "a b"}, {}, "not the name of a function"),
        ({"inputs": ["9" * 5000], "outputs": ["1"], "fn_name": "f"}, {}, "JSON value per line|digits"),
        ({"input": ["1"], "output": []}, {}, "equal length"),
        (NO_TEXT, {}, "packed"),
        *(
            (none, {}, "code needs tests")
            for none in ({"tests": "[]"}, {"inputs": [], "outputs": []}, None, "", [], 42)
        ),
        ({"inputs": [None], "outputs": ["1"]}, {}, "tests must be texts"),
        ({"test_list": [1]}, {}, "tests must be texts"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, {}, "JSON value per line"),
        ([{"input": "1"}], {}, "needs input and output"),
        ({"inputs": ["1", "2"], "outputs": ["", " \n"]}, {}, "every expected"),
        ({"inputs": [[1], [2]], "outputs": [None, None], "fn_name": "f"}, {}, "every expected"),
        ([{"input": "1", "output": ""}], {}, "every expected"),
        ({"test": "import numpy as np\n" + CHECK}, {"entry_point": "total"}, "numpy"),
        (
            "import random\nfrom solution import f\nrandom.seed(0)\nassert f([1, 2]) == 2",
            {},
            "random.seed of the program",
        ),
        *((f"import io, sys\n{test}", {}, "another one") for test in OF_ONE_PROCESS),
    ],
)
def test_tests_of_another_form_are_refused_by_its_name(
    slot: Slot, truth: Any, extra: dict[str, Any], name: str
) -> None:
    with pytest.raises(BadGroundTruth, match=name):
        run(slot, "pass", truth, extra)


# Programs that print 42 for the input 41, in the ways of contest code.
PRINTS: dict[str, str] = {
    "exit": "print(int(input()) + 1)\nexit()",
    "quit": "print(int(input()) + 1)\nquit(0)",
    "exit by name": "if __name__ == '__main__':\n    print(int(input()) + 1)\n    sys.exit(None)",
    "no imports": "print(Counter([floor(1.5)]) and deque([int(input()) + 1])[0], end='')",
    "a name of a usual import": "def product(x): return x + 1\nsub = product\nprint(sub(int(input())))",
    "long integers": "x = int('9' * 5000)\nassert len(str(10 ** 5000)) == 5001\nprint(int(input()) + 1, ' ')",
    "recursion": "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(30000) - 29959 + int(input()) - 40)",
    "recursion in C": "import sys\nsys.setrecursionlimit(10**6)\n@cache\n"
    "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(30000) - 29958)",
    "a thread": "import sys, threading\nsys.setrecursionlimit(10**7)\nthreading.stack_size(2**27)\n"
    "def f(n): return 0 if n == 0 else 1 + f(n - 1)\ndef main():\n    print(f(5000) - 5000 + int(input()) + 1)\n"
    "t = threading.Thread(target=main)\nt.start()\nt.join()",
    "twelve threads": "import threading\ndone = []\n"
    "threads = [threading.Thread(target=done.append, args=(i,)) for i in range(12)]\n"
    "[t.start() for t in threads]; [t.join() for t in threads]\nprint(len(done) + 30)",
    "libraries": "import zoneinfo, sqlite3, csv, bisect, ssl, hashlib, ctypes\n"
    "sqlite3.connect(':memory:').execute('create table t (x)')\nprint(42)",
    "devices": "import os\nwith open(os.devnull, 'w') as f: print('x', file=f)\nprint(len(os.urandom(42)))",
    "lines": "import sys\nfor line in sys.stdin: print(int(line) + 1)",
    "its file": "import os\nos.path.dirname(os.path.abspath(__file__))\nprint(int(input()) + 1)",
    "readline": "import sys\ninput = sys.stdin.readline\nprint(int(input()) + 1)",
    "the size of the input": "import io, os\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\n"
    "print(int(input()) + 1)",
    "a mapped input": "import mmap\nprint(int(mmap.mmap(0, 0, access=mmap.ACCESS_READ).readline()) + 1)",
    "descriptor 0": "print(int(open(0).read()) + 1)",
    "the device": "print(int(open('/dev/stdin').readline()) + 1)",
    "buffers": "import sys\nsys.stdout.buffer.write(b'%d\\r\\n\\r\\n' % (int(sys.stdin.buffer.read()) + 1))",
    "fileinput": "import fileinput\nfor line in fileinput.input(): print(int(line) + 1)",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    print(42)\nasyncio.run(f())",
    "a static method": "class A:\n    @staticmethod\n    def f(x): return x + 1\nprint('', A.f(int(input())))",
    **{
        f"output through {how.split(chr(10))[0][:40]}": f"import atexit, io, os, sys\nx = str(int(input()) + 1)\n{how}"
        for how in (
            "sys.stdout = io.StringIO()\nprint(x)\n"
            "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))",
            "old, sys.stdout = sys.stdout, io.StringIO()\nold.write(x)", "out = open(1, 'w')\nout.write(x)",
            "out = os.fdopen(1, 'w')\nprint(x, file=out)", "sys.stdout = open(1, 'w')\nprint(x)",
            "out = io.BufferedWriter(io.FileIO(1, 'w'))\nout.write(x.encode())", "print(x)\nsys.stdout.close()",
            "sys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(x)",
            "out = sys.stdout.detach()\nout.write(x.encode())", "sys.stdout = None\nos.write(1, x.encode())",
        )
    },
}  # fmt: skip
FAILS = {
    "Python 2": "print int(input()) + 1",
    "numpy": "import numpy as np\nprint(int(input()) + 1)",
    "an exit code": "print(int(input()) + 1)\nexit(1)",
    "writing its input": "import mmap\nmmap.mmap(0, 0)[:1] = b'x'\nprint(42)",
}


@pytest.mark.parametrize("name", [*PRINTS, *FAILS])
def test_contest_programs_run_as_in_the_judges(slot: Slot, name: str) -> None:
    """A program of one's own with the right output passes; the others fail with the reason ``raised``."""
    graded = run(slot, {**PRINTS, **FAILS}[name], {"inputs": ["41\r\n"], "outputs": ["42"]}, {})
    assert graded.reason == ("raised" if name in FAILS else None), graded


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("class Solution:\n    @classmethod\n    def combinations(cls, n): return n", 5),
        ("async def combinations(n): return n", 5),
        ("class Solution:\n    def combinations(self, n: List[int]) -> Dict[str, int]: return n", 5),
        ("def combinations(n): return 10 ** 5000", "1" + "0" * 5000),
        ("def combinations(n): return (n, {1: inf > n})", [5, {"1": True}]),
        ("def combinations(n): return bin(n)[2:]", "101"),
        ("def combinations(n): return 'true'", "true"),
    ],
)  # fmt: skip
def test_functions_are_called_as_by_the_judges(slot: Slot, program: str, expected: Any) -> None:
    """The usual imports never hide a method of the same name, and long results are compared by their digits."""
    truth = {"inputs": [[5]], "outputs": [expected], "fn_name": "combinations"}
    if len(str(expected)) > 5000:  # an integer that no JSON of this machine holds
        truth |= {"inputs": ["5"]}
    assert run(slot, program, truth, {}).reason is None
    wrong = "9" * 5001 if isinstance(expected, str) else 6
    assert run(slot, program, truth | {"outputs": [wrong]}, {}).passed == 0
    assert run(slot, "def combinations(n): return 101", truth, {}).passed == 0


CLEARS = "def f(*a):\n    for x in a: x.clear()\n    return []"
HOLLOW = "def f(c):\n    for k in (c if isinstance(c, dict) else range(len(c))): c[k] = None"
ZEROS = "def f(x):\n    x[:] = [0] * len(x)\n    return 0"
ONLY = "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.x = [2, 1]\n    def test_it(self):\n"
SORTS = "def f(x): x.sort()"
METHOD = "class Solution:\n    def f(self, x): x.sort()"
UNIQUE = "def f(x):\n    y = sorted(set(x))\n    x[:len(y)] = y\n    return len(y)"


@pytest.mark.parametrize(
    ("program", "test", "passed"),
    [
        (CLEARS, "x = [3, 1, 2]\nassert f(x) == sorted(x)", 0),
        (CLEARS, "e = [1, 2, 3]\nassert f([3, 1, 2], e) == e", 0),
        (HOLLOW, "case = {'in': 3, 'want': 6}\nassert f(case) == case['want']", 0),
        (HOLLOW, "case = {'in': 3, 'want': 6}\ngot = f(c=case)\nwant = case['want']\nassert got == want", 0),
        (
            HOLLOW,
            "def run(c): return f(c)\ndef test_it():\n    for c in [[1, 2], [3, 4]]:\n        assert run(c) == c[1]",
            0,
        ),
        (CLEARS, "x = [3, 1, 2]\ny = x\nr = f(y)\nassert all(a == b for a, b in zip(r, x)) and len(r) == len(x)", 0),
        (CLEARS, "x = {'a': 1}\nassert f(x) == list(x)", None),
        (CLEARS, "x = {'a': [1]}\nassert f(x) == list(x)", None),
        (CLEARS, ["x = {'a': [1]}\nassert f(x) == list(x)", "x = {}\nassert f(x) == list(x)"], None),
        ("def f(x): x.clear()", ["x = {'a': [1]}\nf(x)\nassert x == {}", "x = {}\nf(x)\nassert x == {}"], 2),
        (SORTS, "def check(f):\n    x = [2, 1]\n    f(x)\n    assert x == [1, 2]\ncheck(f)", 1),
        (CLEARS, "assert (lambda v: f(v) == sorted(v))([3, 1, 2])", 0),
        (ZEROS, ONLY + "        got = f(self.x)\n        self.assertEqual(got, sum(self.x))", 0),
        (ZEROS, "import solution as s\nx = [2, 1]\nassert max(x) == s.f(x)", 0),
        ("def product(x): return x * 2", "assert product(2) == 4", 1),
        (SORTS, "x = [2, 1]\nf(x)\nassert x == [1, 2]", 1),
        (SORTS, "x = [2, 1]\nassert f(x=x) is None\nassert x == [1, 2]", 1),
        (SORTS, "x = [2, 1]\nwant = sorted(x)\nf(x)\nassert x == want", 1),
        (SORTS, "x = [2, 1]\nf(x)\nassert x == sorted(x)", None),
        (SORTS, "x = [2, 1]\nf(x)\nassert x == sorted(x)\nassert x[0] == 1", 1),
        (SORTS, "def run(v):\n    f(v)\n    return v\nassert run([2, 1]) == [1, 2]", 1),
        (SORTS, "def ok(v): assert v == [1, 2]\nx = [2, 1]\nf(x)\nok(x)", 1),
        (SORTS, "from solution import f as g\nfor x, want in [([2, 1], [1, 2])]:\n    g(x)\n    assert x == want", 1),
        (SORTS, ONLY + "        f(self.x)\n        self.assertEqual(self.x, [1, 2])", 1),
        (UNIQUE, "x = [1, 1, 2]\nk = f(x)\nassert x[:k] == [1, 2]", 1),
        (SORTS, "x = [2, 1]\nf(x)\nassert x == [3, 1]", 0),
        (UNIQUE, "x, want = [1, 1, 2], [1, 2]\nk = f(x)\nassert k == 2 and x[:k] == want[:k]", 1),
        (UNIQUE, "x, want = [1, 1, 2], [1, 2]\nfor i in range(f(x)):\n    assert x[i] == want[i]", 1),
        (SORTS + "; return x", "x = [2, 1]\ngot = f(x)\nassert x == [1, 2]\nassert got is x", 1),
        (METHOD, "s = Solution()\ndef test_it():\n    x = [2, 1]\n    s.f(x)\n    assert x == [1, 2]", 1),
        (METHOD, ONLY + "        Solution().f(self.x)\n        self.assertEqual(self.x, [1, 2])", 1),
        ("def f(x): x[0][0] += 1; return x", "row = [1]\nassert f([row, row]) == [[2], [2]] and row == [2]", 1),
        (
            CLEARS,
            "def test_it():\n    x = [3, 1, 2]\n    got = f(x)\n    want = lambda: sorted(x)\n    assert got == want()",
            0,
        ),
        (CLEARS, "box = {'x': [3, 1]}\ngot = f(box['x'])\nassert len(box) == 1 and got == sorted(box['x'])", 0),
        (CLEARS, "x = [3, 1]\nassert f(x) == [2 * v + 1 for v in x]", None),
    ],
)
def test_a_program_reaches_no_expected_value_by_its_arguments(
    slot: Slot, program: str, test: str | list[str], passed: int | None
) -> None:
    """A program does not change what its answer is compared with, or the row is refused; work done in place is seen."""
    tests = [test] if isinstance(test, str) else test
    if passed is None:
        with pytest.raises(BadGroundTruth, match="empties its arguments"):
            run(slot, program, tests, {})
    else:
        assert run(slot, program, tests, {}).passed == passed


NODE = """
import array, collections, datetime
class Node:
    def __init__(self, d, next=None): self.data, self.next = d, next
    def __len__(self): return 1
    def __str__(self): return f"N{self.data}"
    def __eq__(self, other): return self.data == other.data
    def __getitem__(self, i): return self.data
    def __iter__(self): return iter([self.data])
    def __add__(self, other): return Node(self.data + other.data)
    def __lt__(self, other): return self.data < other.data
    def __enter__(self): return self
    def __exit__(self, *a): pass
    def __bool__(self): return False
    def __hash__(self): return hash(self.data)
class Failed(Exception):
    def __init__(self, code): self.code = code; super().__init__("m")
def fail(): raise Failed(3)
def length(node): return 0 if node is None else 1 + length(node.next)
def tokenize(text): return text.split()
def copy(x): return list(x)
def day(year): return datetime.date(year, 1, 1)
def pair(): return collections.namedtuple("P", "x y")(1, 2)
def apply(f, x): return f(x)
def inc(x): return x + 1
def fills(x): x.append(1)
"""
LIES = """
class Any:
    def __getattr__(self, name): return Any()
    def __call__(self, *a): return Any()
for name in "eq ne lt gt le ge contains".split(): setattr(Any, f"__{name}__", lambda *a: True)
for name in "sub add rsub radd abs".split(): setattr(Any, f"__{name}__", lambda *a: 0)
def f(x): return Any()
"""


@pytest.mark.parametrize(
    ("program", "test", "passed"),
    [
        *(
            (NODE, f"assert {right}\nassert inc(1) == 2", 1)
            for right in (
                "len(Node(1)) == 1", "str(Node(1)) == f'{Node(1)}' == 'N1'", "Node(1) == Node(1)", "Node(1) != Node(2)",
                "Node(4)[0] == 4", "[*Node(4)] == [4] and 4 in Node(4)", "(Node(1) + Node(2)).data == 3",
                "Node(1) < Node(2)", "not Node(1)", "isinstance(Node(1), Node) and not isinstance(1, Node)",
                "len({Node(1), Node(1)}) == 1", "tokenize('a b') == ['a', 'b']", "copy([1]) == [1]",
                "day(2020).year == 2020", "pair().x == 1", "apply(inc, 3) == 4",
            )
        ),
        (NODE, "with Node(1) as n:\n    assert n.data == 1", 1),
        (NODE, "h = Node(1)\nh.next = Node(2)\nassert length(h) == 2", 1),
        (NODE, "try:\n    fail()\nexcept Failed as err:\n    assert err.code == 3\nelse: assert False", 1),
        (NODE, {"test_list": ["assert length(a) == 2"], "test_setup_code": "a = Node(1)\na.next = Node(2)"}, 1),
        (NODE, {"test_list": ["assert a == [2, 1]"], "test_setup_code": "a = [2]\nfills(a)"}, 1),
        ("def same(a, b): return True\ndef f(x): return 1",
         {"test_list": ["assert same(f(1), 2)"], "test_setup_code": "def same(a, b): return a == b"}, 0),
        ("class inc(Exception): pass\ndef apply(f, x): return 5", "assert apply(inc, 3) == 4", 0),
        ("async def inc(x): pass\ndef apply(f, x): return 5", "assert apply(inc, 3) == 4", 0),
        ("class Node:\n    def __init__(self, x): pass\n    def __ne__(self, o): return False",
         "assert Node(1) != Node(2)\nassert f(1)", 0),
        *(
            (LIES, f"assert {right}", 0)
            for right in (
                "f(3) == 6", "6 == f(3)", "abs(f(2) - 1.4) < 1e-6", "f(3) > 5 and f(3) < 7", "6 in f(3)", "f(3) in [6]",
            )
        ),
    ],
)  # fmt: skip
def test_objects_of_a_program_have_its_operators_but_compare_with_no_value_of_the_tests(
    slot: Slot, program: str, test: Any, passed: int
) -> None:
    assert run(slot, program, [test] if isinstance(test, str) else test, {}).passed == passed


DOC = 'def f():\n    """Use:\n%s```\n%sf()\n%s```\n    """\n    return 1\n'


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```py\na\n```\n```python\nb\n```\n```\nc\n```", "b\n"),
        ("```\na\n```\ntext\n```\nb\n```", "b\n"),
        ("```text\nno\n```", None),
        ("```cpp\nint main() {}\n```", None),
        ("```python\nnever closed", "never closed\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("   \n", None),
        ("x" * (code_blocks.MAX_PROGRAM_CHARS + 1), None),
        ("print(1)\n```", "print(1)\n"),
        ("for i in x:\n    print(i)\n```\nThis works:\n```python\nexample()\n```", "for i in x:\n    print(i)\n"),
        ("Here:\n```\nprint(1)", "print(1)\n"),
        ("OK\n```\na = 1\n```", "a = 1\n"),
        ("The answer is x = 5\n```\na = 1\n```", "a = 1\n"),
        ("```\na\n```\n```", "a\n"),
        ("```python\na\n```\n```", "a\n"),
        ("```python\na\n````", "a\n"),
        ("```python\na\n``` x\nb\n```", "a\n``` x\nb\n"),
        *((f"```python\n{DOC % (3 * (indent,))}```\nend", DOC % (3 * (indent,))) for indent in ("", "  ", "    ")),
        ("```python\nx = \"it's\"  # '''\n```\nand ''' more", "x = \"it's\"  # '''\n"),
        ("1. Do:\n   ```python\n   def f():\n       return 1\n   ```\n2. End", "def f():\n    return 1\n"),
        ("1. Do:\n\n    ```python\n    def f():\n        return 1\n    ```", "def f():\n    return 1\n"),
        ("1.\t```python\n\tdef f():\n\t    return 1\n\t```\nEnd", "def f():\n    return 1\n"),
        ("- x\n  - y\n\n    ~~~python\n    a = 1\n    ~~~", "a = 1\n"),
        ("1. Do:\n   ```python\nprint(1)\n   ```", "print(1)\n"),
        ("1. Idea:\n   ```python\n   draft()\n2. Final\n```python\nfinal()\n```", "final()\n"),
        ("> ```python\n> a = 1\n>\n> b\n> ```\nend", "a = 1\n\nb\n"),
        ("Text\n\n    ```python\n    a = 1\n    ```\nEnd", "a = 1\n"),
        ("~~~python\na = '```'\n```\n~~~", "a = '```'\n```\n"),
        ("````markdown\nx\n```python\na\n```\n````", "a\n"),
        ("```Python title='x'\r\nif a:\r\n\tb\r\n```\r\n", "if a:\n\tb\n"),
        ("```{.python .numberLines}\na\n```", "a\n"),
        ("<think>```python\ndraft\n```</think>\nprint(2)", "\nprint(2)"),
        ("<think>```python\ndraft\n```\nstill", None),
        ("so\n```python\ndraft\n```\n</think>\n```python\na\n```", "a\n"),
        ("```python\na\n```\n<think>\n```python\ndraft\n```", "a\n"),
        ("<think>x <think> y</think> z</think>\n```python\na\n```", "a\n"),
        ("<think>x</think><answer>```python\na\n```</answer>", "a\n"),
        *(
            (f"{prose}\n```\nprint(1)\n```", "print(1)\n")
            for prose in (
                "O(n) solution:", "f(n) = 2n, so:\n", "return double the input", '"Double" is the answer.', "x = 2*n.",
                "for each test: print it", "class of problems: y", "Solution(s):", "# Hi\n\nn = int(input()) reads it:",
            )
        ),
        ("f(x) doubles x.\n```\n2 -> 4\n```\n```python\na()\n```", "a()\n"),
        ("x = 5\n```\nprint(1)\n```", "print(1)\n"),
        ("x = 5\n```\n7\n```", "x = 5\n"),
        ("```python\nprint(1)```\nDone.", "print(1)\n"),
        ("```python\ns = 1  # ```\nt = '```'\n```", "s = 1  # ```\nt = '```'\n"),
        ("**Code:** ```python\na\n```\nEnd", "a\n"),
        ("So:\n<answer>\nprint(1)\n</answer>", "\n\nprint(1)\n"),
        ("So:\n<solution>\nprint(1)\n</solution>", "\n\nprint(1)\n"),
        ("<solution>\n```python\na = 1\n```\n</solution>", "a = 1\n"),
        ("[BEGIN]\nx = [\n1]\n[DONE]", "\n\nx = [\n1]\n"),
        ("[PYTHON]\nx = 1\n[/PYTHON]", "\n\nx = 1\n"),
        ("```python\na = 1\n```<|im_end|>", "a = 1\n"),
        ("```python\na = 1<|eot_id|>", "a = 1\n"),
        ("```python\na = 1\n</s><|endoftext|>\n", "a = 1\n"),
        ("a = 1<|im_end|>", "a = 1"),
        ("```python\ns = '<|im_end|>'\n```", "s = '<|im_end|>'\n"),
        ("```python\nprint('<answer>%d</answer>' % 1)\n```", "print('<answer>%d</answer>' % 1)\n"),
        ("```python\ns = '<think>'\nt = '</think>'  # </think>\n```", "s = '<think>'\nt = '</think>'  # </think>\n"),
        ("<think>\n```python\ndraft\n</think>\n```python\ns = '<think>'\n```", "s = '<think>'\n"),
    ],
)  # fmt: skip
def test_the_program_is_found_as_commonmark_reads_the_completion(completion: str, program: str | None) -> None:
    assert code_blocks.program(completion) == program
