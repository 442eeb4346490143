"""``penstock env register`` for a server that runs already, in any language; ``penstock env drain`` and ``resume``."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Sequence

from penstock.agents.environments.over_http import registry
from penstock.agents.environments.over_http.registry import NAME_PATTERN
from penstock.agents.environments.server_urls import checked_url
from penstock.agents.hosting import registrar
from penstock.agents.hosting.commands import LeaseOptions, TargetOptions
from penstock.agents.hosting.registrar import Offer, Registrar
from penstock.protocol.errors import ConfigError
from penstock.protocol.logs import configure
from penstock.protocol.transport.bus import Bus
from penstock.serving import signature
from penstock.serving.host import stopping_by_signal


def register_server(url: str, settings: Sequence[str], name: str, lease: LeaseOptions, targets: TargetOptions) -> int:
    configure("environment")
    asyncio.run(_register(url, settings, name, lease, targets))
    return 0


async def _register(url: str, given: Sequence[str], name: str, lease: LeaseOptions, targets: TargetOptions) -> None:
    stop = asyncio.Event()
    try:
        offer = Offer(check_name(name), checked_url(url), lease.lease_s, lease.replace)
    except ValueError as err:
        raise ConfigError(str(err)) from None
    secrets = signature.read_secrets(targets.secret_file, "--secret-file") if targets.secret_file is not None else ()
    settings = registrar.read_settings(given, dict(os.environ))
    client = await registrar.client_of(
        settings, secrets=secrets, ca_file=targets.ca_file, allowed=targets.allowed_target
    )
    try:
        with Bus.connect(settings.nats, name=f"environment-{offer.name or 'server'}") as bus:
            keeper = Registrar(await registrar.open_registry(bus), client, offer)
            with stopping_by_signal(stop):
                async with keeper.registered() as server:
                    say_registered(keeper.name, server.version, server.url, server.capacity)
                    await stop.wait()
    finally:
        await client.close()


def check_name(name: str) -> str:
    if name and not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"name {name!r}: expected 1 to 64 letters, digits, '_' and '-', the first a letter or digit")
    return name


def say_registered(name: str, version: str, url: str, capacity: int) -> None:
    sys.stdout.write(
        f"environment {name}, version {version}, {capacity} episodes at once, is registered at {url}. Next: "
        f'[environment.define.{name}] type = "http", options = {{ registered = "{name}" }}\n'
    )
    sys.stdout.flush()


def set_drained(name: str, given: Sequence[str], url: str | None, *, drained: bool) -> int:
    settings, verb = registrar.read_settings(given, dict(os.environ)), "drain" if drained else "resume"
    check_name(name)
    url = None if url is None else url.rstrip("/")

    async def change() -> list[str]:
        with Bus.connect(settings.nats, name=f"environment-{verb}") as bus:
            return await registry.drain(await registrar.open_registry(bus), name, url, on=drained)

    changed = asyncio.run(change())
    if not changed:
        raise ConfigError(
            f"no server {'' if url is None else f'at {url} '}is registered under {name!r}; see: penstock env list --registered"
        )
    for one in changed:
        sys.stdout.write(f"{name} at {one}: {'drained; its episodes go on' if drained else 'back in service'}\n")
    return 0
