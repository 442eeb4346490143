"""Assemble the app: middleware, error answers and routers; and the routes without a token: page, login and health."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import structlog
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from penstock import __version__
from penstock.console.web import control_routes, event_routes, reading_routes, server_routes
from penstock.console.web.access import BROWSER_S, CALLER, STATIC, Gate, admit, cookie_name
from penstock.console.web.context import Context, WebContext
from penstock.console.web.jobs import queue
from penstock.console.web.problems import Problem, ProblemBody, answer_errors
from penstock.console.web.reading_routes import closing_runs
from penstock.serving.request_checks import Guard, Rules

PAGES = Path(__file__).parent / "pages"
_MAX_FORM_BYTES = 4096
MAX_BODY_BYTES = 1024 * 1024
_MAX_BODIES_BYTES = 256 * MAX_BODY_BYTES  # of all connections
router = APIRouter(include_in_schema=False)
log = structlog.get_logger("console.app")
_QUEUE_S = 1.0
_DESCRIPTION = """Create, start, pause, resume, stop and remove runs, and read all that they recorded.

Every route but `/healthz` and the page needs a token: `Authorization: Bearer TOKEN`.
Roles: `read` < `log` < `run` < `admin`.
Errors are `application/problem+json` with `detail`, `expected`, `got`, `fix` and `errors`.
"""


@router.get("/healthz")
async def healthz() -> dict[str, bool]:
    return {"ok": True}


@router.get("/")
async def page(request: Request, web: Context, token: Annotated[str, Query(max_length=200)] = "") -> Response:
    """Return the page; with a one-time link's token set the browser's cookie first."""
    if token:
        known = CALLER in request.scope
        session_token = None if known else web.access.redeem(token)
        if session_token is None and not known:
            return RedirectResponse("/?expired", 303)
        answer = RedirectResponse("/", 303)
        if session_token is not None:
            _set_cookie(request, answer, session_token)
        return answer
    return FileResponse(PAGES / "index.html", media_type="text/html; charset=utf-8")


@router.post("/login")
async def login(request: Request, web: Context) -> Response:
    """Set the browser's cookie to the token of the form field ``token``."""
    form = await _form(request)
    if web.access.caller(form.get("token", "")) is None:
        return RedirectResponse("/?refused", 303)
    answer = RedirectResponse("/", 303)
    _set_cookie(request, answer, form["token"])
    return answer


@router.post("/logout")
async def logout(request: Request, web: Context) -> Response:
    """Remove the browser's cookie, and its token if a one-time link made it."""
    caller = request.scope.get(CALLER)
    if caller is not None and caller.name.startswith("browser-"):
        web.access.revoke(caller.name)
    answer = RedirectResponse("/", 303)
    answer.delete_cookie(cookie_name(request.headers.get("host", "")), path="/", httponly=True, samesite="strict")
    return answer


def _set_cookie(request: Request, answer: Response, token: str) -> None:
    answer.set_cookie(
        cookie_name(request.headers.get("host", "")),
        token,
        max_age=int(BROWSER_S),
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form in the ordinary encoding, without a parser for uploads."""
    from urllib.parse import parse_qsl  # noqa: PLC0415

    try:
        body = await request.body()
    except ClientDisconnect:
        return {}
    if len(body) > _MAX_FORM_BYTES:
        raise Problem(413, "the form is too long", expected=f"<= {_MAX_FORM_BYTES} bytes", got=f"{len(body)} bytes")
    try:
        return dict(parse_qsl(body.decode("ascii"), max_num_fields=10))
    except ValueError:
        raise Problem(400, "the form cannot be read", expected="application/x-www-form-urlencoded") from None


def create_app(context: WebContext, *, hosts: Iterable[str] = ()) -> FastAPI:
    """Return the app. The Host header must name loopback or one of ``hosts``."""
    routers = (router, *(routes.router for routes in (control_routes, event_routes, reading_routes, server_routes)))
    app = FastAPI(
        # Not include_router, which analyses each route's signature again: 0.06 s of CPU before the first answer.
        routes=[route for router in routers for route in router.routes],
        title="Penstock Runs API",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.context = context
    app.state.event_streams = Counter()  # open streams by the name of their token
    answer_errors(app)
    app.mount(STATIC.rstrip("/"), StaticFiles(directory=PAGES), name="static")
    fix = "the Host header names another machine; use a name of this one, or start the console with --allow-host NAME"
    app.add_middleware(
        Guard, max_bytes=MAX_BODY_BYTES, max_total_bytes=_MAX_BODIES_BYTES,
        rules=Rules(tuple(hosts), partial(admit, access=context.access), has_page=True, answer=_refuse, fix=fix),
    )  # fmt: skip
    app.add_middleware(Gate)  # the last one is the first that sees a request
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
    queue.advance(context)


async def _advance(context: WebContext) -> None:
    while not context.closing.is_set():
        try:
            await asyncio.to_thread(_advance_once, context)
        except Exception:
            log.warning("the queue was not advanced", exc_info=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(context.closing.wait(), _QUEUE_S)


def _refuse(status: int, text: str, scope: Scope) -> JSONResponse:
    detail, _, fix = text.partition("; ")
    return Problem(status, detail, fix="send a shorter one" if status == 413 else fix).response()


def _describe_problems(app: FastAPI) -> None:
    original = app.openapi

    def openapi() -> dict[str, object]:
        document = original()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.setdefault("ProblemBody", ProblemBody.model_json_schema())
        return document

    app.openapi = openapi
