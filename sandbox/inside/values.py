"""Python values as JSON that keeps their types, for messages between a test process and a program.

Lists, texts, numbers of moderate size, True, False and None are plain JSON; everything else is ``{"~": kind, "v": ...}``.
A value without such a form (an object of a class of the program) stays in its process and is sent as a handle. `decode`
returns only plain values: no class of the program, and so none of its methods, reaches the other process.

Lists, dicts and sets are numbered in the order in which both sides meet them (``shared``): one that occurs again is sent as
its number, so that a message keeps which of its parts are the same object.
"""

from __future__ import annotations

import itertools
import math
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

_PLAIN_BITS = 1024
_MAX_DRAWN = 100_000  # items taken from an iterator
_SEQUENCES: dict[str, Callable[[Iterator[Any]], Any]] = {
    "tuple": tuple,
    "frozenset": frozenset,
    "deque": deque,
    "iterator": lambda items: iter(list(items)),
}
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "fraction": lambda parts: Fraction(int(parts[0], 16), int(parts[1], 16)),
    "decimal": Decimal,
    "range": lambda parts: range(*(int(part, 16) for part in parts)),
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
}
_EMPTY: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "set": set}
Keep = Callable[[Any], int]


def encode(value: Any, keep: Keep, shared: list[Any] | None = None) -> Any:
    """Return a value's JSON form; ``keep`` returns a handle's number for a value without one, or raises.

    ``shared`` are the containers met before; those of ``value`` are appended.
    """
    return _encode(
        value, keep, shared := [] if shared is None else shared, {id(met): n for n, met in enumerate(shared)}
    )


def _encode(value: Any, keep: Keep, shared: list[Any], numbers: dict[int, int]) -> Any:
    if value is None or value is True or value is False:
        return value
    if id(value) in numbers:
        return {"~": "same", "v": numbers[id(value)]}

    def form_of(item: Any) -> Any:
        return _encode(item, keep, shared, numbers)

    for kinds, kind, content in _CONTAINERS:
        if isinstance(value, kinds):
            numbers[id(value)] = len(shared)
            shared.append(value)
            form = content(value, form_of)
            return form if kind == "list" else {"~": kind, "v": form}
    for kinds, form in _FORMS:
        if isinstance(value, kinds):
            return form(value, form_of)
    return {"~": "handle", "v": keep(value)}


def contents(container: Any, keep: Keep, shared: list[Any]) -> Any:
    """Return the JSON form of what a list, dict or set holds, for `fill`."""
    numbers = {id(met): n for n, met in enumerate(shared)}
    content = next(content for kinds, _, content in _CONTAINERS if isinstance(container, kinds))
    return content(container, lambda item: _encode(item, keep, shared, numbers))


def decode(form: Any, handle: Callable[[int], Any], shared: list[Any] | None = None) -> Any:
    """Return the value of a JSON form; raises ValueError, KeyError or TypeError for JSON that `encode` never produces."""
    shared = [] if shared is None else shared
    if not isinstance(form, dict | list):
        return form
    kind, content = cast("tuple[str, Any]", ("list", form) if isinstance(form, list) else (form["~"], form["v"]))
    if kind in _EMPTY:
        shared.append(container := _EMPTY[kind]())
        fill(container, content, handle, shared)
        return container
    if kind == "same":
        return shared[content]
    if kind == "handle":
        return handle(int(content))
    if kind == "namedtuple":
        name, fields, items = content
        return namedtuple(str(name), fields)(*(decode(item, handle, shared) for item in items))  # type: ignore[misc]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, handle, shared) for item in content)
    return _SCALARS[kind](content)


def fill(container: Any, content: Any, handle: Callable[[int], Any], shared: list[Any]) -> None:
    """Give a list, dict or set the items of a form of `contents`; raises as `decode`."""
    if isinstance(container, dict):
        pairs = [(decode(key, handle, shared), decode(item, handle, shared)) for key, item in content]
        container.clear()
        container.update(pairs)
        return
    items = [decode(item, handle, shared) for item in content]
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(items)


def _int(value: int, _: Callable[[Any], Any]) -> Any:
    plain = int.__index__(value)
    return plain if plain.bit_length() < _PLAIN_BITS else {"~": "int", "v": hex(plain)}


def _float(value: float, _: Callable[[Any], Any]) -> Any:
    plain = float.__float__(value)
    return plain if math.isfinite(plain) else {"~": "float", "v": repr(plain)}


def _tuple(value: tuple[Any, ...], form_of: Callable[[Any], Any]) -> Any:
    items, fields = [form_of(item) for item in value], getattr(value, "_fields", None)
    if isinstance(fields, tuple) and len(fields) == len(items):
        return {"~": "namedtuple", "v": [type(value).__name__, [str(field) for field in fields], items]}
    return {"~": "tuple", "v": items}


def _sequence(kind: str) -> Callable[[Any, Callable[[Any], Any]], Any]:
    return lambda value, form_of: {
        "~": kind,
        "v": [form_of(item) for item in itertools.islice(value, _MAX_DRAWN if kind == "iterator" else None)],
    }


_CONTAINERS: list[tuple[Any, str, Callable[[Any, Callable[[Any], Any]], Any]]] = [
    ((list, type({}.values())), "list", lambda value, form_of: [form_of(item) for item in value]),
    (dict, "dict", lambda value, form_of: [[form_of(key), form_of(item)] for key, item in dict.items(value)]),
    ((set, type({}.keys())), "set", lambda value, form_of: [form_of(item) for item in value]),
]
_FORMS: list[tuple[Any, Callable[[Any, Callable[[Any], Any]], Any]]] = [
    (int, _int),
    (float, _float),
    (str, lambda value, _: str.__str__(value)),
    (tuple, _tuple),
    (frozenset, _sequence("frozenset")),
    (deque, _sequence("deque")),
    ((bytes, bytearray), lambda value, _: {"~": "bytes", "v": bytes(value).hex()}),
    (complex, lambda value, _: {"~": "complex", "v": [value.real, value.imag]}),
    (Fraction, lambda value, _: {"~": "fraction", "v": [hex(value.numerator), hex(value.denominator)]}),
    (Decimal, lambda value, _: {"~": "decimal", "v": str(value)}),
    (range, lambda value, _: {"~": "range", "v": [hex(value.start), hex(value.stop), hex(value.step)]}),
    (datetime, lambda value, _: {"~": "datetime", "v": value.isoformat()}),
    (date, lambda value, _: {"~": "date", "v": value.isoformat()}),
    (timedelta, lambda value, _: {"~": "timedelta", "v": [value.days, value.seconds, value.microseconds]}),
    (Iterator, _sequence("iterator")),
]
