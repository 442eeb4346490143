"""Errors of the API: JSON that says what happened, what was expected, what came, and what to do (RFC 9457 with more fields)."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from penstock.protocol.errors import BlobError, BusError, ConfigError, MissingStream, PenstockError

MEDIA_TYPE = "application/problem+json"
_MAX_TEXT = 2000
_MAX_ERRORS = 50


class ProblemBody(BaseModel):
    """Why a request was refused or failed."""

    title: str = Field(description="The phrase of the status.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What happened, and to which run or key.")
    expected: str = Field("", description="What was expected.")
    got: str = Field("", description="What came instead.")
    fix: str = Field("", description="What to do.")
    errors: list[str] = Field([], description="Every error, where there are several.")


class Problem(Exception):
    """A request is answered with a status and a `ProblemBody`."""

    def __init__(
        self, status: int, detail: str, *, expected: str = "", got: str = "", fix: str = "", errors: Sequence[str] = ()
    ) -> None:
        detail, expected, got, fix = (_encodable(text) for text in (detail, expected, got, fix))
        super().__init__(detail)
        self.status = status
        self.body = ProblemBody(
            title=HTTPStatus(status).phrase,
            status=status,
            detail=detail[:_MAX_TEXT],
            expected=expected[:_MAX_TEXT],
            got=got[:_MAX_TEXT],
            fix=fix[:_MAX_TEXT],
            errors=[_encodable(error)[:_MAX_TEXT] for error in errors][:_MAX_ERRORS],
        )

    def response(self, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse(
            self.body.model_dump(exclude_defaults=True), self.status, headers=headers, media_type=MEDIA_TYPE
        )


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, which JSON from a client may hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _described(status: int, text: str) -> dict[str, Any]:
    return {"description": text, "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}}}


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: _described(status, text)
    for status, text in {
        400: "The request is malformed.",
        401: "A bearer token is needed.",
        403: "The token's role does not allow it, or the request comes from another site.",
        404: "There is no such run, or nothing of that name in it.",
        409: "The state of the run does not allow it.",
        413: "The body is too long.",
        422: "A value breaks a rule.",
        429: "Too many event streams or jobs.",
        503: "NATS, S3 or a scheduler's command is unreachable.",
    }.items()
}


def answer_errors(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    async def _problem(_: Request, err: Problem) -> JSONResponse:
        return err.response()

    @app.exception_handler(PenstockError)
    async def _penstock(_: Request, err: PenstockError) -> JSONResponse:
        return of_error(err).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, err: RequestValidationError) -> JSONResponse:
        """Name the wrong fields without their values, which may be secrets."""
        wrong = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in err.errors()]
        fix = "correct the fields named; /openapi.json describes them"
        return Problem(422, f"the request breaks a rule: {'; '.join(wrong[:3])}", errors=wrong, fix=fix).response()

    @app.exception_handler(HTTPException)
    async def _http(_: Request, err: HTTPException) -> JSONResponse:
        fix = {404: "see the routes in /openapi.json", 405: "use one of the methods in the header Allow"}
        problem = Problem(err.status_code, str(err.detail), fix=fix.get(err.status_code, ""))
        return problem.response(dict(err.headers or {}))

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, err: Exception) -> JSONResponse:
        detail = f"internal error, please report it: {type(err).__name__}"
        return Problem(500, detail, fix="the traceback is in the log of penstock console").response()


def of_error(err: PenstockError) -> Problem:
    if isinstance(err, MissingStream):
        return Problem(404, str(err))
    if isinstance(err, (BusError, BlobError)):
        return Problem(503, str(err), fix="check that NATS and S3 of the run are running")
    if isinstance(err, ConfigError):
        lines = str(err).splitlines()
        return Problem(422, lines[0] if lines else "", errors=lines)
    return Problem(409, str(err))
