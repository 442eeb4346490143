"""Serve the files of the page: read once, named in a fixed list, with headers that allow no script but its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

_FOLDER = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# No inline script or style, nothing from another host, no frame around it: a text that became HTML could do nothing.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    content: bytes
    media_type: str
    etag: str


def files() -> dict[str, PageFile]:
    """Return the files of the page by their path below it."""
    found = {}
    for path in sorted(_FOLDER.rglob("*")):
        if path.suffix in _TYPES and path.is_file():
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(_FOLDER).as_posix()] = PageFile(content, _TYPES[path.suffix], etag)
    return found


def router() -> APIRouter:
    """Return the routes of the page; they need no token, because the page has no figure of a run."""
    routes = APIRouter(include_in_schema=False)
    known = files()

    def answer(name: str, request: Request) -> Response:
        file = known.get(name)
        if file is None:
            raise HTTPException(404, "the page has no such file")
        headers = {**HEADERS, "ETag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    @routes.get("/")
    async def index(request: Request) -> Response:
        return answer("index.html", request)

    @routes.get("/favicon.ico")
    async def favicon(request: Request) -> Response:
        return answer("favicon.svg", request)

    @routes.get("/page/{name:path}")
    async def file(name: str, request: Request) -> Response:
        return answer(name, request)

    return routes
