"""The page and its files, the login of a browser, and the health route: the only routes without a token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, RedirectResponse, Response
from starlette.requests import ClientDisconnect

from penstock.console.web.access import BROWSER_S
from penstock.console.web.context import Context
from penstock.console.web.gate import CALLER, TOKEN, cookie_name
from penstock.console.web.problems import Problem

PAGES = Path(__file__).parent / "pages"
_MAX_FORM_BYTES = 4096
router = APIRouter(include_in_schema=False)


@router.get("/healthz")
async def healthz() -> dict[str, bool]:
    """Return that the server answers."""
    return {"ok": True}


@router.get("/")
async def page(request: Request, web: Context, token: Annotated[str, Query(max_length=200)] = "") -> Response:
    """Return the page; with a one-time link's token set the browser's cookie first."""
    if token:
        known = CALLER in request.scope
        own = None if known else web.access.redeem(token)
        if own is None and not known:
            return RedirectResponse("/?expired", 303)
        answer = RedirectResponse("/", 303)
        if own is not None:
            _set_cookie(request, answer, own)
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
        web.access.revoke_token(request.scope[TOKEN])
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
