"""What tests find as ``pytest``: the part of its interface that test modules of data sets use.

Anything else is an error of the tests, and so of the row: never a wrong answer of the program.
"""

from __future__ import annotations

import cmath
import re
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from penstock.sandbox.inside.program_proxy import BadTests

MARKS = "pytestmark"
FIXTURE = "_penstock_fixture"


class Failed(Exception):
    """Raised by `fail`, and by `raises` when nothing was raised."""


class Skipped(Exception):
    """Raised by `skip`; a test that skips itself while it runs has not passed."""


class Mark:
    def __init__(self, name: str, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None) -> None:
        self.name, self.args, self.kwargs = name, arguments, dict(named or {})

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if len(arguments) == 1 and not named and callable(arguments[0]) and not isinstance(arguments[0], Mark):
            marked = arguments[0]
            setattr(marked, MARKS, [*getattr(marked, MARKS, []), self])
            return marked
        return Mark(self.name, arguments, named)


class _Marks:
    def __getattr__(self, name: str) -> Mark:
        return Mark(name)


mark = _Marks()


class Parameters:
    def __init__(self, arguments: tuple[Any, ...], marks: Any) -> None:
        self.values = arguments
        self.marks: list[Mark] = [marks] if isinstance(marks, Mark) else list(marks)


def param(*arguments: Any, marks: Any = (), id: str | None = None) -> Parameters:
    return Parameters(arguments, marks)


def fixture(function: Callable[..., Any] | None = None, **named: Any) -> Any:
    if named.get("params"):
        raise BadTests("the tests use a fixture with params, which is not supported; use pytest.mark.parametrize")

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, FIXTURE, {"name": named.get("name") or function.__name__, "autouse": named.get("autouse")})
        return function

    return made if function is None else made(function)


class ExceptionInfo:
    value: Any = None

    @property
    def type(self) -> Any:
        return type(self.value)

    def match(self, pattern: str) -> bool:
        assert re.search(pattern, str(self.value)), f"{pattern!r} is not in {str(self.value)[:200]!r}"
        return True


class _Raises:
    def __init__(self, expected: Any, match: str | None) -> None:
        self._expected, self._match, self._info = expected, match, ExceptionInfo()

    def __enter__(self) -> ExceptionInfo:
        return self._info

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, _: TracebackType | None) -> bool:
        if err is None:
            raise Failed(f"DID NOT RAISE {self._expected!r}")
        kinds = self._expected if isinstance(self._expected, tuple) else (self._expected,)
        if not isinstance(err, tuple(expected for expected in kinds if isinstance(expected, type))):
            return False
        self._info.value = err
        if self._match is not None:
            self._info.match(self._match)
        return True


def raises(expected: Any, *call: Any, match: str | None = None, **named: Any) -> Any:
    """Expect an exception: as a context manager, or of ``call[0](*call[1:])``."""
    if not call:
        return _Raises(expected, match)
    with _Raises(expected, match) as info:
        call[0](*call[1:], **named)
    return info


class approx:  # noqa: N801 pytest's name
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self._nan_ok = expected, nan_ok
        self._rel = 1e-6 if rel is None and abs is None else (rel or 0.0)
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, actual: object) -> bool:
        return self._same(actual, self.expected)

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    def _same(self, actual: Any, expected: Any) -> bool:
        if isinstance(expected, Mapping):
            return (
                isinstance(actual, Mapping)
                and actual.keys() == expected.keys()
                and all(self._same(actual[key], expected[key]) for key in expected)
            )
        if isinstance(expected, list | tuple):
            return (
                isinstance(actual, list | tuple)
                and len(actual) == len(expected)
                and all(self._same(one, other) for one, other in zip(actual, expected, strict=True))
            )
        if actual == expected:
            return True
        if isinstance(actual, bool) or not hasattr(actual, "__sub__") or isinstance(expected, str | bytes | bool):
            return False
        if expected != expected or actual != actual:  # noqa: PLR0124 NaN
            return self._nan_ok and expected != expected and actual != actual  # noqa: PLR0124
        if cmath.isinf(complex(expected)) or cmath.isinf(complex(actual)):
            return False
        return bool(abs(actual - expected) <= max(self._rel * abs(expected), self._abs))


def fail(reason: str = "", **_: Any) -> None:
    raise Failed(reason)


def skip(reason: str = "", **_: Any) -> None:
    """Skip the test, which then counts as not passed."""
    raise Skipped(reason)


def importorskip(name: str, *_: Any, **__: Any) -> Any:
    """Import a module; one that is missing is an error of the tests."""
    return __import__(name)


def main(*_: Any, **__: Any) -> int:
    """Do nothing: the tests of a module are run in any case."""
    return 0


def each(marks: Iterable[Mark]) -> list[dict[str, Any]]:
    """Return the arguments of every case of a test with these marks; raises BadTests for other forms."""
    cases: list[dict[str, Any]] = [{}]
    for mark in marks:
        if mark.name != "parametrize":
            continue
        if "indirect" in mark.kwargs:
            raise BadTests("the tests use parametrize(indirect=...), which is not supported")
        arguments = dict(zip(("argnames", "argvalues"), mark.args, strict=False)) | mark.kwargs
        names = arguments["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        sets = [_arguments(names, row) for row in arguments["argvalues"]]
        cases = [{**case, **more} for case in cases for more in sets if more is not None]
    return cases


def _arguments(names: list[str], row: Any) -> dict[str, Any] | None:
    if isinstance(row, Parameters):
        if any(is_left_out(mark) for mark in row.marks):
            return None
        row = row.values if len(names) > 1 else row.values[0]
    return dict(zip(names, row, strict=True)) if len(names) > 1 else {names[0]: row}


def is_left_out(mark: Mark) -> bool:
    if mark.name == "skipif":
        conditions = [*mark.args, mark.kwargs.get("condition", False)]
        return any(condition for condition in conditions if not isinstance(condition, str))
    return mark.name in ("skip", "xfail")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise BadTests(f"the tests use pytest.{name}, which is not supported; use raises, approx, mark, param or fixture")
