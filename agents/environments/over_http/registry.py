"""The registered environments, in a bucket of NATS: servers register there, workers find them there.

| value of the bucket `streams.environments_bucket`      | written by               | holds                                       |
|--------------------------------------------------------|--------------------------|---------------------------------------------|
| ``environment.NAME``                                   | registrations and drains | `Registered`, changed by compare-and-swap   |
| ``lease.NAME.ID``, which expires unless it is renewed  | the server ``ID`` alone  | `Lease`                                     |

A server is in service while its lease is there, its version is that of the name, and it is not drained. NATS decides by its
clock when a lease expires, so no two machines need to agree on the time. A new version takes the name over (``replace``): servers
of the earlier one get no new episodes, and end those that they have.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import structlog
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from penstock.agents.environments.shared_options import checked_url
from penstock.protocol.errors import PenstockError
from penstock.protocol.groups import first_problem
from penstock.protocol.transport.key_value import Entry, KeyValue, change_value
from penstock.serving import strict_json
from penstock.serving.hosting import PREFIX, lease_key, server_id

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"  # without dots, which separate the parts of a key
MAX_SERVERS = 256
MAX_NAMES = 256
LONGEST_LEASE_S = 3600.0
ENVIRONMENT = "environment."
State = Literal["in service", "drained", "stopping", "replaced", "lease expired"]
log = structlog.get_logger("rollout.environment")
_PERIOD_S = 1.0
_EXPIRY_S = 1.0  # NATS counts expiry in whole seconds


class RegistrationRefused(PenstockError):
    """A server cannot be registered."""


class NameTaken(RegistrationRefused):
    """Servers of another version have the name."""


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def read(cls, value: bytes) -> Self:
        """Return what a value of the bucket holds; raises ValueError, which names the field at fault."""
        strict_json.loads(value)  # raises for JSON with two readings
        try:
            return cls.model_validate_json(value)
        except ValidationError as err:
            raise ValueError(f"no {cls.__name__}: {first_problem(err, 'the value', most=200)}") from None

    def to_json(self) -> bytes:
        return self.model_dump_json().encode()


class RegisteredServer(_Stored):
    url: Annotated[str, Field(max_length=2000), AfterValidator(checked_url)]
    version: str = Field(min_length=1, max_length=100)
    # episodes at once, of all workers together; the server itself refuses more
    capacity: int = Field(ge=1, le=1_000_000)
    draining: bool = False

    @property
    def id(self) -> str:
        return server_id(self.version, self.url)


class Registered(_Stored):
    protocol: Literal[1] = 1
    version: str = Field(min_length=1, max_length=100)  # the one that gets new episodes
    servers: tuple[RegisteredServer, ...] = Field(max_length=MAX_SERVERS)


class Lease(_Stored):
    """What a server said when its lease was renewed."""

    at: float = Field(ge=0, allow_inf_nan=False)  # seconds since 1970, by the clock of the server's machine; for people
    lease_s: float = Field(gt=0, le=LONGEST_LEASE_S)
    running: int = Field(ge=0)
    draining: bool = False  # by itself: it was asked to stop


@dataclass(frozen=True, slots=True)
class Listed:
    registered: Registered | None
    leases: Mapping[str, Lease]  # by the id of a server
    problem: str = ""

    def state(self, server: RegisteredServer) -> State:
        lease = self.leases.get(server.id)
        if lease is None:
            return "lease expired"
        if self.registered is None or server.version != self.registered.version:
            return "replaced"
        if server.draining:
            return "drained"
        return "stopping" if lease.draining else "in service"


def key(name: str) -> str:
    return f"{ENVIRONMENT}{name}"


def admit(
    name: str, state: Registered | None, server: RegisteredServer, leased: Collection[str], *, replace: bool
) -> Registered:
    """Return the state with a server registered; ``leased`` are the ids of servers whose lease is valid.

    Servers without a lease are removed. A drain of this server ends. Raises NameTaken for another version than that of the
    name, unless ``replace`` is set or no server of that version has a lease; raises RegistrationRefused if there are too many.
    """
    servers = () if state is None else state.servers
    # At its URL nothing else is played.
    others = [peer for peer in servers if peer.id in leased and peer.url != server.url]
    if state is not None and state.version != server.version and not replace:
        taken = [other for other in others if other.version == state.version]
        if taken:
            raise NameTaken(
                f"environment {name!r} is registered with version {state.version!r} at {taken[0].url}, and this is "
                f"{server.version!r}; give --replace to have it take over, or choose another --name"
            )
    if len(others) >= MAX_SERVERS:
        raise RegistrationRefused(f"environment {name!r} has {MAX_SERVERS} servers; stop one first")
    return Registered(version=server.version, servers=(*others, server))


def without(state: Registered, server_id: str, leased: Collection[str]) -> Registered:
    kept = tuple(server for server in state.servers if server.id != server_id and server.id in leased)
    return state.model_copy(update={"servers": kept})


def drained(state: Registered, url: str | None, *, on: bool) -> Registered:
    servers = (
        server.model_copy(update={"draining": on}) if url in (None, server.url) else server for server in state.servers
    )
    return state.model_copy(update={"servers": tuple(servers)})


_EMPTY = Registered(version="none", servers=())


async def list_environments(store: KeyValue) -> dict[str, Listed]:
    """Return all that is registered, by name; what cannot be read is listed with the reason."""
    states: dict[str, tuple[Registered | None, str]] = {}
    leases: dict[str, dict[str, Lease]] = {}
    for entry in await store.entries(aged=True):
        if entry.key.startswith(ENVIRONMENT):
            try:
                state = Registered.read(entry.value), ""
            except ValueError as err:
                state = None, f"{store.bucket}/{entry.key} is unreadable: {err}"
            states[entry.key.removeprefix(ENVIRONMENT)] = state
        elif entry.key.startswith(PREFIX):
            name, _, of_server = entry.key.removeprefix(PREFIX).rpartition(".")
            if (lease := _current_lease(entry)) is not None:
                leases.setdefault(name, {})[of_server] = lease
    return {name: Listed(value, leases.get(name, {}), problem) for name, (value, problem) in states.items()}


async def register(store: KeyValue, name: str, server: RegisteredServer, lease: Lease, *, replace: bool) -> None:
    """Register a server; raises NameTaken, or RegistrationRefused."""
    await _put_lease(store, name, server, lease)  # first, so that nobody sees it without one

    def admitted(state: Registered, leased: Collection[str], num_names: int) -> Registered:
        if state is _EMPTY and num_names >= MAX_NAMES:
            raise RegistrationRefused(f"{MAX_NAMES} environments are registered; stop the servers of one first")
        return admit(name, None if state is _EMPTY else state, server, leased, replace=replace)

    try:
        await _change(store, name, admitted)
    except PenstockError:
        await store.delete(lease_key(name, server.id))
        raise


async def renew(store: KeyValue, name: str, server: RegisteredServer, lease: Lease) -> Listed:
    """Renew a lease, and return what is registered under the name now; raises PenstockError."""
    await _put_lease(store, name, server, lease)
    state, _ = await _read(store, name)
    return Listed(None if state is _EMPTY else state, {server.id: lease})


async def unregister(store: KeyValue, name: str, server: RegisteredServer) -> None:
    """Remove a server; the name goes with its last one."""
    await store.delete(lease_key(name, server.id))
    state = await _change(store, name, lambda state, leased, _: without(state, server.id, leased))
    if not state.servers and state is not _EMPTY and not (await _read(store, name))[0].servers:
        await store.delete(key(name))


async def drain(store: KeyValue, name: str, url: str | None, *, on: bool) -> list[str]:
    """Take the servers at a URL (None: all of the name) out of service, or put them back; return their URLs."""
    state = await _change(store, name, lambda state, *_: drained(state, url, on=on))
    return [server.url for server in state.servers if url in (None, server.url)]


def _current_lease(entry: Entry) -> Lease | None:
    """Return a lease that is valid by the server's clock, though its key may have been written to stay; None: as if there were none."""
    with contextlib.suppress(ValueError):
        lease = Lease.read(entry.value)
        return lease if entry.age_s <= lease.lease_s + _EXPIRY_S else None


async def _put_lease(store: KeyValue, name: str, server: RegisteredServer, lease: Lease) -> None:
    await store.put(lease_key(name, server.id), lease.to_json(), ttl_s=lease.lease_s)


async def _read(store: KeyValue, name: str) -> tuple[Registered, int | None]:
    entry = await store.get(key(name))
    if entry is None:
        return _EMPTY, None
    try:
        return Registered.read(entry.value), entry.revision
    except ValueError as err:
        raise RegistrationRefused(
            f"{store.bucket}/{key(name)} is unreadable: {err}; remove it: nats kv purge {store.bucket} {key(name)}"
        ) from None


async def _change(
    store: KeyValue, name: str, change: Callable[[Registered, Collection[str], int], Registered]
) -> Registered:
    """Change what is registered, given also the ids of servers with a valid lease, and how many names there are."""
    leased: set[str] = set()
    num_names = 0

    async def read() -> tuple[Registered, int | None]:
        nonlocal leased, num_names
        entry = await _read(store, name)
        leases = await store.entries(f"{PREFIX}{name}.", aged=True)  # after the servers: each has its lease by then
        leased = {lease.key.rpartition(".")[2] for lease in leases if _current_lease(lease) is not None}
        num_names = len(await store.entries(ENVIRONMENT)) if entry[1] is None else 0
        return entry

    state, _ = await change_value(
        store, key(name), read, lambda state: change(state, leased, num_names), Registered.to_json
    )
    return state


class RegistryFollower:
    def __init__(self, store: KeyValue) -> None:
        self._store = store
        self._wanted: list[tuple[str, Callable[[Listed], None]]] = []
        self._listed: Mapping[str, Listed] | None = None
        self._problems: dict[str, str] = {}

    def follow(self, name: str, on_read: Callable[[Listed], None]) -> None:
        self._wanted.append((name, on_read))
        if self._listed is not None:
            on_read(self._of(name))

    async def refresh(self) -> None:
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
