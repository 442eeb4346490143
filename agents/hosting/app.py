"""The HTTP API of an environment server; `/openapi.json` describes it, for servers in other languages."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from penstock.agents.environments.over_http.wire import (
    MAX_DEPTH,
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
    is_deeper,
)
from penstock.agents.hosting.episodes import Episodes, Refused
from penstock.protocol.endpoints import signature, strict_json

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


def build(episodes: Episodes, *, secrets: Sequence[str] = ()) -> FastAPI:
    """Return the app; with ``secrets`` (``whsec_...``) a call without a valid signature is refused with 401."""
    app = FastAPI(title=f"Penstock environment: {episodes.environment.name}", version=episodes.version or "0")
    app.router.route_class = _checked_route(secrets)
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

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, err: RequestValidationError) -> JSONResponse:
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in err.errors()]
        return _problem(400, "bad_request", "; ".join(wrong[:5])[:1000])


def _problem(status: int, code: ProblemCode, text: str) -> JSONResponse:
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse(Problem(code=code, message=text).model_dump(), status, headers=headers)


def _checked_route(secrets: Sequence[str]) -> type[APIRoute]:
    """Return a route class that bounds a body, checks its signature, and reads JSON that has one reading."""

    class CheckedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def checked(request: Request) -> Response:
                bounded = _BoundedRequest(request.scope, request.receive)
                if secrets:
                    try:
                        given = signature.verify(secrets, request.headers, await bounded.body(), now_s=time.time())
                    except signature.BadSignature as err:
                        raise Refused(401, "unauthorized", str(err)) from None
                    await _check_call_id(given, bounded)
                if request.method == "POST":
                    await bounded.json()  # here, because FastAPI would replace the reason of a refusal
                return await handler(bounded)

            return checked

    return CheckedRoute


async def _check_call_id(given: str, request: _BoundedRequest) -> None:
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
        raise Refused(
            401, "unauthorized", f"the signature is of the call {given[:80]!r}, and this is {expected[:80]!r}"
        )


class _BoundedRequest(Request):
    """A request whose body is read up to a limit, and whose JSON has one reading."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            content = bytearray()
            async for chunk in self.stream():
                content += chunk
                if len(content) > _MAX_REQUEST_BYTES:
                    raise Refused(400, "bad_request", f"the body is longer than {_MAX_REQUEST_BYTES} bytes")
            self._body = bytes(content)
        return self._body

    async def json(self) -> Any:
        if hasattr(self, "_json"):
            return self._json
        try:
            value = strict_json.loads(await self.body())
        except strict_json.AmbiguousJson as err:
            raise Refused(400, "bad_request", f"the body is refused: {err}") from None
        if is_deeper(value, MAX_DEPTH):
            raise Refused(400, "bad_request", f"the body is nested more than {MAX_DEPTH} times")
        self._json = value
        return value
