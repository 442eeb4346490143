"""Servers that are registered, and workers that play at them; also `penstock env serve --register` as a process."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from penstock.agents.environments.over_http.http_environment import HTTP, Http
from penstock.agents.environments.over_http.registry import Lease, list_environments
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.hosting import registration, serve
from penstock.agents.hosting.commands import LeaseOptions
from penstock.agents.hosting.episodes import Episodes
from penstock.agents.hosting.registration import Registrar, RegistrySettings
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.rollout_service.__main__ import _registry
from penstock.serving.web_server import serving_app
from tests.agents.environments.played import engine_of, task_of
from tests.servers import secret_file

LEASE = Lease(at=1.0, lease_s=60.0, running=0)


@contextlib.asynccontextmanager
async def registered(
    store: KeyValue,
    name: str,
    environment: TurnEnvironment,
    *,
    version: str = "1",
    capacity: int = 64,
    replace: bool = False,
    host: str = "127.0.0.1",
    ca_file: Path | None = None,
    secrets: tuple[str, ...] = (),
) -> AsyncIterator[tuple[str, Episodes, Registrar]]:
    """Serve and register an environment as `penstock env serve --register` does."""
    episodes = Episodes(environment, version, capacity=capacity, reply_deadline_s=30.0, idle_s=60.0)
    client = await registration.client_of(RegistrySettings(), secrets=secrets, ca_file=ca_file, allowed=())
    try:
        async with serving_app(serve.build_app(episodes, secrets=secrets), host, 0, key="--port") as bound:
            url = bound.replace("0.0.0.0", "localhost")
            keeper = Registrar(store, client, name, url, LeaseOptions(lease_s=60.0, replace=replace))
            async with keeper.registered():
                yield url, episodes, keeper
    finally:
        await client.close()
        await episodes.close()


@contextlib.asynccontextmanager
async def worker(bus: Bus, model: Path, name: str, **settings: Any) -> AsyncIterator[Http]:
    """An environment of a worker that plays at the servers of a name, wired as a worker does it."""
    options = {"registered": name, **settings.pop("options", {})}
    own = HTTP.defined("mine", EnvironmentDefinition(type="http", options=options, **settings))
    follower = await _registry(bus, [own])
    assert follower is not None
    own.use_model(model, 8192)
    async with follower.following():
        yield own
    await own.close()


async def play(model: Path, environment: Http, script: list[str], size: int = 1, group: str = "r:0:1") -> Any:
    """Play one task with an engine that answers with texts; return what became of it."""
    (found,) = await environment.rollout([task_of(size=size, group=group)], engine_of(model, script))
    return found


async def states(store: KeyValue, name: str) -> dict[str, str]:
    """Return the state of each server that is registered under a name, by its URL."""
    listed = (await list_environments(store))[name]
    return {server.url: listed.state(server) for server in (listed.registered.servers if listed.registered else ())}


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds; fails naming what was waited for."""
    ends = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < ends, f"waited 60 s for {what}"
        await asyncio.sleep(0.02)


SLOW = """
import time

from penstock import Message, Play, TurnEnvironment, done, say


class SlowPlay(Play):
    def __init__(self, seed):
        self.seed, self.turns = seed, 0

    def start(self):
        return [Message("user", "go")]

    def step(self, answer):
        self.turns += 1
        if self.turns < 3:
            time.sleep({pause})
            return say(f"on {self.seed}", 0.25)
        return done(0.5)


class Slow(TurnEnvironment):
    name = "slow"
    version = "1"

    def play(self, seed, row, options):
        return SlowPlay(seed)
"""


def where(nats: NatsSettings) -> list[str]:
    return [f"nats.url={nats.url}", f"nats.user={nats.user}", f"nats.password_file={secret_file(nats.secret())}"]


def start_server(folder: Path, nats: NatsSettings, name: str, pause: float) -> tuple[subprocess.Popen[str], str]:
    """Start ``penstock env serve --register`` with a lease of 3 s; return it and its URL."""
    folder.mkdir()
    (folder / "slow.py").write_text(SLOW.replace("{pause}", str(pause)))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.agents.hosting", "serve", "slow.py:Slow", *where(nats),
         "--register", name, "--lease-s", "3"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    url = process.stdout.readline().partition(" at ")[2].partition(". Next")[0]
    registered = f"environment {name}, version 1, 256 episodes at once, is registered at {url}"
    said = list[str]()
    for line in process.stdout:  # a busy NATS server may be waited for first
        said.append(line)
        if registered in line:
            return process, url
    raise AssertionError(f"the server ended: {said}")
