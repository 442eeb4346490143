"""Hostile values for mutations: boundary numbers, texts, ids; pure, and the same for the same generator."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

INTEGERS = (
    -(2**63), -(2**31), -2, -1, 0, 1, 2, 7, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**64 - 1,
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e300, -1e300, 1.7e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", " ", "\x00", "a\nb", "../../../etc/passwd", "x" * 201, "y" * 5000, "é" * 120, "\ud7ff", "%s%n{0}", "*", ">", "a.b.>",
    "runs/other/groups/v00000000/x.parquet", "$JS.API.STREAM.DELETE.x", "'; DROP TABLE runs; --", "NaN", "1e999", "null",
    "\u202e", "0" * 64, "f" * 64, "e0.p0.a0", "eval.v0.p0", "eval.v9999999999999.p0", "eval.vx.p0", "eval.", "-1",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    b"",
    b"\xff" * 40,
    [[] for _ in range(40)],
    {"": {}},
    [None],
    {"a": [1, {"b": 2}]},
)
_GROUP_ID = re.compile(r"e(\d+)\.p(\d+)\.a(\d+)")


def integer(rng: random.Random) -> int:
    return rng.choice(INTEGERS) if rng.random() < 0.7 else rng.getrandbits(rng.randint(1, 63))


def number(rng: random.Random) -> float:
    return rng.choice(FLOATS) if rng.random() < 0.7 else rng.uniform(-1e6, 1e6)


def text(rng: random.Random) -> str:
    if rng.random() < 0.8:
        return rng.choice(TEXTS)
    return "".join(chr(rng.randint(1, 0x2FF)) for _ in range(rng.randint(1, 80)))


def nested(depth: int) -> Any:
    found: Any = 0
    for _ in range(depth):
        found = [found]
    return found


def leaf(rng: random.Random) -> Any:
    """Return any hostile value that MessagePack can hold."""
    kind = rng.randrange(6)
    if kind == 0:
        return integer(rng)
    if kind == 1:
        return number(rng)
    if kind == 2:
        return text(rng)
    if kind == 3:
        return nested(rng.choice((2, 31, 33, 300)))
    return copy.deepcopy(rng.choice(OTHERS))  # what is drawn is mutated further


def same_type(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(0, value + rng.choice((-3, -1, 1, 2, 7, 1000))) if rng.random() < 0.6 else abs(integer(rng)) % 2**53
    if isinstance(value, float):
        return (
            value + rng.choice((-1.0, 1e-3, 1.0, 1e12))
            if rng.random() < 0.6
            else rng.choice((0.0, -0.0, 1e300, -1e300))
        )
    if isinstance(value, str):
        return group_id(rng, value) if _GROUP_ID.fullmatch(value) else _other_text(rng, value)
    return value


def group_id(rng: random.Random, known: str) -> str:
    """Return an id near a known one: an alias of it, of another attempt, prompt or epoch, or of a held-out group."""
    match = _GROUP_ID.fullmatch(known)
    if match is None:
        return known + rng.choice((".a0", "x", "-1"))
    epoch, prompt, attempt = map(int, match.groups())
    return rng.choice(
        (
            f"e{epoch}.p0{prompt}.a{attempt}",
            f"e{epoch}.p{prompt}.a{attempt:02d}",
            f"e00{epoch}.p{prompt}.a{attempt}",
            f"e{epoch}.p{prompt}.a{attempt + rng.choice((1, 2, 999_999))}",
            f"e{epoch}.p{prompt + rng.choice((1, 5, 60, 10**6, 10**30))}.a{attempt}",
            f"e{epoch + rng.choice((1, 7, 10**12))}.p{prompt}.a{attempt}",
            f"e{epoch}.p{prompt}.a{'9' * 150}",
            f"eval.v{epoch}.p{prompt}",
            f"eval.v{10**12}.p0",
            "eval.vx.p0",
        )
    )


def _other_text(rng: random.Random, value: str) -> str:
    if rng.random() < 0.4 and value:
        place = rng.randrange(len(value))
        return value[:place] + rng.choice("0aZ-.:#_") + value[place + 1 :]
    return rng.choice((value + "0", value[:-1], value * 2, value.upper(), text(rng)))
