"""`penstock env register`, `serve --register`, `list`, `drain` and `resume`: on a real NATS, with killed servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.played import Script, task_of
from tests.agents.environments.test_over_http import SECRET
from tests.json_server import JsonServer
from tests.rollout_service.registered import LEASE, play, registered, start_server, states, until, where, worker

from penstock.agents.environments.episode_environment import group_seed
from penstock.agents.environments.over_http import registry
from penstock.agents.environments.over_http.http_environment import Http
from penstock.agents.environments.over_http.registry import RegisteredServer
from penstock.agents.environments.play import done
from penstock.agents.hosting import commands, registration, serve
from penstock.agents.hosting.episodes import Episodes
from penstock.agents.hosting.registration import Registrar, RegistrySettings
from penstock.deploy.certificates import write_certificates
from penstock.protocol.command_line import run
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError
from penstock.protocol.transport import tls
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.rollout_service.environments.environment import load_environments
from penstock.rollout_service.errors import TaskRefused
from penstock.serving.web_server import serving_app


async def test_an_https_server_is_known_by_its_authority(
    bus: Bus, store: KeyValue, model: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are encrypted and signed; without the authority nothing is registered, and the worker starts nothing."""
    certificates = tmp_path / "tls"
    write_certificates(certificates, services=("guess",))
    authority = certificates / "ca.pem"
    monkeypatch.setenv(tls.CERTIFICATE, str(certificates / "guess.pem"))
    monkeypatch.setenv(tls.KEY, str(certificates / "guess.key"))
    (tmp_path / "secret").write_text(SECRET)
    options = {"secret_file": str(tmp_path / "secret")}
    script = Script(lambda: done(1.0))
    with pytest.raises(
        Exception, match=r"the server's certificate is refused: .*; set PENSTOCK_TLS_CA_FILE to the ca\.pem"
    ):
        async with registered(store, name, script, host="0.0.0.0", secrets=(SECRET,)):
            pass
    async with registered(store, name, script, host="0.0.0.0", ca_file=authority, secrets=(SECRET,)) as (url, _, _):
        assert url.startswith("https://")
        async with worker(bus, model, name, options={**options, "ca_file": str(authority)}) as own:
            (episode,) = await play(model, own, ["a"])
            assert episode.reward == 1.0
        async with worker(bus, model, name, attempts=1, options={**options, "place_deadline_s": 0.3}) as own:
            found = await play(model, own, ["a"])
            assert isinstance(found, TaskRefused)
            assert "the server's certificate is refused" in str(found)


async def test_a_server_that_is_none_is_not_registered(store: KeyValue, name: str) -> None:
    """Nothing there, rules without a version, one that is stopping, an address that is never called."""
    client = await registration.client_of(RegistrySettings(), secrets=(), ca_file=None, allowed=())
    episodes = Episodes(Script(), "", capacity=1, reply_deadline_s=1.0, idle_s=60.0)
    try:
        async with serving_app(serve.build_app(episodes), "127.0.0.1", 0, key="--port") as url:
            for offered, said in (
                ("http://127.0.0.1:9", "ClientConnectorError"),
                (url, "cannot be registered: version: String should have at least 1 character"),
                ("http://169.254.169.254", "never called"),
                ("http://127.0.0.1:4222", "is NATS of this run"),
                (f"{url}/nowhere", "answers HTTP 404"),
            ):
                with pytest.raises(Exception, match=said):
                    async with Registrar(store, client, name, offered, commands.LeaseOptions()).registered():
                        pass
            episodes.version, episodes.draining = "1", True
            with pytest.raises(registry.RegistrationRefused, match="it is stopping"):
                async with Registrar(store, client, name, url, commands.LeaseOptions()).registered():
                    pass
            with pytest.raises(ConfigError, match="expected 3 to 3600"):
                Registrar(store, client, name, url, commands.LeaseOptions(lease_s=1.0))
    finally:
        await client.close()
        await episodes.close()
    assert await store.entries() == []


async def test_a_server_that_was_forgotten_registers_again(
    store: KeyValue, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lease had expired, and a second one registered; one that was refused, or restarted with other rules."""
    async with registered(store, name, Script()) as (url, episodes, keeper):
        other = RegisteredServer(url="http://127.0.0.1:2", version="1", capacity=1)
        own = (await registry.list_environments(store))[name].registered
        assert own is not None
        await store.delete(registry.lease_key(name, own.servers[0].id))
        await registry.register(store, name, other, LEASE, replace=False)
        assert await states(store, name) == {other.url: "in service"}
        episodes.draining = True
        await keeper.renew()
        assert "it is stopping (draining)" in capsys.readouterr().err
        episodes.draining = False
        await keeper.renew()
        assert await states(store, name) == {other.url: "in service", url: "in service"}
        await registry.unregister(store, name, other)
        episodes.version = "2"
        await keeper.renew()
        listed = (await registry.list_environments(store))[name]
        assert listed.registered is not None
        assert [(server.version, listed.state(server)) for server in listed.registered.servers] == [("2", "in service")]


@pytest.mark.slow
async def test_episodes_of_a_killed_server_are_played_again_with_their_seed(
    bus: Bus, store: KeyValue, nats_settings: NatsSettings, model: Path, name: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """SIGKILL in the middle of four episodes: none is lost or gets a reward of 0; the other server plays the rest."""
    first, url = await asyncio.to_thread(start_server, tmp_path / "first", nats_settings, name, 30.0)
    second: subprocess.Popen[str] | None = None
    try:
        async with worker(bus, model, name, attempts=2) as own:
            playing = asyncio.create_task(play(model, own, ["a"] * 40, size=4))
            assert own.sessions is not None
            servers = own.sessions.servers._servers
            await until(
                lambda: [server.running for server in servers.values()] == [4], "four episodes at the first server"
            )
            second, other = await asyncio.to_thread(start_server, tmp_path / "second", nats_settings, name, 0.0)
            first.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.wait)
            group = await playing
            assert [(one.status, one.reward, one.environment_version) for one in group] == [("done", 1.0, "1")] * 4
            assert Counter(one.attempt for one in group) == {1: 4}
            assert {one.seed for one in group} == {group_seed(task_of())}
            assert all(f"on {group_seed(task_of())}" in one.messages for one in group)
            await until(
                lambda: {server.url: server.is_leased for server in servers.values()} == {url: False, other: True},
                "an expiry",
            )
        await asyncio.to_thread(run, commands.app, ["list", "--registered", *where(nats_settings), "--json"])
        states = {
            one["url"]: one["state"] for one in json.loads(capsys.readouterr().out.splitlines()[-1])[name]["servers"]
        }
        assert states == {url: "lease expired", other: "in service"}
        second.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second.wait, 60) == 0
        assert name not in await registry.list_environments(store)
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


async def test_servers_are_listed_drained_and_resumed_from_the_command_line(
    store: KeyValue, nats_settings: NatsSettings, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With version, state, episodes and lease of each."""
    nats = where(nats_settings)

    def said(*arguments: str) -> str:
        assert run(commands.app, [*arguments, *nats]) == 0
        return capsys.readouterr().out

    assert "no environment server is registered" in await asyncio.to_thread(said, "list", "--registered")
    async with registered(store, name, Script(), capacity=7) as (url, _, _):
        text = await asyncio.to_thread(said, "list", "--registered")
        assert f"{name}: version 1\n    {url}  version 1: in service, 0 of 7 episodes, lease of 60 s renewed " in text
        assert f"{name} at {url}: drained" in await asyncio.to_thread(said, "drain", name)
        assert "version 1: drained, 0 of 7" in await asyncio.to_thread(said, "list", "--registered")
        assert "back in service" in await asyncio.to_thread(said, "resume", name, "--url", url)
        with pytest.raises(ConfigError, match="no server at http://x is registered under"):
            await asyncio.to_thread(said, "drain", name, "--url", "http://x")


def test_a_signal_during_a_registration_withdraws_it(
    store: KeyValue, nats_settings: NatsSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is there already: it would keep a server in service that no longer renews it."""
    register, registrations = registry.register, list[str]()

    async def interrupted(*arguments: Any, **more: Any) -> None:
        await register(*arguments, **more)
        registrations.append(name)
        os.kill(os.getpid(), signal.SIGTERM)

    def unhandled(*_: object) -> None:
        raise AssertionError("the command does not handle SIGTERM yet")

    monkeypatch.setattr(registry, "register", interrupted)
    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        with About() as server:
            assert run(commands.app, ["register", server.url, *where(nats_settings), "--name", name]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (registrations, asyncio.run(registry.list_environments(store))) == ([name], {})


class About(JsonServer):
    def answer(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
        return 200, {"name": "far", "version": "1", "capacity": 1, "running": 0}


def test_servers_are_found_in_a_run_alone(name: str) -> None:
    definition = EnvironmentDefinition.model_validate({"type": "http", "options": {"registered": name}})
    own = load_environments((), {"mine": definition})["mine"]
    assert isinstance(own, Http)
    with pytest.raises(ConfigError, match="servers are found on NATS, in a run"):
        own.connect()
