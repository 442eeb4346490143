"""``penstock env serve``: an environment of several turns on an address, until SIGTERM or Ctrl-C, and its HTTP API.

`/openapi.json` describes the API, for servers in other languages.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import fastapi
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from penstock.agents.environments.over_http import wire
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.hosting.commands import LeaseOptions, ServeOptions
from penstock.agents.hosting.episodes import Episodes, Refused
from penstock.agents.hosting.registration import check_name, registrar_of
from penstock.protocol.errors import ConfigError
from penstock.protocol.logs import configure
from penstock.protocol.transport import tls
from penstock.rollout_service.environments.environment import ENVIRONMENTS
from penstock.serving import signature, strict_json
from penstock.serving.hosting import say, stopping_by_signal
from penstock.serving.request_checks import Rules, StrictRequest, check_signature, guard
from penstock.serving.target_policy import PRIVATE_TARGETS
from penstock.serving.web_server import allowed_hosts, serving_app

_MAX_REQUEST_BYTES = 16 * 1024 * 1024
_RETRY_AFTER_S = 1
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": wire.Problem, "description": description}
    for status, description in {
        400: "The body is not what the protocol says.",
        401: "Not signed with a key of this server.",
        404: "`unknown_episode`: the worker starts the episode again, with the same seed.",
        409: "`step_refused`: out of order, or the same step with another answer; `wrong_version`: other rules are played here.",
        422: "`row_refused`: no episode can be made of the row; it is not tried again.",
        500: "`environment_failed`: the worker starts the episode again.",
        503: "`full` or `draining`, with the header Retry-After in seconds.",
    }.items()
}
PathId = Annotated[wire.EpisodeId, fastapi.Path()]


def build_app(episodes: Episodes, *, secrets: Sequence[str] = (), hosts: Sequence[str] | None = None) -> FastAPI:
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

    rules = Rules(hosts, answer=_refusal)
    guard(app, check, rules, max_bytes=_MAX_REQUEST_BYTES, max_depth=strict_json.MAX_DEPTH)
    _answer_problems(app)

    @app.get("/environment")
    async def environment() -> wire.About:
        """Say what is played here, and how many episodes."""
        return wire.About(
            protocol=1, name=episodes.environment.name, version=episodes.version, capacity=episodes.capacity,
            running=episodes.running, draining=episodes.draining,
            options=episodes.environment.options.model_json_schema(),
        )  # fmt: skip

    @app.post("/episodes", responses=_PROBLEMS, response_model_exclude_unset=True)
    async def start(body: wire.Start) -> wire.Started:
        """Start an episode; sent again with the same id and body, it gets the same answer."""
        return await episodes.start(body)

    @app.post("/episodes/{id}/step", responses=_PROBLEMS, response_model_exclude_unset=True)
    async def step(id: PathId, body: wire.Step) -> wire.Stepped:
        """Reply to the policy's answer; sent again with the same number and body, it gets the same reply and moves nothing."""
        return await episodes.step(id, body)

    @app.post("/episodes/{id}/score", responses=_PROBLEMS)
    async def score(id: PathId, body: wire.Score) -> wire.Scored:
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
        wrong = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in err.errors()]
        return _problem(400, "bad_request", "; ".join(wrong[:5])[:1000])


def _refusal(status: int, text: str, scope: object = None) -> JSONResponse:
    codes: dict[int, wire.ProblemCode] = {401: "unauthorized", 503: "full"}
    return _problem(400 if status == 413 else status, codes.get(status, "bad_request"), text)


def _problem(status: int, code: wire.ProblemCode, text: str) -> JSONResponse:
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse(wire.Problem(code=code, message=text).model_dump(), status, headers=headers)


async def _check_call_id(signed_id: str, request: StrictRequest) -> None:
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
    if signed_id != expected:
        raise HTTPException(401, f"the signature is of the call {signed_id[:80]!r}, and this is {expected[:80]!r}")


def serve_environment(reference: str, settings: Sequence[str], options: ServeOptions, lease: LeaseOptions) -> int:
    environment = served_environment(reference)
    secrets = signature.read_secrets(options.secret_file, "--secret-file")
    if not secrets and not tls.is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines: give --secret-file, or listen on 127.0.0.1"
        )
    if options.capacity < 1 or not min(options.reply_s, options.idle_s, options.drain_s) > 0:
        raise ConfigError("--capacity must be at least 1, and --reply-s, --idle-s and --drain-s more than 0")
    check_name(options.register)
    if settings and not options.register:
        raise ConfigError(f"{settings[0]} says where NATS is, which is needed with --register NAME only")
    configure("environment")
    asyncio.run(_serve(environment, options, secrets, (settings, lease)))
    return 0


def served_environment(reference: str) -> TurnEnvironment:
    environment = ENVIRONMENTS.find(reference).value
    if not isinstance(environment, TurnEnvironment):
        raise ConfigError(
            f"{reference} is a {type(environment).__name__}, which makes no plays; serve a TurnEnvironment"
        )
    return environment


def version_of(environment: TurnEnvironment) -> str:
    """Return its version; without one, 8 digits that change with the file of its class."""
    if environment.version:
        return environment.version
    file = inspect.getsourcefile(type(environment))
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:8] if file else ""


async def _serve(
    environment: TurnEnvironment,
    options: ServeOptions,
    secrets: Sequence[str],
    registration: tuple[Sequence[str], LeaseOptions],
) -> None:
    stop = asyncio.Event()
    version = version_of(environment)
    episodes = Episodes(
        environment, version, capacity=options.capacity, reply_deadline_s=options.reply_s, idle_s=options.idle_s
    )
    sweeping = asyncio.create_task(episodes.sweep())
    try:
        api = build_app(episodes, secrets=secrets, hosts=allowed_hosts(options.host, options.url, secrets))
        async with serving_app(api, options.host, options.port, key="--port") as url:
            next_step = f"Next: penstock env test {url}"
            say(f"{environment.name}, version {version or 'none'}, at {url}. {next_step}", sys.stdout)
            with stopping_by_signal(stop):
                if not options.register:
                    await stop.wait()
                    await episodes.drain(options.drain_s)
                    return
                url = options.url or url
                allowed = (*PRIVATE_TARGETS, urlsplit(url).hostname or "")  # it is called by itself, wherever it is
                new = registrar_of(options.register, url, *registration, secrets=secrets, allowed=allowed)
                async with new as registrar, registrar.registered():
                    await stop.wait()
                    # It refuses new episodes from now on, and workers learn it.
                    await asyncio.gather(episodes.drain(options.drain_s), registrar.renew())
    finally:
        sweeping.cancel()
        await episodes.close()
