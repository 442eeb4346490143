"""References made from pydantic models: every key of the run file, and the HTTP APIs of the console and the reward service."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from penstock.console.web.app import create_app
from penstock.console.web.context import WebContext
from penstock.console.web.jobs.job_request import RunRequest
from penstock.deploy.config_show import SERVICES
from penstock.reward_service.api import app as api
from penstock.reward_service.api.api_models import Registration
from penstock.reward_service.endpoints import wire
from penstock.reward_service.endpoints.endpoint import DIALECTS, Access

_READERS = {"TrainerSettings": "trainer", "RolloutSettings": "rollout worker", "RewardSettings": "reward service",
            "TrackSettings": "trackers"}  # fmt: skip
_DYNAMIC = {"worker.id", "reward_service.id"}  # made from host and process id
_METHODS = ("get", "post", "put", "patch", "delete")


def cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ").replace("<", "\\<").strip()


def table(*header: str, rows: Sequence[tuple[object, ...]]) -> str:
    """Return a Markdown table; cells are escaped."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(cell(value) for value in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def settings() -> str:
    parts = []
    for section, (model, readers) in sections().items():
        parts.append(f"## {section}\n\n{_summary(model)} Read by: {', '.join(readers)}.\n")
        parts.append(table("key", "type", "default", "meaning", rows=list(_rows(section, model))))
    return "\n".join(parts)


def sections() -> dict[str, tuple[type[BaseModel], list[str]]]:
    by_name: dict[str, tuple[type[BaseModel], list[str]]] = {}
    for service in SERVICES:
        for name, field in service.model_fields.items():
            model = field.annotation
            while get_origin(model) in (list, Annotated):  # [[tracker]]
                model = get_args(model)[0]
            if isinstance(model, type) and issubclass(model, BaseModel):
                by_name.setdefault(name, (model, []))[1].append(_READERS.get(service.__name__, service.__name__))
    return by_name


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


def http_apis() -> str:
    parts = ["## Routes of the Runs API\n", _routes(runs_api())]
    parts += ["## A run to create\n", _model_table(RunRequest)]
    parts += ["## Routes of the reward service\n", _routes(openapi())]
    parts += ["## Registration of an endpoint\n", _model_table(Registration)]
    parts.append("## What an endpoint of the dialect `penstock` receives and answers\n")
    parts += [
        _model_table(model, level=3)
        for model in (wire.ScoreRequest, wire.GroupToScore, wire.ScoreResponse, wire.GroupScore)
    ]
    rows: list[tuple[object, ...]] = []
    for name, kind in sorted(DIALECTS.built_in.items()):
        options = ", ".join(f"`{model_field}`" for model_field in kind.options.model_fields) or "none"
        rows.append((f"`{name}`", " ".join((kind.options.__doc__ or "").split("\n\n")[0].split()), options))
    parts += ["## Dialects\n", table("dialect", "is", "options", rows=rows)]
    return "\n".join(parts)


def openapi() -> dict[str, Any]:
    nothing = cast(Any, None)
    context = api.ApiContext(*[nothing] * len(api.ApiContext.__dataclass_fields__))
    app = api.build(context, access=Access(tokens=()), max_request_bytes=1, max_requests_bytes=1)
    return app.openapi()


def runs_api() -> dict[str, Any]:
    return create_app(WebContext(Path("runs"), cast(Any, None))).openapi()


def _routes(document: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if method in methods:
                operation = methods[method]
                says = operation.get("description", operation.get("summary", "")).split("\n\n")[0]
                rows.append((f"`{method.upper()} {path}`", says, _body(operation)))
    return table("call", "does", "body", rows=rows)


def _body(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    reference = next(iter(content.values()), {}).get("schema", {}).get("$ref", "")
    return f"`{reference.rpartition('/')[2]}`" if reference else ""


def _model_table(model: type[BaseModel], level: int = 0) -> str:
    rows: list[tuple[object, ...]] = []
    for name, field in model.model_fields.items():
        if field.is_required():
            default = "required"
        else:
            default = f"`{field.get_default(call_default_factory=True, validated_data={})!r}`"
        rows.append((f"`{name}`", type_name(field.annotation), default, field.description or ""))
    summary = " ".join((model.__doc__ or "").split())
    head = f"{'#' * level} {model.__name__}\n\n" if level else ""
    return f"{head}{summary}\n\n" + table("field", "type", "default", "meaning", rows=rows)
