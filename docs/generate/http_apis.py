"""The HTTP APIs: routes of the Runs API and of the reward service, and what an endpoint receives and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from docs.generate import table
from docs.generate.settings import type_name
from penstock.console.web.app import create_app
from penstock.console.web.context import WebContext
from penstock.console.web.jobs.job_request import RunRequest
from penstock.reward_service.api import app as api
from penstock.reward_service.api.api_models import Registration
from penstock.reward_service.endpoints import wire
from penstock.reward_service.endpoints.endpoint import DIALECTS, Access

_METHODS = ("get", "post", "put", "patch", "delete")


def text() -> str:
    """Return the routes, the models that people write or serve, and the dialects."""
    parts = ["## Routes of the Runs API\n", _routes(runs_api())]
    parts += ["## A run to create\n", _model(RunRequest)]
    parts += ["## Routes of the reward service\n", _routes(openapi())]
    parts += ["## Registration of an endpoint\n", _model(Registration)]
    parts.append("## What an endpoint of the dialect `penstock` receives and answers\n")
    parts += [
        _model(model, level=3) for model in (wire.ScoreRequest, wire.GroupToScore, wire.ScoreResponse, wire.GroupScore)
    ]
    parts += ["## Dialects\n", _dialects()]
    return "\n".join(parts)


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of the reward service; no route is called."""
    nothing = cast(Any, None)
    context = api.ApiContext(*[nothing] * len(api.ApiContext.__dataclass_fields__))
    app = api.build(context, access=Access(tokens=()), max_request_bytes=1, max_requests_bytes=1)
    return app.openapi()


def runs_api() -> dict[str, Any]:
    """Return the OpenAPI document of the Runs API; no route is called."""
    return create_app(WebContext(Path("runs"), cast(Any, None))).openapi()


def _routes(document: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if method in methods:
                one = methods[method]
                says = one.get("description", one.get("summary", "")).split("\n\n")[0]
                rows.append((f"`{method.upper()} {path}`", says, _body(one)))
    return table("call", "does", "body", rows=rows)


def _body(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    reference = next(iter(content.values()), {}).get("schema", {}).get("$ref", "")
    return f"`{reference.rpartition('/')[2]}`" if reference else ""


def _model(model: type[BaseModel], level: int = 0) -> str:
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


def _dialects() -> str:
    rows: list[tuple[object, ...]] = []
    for name, kind in sorted(DIALECTS.built_in.items()):
        options = ", ".join(f"`{model_field}`" for model_field in kind.options.model_fields) or "none"
        rows.append((f"`{name}`", " ".join((kind.options.__doc__ or "").split("\n\n")[0].split()), options))
    return table("dialect", "is", "options", rows=rows)
