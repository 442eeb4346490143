"""Environments with servers registered on a real NATS: what a worker does about leases, drains and a new version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.agents.environments.played import Script, task_of
from tests.agents.environments.test_over_http import LosesAnswers
from tests.rollout_service.registered import LEASE, play, registered, until, worker

from penstock.agents.environments.episode_environment import group_seed
from penstock.agents.environments.over_http import registry
from penstock.agents.environments.over_http.registry import RegisteredServer
from penstock.agents.environments.play import Reply, done
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.rollout_service.errors import TaskRefused


async def test_a_worker_finds_the_servers_of_a_name(bus: Bus, store: KeyValue, model: Path, name: str) -> None:
    """Those that register later too; the version of the rules is stored with each episode, and no server is left."""
    async with worker(bus, model, name) as own:
        async with registered(store, name, Script(lambda: done(1.0)), capacity=1) as (url, first, _):
            (episode,) = await play(model, own, ["a"])
            assert (episode.status, episode.reward, episode.environment_version) == ("done", 1.0, "1")
            async with registered(store, name, Script(lambda: done(0.5)), capacity=1) as (_, second, _):
                group = await play(model, own, ["a"] * 6, size=6)
                assert [one.status for one in group] == ["done"] * 6
                assert {one.reward for one in group} <= {0.5, 1.0}
                assert first.running == second.running == 0
            listed = (await registry.list_environments(store))[name]
            assert listed.registered is not None
            assert [server.url for server in listed.registered.servers] == [url]
        assert name not in await registry.list_environments(store)


async def test_a_drained_server_ends_its_episodes_and_gets_no_others(
    bus: Bus, store: KeyValue, model: Path, name: str
) -> None:
    for by in ("operator", "itself"):
        stepping, released = asyncio.Event(), asyncio.Event()

        async def step(stepping: asyncio.Event = stepping, released: asyncio.Event = released) -> Reply:
            stepping.set()
            await released.wait()
            return done(0.25)

        async with (
            registered(store, name, Script(step), capacity=8) as (url, old, keeper),
            worker(bus, model, name) as own,
        ):
            playing = asyncio.create_task(play(model, own, ["a"]))
            await stepping.wait()
            async with registered(store, name, Script(lambda: done(0.75)), capacity=8):
                if by == "operator":
                    assert await registry.drain(store, name, url, on=True) == [url]
                else:
                    old.draining = True
                    await keeper.renew()
                assert own.sessions is not None
                await until(
                    lambda: [server.takes_new for server in own.sessions.servers._servers.values()] == [False, True],
                    "a drain",
                )
                group = await play(model, own, ["a"] * 3, size=3, group="r:0:2")
                assert [one.reward for one in group] == [0.75] * 3
            released.set()
            (episode,) = await playing
            assert (episode.reward, episode.attempt) == (0.25, 0)
            if by == "operator":
                assert await registry.drain(store, name, None, on=False) == [url]
                (episode,) = await play(model, own, ["a"], group="r:0:3")
                assert episode.reward == 0.25


async def test_a_new_version_takes_over_and_no_episode_is_lost(
    bus: Bus, store: KeyValue, model: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An episode in progress ends under the rules it began with; the next begins under the new ones."""
    stepping, released = asyncio.Event(), asyncio.Event()

    async def step() -> Reply:
        stepping.set()
        await released.wait()
        return done(0.25)

    async with registered(store, name, Script(step)) as (_, _, keeper), worker(bus, model, name) as own:
        playing = asyncio.create_task(play(model, own, ["a"]))
        await stepping.wait()
        with pytest.raises(registry.NameTaken, match="give --replace"):
            async with registered(store, name, Script(lambda: done(0.75)), version="2"):
                pass
        async with registered(store, name, Script(lambda: done(0.75)), version="2", replace=True):
            await keeper.renew()
            assert "is replaced by version 2: no new episodes come; 1 in progress" in capsys.readouterr().err
            assert own.sessions is not None
            await until(
                lambda: [server.takes_new for server in own.sessions.servers._servers.values()] == [False, True],
                "version 2",
            )
            (new,) = await play(model, own, ["a"], group="r:0:2")
            released.set()
            (old,) = await playing
    assert (old.reward, old.environment_version, old.attempt) == (0.25, "1", 0)
    assert (new.reward, new.environment_version, new.attempt) == (0.75, "2", 0)


async def test_a_step_is_repeated_only_while_the_lease_is_valid(
    bus: Bus, store: KeyValue, model: Path, name: str
) -> None:
    """A server that is registered no more and does not answer is given up at once: the episode restarts elsewhere."""
    script, losing = Script(lambda: done(0.25)), asyncio.Event()

    def lose(request: bytes) -> bool:
        if b"/step" in request.partition(b"\r\n")[0]:
            losing.set()
            return True
        return False

    async with registered(store, f"{name}-behind", script) as (hidden, _, _), worker(bus, model, name) as own:
        forwarder = LosesAnswers(hidden, lose)
        async with forwarder.forwarding() as url:
            lost = RegisteredServer(url=url, version="1", capacity=8)
            await registry.register(store, name, lost, LEASE, replace=False)
            playing = asyncio.create_task(play(model, own, ["a", "b"]))
            await losing.wait()
            async with registered(store, name, Script(lambda: done(0.75))):
                await store.delete(registry.lease_key(name, lost.id))
                async with asyncio.timeout(50.0):  # of reply_deadline_s, which is 60
                    (episode,) = await playing
    assert (episode.status, episode.reward, episode.attempt) == ("done", 0.75, 1)
    assert script.seeds == [group_seed(task_of())]
    assert episode.seed == group_seed(task_of())


async def test_a_registration_that_is_not_followed_by_its_server_costs_no_attempt(
    bus: Bus, store: KeyValue, model: Path, name: str
) -> None:
    """A server that plays another version by now is left alone; with no server in service the reason is named."""
    async with registered(store, f"{name}-behind", Script(lambda: done(0.25)), version="2") as (url, _, _):
        await registry.register(store, name, RegisteredServer(url=url, version="1", capacity=8), LEASE, replace=False)
        async with worker(bus, model, name, attempts=1, options={"place_deadline_s": 1.0}) as own:
            found = await play(model, own, [])
            assert isinstance(found, TaskRefused)
            assert f"registered environment '{name}': {url} (version 1): in service; " in str(found)
            assert "wrong_version: version '2' is played here, not '1'" in str(found)
            async with registered(store, name, Script(lambda: done(0.75))):
                assert own.sessions is not None
                await until(lambda: len(own.sessions.servers._servers) == 2, "the second server")
                (episode,) = await play(model, own, ["a"])
                assert (episode.reward, episode.attempt) == (0.75, 0)


async def test_values_that_others_wrote_are_not_believed(bus: Bus, store: KeyValue, model: Path, name: str) -> None:
    """The name counts as one without servers, with the reason; another name is not affected."""
    await store.put(registry.key(name), b'{"version": "1", "servers": [], "secret": 1}')
    await store.put(f"{registry.PREFIX}{name}.x", b"{}")
    listed = await registry.list_environments(store)
    assert "unreadable: no Registered: secret: Extra inputs are not permitted" in listed[name].problem
    async with worker(bus, model, name, attempts=1, options={"place_deadline_s": 0.2}) as own:
        found = await play(model, own, [])
        assert isinstance(found, TaskRefused)
        assert "unreadable: no Registered: secret" in str(found)
    with pytest.raises(registry.RegistrationRefused, match=f"remove it: nats kv purge .* environment.{name}"):
        await registry.register(
            store, name, RegisteredServer(url="http://127.0.0.1:1", version="1", capacity=1), LEASE, replace=True
        )
    assert [entry.value for entry in await store.entries(f"{registry.PREFIX}{name}.")] == [b"{}"]
