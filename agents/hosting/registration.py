"""Register an environment server on NATS, renew its lease while it answers, and remove it at the end.

`penstock env register` does this for a server that runs already; `penstock env drain` and `resume` change its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from penstock.agents.environments.over_http import registry
from penstock.agents.environments.over_http.registry import (
    LONGEST_LEASE_S,
    NAME_PATTERN,
    Lease,
    Listed,
    RegisteredServer,
    RegistrationRefused,
)
from penstock.agents.environments.over_http.servers import EnvironmentClient
from penstock.agents.environments.over_http.wire import About
from penstock.agents.environments.shared_options import checked_url
from penstock.agents.hosting.commands import LEASE_S, LeaseOptions, TargetOptions
from penstock.protocol import streams
from penstock.protocol.config import run_file
from penstock.protocol.config.connection import NatsSettings, S3Settings, Section
from penstock.protocol.errors import ConfigError, MissingStream
from penstock.protocol.groups import first_problem
from penstock.protocol.logs import configure
from penstock.protocol.transport import tls
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.serving import signature, target_policy
from penstock.serving.hosting import RENEWALS_PER_LEASE, ServerRegistration, say, stopping_by_signal, until_there
from penstock.serving.http_connections import HttpConnections, within
from penstock.serving.target_policy import PRIVATE_TARGETS, TargetPolicy

LEAST_LEASE_S = 3.0  # NATS counts expiry in whole seconds
_ASK_S = 5.0
_MAX_ANSWER_BYTES = 1024 * 1024


class RegistrySettings(Section):
    nats: NatsSettings = NatsSettings()  # pyright: ignore[reportCallIssue]
    s3: S3Settings = S3Settings()  # pyright: ignore[reportCallIssue]


def read_settings(arguments: Sequence[str], environ: dict[str, str]) -> RegistrySettings:
    files, overrides = run_file.split_arguments(list(arguments))
    return run_file.load(RegistrySettings, files=files, overrides=overrides, environ=environ).settings


async def client_of(
    settings: RegistrySettings, *, secrets: Sequence[str], ca_file: Path | None, allowed: Sequence[str]
) -> EnvironmentClient:
    own_servers = await target_policy.find_own_servers(settings.nats, settings.s3)
    try:
        policy = TargetPolicy(allowed or PRIVATE_TARGETS, own_servers, key="--allowed-target")
    except ValueError as err:
        raise ConfigError(str(err)) from None
    connections = HttpConnections(
        keep_s=LEASE_S, policy=policy, max_answer_bytes=_MAX_ANSWER_BYTES, ca_file=ca_file,
        ca_key="--ca-file" if ca_file else tls.AUTHORITY,
    )  # fmt: skip
    return EnvironmentClient(connections, secrets)


async def open_registry(bus: Bus) -> KeyValue:
    return await until_there(
        lambda: bus.key_value(streams.environments_bucket().bucket),
        MissingStream,
        lambda err: f"waiting for the first run on {bus.url}, which creates the bucket: {err}",
    )


class Registrar(ServerRegistration):
    def __init__(self, store: KeyValue, client: EnvironmentClient, name: str, url: str, options: LeaseOptions) -> None:
        """Without a ``name`` it is registered as the server calls itself."""
        if not LEAST_LEASE_S <= options.lease_s <= LONGEST_LEASE_S:
            raise ConfigError(f"--lease-s {options.lease_s:g}: expected {LEAST_LEASE_S:g} to {LONGEST_LEASE_S:g}")
        self._store, self._client, self._url, self._options = store, client, url, options
        self._server: RegisteredServer | None = None
        self._said = ""
        self.name, self.lease_s = name, options.lease_s

    async def register(self) -> None:
        server = await self._register(await self._ask())
        say(
            f"environment {self.name}, version {server.version}, {server.capacity} episodes at once, is registered at {server.url}. "
            f'Next: [environment.define.{self.name}] type = "http", options = {{ registered = "{self.name}" }}',
            sys.stdout,
        )

    async def _renew(self) -> bool:
        about, before = await self._ask(), self._server
        if before is not None and about.version == before.version:
            self._check_standing(await registry.renew(self._store, self.name, before, self._lease(about)), about)
            if self._server is None:
                await self._register(about)
        else:
            await self._register(about)
            if before is not None:
                await registry.unregister(self._store, self.name, before)
        return True

    async def _remove(self) -> None:
        if self._server is not None:
            await registry.unregister(self._store, self.name, self._server)

    def _check_standing(self, listed: Listed, about: About) -> None:
        assert self._server is not None
        servers = listed.registered.servers if listed.registered else ()
        server = next((server for server in servers if server.id == self._server.id), None)
        if server is None:  # the lease had expired, and another registration removed it
            self._server = None
            return
        state = listed.state(server)
        if state in ("replaced", "drained") and state != self._said:
            by = f" by version {listed.registered.version}" if state == "replaced" and listed.registered else ""
            say(
                f"environment {self.name} at {self._url} is {state}{by}: no new episodes come; {about.running} in progress"
            )
        self._said = state

    async def _ask(self) -> About:
        url = f"{self._url}/environment"
        async with within(min(_ASK_S, self._options.lease_s / RENEWALS_PER_LEASE), url):
            return await self._client.call("GET", url, "environment", None, About)

    async def _register(self, about: About) -> RegisteredServer:
        self.name = self.name or about.name
        self.what = f"environment {self.name} ({self._url})"
        try:
            server = RegisteredServer(url=self._url, version=about.version, capacity=about.capacity)
        except ValidationError as err:
            raise RegistrationRefused(f"{self._url} cannot be registered: {first_problem(err, 'it')}") from None
        if about.draining:
            raise RegistrationRefused(f"{self._url} cannot be registered: it is stopping (draining)")
        await registry.register(self._store, self.name, server, self._lease(about), replace=self._options.replace)
        self._server = server
        return server

    def _lease(self, about: About) -> Lease:
        return Lease(at=time.time(), lease_s=self._options.lease_s, running=about.running, draining=about.draining)


def register_server(url: str, settings: Sequence[str], name: str, options: LeaseOptions, targets: TargetOptions) -> int:
    configure("environment")
    secrets = signature.read_secrets(targets.secret_file, "--secret-file")

    async def register() -> None:
        stop = asyncio.Event()
        async with registrar_of(
            name, url, settings, options, secrets=secrets, ca_file=targets.ca_file, allowed=targets.allowed_target
        ) as registrar:
            with stopping_by_signal(stop):  # around the lease: a signal at any time withdraws it
                async with registrar.registered():
                    await stop.wait()

    asyncio.run(register())
    return 0


@contextlib.asynccontextmanager
async def registrar_of(
    name: str, url: str, arguments: Sequence[str], options: LeaseOptions, *, secrets: Sequence[str],
    ca_file: Path | None = None, allowed: Sequence[str],
) -> AsyncIterator[Registrar]:  # fmt: skip
    """Yield what registers the server at a URL on the NATS that ``arguments`` name, while it is connected; raises PenstockError."""
    check_name(name)
    try:
        url = checked_url(url)
    except ValueError as err:
        raise ConfigError(str(err)) from None
    settings = read_settings(arguments, dict(os.environ))
    client = await client_of(settings, secrets=secrets, ca_file=ca_file, allowed=allowed)
    try:
        with Bus.connect(settings.nats, name=f"environment-{name or 'server'}") as bus:
            yield Registrar(await open_registry(bus), client, name, url, options)
    finally:
        await client.close()


def check_name(name: str) -> None:
    if name and not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"name {name!r}: expected 1 to 64 letters, digits, '_' and '-', the first a letter or digit")


def set_drained(name: str, arguments: Sequence[str], url: str | None, *, drained: bool) -> int:
    settings, verb = read_settings(arguments, dict(os.environ)), "drain" if drained else "resume"
    check_name(name)
    url = None if url is None else url.rstrip("/")

    async def change() -> list[str]:
        with Bus.connect(settings.nats, name=f"environment-{verb}") as bus:
            return await registry.drain(await open_registry(bus), name, url, on=drained)

    changed = asyncio.run(change())
    if not changed:
        raise ConfigError(
            f"no server {'' if url is None else f'at {url} '}is registered under {name!r}; see: penstock env list --registered"
        )
    for server_url in changed:
        sys.stdout.write(f"{name} at {server_url}: {'drained; its episodes go on' if drained else 'back in service'}\n")
    return 0
