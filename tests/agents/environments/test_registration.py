"""What is registered under a name, who takes it over, and which values of the bucket are believed."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from penstock.agents.environments.over_http import registry
from penstock.agents.environments.over_http.registry import (
    Lease,
    Listed,
    NameTaken,
    Registered,
    RegisteredServer,
    RegistrationRefused,
)
from penstock.agents.environments.over_http.servers import Servers
from penstock.protocol.transport.key_value import Entry, KeyValue

LEASE = Lease(at=1.0, lease_s=15.0, running=0)


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

    async def entries(self, prefix: str = "") -> list[Entry]:
        return []

    async def delete(self, key: str) -> None:
        self.deleted.append(key)


async def test_unregistering_from_a_name_that_is_not_registered_deletes_the_lease_alone() -> None:
    """The name may be registered by another server at that moment."""
    store = EmptyStore()
    await registry.unregister(cast("KeyValue", store), "guess", server(1))
    assert store.deleted == [registry.lease_key("guess", server(1).id)]
