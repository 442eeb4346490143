"""``serve FILE.py``: a user's reward function as an HTTP endpoint, registered while it runs.

The function runs on the main thread, one call at a time (async ones overlap), and HTTP in a thread
beside it: libraries like math-verify use alarms, which only the main thread may set. This is the only
place of Penstock where user code runs, in a process that its user started.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import re
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from protocol.errors import ConfigError
from reward_service import registration, user_function, web_server
from reward_service.endpoint import NAME_PATTERN
from reward_service.registration import Offer, ServiceAddress
from reward_service.user_function import UserReward
from reward_service.wire import GroupScore, ScoreRequest, ScoreResponse

_LEASE_S = 15.0  # a process that was killed is out of service so soon


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; raises PenstockError when the file or the registration is wrong."""
    options = _options(arguments)
    reward = user_function.load(options.file, options.function)
    name = options.name or re.sub(r"[^A-Za-z0-9_.-]", "_", options.file.stem)
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"--name {name!r} must be letters, digits, '_', '.' and '-', starting with a letter or digit")
    token = ""
    if options.token_file is not None:
        try:
            token = options.token_file.read_text().strip()
        except OSError as err:
            raise ConfigError(f"--token-file {options.token_file}: not readable ({err.strerror})") from None
    bound = web_server.listen(options.host, options.port, key="--port")
    port = bound.getsockname()[1]
    url = options.url or f"http://{options.host}:{port}/score"
    service = ServiceAddress(options.register.rstrip("/"), token) if options.register else None
    with bound:
        asyncio.run(_serve(reward, name, bound, url, service))
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="penstock reward serve", description=__doc__)
    parser.add_argument(
        "file", type=Path, help="Python file with compute_score, a TRL-style function or a callable class"
    )
    parser.add_argument("--name", help="reward name that tasks ask for (default: the file's name)")
    parser.add_argument("--function", help="which function of the file, when it has several")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--url", help="how the reward service reaches this endpoint, when not at host and port")
    parser.add_argument("--register", metavar="URL", help="reward service to register at, e.g. http://127.0.0.1:8700")
    parser.add_argument("--token-file", type=Path, help="file with the reward service's bearer token")
    return parser.parse_args(arguments)


async def _serve(reward: UserReward, name: str, bound: Any, url: str, service: ServiceAddress | None) -> None:
    stop = asyncio.Event()
    app = build(reward, asyncio.get_running_loop())
    version = hashlib.sha256(reward.file.read_bytes()).hexdigest()[:8]
    offer = Offer(name=name, url=url, version=version, lease_s=_LEASE_S)
    with _stopping_by_signal(stop), _beside(web_server.serve, app, bound, service, offer):
        if service is not None:
            await registration.register(service, offer)
        _say_what_next(reward, name, url, service)
        await stop.wait()
        if service is not None:
            await registration.unregister(service, offer)


def build(reward: UserReward, home: asyncio.AbstractEventLoop) -> FastAPI:
    """Return the endpoint's app; the reward itself runs on ``home``, the main thread's loop."""
    app = FastAPI(title=f"Penstock reward {reward.name}", version="1")

    @app.post("/score")
    async def score(wanted: ScoreRequest, request: Request) -> ScoreResponse:
        """Score groups; a completion that cannot be scored has an error instead of a score."""
        results = []
        for group in wanted.groups:
            if await request.is_disconnected():  # nobody waits any more: leave the time to those who do
                raise HTTPException(499, "the caller went away")
            scores = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(reward.score(group), home))
            results.append(GroupScore(group_id=group.group_id, scores=scores))
        return ScoreResponse(results=results)

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        """Say that the endpoint lives, and what it serves."""
        return {"ok": True, "function": reward.name, "file": reward.file.name}

    return app


@contextmanager
def _beside(serve: Any, app: FastAPI, bound: Any, service: ServiceAddress | None, offer: Offer) -> Iterator[None]:
    """Run the HTTP server, and the renewal of the lease, in a thread with a loop of its own.

    The user's code may hold the main thread for minutes; the lease must not end for that.
    """
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def run() -> None:
        done = asyncio.Event()
        started.append((asyncio.get_running_loop(), done))
        ready.set()
        renewing = asyncio.create_task(registration.keep(service, offer)) if service is not None else None
        await serve(app, bound, done)
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    thread = threading.Thread(target=_run_to_end, args=(run(),), name="http", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        loop, done = started[0]
        if thread.is_alive():
            loop.call_soon_threadsafe(done.set)
        thread.join(5.0)


def _run_to_end(action: Coroutine[Any, Any, None]) -> None:
    asyncio.run(action)


@contextmanager
def _stopping_by_signal(stop: asyncio.Event) -> Iterator[None]:
    """Stop in order at the first signal, at once at the second: the user's code may be in an endless loop."""
    loop = asyncio.get_running_loop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)  # an exception would surface inside the user's code, which may catch it
        stop.set()
        loop.call_soon_threadsafe(lambda: None)  # wakes the loop

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_what_next(reward: UserReward, name: str, url: str, service: ServiceAddress | None) -> None:
    what = f"{reward.file.name}: {reward.name} serves reward {name} at {url}"
    if service is None:
        text = f"{what}. Next: start it with --register http://HOST:PORT of your reward service"
    else:
        text = f"{what}, registered at {service.url}. Next: penstock train run.toml reward.name={name}"
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
