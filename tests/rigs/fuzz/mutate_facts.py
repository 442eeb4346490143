"""Mutations of messages, from real ones and from the pydantic models; pure, and the same for the same generator.

| function    | gives                                                                                      |
|-------------|--------------------------------------------------------------------------------------------|
| `bytes_of`  | flipped, cut, extended, spliced or random bytes, and MessagePack headers that promise much  |
| `fields_of` | one to three fields of another type, size or depth; fields added, removed, renamed          |
| `lies_of`   | fields that the schema accepts and that are not true: ids, versions, counts, references     |
| `generated` | an instance drawn from a model's own annotations and constraints                            |
"""

from __future__ import annotations

import copy
import random
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgpack
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tests.rigs.fuzz import values

from penstock.protocol.facts import Fact

Tree = list[Any]  # [schema tag, fields], lists and dicts
_BOMBS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xc1",
    b"\x91" * 60_000,
)
_MAX_BYTES = 60 * 1024


def unpack(data: bytes) -> Tree:
    """Return a real message as lists and dicts."""
    return msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=True)


def pack(tree: Any) -> bytes:
    """Return the bytes of a tree; numbers beyond 64 bits become texts."""
    try:
        return msgpack.packb(tree, use_bin_type=True, default=str) or b""
    except (OverflowError, ValueError, UnicodeEncodeError, RecursionError):
        return msgpack.packb(_packable(tree), use_bin_type=True, default=str) or b""


def _packable(value: Any, depth: int = 0) -> Any:
    if depth > 400:
        return 0
    if isinstance(value, dict):
        return {_packable(k, depth + 1): _packable(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_packable(item, depth + 1) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


def bytes_of(rng: random.Random, data: bytes, other: bytes = b"") -> tuple[str, bytes]:
    raw, name = bytearray(data), rng.choice(("flip", "cut", "extend", "splice", "random", "bomb", "empty", "insert"))
    if name == "flip":
        for _ in range(rng.choice((1, 1, 2, 8, 64))):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif name == "cut":
        del raw[rng.randrange(len(raw)) :]
    elif name == "extend":
        raw += rng.randbytes(rng.choice((1, 16, 4000)))
    elif name == "splice" and other:
        raw[rng.randrange(len(raw)) :] = other[rng.randrange(len(other)) :]
    elif name == "random":
        raw = bytearray(rng.randbytes(rng.choice((1, 7, 300, 20_000))))
    elif name == "bomb":
        raw = bytearray(rng.choice(_BOMBS) + data)
    elif name == "empty":
        raw = bytearray()
    else:
        place = rng.randrange(len(raw))
        raw[place:place] = rng.randbytes(rng.randint(1, 9))
    return name, bytes(raw[:_MAX_BYTES])


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value below a tree's fields, deepest included."""
    return list(_places(tree[1])) if isinstance(tree, list) and len(tree) > 1 else []


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)


def fields_of(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """Return the name of the last of one to three operations on fields, and the message."""
    tree = unpack(data)
    name = ""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = _change_field(rng, tree)
    return name, pack(tree)[:_MAX_BYTES]


def _change_field(rng: random.Random, tree: Tree) -> str:
    found = places(tree)
    if not found:
        return "none"
    container, key = rng.choice(found)
    name = rng.choice(("leaf", "leaf", "same-type", "drop", "add", "rename", "repeat", "tag", "empty"))
    if name == "leaf":
        container[key] = values.leaf(rng)
    elif name == "same-type":
        container[key] = values.same_type(rng, container[key])
    elif name == "drop":
        del container[key]
    elif name == "add" and isinstance(container, dict):
        container[values.text(rng)] = values.leaf(rng)
    elif name == "rename" and isinstance(container, dict):
        container[f"{key}s"] = container.pop(key)
    elif name == "repeat" and isinstance(container, list):
        container.extend(copy.deepcopy(container[key]) for _ in range(rng.choice((1, 2, 300))))
    elif name == "tag":
        tree[0] = rng.choice([*Fact.registry, "group_scored.v9", 7, None])
    else:
        container[key] = type(container[key])() if isinstance(container[key], str | int | float | list | dict) else None
    return name


# ── lies ──────────────────────────────────────────────────────────────────────────────────────────────────


def lies_of(rng: random.Random, data: bytes, other: bytes) -> tuple[str, bytes]:
    """Return the name of a lie, and the message; ``other`` is another real message of the same kind."""
    tree, spare = unpack(data), unpack(other)
    name = rng.choice(sorted(_LIES))
    _LIES[name](rng, tree[1], spare[1])
    return name, pack(tree)[:_MAX_BYTES]


def _summaries(fields: dict[str, Any]) -> list[dict[str, Any]]:
    groups = fields.get("groups") or fields.get("tasks") or []
    return [group.get("generated", group) for group in groups if isinstance(group, dict)]


def _ids(rng: random.Random, fields: dict[str, Any], _: dict[str, Any]) -> None:
    for summary in _summaries(fields):
        if rng.random() < 0.5:
            summary["group_id"] = values.group_id(rng, summary["group_id"])


def _swapped_ids(rng: random.Random, fields: dict[str, Any], spare: dict[str, Any]) -> None:
    for mine, theirs in zip(_summaries(fields), _summaries(spare), strict=False):
        if rng.random() < 0.5:
            mine["group_id"] = theirs["group_id"]


def _versions(rng: random.Random, fields: dict[str, Any], _: dict[str, Any]) -> None:
    shift = rng.choice((-1, 1, 2, 50, 2**40))
    for summary in _summaries(fields):
        for key in ("oldest_version", "newest_version", "issued_version"):
            if isinstance(summary.get(key), int) and rng.random() < 0.7:
                summary[key] = max(0, summary[key] + shift)


def _counts(rng: random.Random, fields: dict[str, Any], _: dict[str, Any]) -> None:
    for summary in _summaries(fields):
        for key in ("completion_tokens", "finish_reasons"):
            row = summary.get(key)
            if isinstance(row, list) and row:
                if rng.random() < 0.5:
                    row[0] = (
                        values.same_type(rng, row[0])
                        if key == "completion_tokens"
                        else rng.choice(("stop", "length", "abort"))
                    )
                else:
                    row.extend(row)
        if isinstance(summary.get("row_group"), int):
            summary["row_group"] = rng.choice((0, 1, summary["row_group"] + 1, 2**31, 2**53))


def _reference(rng: random.Random, fields: dict[str, Any], spare: dict[str, Any]) -> None:
    ref = fields.get("pack") or fields.get("manifest") or fields.get("tasks_blob")
    other = spare.get("pack") or spare.get("manifest") or ref
    if not isinstance(ref, dict) or not isinstance(other, dict):
        return
    change = rng.randrange(6)
    if change == 0:
        ref.update(other)
    elif change == 1:
        ref["sha256"] = rng.choice(("0" * 64, other["sha256"]))
    elif change == 2:
        ref["size_bytes"] = rng.choice((0, 1, ref["size_bytes"] + 1, 2**40, 2**53))
    elif change == 3:
        ref["key"] = rng.choice(
            (
                f"runs/other/{ref['key']}",
                "../" * 9 + "etc/passwd",
                "runs/",
                "a" * 512,
                ref["key"] + "\x00",
                "//",
                "%2e%2e/x",
            )
        )
    else:
        ref["key"] = other["key"]


def _repeated(rng: random.Random, fields: dict[str, Any], spare: dict[str, Any]) -> None:
    for key in ("groups", "tasks"):
        if isinstance(fields.get(key), list) and fields[key]:
            fields[key].append(copy.deepcopy(rng.choice(fields[key])))
            if rng.random() < 0.3 and isinstance(spare.get(key), list):
                fields[key] += copy.deepcopy(spare[key])


def _labels(rng: random.Random, fields: dict[str, Any], _: dict[str, Any]) -> None:
    for summary in _summaries(fields):
        if "sampling" not in summary:  # a task in the other split's queue is a dead letter of a real, outstanding group
            summary["split"] = rng.choice(("eval", "train"))
        if "reward_name" in summary:
            summary["reward_name"] = rng.choice(("exact_match", "nothing-like-this", "code", summary["reward_name"]))
        if "has_baseline" in summary:
            summary["has_baseline"] = rng.random() < 0.5
        summary["attempt"] = rng.choice((0, 1, 2**53))


def _identity(rng: random.Random, fields: dict[str, Any], _: dict[str, Any]) -> None:
    for key in ("run_id", "pack_id", "worker_id", "service_id", "version", "step", "holder"):
        if key in fields and rng.random() < 0.6:
            fields[key] = values.same_type(rng, fields[key])


def _any_value(rng: random.Random, fields: dict[str, Any], _: dict[str, Any]) -> None:
    found = [(c, k) for c, k in _places(fields) if not isinstance(c[k], dict | list)]
    for container, key in rng.sample(found, min(len(found), rng.choice((1, 1, 2, 4)))):
        container[key] = values.same_type(rng, container[key])


_LIES: dict[str, Callable[[random.Random, dict[str, Any], dict[str, Any]], None]] = {
    "ids": _ids,
    "swapped-ids": _swapped_ids,
    "versions": _versions,
    "counts": _counts,
    "reference": _reference,
    "repeated": _repeated,
    "labels": _labels,
    "identity": _identity,
    "any-value": _any_value,
}


# ── from the models ───────────────────────────────────────────────────────────────────────────────────────


def generated(rng: random.Random, model: type[BaseModel]) -> dict[str, Any]:
    """Return fields drawn from a model's annotations: each within its constraints, at their edges where there are any."""
    share = rng.choice((0.2, 0.7))  # of optional fields; some of them are only valid together
    return {
        name: _drawn(rng, field.annotation, field)
        for name, field in model.model_fields.items()
        if field.is_required() or rng.random() < share
    }


def generated_fact(rng: random.Random, model: type[Fact]) -> bytes:
    return pack([model.schema_tag, generated(rng, model)])[:_MAX_BYTES]


def _drawn(rng: random.Random, annotation: Any, field: FieldInfo | None = None) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    metadata = list(field.metadata) if field is not None else []
    if origin is typing.Annotated:
        inner = FieldInfo.from_annotation(annotation)
        return _drawn(rng, inner.annotation, inner)
    if origin is Literal:
        return rng.choice(arguments)
    if origin in (typing.Union, types.UnionType):
        return _drawn(rng, rng.choice(arguments))
    if origin is tuple:
        size = _limit(metadata, MinLen, "min_length", 0) + rng.choice((0, 1, 2, 8))
        return [_drawn(rng, arguments[0]) for _ in range(size)]
    if origin is dict:
        return {str(_drawn(rng, arguments[0]))[:40]: _drawn(rng, arguments[1]) for _ in range(rng.choice((0, 1, 3)))}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return generated(rng, annotation)
    return _drawn_scalar(rng, annotation, metadata)


def _drawn_scalar(rng: random.Random, annotation: Any, metadata: list[Any]) -> Any:
    if annotation is type(None):
        return None
    if annotation is bool:
        return rng.random() < 0.5
    if annotation is int:
        low = max(_limit(metadata, Ge, "ge", 0), _limit(metadata, Gt, "gt", -1) + 1)
        high = min(_limit(metadata, Le, "le", 2**53), _limit(metadata, Lt, "lt", 2**53 + 1) - 1)
        return rng.choice((low, high, rng.randint(low, min(high, low + 100))))
    if annotation is float:
        return float(rng.choice((_limit(metadata, Ge, "ge", 0.0), 0.5, 1.0, 1e9)))
    if annotation is str:
        return _drawn_text(rng, metadata)
    if annotation is bytes:
        return rng.randbytes(rng.choice((0, 5, 900)))
    return values.leaf(rng)


def _limit(metadata: list[Any], kind: type, name: str, default: Any) -> Any:
    return next((getattr(found, name) for found in metadata if isinstance(found, kind)), default)


def _drawn_text(rng: random.Random, metadata: list[Any]) -> str:
    pattern = next((found.pattern for found in metadata if getattr(found, "pattern", None)), None)
    if pattern is not None and "0-9a-f" in pattern:
        return rng.randbytes(16 if "{32}" in pattern else 32).hex()
    size = min(_limit(metadata, MaxLen, "max_length", 40), rng.choice((1, 5, 40, 200)))
    if pattern is not None:
        return "".join(rng.choice("abcXYZ0189_.:#-") for _ in range(max(1, size)))
    return values.text(rng)
