"""Serve a reward as an HTTP endpoint of the penstock dialect: listen, register, renew, check signatures, drain.

What ``serve``, ``serve-judge``, ``serve-grader`` and ``serve-model`` have in common. The reward runs on the main
thread, one request at a time (what it awaits overlaps), and HTTP in a second thread: libraries like math-verify
use alarms, which only the main thread may set, and a reward that computes for minutes must not let its lease expire.

`HostedFunction` is user code, as ``serve FILE.py`` and the Python client serve it. It runs here, in a process that its
user started, or in the worker processes of a reward service (`user_code/worker.py`), and in no other process.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from penstock.protocol.errors import ConfigError
from penstock.protocol.secret_values import content_of
from penstock.protocol.transport import tls
from penstock.protocol.transport.loop_thread import LoopThread
from penstock.reward_service.endpoints.endpoint import NAME_PATTERN
from penstock.reward_service.endpoints.wire import (
    ERROR_HEADER,
    GroupScore,
    GroupToScore,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from penstock.reward_service.hosting.registration import Offer, RewardRegistration, ServiceAddress
from penstock.reward_service.user_code import user_file
from penstock.reward_service.user_code.user_function import UserReward
from penstock.serving import signature, web_server
from penstock.serving.hosting import drain, say, stopping_by_signal
from penstock.serving.request_checks import Rules, StrictRequest, check_signature, guard
from penstock.serving.web_server import allowed_hosts

if TYPE_CHECKING:
    from penstock.reward_service.hosting.commands import ServeOptions

_MAX_REQUEST_BYTES = 256 * 1024 * 1024
_LEASE_S = 15.0  # a killed process is out of service after this time


class Hosted:
    """A reward that is served; it is opened before it is registered.

    Attributes:
        title: A description for messages and `/healthz`.
        version: Stored with scored groups; different after every change of the reward.
        batched: True if `score` takes all groups of a request at once, False for one group a call.
        terms: Further fields of its registration, such as ``timeout_s`` or ``batch_size``.
    """

    title: str
    version: str
    batched: bool = True
    terms: Mapping[str, Any] = MappingProxyType({})

    @property
    def figures(self) -> Mapping[str, float]:
        """Numbers that `/healthz` shows."""
        return {}

    async def open(self) -> None:
        """Prepare, before it is registered; raises PenstockError."""

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        raise NotImplementedError

    async def close(self) -> None:
        """Release what `open` has prepared."""


class HostedFunction(Hosted):
    def __init__(self, reward: UserReward, version: str, terms: Mapping[str, Any]) -> None:
        """``version``: a hash of the source that was loaded, whatever its file holds later."""
        self.reward, self.version, self.terms = reward, version, terms
        self.title, self.batched = f"{reward.file.name}: {reward.name}", reward.batched

    async def open(self) -> None:
        await self.reward.open()

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        """Call the function; what it raises is the error of the score."""
        return await self.reward.score_all(groups)

    async def close(self) -> None:
        await self.reward.close()


class Calls:
    """Count the calls in progress, on the event loop where the reward runs."""

    def __init__(self, home: asyncio.AbstractEventLoop) -> None:
        self.home = home
        self.num_in_progress = 0

    async def score(self, reward: Hosted, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        """Score groups on the main thread; called in the server's thread."""
        work = asyncio.run_coroutine_threadsafe(self._counted(reward, groups), self.home)
        return await asyncio.wrap_future(work)

    async def _counted(self, reward: Hosted, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        self.num_in_progress += 1
        try:
            return await reward.score(groups)
        finally:
            self.num_in_progress -= 1


def build_app(reward: Hosted, calls: Calls, *, secrets: Sequence[str], hosts: Sequence[str] | None = None) -> FastAPI:
    """Return the endpoint's app.

    With ``secrets``, a request without a valid signature is refused with 401. A Host header must be one of ``hosts`` or
    of the loopback, unless it is None.
    """
    app = FastAPI(title=f"Penstock reward: {reward.title}", version="1")

    async def signed(request: StrictRequest) -> None:
        if secrets and request.method == "POST":
            await check_signature(secrets, request)

    guard(app, signed, Rules(hosts), max_bytes=_MAX_REQUEST_BYTES)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, err: HTTPException) -> JSONResponse:
        """Give the reason in a header too: the reward service quotes nothing of a body."""
        reason = "".join(letter if " " <= letter <= "~" else "?" for letter in str(err.detail))
        return JSONResponse({"detail": err.detail}, err.status_code, headers={ERROR_HEADER: reason})

    @app.post("/score")
    async def score(wanted: ScoreRequest, request: Request) -> ScoreResponse:
        """Score groups; a completion that cannot be scored has an error instead of a score."""
        if reward.batched:
            group_scores = await calls.score(reward, wanted.groups)
        else:
            group_scores = []
            for group in wanted.groups:
                if await request.is_disconnected():  # do not compute scores that no client waits for
                    raise HTTPException(499, "the client closed the connection")
                group_scores += await calls.score(reward, [group])
        named = zip(wanted.groups, group_scores, strict=True)
        return ScoreResponse(results=[GroupScore(group_id=group.group_id, scores=scores) for group, scores in named])

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        """Return 200 and a description of the served reward."""
        about = {"reward": reward.title, "version": reward.version, "calls": calls.num_in_progress}
        return {"ok": True, **about, "figures": dict(reward.figures)}

    return app


@dataclass(frozen=True, slots=True)
class Place:
    """Under which name a reward is served, where it is registered, and the keys that sign its requests."""

    name: str
    service: ServiceAddress | None
    secrets: tuple[str, ...] = field(repr=False)


def place_of(options: ServeOptions, default_name: str) -> Place:
    """Return the place that options mean; raises ConfigError for options that cannot work."""
    name = options.name or re.sub(r"[^A-Za-z0-9_.-]", "_", default_name)
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"--name {name!r} must be letters, digits, '_', '.' and '-', starting with a letter or digit")
    if not options.drain_s >= 0:
        raise ConfigError(f"--drain-s {options.drain_s} must not be negative")
    token = "" if options.token_file is None else content_of(options.token_file, "--token-file")
    secrets = signature.read_secrets(options.secret_file, "--secret-file")
    return Place(name, ServiceAddress(options.register, token) if options.register else None, secrets)


def serve_reward(reward: Hosted, default_name: str, options: ServeOptions) -> int:
    place = place_of(options, default_name)
    with tls.listen(options.host, options.port, key="--port") as bound:
        asyncio.run(_serve(reward, place, options, bound))
    return 0


async def _serve(reward: Hosted, place: Place, options: ServeOptions, bound: socket.socket) -> None:
    stop = asyncio.Event()
    calls = Calls(asyncio.get_running_loop())
    hosts = allowed_hosts(options.host, options.url, place.secrets)
    app = build_app(reward, calls, secrets=place.secrets, hosts=hosts)
    url = options.url or f"{tls.scheme(options.host)}://{options.host}:{bound.getsockname()[1]}/score"
    offer = Offer(place.name, url, reward.version, lease_s=_LEASE_S, secrets=place.secrets, more=reward.terms)
    service = place.service
    registered = nullcontext() if service is None else RewardRegistration(service, offer).registered()
    # A certificate that cannot be used raises ConfigError here, before the reward is opened, which may take minutes.
    serving = web_server.serving(app, bound, **tls.server_options(options.host))
    with stopping_by_signal(stop):
        await reward.open()
        thread = LoopThread("http")
        try:
            async with thread.inside(serving):
                async with thread.inside(registered):
                    _print_next_step(reward.title, offer, service)
                    await stop.wait()
                # Calls that are left would be scored a second time elsewhere.
                await drain(lambda: calls.num_in_progress, "calls", options.drain_s)
        finally:
            thread.stop()
            await reward.close()


def _print_next_step(title: str, offer: Offer, service: ServiceAddress | None) -> None:
    what = f"{title} serves reward {offer.name} at {offer.url}"
    if service is None:
        text = f"{what}. Next: start it with --register http://HOST:PORT of your reward service"
    else:
        text = f"{what}, registered at {service.url}. Next: penstock train run.toml reward.name={offer.name}"
    say(text, sys.stdout)


def serve_file(
    file: Path, function: str | None, options: ServeOptions, *, conversational: bool | None, timeout_s: float
) -> int:
    reward = user_file.load(file, function, conversational=conversational)
    version = hashlib.sha256(reward.file.read_bytes()).hexdigest()[:8]
    return serve_reward(HostedFunction(reward, version, {"timeout_s": timeout_s}), file.stem, options)
