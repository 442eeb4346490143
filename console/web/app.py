"""The app: middleware, error answers, and the routers of the other files."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

import structlog
from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from penstock import __version__
from penstock.console.web import control_routes, event_routes, page_routes, reading_routes
from penstock.console.web.context import WebContext
from penstock.console.web.gate import STATIC, Gate
from penstock.console.web.jobs import actions, queue
from penstock.console.web.problems import ProblemBody, answer_errors
from penstock.console.web.reading_context import closing_runs

log = structlog.get_logger("console.app")
_QUEUE_S = 1.0
_DESCRIPTION = """Create, start, pause, resume, stop and remove runs, and read all that they recorded.

Every route but `/healthz` and the page needs a token: `Authorization: Bearer TOKEN`. Roles: `read` < `run` < `admin`.
Errors are `application/problem+json` with `detail`, `expected`, `got`, `fix` and `errors`.
"""


def create_app(context: WebContext, *, hosts: Iterable[str] = ()) -> FastAPI:
    """Return the app. The Host header must name loopback or one of ``hosts``."""
    routers = (page_routes.router, control_routes.router, event_routes.router, *reading_routes.routers)
    app = FastAPI(
        # Not include_router, which analyses the signature of each route a second time: 0.06 s of CPU before the first answer.
        routes=[route for router in routers for route in router.routes],
        title="Penstock Runs API",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.context = context
    app.state.event_streams = set()  # one mark for each open stream
    answer_errors(app)
    app.mount(STATIC.rstrip("/"), StaticFiles(directory=page_routes.PAGES), name="static")
    app.add_middleware(Gate, access=context.access, hosts=tuple(hosts))
    _describe_problems(app)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Advance the queue while the server runs; end the event streams and close the runs when it stops."""
    context: WebContext = app.state.context
    await asyncio.to_thread(queue.remove_unfinished, context.runs_dir)
    queueing = asyncio.create_task(_advance(context))
    try:
        async with closing_runs(app):
            yield
    finally:
        context.closing.set()
        await queueing


def _advance_once(context: WebContext) -> None:
    queue.repeat_pauses(context.runs_dir)
    queue.advance(actions.machine(context))


async def _advance(context: WebContext) -> None:
    while not context.closing.is_set():
        try:
            await asyncio.to_thread(_advance_once, context)
        except Exception:
            log.warning("the queue was not advanced", exc_info=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(context.closing.wait(), _QUEUE_S)


def _describe_problems(app: FastAPI) -> None:
    """Add the schema that the error answers of all routes refer to."""
    original = app.openapi

    def openapi() -> dict[str, object]:
        document = original()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.setdefault("ProblemBody", ProblemBody.model_json_schema())
        return document

    app.openapi = openapi
