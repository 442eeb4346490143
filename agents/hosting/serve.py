"""``penstock env serve``: an environment of several turns on an address, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from penstock.agents.environments.server_urls import checked_url
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.hosting import app, registrar
from penstock.agents.hosting.commands import LeaseOptions, ServeOptions
from penstock.agents.hosting.episodes import Episodes
from penstock.agents.hosting.register import check_name, say_registered
from penstock.agents.hosting.registrar import Offer, Registrar
from penstock.protocol.errors import ConfigError
from penstock.protocol.logs import configure
from penstock.protocol.transport import http_tls
from penstock.protocol.transport.bus import Bus
from penstock.rollout_service.environments.environment import ENVIRONMENTS
from penstock.serving import signature
from penstock.serving.host import allowed_hosts, stopping_by_signal
from penstock.serving.target_policy import PRIVATE_TARGETS
from penstock.serving.web_server import serving_app


def serve_environment(reference: str, settings: Sequence[str], options: ServeOptions, lease: LeaseOptions) -> int:
    environment = served_environment(reference)
    secrets = signature.read_secrets(options.secret_file, "--secret-file") if options.secret_file is not None else ()
    if not secrets and not http_tls.is_loopback(options.host):
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
    found = ENVIRONMENTS.find(reference).value
    if not isinstance(found, TurnEnvironment):
        raise ConfigError(f"{reference} is a {type(found).__name__}, which makes no plays; serve a TurnEnvironment")
    return found


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
        api = app.build(episodes, secrets=secrets, hosts=allowed_hosts(options.host, options.url, secrets))
        async with serving_app(api, options.host, options.port, key="--port") as url:
            sys.stdout.write(
                f"{environment.name}, version {version or 'none'}, at {url}. Next: penstock env test {url}\n"
            )
            sys.stdout.flush()
            with stopping_by_signal(stop):
                async with _registered(options, registration, secrets, options.url or url) as keeper:
                    await stop.wait()
                    await _drain(episodes, options.drain_s, keeper)
    finally:
        sweeping.cancel()
        await episodes.close()


async def _drain(episodes: Episodes, drain_s: float, keeper: Registrar | None) -> None:
    if episodes.running:
        sys.stderr.write(f"{episodes.running} episodes in progress; press Ctrl-C again to exit without waiting\n")
    draining = asyncio.create_task(episodes.drain(drain_s))
    await asyncio.sleep(0)  # it refuses new ones from now on
    if keeper is not None:
        await keeper.renew()  # workers learn that it is stopping
    await draining


@contextlib.asynccontextmanager
async def _registered(
    options: ServeOptions, registration: tuple[Sequence[str], LeaseOptions], secrets: Sequence[str], url: str
) -> AsyncIterator[Registrar | None]:
    if not options.register:
        yield None
        return
    given, lease = registration
    try:
        offer = Offer(options.register, checked_url(url), lease.lease_s, lease.replace)
    except ValueError as err:
        raise ConfigError(str(err)) from None
    settings = registrar.read_settings(given, dict(os.environ))
    own = [urlsplit(url).hostname or ""]  # it is called by itself, wherever it is
    client = await registrar.client_of(settings, secrets=secrets, ca_file=None, allowed=(*PRIVATE_TARGETS, *own))
    try:
        with Bus.connect(settings.nats, name=f"environment-{offer.name}") as bus:
            keeper = Registrar(await registrar.open_registry(bus), client, offer)
            async with keeper.registered() as server:
                say_registered(keeper.name, server.version, server.url, server.capacity)
                yield keeper
    finally:
        await client.close()
