"""Python values as JSON that keeps their types, for messages between a test process and a program.

Lists, texts, numbers of moderate size, True, False and None are plain JSON; everything else is ``{"~": kind, "v": ...}``.
A value without such a form (an object of a class of the program) stays in its process and is sent as a handle. `decode`
returns only plain values: no class of the program, and so none of its methods, reaches the other process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

_PLAIN_BITS = 1024
_MAX_DRAWN = 100_000  # items taken from an iterator
_SEQUENCES: dict[str, Callable[[Iterator[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
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
}


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Return a value's JSON form; ``keep`` returns a handle's number for a value without one, or raises."""
    if value is None or value is True or value is False:
        return value
    for kinds, form in _FORMS:
        if isinstance(value, kinds):
            return form(value, keep)
    return {"~": "handle", "v": keep(value)}


def decode(form: Any, handle: Callable[[int], Any]) -> Any:
    """Return the value of a JSON form; raises ValueError, KeyError or TypeError for JSON that `encode` never produces."""
    if isinstance(form, list):
        return [decode(item, handle) for item in form]
    if not isinstance(form, dict):
        return form
    kind, content = form["~"], form["v"]
    if kind == "handle":
        return handle(int(content))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, handle) for item in content)
    if kind == "dict":
        return {decode(key, handle): decode(item, handle) for key, item in content}
    return _SCALARS[kind](content)


def _items(kind: str) -> Callable[[Any, Callable[[Any], int]], Any]:
    def form(value: Any, keep: Callable[[Any], int]) -> Any:
        items = [encode(item, keep) for item in value]
        return items if kind == "list" else {"~": kind, "v": items}

    return form


def _int(value: int, _: Callable[[Any], int]) -> Any:
    plain = int.__index__(value)
    return plain if plain.bit_length() < _PLAIN_BITS else {"~": "int", "v": hex(plain)}


def _float(value: float, _: Callable[[Any], int]) -> Any:
    plain = float.__float__(value)
    return plain if math.isfinite(plain) else {"~": "float", "v": repr(plain)}


_FORMS: list[tuple[Any, Callable[[Any, Callable[[Any], int]], Any]]] = [
    (int, _int),
    (float, _float),
    (str, lambda value, _: str.__str__(value)),
    (list, _items("list")),
    (tuple, _items("tuple")),
    (dict, lambda value, keep: {"~": "dict", "v": [[encode(k, keep), encode(v, keep)] for k, v in dict.items(value)]}),
    (frozenset, _items("frozenset")),
    ((set, type({}.keys())), _items("set")),
    ((bytes, bytearray), lambda value, _: {"~": "bytes", "v": bytes(value).hex()}),
    (complex, lambda value, _: {"~": "complex", "v": [value.real, value.imag]}),
    (Fraction, lambda value, _: {"~": "fraction", "v": [hex(value.numerator), hex(value.denominator)]}),
    (Decimal, lambda value, _: {"~": "decimal", "v": str(value)}),
    (range, lambda value, _: {"~": "range", "v": [hex(value.start), hex(value.stop), hex(value.step)]}),
    (type({}.values()), _items("list")),
    (
        Iterator,
        lambda value, keep: {"~": "iterator", "v": [encode(v, keep) for v in itertools.islice(value, _MAX_DRAWN)]},
    ),
]
