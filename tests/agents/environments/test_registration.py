"""What is registered under a name, and what a worker on a real NATS does about leases, drains and a new version."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from tests.agents.environments.played import Script, task_of
from tests.agents.environments.test_over_http import LosesAnswers
from tests.rollout_service.registered import LEASE, play, registered, states, until, worker

from penstock.agents.environments.episode_environment import group_seed
from penstock.agents.environments.over_http import registry
from penstock.agents.environments.over_http.http_environment import Http
from penstock.agents.environments.over_http.registry import (
    Lease,
    Listed,
    NameTaken,
    Registered,
    RegisteredServer,
    RegistrationRefused,
)
from penstock.agents.environments.over_http.servers import Servers
from penstock.agents.environments.play import Reply, done
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry, KeyValue
from penstock.rollout_service.errors import TaskRefused


def server(port: int, version: str = "1", **more: Any) -> RegisteredServer:
    return RegisteredServer(url=f"http://10.0.0.1:{port}", version=version, capacity=4, **more)


def ids(*servers: RegisteredServer) -> set[str]:
    return {one.id for one in servers}


def test_servers_of_one_version_share_a_name() -> None:
    """Each once, however often it registers; a drain of it ends with a registration."""
    state = registry.admit("guess", None, server(1), (), replace=False)
    state = registry.admit("guess", state, server(2), ids(server(1)), replace=False)
    state = registry.drained(state, server(2).url, on=True)
    assert [one.draining for one in state.servers] == [False, True]
    state = registry.admit("guess", state, server(2), ids(server(1), server(2)), replace=False)
    assert state == Registered(version="1", servers=(server(1), server(2)))
    assert Registered.read(state.to_json()) == state
    assert registry.drained(state, None, on=True).servers == (server(1, draining=True), server(2, draining=True))


def test_another_version_takes_the_name_over_only_if_it_is_told_to_or_nobody_is_there() -> None:
    state = Registered(version="1", servers=(server(1),))
    with pytest.raises(
        NameTaken, match=r"registered with version '1' at http://10.0.0.1:1, and this is '2'; give --replace"
    ):
        registry.admit("guess", state, server(2, "2"), ids(server(1)), replace=False)
    replaced = registry.admit("guess", state, server(2, "2"), ids(server(1)), replace=True)
    assert replaced == Registered(version="2", servers=(server(1), server(2, "2")))
    listed = Listed(replaced, {one.id: LEASE for one in replaced.servers})
    assert [listed.state(one) for one in replaced.servers] == ["replaced", "in service"]
    dead = registry.admit("guess", state, server(2, "2"), (), replace=False)
    assert dead == Registered(version="2", servers=(server(2, "2"),))


def test_a_name_has_a_limited_number_of_servers() -> None:
    """Those without a lease do not count."""
    servers = tuple(server(port) for port in range(1, registry.MAX_SERVERS + 1))
    state = Registered(version="1", servers=servers)
    with pytest.raises(RegistrationRefused, match="has 256 servers; stop one first"):
        registry.admit("guess", state, server(999), ids(*servers), replace=False)
    assert len(registry.admit("guess", state, server(999), ids(*servers[1:]), replace=False).servers) == 256


GOOD = json.loads(Registered(version="1", servers=(server(1),)).to_json())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "ftp://10.0.0.1"}, "only http:// and https://"),
        ({"url": "http://me:word@10.0.0.1"}, "put no user name or password"),
        ({"url": "http://10.0.0.1/?a=b"}, "has no ?query"),
        ({"url": "http://" + "a" * 2000}, "at most 2000 characters"),
        ({"version": ""}, "at least 1 character"),
        ({"capacity": 0}, "greater than or equal to 1"),
        ({"capacity": "4"}, "valid integer"),
        ({"capacity": True}, "valid integer"),
        ({"secret": "x"}, "Extra inputs"),
    ],
)
def test_a_registration_that_cannot_be_is_refused_by_its_readers(change: dict[str, Any], said: str) -> None:
    """Whoever wrote it; with the field at fault, and nothing of it is used."""
    value = {**GOOD, "servers": [{**GOOD["servers"][0], **change}]}
    with pytest.raises(ValueError, match=r"no Registered: servers\.0") as caught:
        Registered.read(json.dumps(value).encode())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "value", [b"", b"[]", b'{"version": "1", "version": "2", "servers": []}', b"\xff", b"[" * 100_000]
)
def test_a_value_that_is_none_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Registered.read(value)
    for wrong in ({"at": 1, "lease_s": 0, "running": 0}, {"at": -1.0, "lease_s": 1.0, "running": 0}, {}):
        with pytest.raises(ValueError, match="no Lease"):
            Lease.read(json.dumps(wrong).encode())


def test_the_next_episode_goes_where_most_places_are_free() -> None:
    """To no server that is drained, replaced, of another version than is expected, or filled by this worker."""
    small = RegisteredServer(url="http://10.0.0.1:1", version="1", capacity=2)
    large = RegisteredServer(url="http://10.0.0.1:2", version="1", capacity=6)
    old = RegisteredServer(url="http://10.0.0.1:3", version="0", capacity=90)
    state = Registered(version="1", servers=(small, large, old))
    servers = Servers(registered="guess")
    servers.read(Listed(state, {one.id: LEASE for one in state.servers}))
    chosen = []
    while (found := servers.choose(0.0)) is not None:
        found.running += 1
        chosen.append(found)
    assert [(one.url[-1], one.running) for one in {id(one): one for one in chosen}.values()] == [("1", 2), ("2", 6)]
    assert servers.ready_in_s(0.0) == 0.25
    chosen[0].running -= 1
    assert servers.choose(0.0) is chosen[0]
    chosen[0].is_full(0.0, 20.0)
    assert (servers.choose(0.0), servers.ready_in_s(0.0), servers.ready_in_s(19.9)) == (None, 0.25, pytest.approx(0.1))
    chosen[0].works()
    servers.read(Listed(registry.drained(state, small.url, on=True), {one.id: LEASE for one in state.servers}))
    assert (servers.choose(0.0), chosen[0].is_leased) == (None, True)
    servers.read(Listed(state, {large.id: LEASE}))
    assert (servers.choose(0.0), chosen[0].is_leased) == (None, False)
    assert "http://10.0.0.1:1 (version 1): lease expired" in servers.why_none("")
    servers.read(Listed(None, {}, "no server is registered under this name"))
    assert (
        servers.why_none("a call") == "registered environment 'guess': no server is registered under this name; a call"
    )
    other = Servers(registered="guess", version="2")
    other.read(Listed(state, {one.id: LEASE for one in state.servers}))
    assert other.choose(0.0) is None
    assert "of which the run expects version '2' (options.version)" in other.why_none("")


class EmptyStore:
    """A bucket without keys, which notes what is deleted."""

    bucket = "environments"

    def __init__(self) -> None:
        self.deleted: list[str] = []

    async def get(self, key: str) -> None: ...

    async def entries(self, prefix: str = "", *, aged: bool = False) -> list[Entry]:
        return []

    async def delete(self, key: str) -> None:
        self.deleted.append(key)


async def test_unregistering_from_a_name_that_is_not_registered_deletes_the_lease_alone() -> None:
    """The name may be registered by another server at that moment."""
    store = EmptyStore()
    await registry.unregister(cast("KeyValue", store), "guess", server(1))
    assert store.deleted == [registry.lease_key("guess", server(1).id)]


def takes_new(own: Http) -> list[bool]:
    assert own.sessions is not None
    return [server.takes_new for server in own.sessions.servers._servers.values()]


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
            assert await states(store, name) == {url: "in service"}
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
                await until(lambda: takes_new(own) == [False, True], "a drain")
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
            await until(lambda: takes_new(own) == [False, True], "version 2")
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
                await until(lambda: len(takes_new(own)) == 2, "the second server")
                (episode,) = await play(model, own, ["a"])
                assert (episode.reward, episode.attempt) == (0.75, 0)


async def test_values_that_others_wrote_are_not_believed(bus: Bus, store: KeyValue, model: Path, name: str) -> None:
    """The name counts as one without servers, with the reason; another name is not affected."""
    await store.put(registry.key(name), b'{"version": "1", "servers": [], "secret": 1}')
    await store.put(f"{registry.PREFIX}{name}.x", b"{}")
    for server, lease_s in ("ghost", 0.2), ("long", 1e9):  # written to stay: its own words or the longest lease end it
        await store.put(
            f"{registry.PREFIX}{name}.{server}", f'{{"at": 9e12, "lease_s": {lease_s}, "running": 0}}'.encode()
        )
    await asyncio.sleep(1.5)
    listed = await registry.list_environments(store)
    assert not listed[name].leases
    assert "unreadable: no Registered: secret: Extra inputs are not permitted" in listed[name].problem
    async with worker(bus, model, name, attempts=1, options={"place_deadline_s": 0.2}) as own:
        found = await play(model, own, [])
        assert isinstance(found, TaskRefused)
        assert "unreadable: no Registered: secret" in str(found)
    with pytest.raises(registry.RegistrationRefused, match=f"remove it: nats kv purge .* environment.{name}"):
        await registry.register(
            store, name, RegisteredServer(url="http://127.0.0.1:1", version="1", capacity=1), LEASE, replace=True
        )
    assert b"{}" in [entry.value for entry in await store.entries(f"{registry.PREFIX}{name}.")]
