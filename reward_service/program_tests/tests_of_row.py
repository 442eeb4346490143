"""Read a row's tests of a program from the forms of the usual data sets.

- stdin tests: ``{"inputs": [...], "outputs": [...]}`` (APPS, TACO, verl), ``{"input": [...], "output": [...]}``
  (CodeContests), or a list of ``{"input", "output"}`` (LiveCodeBench, PrimeIntellect, DeepCoder, open-r1), or ROLL's names of these.
- function tests: the same with ``fn_name`` or ``func_name``, of the row, of its ``metadata`` or of a test; an input is a list
  of arguments, or a text with one JSON argument per line; then an output that is a text is JSON, too.
- test code: a text, a list of texts, ``{"test", "entry_point"}`` (HumanEval), ``{"test_list", "test_setup_code"}``
  (MBPP, also ``test_imports``).

Any of them may be a JSON text, the packed text of LiveCodeBench's private tests, or held by a column of `_HOLDERS`. What the
ground truth leaves out is taken from the row's other columns. A form that is not understood is an error of the row that
names it. Pure, as are the rules that compare outputs.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import pickletools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import Any, NamedTuple

from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.program_tests.code_blocks import LANGUAGES

_FUNCTION_NAMES = ("fn_name", "func_name")
_SETUPS = ("setup", "test_setup_code", "test_imports", "import_prefix")
_CODE = ("test", "test_code", "functional", "test_list", "testcase", "assert_case")
_HOLDERS = (
    "verification_info", "input_output", "tests", "test_cases", "unit_tests", "public_tests", "private_tests",
    "generated_tests", "public_test_cases", "private_test_cases", "official_tests",
)  # fmt: skip
_FORMS = {
    **dict.fromkeys(("stdin", "stdin_stdout", "stdio", "standard_input"), "stdin"),
    **dict.fromkeys(("functional", "function_call", "function", "call_based"), "function"),
}
# What decides a test otherwise than by comparing standard output; null, false or "" where it does not.
_OTHER_JUDGES = (
    "checker", "generated_checker", "checker_code", "special_judge", "interactor", "interaction_format", "input_file",
    "output_file",
)  # fmt: skip
_OF_ROLL = {"stdin": "input", "expected_stdout": "output"}
_OTHER_COLUMNS = (*_FUNCTION_NAMES, *_SETUPS, *_OTHER_JUDGES, "entry_point", "language", "input_mode")
_CASE_FIELDS = {
    "input", "output", "type", "testtype", "metadata", "explanation", "id", "index", "name", "weight", "points",
    "is_public", "hidden", "time_limit", "memory_limit", *_FUNCTION_NAMES,
}  # fmt: skip
_PACKED = re.compile(r"e[AFJN][0-9A-Za-z+/\s]{14,}=*\s*")  # base64 of what zlib compressed
_MAX_UNPACKED = 256 * 1024**2
_MAX_DIGITS = 4300  # of an integer that is converted, because that is quadratic; longer ones are compared as texts
_TOLERANCE = 1e-6  # relative and absolute
# Digits are ASCII: float() and \d also take those of other scripts. Bounded, because conversion is quadratic.
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,4})?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_EXACT_FLOATS = 1e9  # up to here the error of a float is far below the tolerance


@dataclass(frozen=True, slots=True)
class StdinTests:
    """Each input goes to a new process of the program, whose output is compared."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FunctionTests:
    """Each list of arguments is passed to ``function``, whose JSON result is compared."""

    function: str
    arguments: tuple[list[Any], ...]
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Assertions:
    """Python code that calls the program and asserts; ``entry_points`` are the program's names it uses."""

    pieces: tuple[str, ...]
    setup: str = ""
    entry_points: tuple[str, ...] = ()


Tests = StdinTests | FunctionTests | Assertions


class _Case(NamedTuple):
    input: Any
    output: Any
    form: Any = None
    function: Any = None


@dataclass(frozen=True, slots=True)
class _LongInteger:
    """An integer of a JSON text that has too many digits to be converted."""

    digits: str


def read(truth: Any, extra: Any) -> Tests:
    """Return a row's tests; raises BadGroundTruth when there are none, of another form, or in another language."""
    fields = _fields(truth, extra if isinstance(extra, Mapping) else {})
    language = fields.get("language") or LANGUAGES[0]
    if str(language).lower().replace(" ", "") not in LANGUAGES:
        raise BadGroundTruth(f"code runs only Python programs, the row's language is {language!r}")
    code = next((fields[name] for name in _CODE if fields.get(name)), None)
    if code:
        listed = _unpacked(code)
        pieces = tuple(listed) if isinstance(listed, list) else (code,)
        setup = "\n".join(_lines(_unpacked(fields[name])) for name in _SETUPS if fields.get(name))
        named = fields.get("entry_point") or ()
        named = (named,) if isinstance(named, str) else tuple(named)
        return Assertions(_texts(pieces), setup, tuple(_function_name(name) for name in named))
    judge = next((name for name in _OTHER_JUDGES if fields.get(name)), None)
    if judge or fields.get("input_mode", "stdio") != "stdio":
        raise BadGroundTruth(
            f"code compares standard output; the row is judged by {judge or 'files (input_mode)'}, leave it out"
        )
    if not fields.get("cases"):
        raise BadGroundTruth(
            "code needs tests: {inputs, outputs} of equal length, a list of {input, output}, {test, entry_point} or "
            f"{{test_list}}; the row's ground_truth is {str(truth)[:120]!r}"
        )
    row_function = next((fields[name] for name in _FUNCTION_NAMES if fields.get(name)), None)
    return _tests_of([_resolved(case, row_function) for case in fields["cases"]])


def called(tests: Tests) -> Sequence[str]:
    """Return the names that tests call a program by, and of test code without them all that it calls."""
    if isinstance(tests, Assertions):
        return tests.entry_points or re.findall(r"\b([A-Za-z_]\w*)\(", "\n".join(tests.pieces))
    return (tests.function,) if isinstance(tests, FunctionTests) else ()


def _resolved(case: _Case, row_function: Any) -> _Case:
    function = str(case.function or row_function or "")
    form = "function" if function else "stdin"
    if case.form is not None and (form := _FORMS.get(str(case.form).lower(), "")) == "":
        raise BadGroundTruth(f"code: tests of the form {case.form!r} are not understood, only {', '.join(_FORMS)}")
    if form == "function" and not function:
        raise BadGroundTruth(f"code: a test of the form {case.form!r} needs fn_name or func_name")
    whole = case.form == "function_call"  # PrimeIntellect: all arguments in one JSON text
    if form == "stdin":
        return _Case(case.input, case.output, form, "")
    output = _unpacked(case.output) if isinstance(case.input, str) else case.output
    return _Case(_unpacked(case.input) if whole else case.input, output, form, function)


def _tests_of(cases: Sequence[_Case]) -> Tests:
    inputs, outputs = [case.input for case in cases], [case.output for case in cases]
    kinds = {(case.form, case.function) for case in cases}
    if len(kinds) > 1:
        forms = sorted(f"{form} {function}".strip() for form, function in kinds)
        raise BadGroundTruth(f"code: the row's tests have several forms: {', '.join(forms)}; give each a row")
    ((form, function),) = kinds
    if form == "stdin":
        printed = _texts(map(_lines, outputs))
        if not any(text.strip() for text in printed):
            raise BadGroundTruth("code: every expected output is empty, so that an empty program passes all tests")
        return StdinTests(_texts(map(_lines, inputs)), printed)
    results = tuple(outputs)
    if all(result is None or result == [None] for result in results):
        raise BadGroundTruth("code: every expected result is null, so that a function that returns nothing passes")
    return FunctionTests(_function_name(function), tuple(map(_arguments, inputs)), results)


def _function_name(name: Any) -> str:
    """Return a function's name without the class that LeetCode's rows put before it."""
    text = re.sub(r"^Solution(\(\))?\.", "", str(name).strip())
    if not text.isidentifier():
        raise BadGroundTruth(f"code: {str(name)[:80]!r} is not the name of a function")
    return text


def fields_of(truth: Any, extra: Any, *, extra_columns: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a row says about its tests, by the column's name; "cases" if it has inputs and outputs. Never raises."""
    columns = extra if isinstance(extra, Mapping) else {}
    try:
        fields = _fields(truth, columns)
    except BadGroundTruth:
        fields = {}
    return {name: columns[name] for name in extra_columns if columns.get(name) is not None} | fields


def _fields(truth: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the ground truth says, and what the columns say of that which it leaves out."""
    of_truth = _flat(truth)
    names = _OTHER_COLUMNS
    if not any(of_truth.get(name) for name in ("cases", *_CODE)):
        names = (*names, *_CODE, *_HOLDERS, "inputs", "outputs")
    return _flat({name: columns[name] for name in (*names, "metadata") if name in columns}) | of_truth


def _flat(value: Any) -> dict[str, Any]:
    """Return the fields of tests in one of the usual forms, with "cases" for those of its inputs and outputs."""
    value = _unpacked(value)
    if isinstance(value, str) and value.strip():
        return {"test": value}
    if isinstance(value, list) and value and all(isinstance(piece, str) for piece in value):
        return {"test_list": value}
    if isinstance(value, list) and value and all(isinstance(case, Mapping) for case in value):
        return _listed(value)
    if not isinstance(value, Mapping):
        return {}
    fields = {str(name): content for name, content in value.items() if content is not None}
    fields |= {
        name: _unpacked(fields[name]) for name in ("inputs", "outputs") if name in fields
    }  # texts in rStar-Coder
    metadata = _unpacked(fields.pop("metadata", None))
    if isinstance(metadata, Mapping):
        fields = {name: metadata[name] for name in _FUNCTION_NAMES if metadata.get(name)} | fields
    cases: list[_Case] = []
    is_case = {"input", "output"} <= fields.keys() and (
        not isinstance(fields["input"], list) or not fields.keys().isdisjoint(("type", "testtype"))
    )
    if is_case:
        cases.append(_case(fields))
    for names in (("inputs", "outputs"), *((("input", "output"),) if not is_case else ())):
        if any(fields.get(name) and isinstance(fields[name], list) for name in names):
            cases += _pairs(*(fields.get(name) for name in names))
    for name in [name for name in _HOLDERS if name in fields]:
        held = _flat(fields.pop(name))
        cases += held.pop("cases", [])
        fields = held | fields
    return {**fields, "cases": cases}


def _listed(tests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not all("assert_code" in test for test in tests):
        return {"cases": list(map(_case, tests))}
    setup = {name: tests[0][name] for name in ("import_prefix", "entry_point") if tests[0].get(name)}
    return {"test_list": [test["assert_code"] for test in tests], **setup}  # of ROLL


def _pairs(inputs: Any, outputs: Any) -> list[_Case]:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise BadGroundTruth(
            f"code needs inputs and outputs of equal length, got {str(inputs)[:60]!r} and {str(outputs)[:60]!r}"
        )
    return [_Case(given, expected) for given, expected in zip(inputs, outputs, strict=True)]


def _case(fields: Mapping[str, Any]) -> _Case:
    case = {_OF_ROLL.get(name, name): content for name, content in fields.items()}
    judge = next((name for name in sorted(case.keys() - _CASE_FIELDS) if case[name] not in (None, "", False)), None)
    if judge or "input" not in case or "output" not in case:
        raise BadGroundTruth(
            f"code: a test has input and output, not {judge}"
            if judge
            else "code: every test of a list needs input and output"
        )
    metadata = _unpacked(case.get("metadata"))
    names = [case.get(name) or (isinstance(metadata, Mapping) and metadata.get(name)) for name in _FUNCTION_NAMES]
    form = case.get("type") or case.get("testtype")
    return _Case(case["input"], case["output"], form, names[0] or names[1] or None)


def _unpacked(value: Any) -> Any:
    """Return the value of a JSON text, which may be packed as LiveCodeBench's private tests are; others as they are."""
    if isinstance(value, str) and _PACKED.fullmatch(value):
        try:
            unpacking = zlib.decompressobj()
            data = unpacking.decompress(base64.b64decode(value), _MAX_UNPACKED)
            texts = [text for code, text, _ in pickletools.genops(data) if "UNICODE" in code.name]
        except (binascii.Error, zlib.error, ValueError):
            return value
        if unpacking.unconsumed_tail or len(texts) != 1:
            raise BadGroundTruth(f"code: packed tests must be one JSON text of at most {_MAX_UNPACKED} bytes")
        value = texts[0]
    if isinstance(value, str):
        try:
            return result_of(value)
        except (ValueError, RecursionError):
            return value
    return value


def _integer(digits: str) -> int | _LongInteger:
    return int(digits) if len(digits.lstrip("-")) <= _MAX_DIGITS else _LongInteger(digits)


def _texts(values: Any) -> tuple[str, ...]:
    values = tuple(values)
    if not values or not all(isinstance(value, str) for value in values):
        raise BadGroundTruth("code: tests must be texts")
    return values


def _lines(value: Any) -> Any:
    """APPS keeps some inputs and outputs as lists of lines; a line ends as on the machine of the judges."""
    text = "\n".join(map(str, value)) if isinstance(value, list) else value
    text = str(text) if isinstance(text, int | float) and not isinstance(text, bool) else text
    return text.replace("\r\n", "\n") if isinstance(text, str) else text


def _arguments(value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            return [json.loads(line) for line in value.split("\n") if line.strip()]
        except ValueError:
            raise BadGroundTruth(f"code: arguments must be one JSON value per line, got {value[:80]!r}") from None
    if not isinstance(value, list):
        raise BadGroundTruth(f"code: an input of a function test must be a list of arguments, got {str(value)[:80]!r}")
    try:
        json.dumps(value)
    except TypeError:
        raise BadGroundTruth(f"code: an argument of a function test has more than {_MAX_DIGITS} digits") from None
    return value


def result_of(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text, for `same_result`; raises ValueError, RecursionError."""
    try:
        return json.loads(text)
    except ValueError:  # of an integer that is too long, or of the text
        return json.loads(text, parse_int=_integer)


def same_output(printed: str, expected: str) -> bool:
    """Compare outputs line by line and word by word, ignoring empty lines and other white space.

    Two words are equal as texts or as numbers: integers exactly, another number equals an expected integer within 1e-6
    and any other expected number within 1e-6, relative or absolute.
    """
    for ours, theirs in zip_longest(*(filter(str.strip, text.splitlines()) for text in (printed, expected))):
        if ours is None or theirs is None:
            return False
        if ours.strip() == theirs.strip():
            continue
        mine, wanted = ours.split(), theirs.split()
        if len(mine) != len(wanted) or not all(_same_word(a, b) for a, b in zip(mine, wanted, strict=True)):
            return False
    return True


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(word) and _INTEGER.fullmatch(expected):
        return int(word) == int(expected)
    mine, wanted = float(word), float(expected)
    if math.isinf(mine) or math.isinf(wanted):
        return Fraction(word) == Fraction(expected)
    if not _close(mine, wanted):
        return False
    return _INTEGER.fullmatch(expected) is None or _is_integer(mine, lambda: Fraction(word), int(expected))


def same_result(result: Any, expected: Any) -> bool:
    """Compare JSON results: numbers as in `same_output`, sequences item by item.

    APPS wraps some expected results in a list of one item; that item alone is accepted too.
    """
    if _same(result, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same(result, expected[0])


def _same(result: Any, expected: Any) -> bool:
    if isinstance(result, bool) or isinstance(expected, bool):
        return result is expected
    if isinstance(result, int | float) and isinstance(expected, int | float):
        if isinstance(result, int) and isinstance(expected, int):
            return result == expected
        if isinstance(expected, int):
            return math.isfinite(result) and _is_integer(result, lambda: Fraction(result), expected)
        return _close(result, expected) or (result != result and expected != expected)  # noqa: PLR0124 both are NaN
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(_same(a, b) for a, b in zip(result, expected, strict=True))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(_same(result[key], expected[key]) for key in expected)
    return type(result) is type(expected) and result == expected


def _is_integer(number: float, exact: Callable[[], Fraction], expected: int) -> bool:
    """Return True if a number is an expected integer: within the tolerance, which is not relative to large ones."""
    if abs(expected) <= _EXACT_FLOATS:
        return abs(number - expected) <= _TOLERANCE
    return abs(exact() - expected) <= _TOLERANCE


def _close(a: float, b: float) -> bool:
    try:
        return a == b or math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:  # an int too large for a float
        return False
