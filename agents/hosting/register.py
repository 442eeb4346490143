"""``penstock env register`` for a server that runs already, in any language; ``penstock env drain`` and ``resume``."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Sequence

from penstock.agents.environments.over_http import registry
from penstock.agents.environments.over_http.registry import NAME_PATTERN
from penstock.agents.environments.server_urls import checked_url
from penstock.agents.hosting import registrar
from penstock.agents.hosting.registrar import Offer, Registrar
from penstock.protocol.errors import ConfigError
from penstock.protocol.logs import configure
from penstock.protocol.transport.bus import Bus
from penstock.serving import signature
from penstock.serving.host import stopping_by_signal

_EPILOG = """\
The server is asked for its version and capacity before it is registered and before each renewal of its lease: one that does not
answer is out of service --lease-s after its last answer. Ctrl-C unregisters it, and its episodes go on.

Example:  penstock env register http://10.0.0.7:8800 run.toml --name guess
          penstock env list --registered run.toml
Then:     [environment.define.guess] type = "http", options = { registered = "guess" }
"""


def main(arguments: Sequence[str]) -> int:
    """Register a server until SIGTERM or Ctrl-C; raises PenstockError when it cannot be registered."""
    parser = argparse.ArgumentParser(
        prog="penstock env register",
        description="Register a running environment server on NATS, and renew its lease while it answers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="URL of the server, as workers reach it")
    parser.add_argument("--name", default="", help="name that run files use (default: as the server calls itself)")
    registrar.add_options(parser)
    registrar.add_target_options(parser)
    options = parser.parse_intermixed_args(arguments)  # run files may stand between options
    configure("environment")
    asyncio.run(_register(options))
    return 0


async def _register(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    try:
        offer = Offer(check_name(options.name), checked_url(options.url), options.lease_s, options.replace)
    except ValueError as err:
        raise ConfigError(str(err)) from None
    secrets = signature.read_secrets(options.secret_file, "--secret-file") if options.secret_file is not None else ()
    settings = registrar.read_settings(options.settings, dict(os.environ))
    client = await registrar.client_of(
        settings, secrets=secrets, ca_file=options.ca_file, allowed=options.allowed_target
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
    """Return a name, or an empty one; raises ConfigError for one that no run file can use."""
    if name and not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"name {name!r}: expected 1 to 64 letters, digits, '_' and '-', the first a letter or digit")
    return name


def say_registered(name: str, version: str, url: str, capacity: int) -> None:
    sys.stdout.write(
        f"environment {name}, version {version}, {capacity} episodes at once, is registered at {url}. Next: "
        f'[environment.define.{name}] type = "http", options = {{ registered = "{name}" }}\n'
    )
    sys.stdout.flush()


def drain(arguments: Sequence[str]) -> int:
    return _drain(
        arguments, "drain", "Take the servers of a registered environment out of service: no new episodes start there."
    )


def resume(arguments: Sequence[str]) -> int:
    return _drain(arguments, "resume", "Put drained servers of a registered environment back into service.")


def _drain(arguments: Sequence[str], verb: str, description: str) -> int:
    parser = argparse.ArgumentParser(prog=f"penstock env {verb}", description=description)
    parser.add_argument("name", help="the name under which they are registered")
    parser.add_argument("settings", nargs="*", help="run files, and overrides such as nats.url=nats://HOST:4222")
    parser.add_argument("--url", help="only the server at this URL (default: all of the name)")
    options = parser.parse_intermixed_args(arguments)  # run files may stand between options
    name, settings = check_name(options.name), registrar.read_settings(options.settings, dict(os.environ))
    url = None if options.url is None else options.url.rstrip("/")

    async def change() -> list[str]:
        with Bus.connect(settings.nats, name=f"environment-{verb}") as bus:
            return await registry.drain(await registrar.open_registry(bus), name, url, on=verb == "drain")

    changed = asyncio.run(change())
    if not changed:
        raise ConfigError(
            f"no server {'' if url is None else f'at {url} '}is registered under {name!r}; see: penstock env list --registered"
        )
    for one in changed:
        sys.stdout.write(
            f"{name} at {one}: {'drained; its episodes go on' if verb == 'drain' else 'back in service'}\n"
        )
    return 0
