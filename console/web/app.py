"""The app: middleware, error answers, and the routers of the other files."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from penstock import __version__
from penstock.console.web import control_routes, page_routes, reading_routes
from penstock.console.web.context import WebContext
from penstock.console.web.gate import STATIC, Gate
from penstock.console.web.problems import ProblemBody, answer_errors

_DESCRIPTION = """Create, start, pause, resume, stop and remove runs, and read all that they recorded.

Every route but `/healthz` and the page needs a token: `Authorization: Bearer TOKEN`. Roles: `read` < `run` < `admin`.
Errors are `application/problem+json` with `detail`, `expected`, `got`, `fix` and `errors`.
"""


def create_app(context: WebContext, *, hosts: Iterable[str] = ()) -> FastAPI:
    """Return the app. The Host header must name loopback or one of ``hosts``."""
    app = FastAPI(
        title="Penstock Runs API", version=__version__, description=_DESCRIPTION, docs_url=None, redoc_url=None
    )
    app.state.context = context
    answer_errors(app)
    for router in (page_routes.router, control_routes.router, *reading_routes.routers):
        app.include_router(router)
    app.mount(STATIC.rstrip("/"), StaticFiles(directory=page_routes.PAGES), name="static")
    app.add_middleware(Gate, access=context.access, hosts=tuple(hosts))
    _describe_problems(app)
    return app


def _describe_problems(app: FastAPI) -> None:
    """Add the schema that the error answers of all routes refer to."""
    original = app.openapi

    def openapi() -> dict[str, object]:
        document = original()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.setdefault("ProblemBody", ProblemBody.model_json_schema())
        return document

    app.openapi = openapi
