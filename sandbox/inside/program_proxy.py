"""The program as its tests see it: proxies whose calls go to another process, or to a stand-in that answers without one.

A stand-in (`Stub`) answers every call alike. Tests that accept all stand-ins accept any program.
"""

from __future__ import annotations

import builtins
import copy
import io
import itertools
import json
import types
from collections.abc import Callable
from typing import Any, Protocol

from penstock.sandbox.inside import values

STUBS = ("opaque", "none", "missing")  # a new object equal to nothing; None; NameError, as an empty program
# Stand-ins that change their arguments: how, and the number of their answer in `_answer_of`; 0 is an object equal to nothing.
_HOW = ("clear", "zeros", "ones", "one")
_OUTER = "outer"  # a stand-in that empties a dict whatever its values are, instead of the containers in it
_KINDS = (*(f"{how} {{}}" for how in _HOW), f"clear {{}} {_OUTER}")
CHANGES = tuple(kind.format(number) for number in range(10) for kind in _KINDS)
UNCHANGED = " unchanged"  # ends the kind of a stand-in that gives that answer and changes nothing
EMPTY = tuple(f"clear {number}{UNCHANGED}" for number in (4, 6, 7, 8, 9))  # [], "", set(), (), {}
# Modules that tests import the program from.
PROGRAM_MODULES = [
    "solution", "solutions", "main", "program", "submission", "answer", "candidate", "implementation", "module",
    "your_module", "my_module", "mymodule", "your_solution", "my_solution", "user_solution",
]  # fmt: skip
_MAX_ANSWER = 4 * 1024 * 1024  # bytes of one answer
# If a called function raises one of these, it would end a loop or the tests instead of failing them.
_SILENT = (StopIteration, StopAsyncIteration, GeneratorExit)
_OPAQUE = object()
_DECODING = (ValueError, KeyError, TypeError, IndexError, ArithmeticError, RecursionError, AttributeError)


class ProgramFailed(Exception):
    """The program raised an exception that tests do not catch, sent an invalid answer, or exited."""


class BadTests(BaseException):
    """The tests cannot be run, whatever the program; not an Exception, so that tests do not catch it."""


class Answers(Protocol):
    shows_changes: bool  # whether the test that is run sees how the program changed its arguments

    def ask(self, where: dict[str, Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any: ...

    def attribute(self, handle: int, name: str) -> Any: ...

    def look_up(self, name: str) -> Any: ...


class Program:
    """The channel to the program in the other process: one line for a call, one for its answer."""

    def __init__(self, answers: io.BufferedReader, calls: Any, say: Callable[[dict[str, Any]], None]) -> None:
        self._answers = answers
        self._calls = calls
        self._say = say
        self._has_answered = False
        self._exceptions: dict[str, type[Exception]] = {}
        self.shows_changes = True

    def ask(self, where: dict[str, Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        passed: list[Any] = []
        sent = values.encode((arguments, named), _handle_of, passed)["v"]
        answer = self._exchange({**where, "arguments": {"~": "tuple", "v": sent}})
        if "raised" in answer:
            raise self._exception(answer)
        held = passed if self.shows_changes else [type(container)() for container in passed]
        shared = list(held)
        value = self._decode(answer.get("value"), shared)
        self._checked(lambda: self._fill(held, answer["changed"], shared))
        return value

    def _fill(self, containers: list[Any], changed: list[Any], shared: list[Any]) -> None:
        for container, content in zip(containers, changed, strict=True):
            values.fill(container, content, self._remote, shared)

    def attribute(self, handle: int, name: str) -> Any:
        return self._value(self._exchange({"handle": handle, "attribute": name}))

    def look_up(self, name: str) -> Any:
        """Return a name's plain value or exception class, else a proxy; a name that is missing fails when it is called."""
        proxy = Remote(self, name=name)
        if name in self._exceptions:
            return self._exceptions[name]
        try:
            answer = self._exchange({"name": name})
            value = self._value(answer)
        except Exception:
            return proxy
        if isinstance(answer.get("exception"), list):
            base = self._class_of([text for text in answer["exception"] if text != name]) or Exception
            self._exceptions[name] = type(name, (base,), {"_handle": getattr(value, "_handle", -1)})  # pyright: ignore[reportArgumentType] - a class of `base`
            return self._exceptions[name]
        if not isinstance(value, Remote):
            return value
        proxy = Remote(self, name=name, handle=value._handle)
        return _awaited(proxy) if answer.get("async") is True else proxy

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
        if not self._has_answered:
            self._has_answered = True
            self._say({"answered": True})
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ProgramFailed("the program wrote to the descriptor of its answers")
        return answer

    def _value(self, answer: dict[str, Any]) -> Any:
        if "raised" in answer:
            raise self._exception(answer)
        return self._decode(answer.get("value"))

    def _decode(self, form: Any, shared: list[Any] | None = None) -> Any:
        return self._checked(lambda: values.decode(form, self._remote, shared))

    def _remote(self, handle: int) -> Remote:
        return Remote(self, handle=handle)

    def _checked(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except _DECODING as err:
            raise ProgramFailed(f"the program's answer is not a value: {type(err).__name__}") from None

    def _exception(self, answer: dict[str, Any]) -> Exception:
        name, text, names = str(answer["raised"]), str(answer.get("text", "")), answer.get("types")
        kind = self._class_of([name, *(names if isinstance(names, list) else [])])
        if kind is not None:
            try:
                err = kind(text)
                attributes = self._decode(answer.get("attributes"))
                err.__dict__.update(attributes if isinstance(attributes, dict) else {})
                return from_program(err)
            except TypeError:  # UnicodeDecodeError requires five arguments
                pass
        return from_program(ProgramFailed(f"{name}: {text}"))

    def _class_of(self, names: list[Any]) -> type[Exception] | None:
        """Return the first class of an exception's ancestors that the tests know; None if it would end a loop of theirs."""
        expected: type[Exception] | None = None
        for name in names:
            kind = self._exceptions.get(str(name)) or getattr(builtins, str(name), None)
            if not isinstance(kind, type) or not issubclass(kind, Exception) or kind is Exception:
                continue
            if issubclass(kind, _SILENT):
                return None
            expected = expected or kind
        return expected


class Stub:
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._num_objects = 0
        self.shows_changes = True

    def ask(self, where: dict[str, Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Answer a call; arguments that could not be sent to a program are found here too."""
        containers: list[Any] = []
        values.encode([arguments, named], _handle_of, containers)
        if self._kind.startswith(_HOW) and (len(containers) > 2 or self._kind in EMPTY):
            passed = [*arguments, *named.values()]
            if self._kind.endswith(UNCHANGED):
                passed = copy.deepcopy(passed)
            for argument in passed:
                _change(argument, self._kind.split()[0], is_outer=_OUTER in self._kind)
            if "operator" in where:
                return self._operated(where["operator"])
            answer = _answer_of(self._kind, passed)
            return self._object() if answer is _OPAQUE else answer
        if "operator" in where:
            return self._operated(where["operator"])
        if self._kind == "missing":
            raise from_program(NameError(f"name {where.get('name')!r} is not defined"))
        return None if self._kind == "none" else self._object()

    def attribute(self, handle: int, name: str) -> Any:
        return self._object()

    def look_up(self, name: str) -> Any:
        return Remote(self, name=name, handle=0)

    def _operated(self, name: str) -> Any:
        """Answer as an object without operators."""
        answers = {
            "eq": False,
            "ne": True,
            "truth": True,
            "hash": 0,
            "str": "object",
            "repr": "object",
            "setattr": None,
        }
        if name not in answers and name != "isinstance":
            raise TypeError(f"an object does not support {name}")
        return answers.get(name, False)

    def _object(self) -> Remote:
        self._num_objects += 1
        return Remote(self, handle=self._num_objects)


class Remote:
    """A proxy of an object in the program's process, for calls, attributes and operators; equal to no value of the tests."""

    def __init__(self, program: Answers, *, name: str = "", handle: int = -1) -> None:
        self.__dict__.update(_program=program, _where={"name": name} if name else {"handle": handle}, _handle=handle)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.ask(self._where, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._handle < 0:
            raise AttributeError(name)
        return self._program.attribute(self._handle, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._operate("setattr", name, value)

    def _operate(self, name: str, *arguments: Any) -> Any:
        return self._program.ask({"operator": name}, (self, *arguments), {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and (self._where == other._where or self._operate("eq", other) is True)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, Remote) or (self._where != other._where and self._operate("ne", other) is True)

    def __hash__(self) -> int:
        return self._operate("hash") if self._handle >= 0 else hash(str(self._where))

    def __bool__(self) -> bool:
        return self._operate("truth") if self._handle >= 0 else True

    def __instancecheck__(self, instance: object) -> bool:
        return (
            isinstance(instance, Remote) and self._program.ask({"operator": "isinstance"}, (instance, self), {}) is True
        )

    def __enter__(self) -> Any:
        return self._operate("enter")

    def __exit__(self, *_: object) -> None:
        self._operate("exit")


def _unary(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._operate(name, *arguments)


def _of_two(name: str) -> Callable[[Remote, Any], Any]:
    """An operator of two objects of the program; with a value of the tests it would hand over what they expect."""
    return lambda self, other: self._operate(name, other) if isinstance(other, Remote) else NotImplemented


for _name in ("len", "str", "repr", "iter", "getitem", "setitem", "int", "float", "abs", "neg"):
    setattr(Remote, f"__{_name}__", _unary(_name))
for _name in ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "or", "and", "xor"):
    setattr(Remote, f"__{_name}__", _of_two(f"{_name}_" if _name in ("or", "and") else _name))


def module_of(program: Answers, name: str, exported: list[str]) -> types.ModuleType:
    """Return a module whose attributes are the program's names; ``exported`` is what ``import *`` takes."""
    made = types.ModuleType(name)
    made.__dict__["__all__"] = exported

    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return program.look_up(wanted)

    made.__dict__["__getattr__"] = attribute
    return made


def _awaited(function: Remote) -> Callable[..., Any]:
    async def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    call.__dict__["_handle"] = function._handle
    return call


def from_program(err: Exception) -> Exception:
    """Mark an exception as the program's, so that it is not taken for an error of the tests."""
    err.__dict__["is_of_program"] = True
    return err


def is_of_program(err: BaseException) -> bool:
    return bool(getattr(err, "is_of_program", False))


def _handle_of(thing: Any) -> int:
    handle = getattr(thing, "_handle", None) if isinstance(thing, Remote | type | types.FunctionType) else None
    if isinstance(handle, int):
        if handle < 0:
            raise from_program(ProgramFailed("the program does not define a name that a test passes to it"))
        return handle
    raise BadTests(f"a test passes the program a {type(thing).__name__}, which cannot be sent to another process")


def _change(argument: Any, how: str, *, is_outer: bool = False) -> None:
    """Empty a container, put zeros or ones into it and into those in it, or leave one item, a one."""
    is_flat = isinstance(argument, dict) and not any(isinstance(v, dict | list) for v in argument.values())
    if isinstance(argument, dict) and how == "clear" and (is_flat or is_outer):
        argument.clear()
    elif isinstance(argument, dict):
        argument.update({key: _changed(item, how) for key, item in argument.items()})
    elif isinstance(argument, list | set) and argument:
        kept = {"clear": 0, "one": 1}.get(how)
        items = [_changed(item, how) for item in itertools.islice(argument, kept)]
        argument.clear()
        (argument.extend if isinstance(argument, list) else argument.update)(items)
    elif isinstance(argument, tuple):
        for item in argument:
            _change(item, how)


def _changed(item: Any, how: str) -> Any:
    _change(item, how)
    if isinstance(item, str):
        return "a" if how.startswith("one") else ""
    return type(item)(how.startswith("one")) if isinstance(item, int | float) else item


def _answer_of(kind: str, passed: list[Any]) -> Any:
    how, number, passed = *kind.split()[:2], passed or [None]
    leaf = int(how.startswith("one"))
    items = [] if how == "clear" else [leaf]
    text = "a" * leaf
    return (
        _OPAQUE, passed[0], passed[-1], leaf, items, len(items), text, set(items), tuple(items), dict.fromkeys(items, 1)
    )[int(number)]  # fmt: skip
