"""The registered environments, in a bucket of NATS: servers register there, workers find them there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

import structlog

from penstock.agents.environments.over_http import registration
from penstock.agents.environments.over_http.registration import (
    Lease,
    Listed,
    Registered,
    RegisteredServer,
    RegistrationRefused,
)
from penstock.protocol.errors import PenstockError
from penstock.protocol.transport.key_value import KeyValue, change_value

log = structlog.get_logger("rollout.environment")

_PERIOD_S = 1.0
_EMPTY = Registered(version="none", servers=())


async def list_environments(store: KeyValue) -> dict[str, Listed]:
    """Return all that is registered, by name; what cannot be read is listed with the reason."""
    found: dict[str, tuple[Registered | None, str]] = {}
    leases: dict[str, dict[str, Lease]] = {}
    for entry in await store.entries():
        try:
            if entry.key.startswith(registration.ENVIRONMENT):
                found[entry.key.removeprefix(registration.ENVIRONMENT)] = (None, "")
                value = registration.read_registered(entry.value)
                found[entry.key.removeprefix(registration.ENVIRONMENT)] = (value, "")
            elif entry.key.startswith(registration.LEASE):
                name, _, server_id = entry.key.removeprefix(registration.LEASE).rpartition(".")
                leases.setdefault(name, {})[server_id] = registration.read_lease(entry.value)
        except ValueError as err:
            problem = f"{store.bucket}/{entry.key} is unreadable: {err}"
            if entry.key.startswith(registration.ENVIRONMENT):
                found[entry.key.removeprefix(registration.ENVIRONMENT)] = (None, problem)
    return {name: Listed(value, leases.get(name, {}), problem) for name, (value, problem) in found.items()}


async def register(store: KeyValue, name: str, server: RegisteredServer, lease: Lease, *, replace: bool) -> None:
    """Register a server; raises NameTaken, or RegistrationRefused."""
    await _put_lease(store, name, server, lease)  # first, so that nobody sees it without one
    leased: set[str] = set()
    num_names = 0

    async def read() -> tuple[Registered, int | None]:
        nonlocal leased, num_names
        found = await _read(store, name)
        leased = await _leased(store, name)  # after the servers: each has its lease by then
        num_names = 0 if found[1] is not None else len(await store.entries(registration.ENVIRONMENT))
        return found

    def admit(state: Registered) -> Registered:
        if num_names >= registration.MAX_NAMES:
            raise RegistrationRefused(
                f"{registration.MAX_NAMES} environments are registered; stop the servers of one first"
            )
        return registration.admit(name, None if state is _EMPTY else state, server, leased, replace=replace)

    try:
        await change_value(store, registration.key(name), read, admit, Registered.to_json)
    except PenstockError:
        await store.delete(registration.lease_key(name, server))
        raise


async def renew(store: KeyValue, name: str, server: RegisteredServer, lease: Lease) -> Listed:
    """Renew a lease, and return what is registered under the name now; raises PenstockError."""
    await _put_lease(store, name, server, lease)
    state, _ = await _read(store, name)
    return Listed(None if state is _EMPTY else state, {server.id: lease})


async def unregister(store: KeyValue, name: str, server: RegisteredServer) -> None:
    """Remove a server; the name goes with its last one."""
    await store.delete(registration.lease_key(name, server))
    leased: set[str] = set()

    async def read() -> tuple[Registered, int | None]:
        nonlocal leased
        found = await _read(store, name)
        leased = await _leased(store, name)
        return found

    state, _ = await change_value(
        store,
        registration.key(name),
        read,
        lambda state: registration.without(state, server.id, leased),
        Registered.to_json,
    )
    if not state.servers and state is not _EMPTY:
        await _delete_if_empty(store, name)


async def drain(store: KeyValue, name: str, url: str | None, *, on: bool) -> list[str]:
    """Take the servers at a URL (None: all of the name) out of service, or put them back; return their URLs."""
    state = await _change(store, name, lambda state: registration.drained(state, url, on=on))
    return [one.url for one in state.servers if url in (None, one.url)]


async def _leased(store: KeyValue, name: str) -> set[str]:
    return {entry.key.rpartition(".")[2] for entry in await store.entries(f"{registration.LEASE}{name}.")}


async def _put_lease(store: KeyValue, name: str, server: RegisteredServer, lease: Lease) -> None:
    value = lease.model_dump_json().encode()
    await store.put(registration.lease_key(name, server), value, ttl_s=lease.lease_s)


async def _read(store: KeyValue, name: str) -> tuple[Registered, int | None]:
    """Return what is registered, `_EMPTY` if nothing is, and the revision; raises RegistrationRefused for what is unreadable."""
    entry = await store.get(registration.key(name))
    if entry is None:
        return _EMPTY, None
    try:
        return registration.read_registered(entry.value), entry.revision
    except ValueError as err:
        raise RegistrationRefused(
            f"{store.bucket}/{registration.key(name)} is unreadable: {err}; remove it: nats kv purge {store.bucket} "
            f"{registration.key(name)}"
        ) from None


async def _change(store: KeyValue, name: str, change: Callable[[Registered], Registered]) -> Registered:
    state, _ = await change_value(store, registration.key(name), lambda: _read(store, name), change, Registered.to_json)
    return state


async def _delete_if_empty(store: KeyValue, name: str) -> None:
    """Delete a name without servers; one that registers at this moment finds its name gone, and registers again."""
    state, _ = await _read(store, name)
    if not state.servers:
        await store.delete(registration.key(name))


class RegistryFollower:
    """Reads the registry every second, and tells it to those who asked for a name."""

    def __init__(self, store: KeyValue) -> None:
        """Start with nothing read."""
        self._store = store
        self._wanted: list[tuple[str, Callable[[Listed], None]]] = []
        self._listed: Mapping[str, Listed] | None = None
        self._problems: dict[str, str] = {}

    def follow(self, name: str, on_read: Callable[[Listed], None]) -> None:
        """Call ``on_read`` with what is registered under a name, now and after each reading."""
        self._wanted.append((name, on_read))
        if self._listed is not None:
            on_read(self._of(name))

    async def refresh(self) -> None:
        """Read what is registered; raises PenstockError."""
        self._listed = await list_environments(self._store)
        for name, on_read in self._wanted:
            listed = self._of(name)
            if listed.problem and self._problems.get(name) != listed.problem:
                log.error("registered environment cannot be used", environment=name, problem=listed.problem)
            self._problems[name] = listed.problem
            on_read(listed)

    def _of(self, name: str) -> Listed:
        return (self._listed or {}).get(name) or Listed(None, {}, "no server is registered under this name")

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Read inside the block; while NATS is unreachable the last reading stays valid."""
        await self.refresh()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._run())
            yield
            reading.cancel()

    async def _run(self) -> None:
        is_failing = False
        while True:
            await asyncio.sleep(_PERIOD_S)
            try:
                await self.refresh()
                is_failing = False
            except PenstockError as err:
                if not is_failing:
                    log.warning("registered environments not read; using what was read last", problem=str(err))
                is_failing = True
