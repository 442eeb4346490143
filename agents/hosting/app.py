"""The HTTP API of an environment server; `/openapi.json` describes it, for servers in other languages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from penstock.agents.environments.over_http.wire import (
    About,
    EpisodeId,
    Problem,
    ProblemCode,
    Score,
    Scored,
    Start,
    Started,
    Step,
    Stepped,
)
from penstock.agents.hosting.episodes import Episodes, Refused
from penstock.serving import strict_json
from penstock.serving.request_checks import StrictRequest, check_signature, guard

_MAX_REQUEST_BYTES = 16 * 1024 * 1024
_RETRY_AFTER_S = 1
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The body is not what the protocol says."},
    401: {"model": Problem, "description": "Not signed with a key of this server."},
    404: {
        "model": Problem,
        "description": "`unknown_episode`: the worker starts the episode again, with the same seed.",
    },
    409: {
        "model": Problem,
        "description": "`step_refused`: out of order, or the same step with another answer; `wrong_version`: other rules are played here.",
    },
    422: {"model": Problem, "description": "`row_refused`: no episode can be made of the row; it is not tried again."},
    500: {"model": Problem, "description": "`environment_failed`: the worker starts the episode again."},
    503: {"model": Problem, "description": "`full` or `draining`, with the header Retry-After in seconds."},
}
PathId = Annotated[EpisodeId, Path()]


def build(episodes: Episodes, *, secrets: Sequence[str] = (), hosts: Sequence[str] | None = None) -> FastAPI:
    """Return the app.

    With ``secrets`` (``whsec_...``) a call without a valid signature is refused with 401. A Host header must be one of ``hosts`` or
    of the loopback, unless it is None.
    """
    app = FastAPI(title=f"Penstock environment: {episodes.environment.name}", version=episodes.version or "0")

    async def check(request: StrictRequest) -> None:
        if secrets:
            await _check_call_id(await check_signature(secrets, request), request)
        if request.method == "POST":
            await request.json()  # here, because FastAPI would replace the reason of a refusal

    guard(app, check, max_bytes=_MAX_REQUEST_BYTES, hosts=hosts, max_depth=strict_json.MAX_DEPTH, answer=_refusal)
    _answer_problems(app)

    @app.get("/environment")
    async def environment() -> About:
        """Say what is played here, and how many episodes."""
        return About(
            protocol=1,
            name=episodes.environment.name,
            version=episodes.version,
            capacity=episodes.capacity,
            running=episodes.running,
            draining=episodes.draining,
            options=episodes.environment.options.model_json_schema(),
        )

    @app.post("/episodes", responses=_PROBLEMS, response_model_exclude_unset=True)
    async def start(body: Start) -> Started:
        """Start an episode; sent again with the same id and body, it gets the same answer."""
        return await episodes.start(body)

    @app.post("/episodes/{id}/step", responses=_PROBLEMS, response_model_exclude_unset=True)
    async def step(id: PathId, body: Step) -> Stepped:
        """Reply to the policy's answer; sent again with the same number and body, it gets the same reply and moves nothing."""
        return await episodes.step(id, body)

    @app.post("/episodes/{id}/score", responses=_PROBLEMS)
    async def score(id: PathId, body: Score) -> Scored:
        """Say what the last step gets where a limit of the run ended the episode; called if `Started` has `scores`."""
        return await episodes.score(id, body)

    @app.delete("/episodes/{id}", status_code=204)
    async def end(id: PathId) -> Response:
        """End an episode; one that is not played here has ended."""
        await episodes.end(id)
        return Response(status_code=204)

    return app


def _answer_problems(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, err: Refused) -> JSONResponse:
        return _problem(err.status, err.code, str(err))

    @app.exception_handler(HTTPException)
    async def unfit(_: Request, err: HTTPException) -> JSONResponse:
        return _refusal(err.status_code, str(err.detail))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, err: RequestValidationError) -> JSONResponse:
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in err.errors()]
        return _problem(400, "bad_request", "; ".join(wrong[:5])[:1000])


def _refusal(status: int, text: str) -> JSONResponse:
    codes: dict[int, ProblemCode] = {401: "unauthorized", 403: "unauthorized", 503: "full"}
    return _problem(400 if status == 413 else status, codes.get(status, "bad_request"), text)


def _problem(status: int, code: ProblemCode, text: str) -> JSONResponse:
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse(Problem(code=code, message=text).model_dump(), status, headers=headers)


async def _check_call_id(given: str, request: StrictRequest) -> None:
    """Raise Refused unless the signed id is that of this call: the signature of one call opens no other."""
    path_id = request.path_params.get("id")
    if request.method == "GET":
        expected = "environment"
    elif request.method == "DELETE":
        expected = f"{path_id}.end"
    else:
        body = await request.json()
        fields = body if isinstance(body, dict) else {}
        expected = f"{fields.get('id')}.start" if path_id is None else f"{path_id}.{fields.get('step')}"
        if request.url.path.endswith("/score"):
            expected = f"{path_id}.score"
    if given != expected:
        raise HTTPException(401, f"the signature is of the call {given[:80]!r}, and this is {expected[:80]!r}")
