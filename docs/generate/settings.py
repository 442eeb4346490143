"""Every key of the run file: section by section, with type, default and meaning."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docs.generate import table
from penstock.deploy.config_show import SERVICES

_READERS = {"TrainerSettings": "trainer", "RolloutSettings": "rollout worker", "RewardSettings": "reward service",
            "TrackSettings": "trackers"}  # fmt: skip
_DYNAMIC = {"worker.id", "reward_service.id"}  # made from host and process id


def text() -> str:
    parts = []
    for section, (model, readers) in sections().items():
        parts.append(f"## {section}\n\n{_summary(model)} Read by: {', '.join(readers)}.\n")
        parts.append(table("key", "type", "default", "meaning", rows=list(_rows(section, model))))
    return "\n".join(parts)


def sections() -> dict[str, tuple[type[BaseModel], list[str]]]:
    found: dict[str, tuple[type[BaseModel], list[str]]] = {}
    for service in SERVICES:
        for name, field in service.model_fields.items():
            model = field.annotation
            while get_origin(model) in (list, Annotated):  # [[tracker]]
                model = get_args(model)[0]
            if isinstance(model, type) and issubclass(model, BaseModel):
                found.setdefault(name, (model, []))[1].append(_READERS.get(service.__name__, service.__name__))
    return found


def all_keys() -> set[str]:
    """Return every key as ``section.key``, nested tables as ``section.table.key``."""
    return {key for section, (model, _) in sections().items() for key, _ in _fields(section, model)}


def _rows(section: str, model: type[BaseModel]) -> Iterator[tuple[object, ...]]:
    for key, field in _fields(section, model):
        default = "(host and process id)" if key in _DYNAMIC else _default(field)
        yield f"`{key}`", type_name(field.annotation), default, field.description or ""


def _fields(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from _fields(f"{prefix}.{name}", nested)
        else:
            yield f"{prefix}.{name}", field


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, tuple | list):
        return f"`{list(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def type_name(annotation: Any) -> str:
    """Return a type in words: `whole number`, `list of text`, the values of a choice."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in {Union, types.UnionType}:
        return " or ".join(type_name(argument) for argument in arguments if argument is not type(None))
    if origin in {list, tuple}:
        return f"list of {type_name(arguments[0])}" if arguments else "list"
    if origin is dict:
        return "table"
    names = {str: "text", int: "whole number", float: "number", bool: "true, false", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))
