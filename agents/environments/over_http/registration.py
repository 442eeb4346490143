"""What is registered under the name of an environment, and who may register. Pure.

| value of the bucket `streams.environments_bucket`      | written by               | holds                                       |
|--------------------------------------------------------|--------------------------|---------------------------------------------|
| ``environment.NAME``                                   | registrations and drains | `Registered`, changed by compare-and-swap   |
| ``lease.NAME.ID``, which expires unless it is renewed  | the server ``ID`` alone  | `Lease`                                     |

A server is in service while its lease is there, its version is that of the name, and it is not drained. NATS decides by its own
clock when a lease expires, so no two machines need to agree on the time. A new version takes the name over (``replace``): servers
of the earlier one get no new episodes, and end those that they have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from penstock.agents.environments.server_urls import checked_url
from penstock.protocol.errors import PenstockError
from penstock.serving import strict_json

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"  # without dots, which separate the parts of a key
MAX_SERVERS = 256
MAX_NAMES = 256
ENVIRONMENT, LEASE = "environment.", "lease."


class RegistrationRefused(PenstockError):
    """A server cannot be registered."""


class NameTaken(RegistrationRefused):
    """Servers of another version have the name."""


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RegisteredServer(_Stored):
    """One server of an environment."""

    url: Annotated[str, Field(max_length=2000), AfterValidator(checked_url)]
    version: str = Field(min_length=1, max_length=100)
    capacity: int = Field(
        ge=1, le=1_000_000
    )  # episodes at once, of all workers together; the server itself refuses more
    draining: bool = False

    @property
    def id(self) -> str:
        """A short id of this version at this URL."""
        return hashlib.sha256(f"{self.version}\n{self.url}".encode()).hexdigest()[:16]


class Registered(_Stored):
    """All servers of one name."""

    protocol: Literal[1] = 1
    version: str = Field(min_length=1, max_length=100)  # the one that gets new episodes
    servers: tuple[RegisteredServer, ...] = Field(max_length=MAX_SERVERS)

    def to_json(self) -> bytes:
        """Return what is stored."""
        return self.model_dump_json().encode()


class Lease(_Stored):
    """What a server said when its lease was renewed."""

    at: float = Field(ge=0, allow_inf_nan=False)  # seconds since 1970, by the clock of the server's machine; for people
    lease_s: float = Field(gt=0, allow_inf_nan=False)
    running: int = Field(ge=0)
    draining: bool = False  # by itself: it was asked to stop


_Kind = TypeVar("_Kind", bound=_Stored)
State = Literal["in service", "drained", "stopping", "replaced", "lease expired"]


@dataclass(frozen=True, slots=True)
class Listed:
    """One name: its servers and their leases, or why its value cannot be used."""

    registered: Registered | None
    leases: Mapping[str, Lease]  # by the id of a server
    problem: str = ""

    def state(self, server: RegisteredServer) -> State:
        """Return whether a server gets new episodes, and why not."""
        lease = self.leases.get(server.id)
        if lease is None:
            return "lease expired"
        if self.registered is None or server.version != self.registered.version:
            return "replaced"
        if server.draining:
            return "drained"
        return "stopping" if lease.draining else "in service"


def key(name: str) -> str:
    """Return the key of an environment."""
    return f"{ENVIRONMENT}{name}"


def lease_key(name: str, server: RegisteredServer) -> str:
    """Return the key of a server's lease."""
    return f"{LEASE}{name}.{server.id}"


def read_registered(value: bytes) -> Registered:
    """Return what is stored under `key`; raises ValueError for anything else."""
    return _read(value, Registered)


def read_lease(value: bytes) -> Lease:
    """Return what is stored under `lease_key`; raises ValueError for anything else."""
    return _read(value, Lease)


def _read(value: bytes, kind: type[_Kind]) -> _Kind:
    strict_json.loads(value)  # raises for JSON with two readings
    try:
        return kind.model_validate_json(value)
    except ValidationError as err:
        first = err.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200] or "the value"
        raise ValueError(f"no {kind.__name__}: {where}: {first['msg'][:200]}") from None


def admit(
    name: str, state: Registered | None, server: RegisteredServer, leased: Collection[str], *, replace: bool
) -> Registered:
    """Return the state with a server registered; ``leased`` are the ids of servers whose lease is valid.

    Servers without a lease are removed. A drain of this server ends. Raises NameTaken for another version than that of the
    name, unless ``replace`` is given or no server of that version has a lease; raises RegistrationRefused if there are too many.
    """
    servers = () if state is None else state.servers
    others = [one for one in servers if one.id in leased and one.url != server.url]  # at its URL nothing else is played
    if state is not None and state.version != server.version and not replace:
        taken = [one for one in others if one.version == state.version]
        if taken:
            raise NameTaken(
                f"environment {name!r} is registered with version {state.version!r} at {taken[0].url}, and this is "
                f"{server.version!r}; give --replace to have it take over, or choose another --name"
            )
    if len(others) >= MAX_SERVERS:
        raise RegistrationRefused(f"environment {name!r} has {MAX_SERVERS} servers; stop one first")
    return Registered(version=server.version, servers=(*others, server))


def without(state: Registered, server_id: str, leased: Collection[str]) -> Registered:
    """Return the state without a server, and without those that have no lease."""
    kept = tuple(one for one in state.servers if one.id != server_id and one.id in leased)
    return state.model_copy(update={"servers": kept})


def drained(state: Registered, url: str | None, *, on: bool) -> Registered:
    """Return the state with the servers at a URL (None: all) drained, or put back into service."""
    servers = (one.model_copy(update={"draining": on}) if url in (None, one.url) else one for one in state.servers)
    return state.model_copy(update={"servers": tuple(servers)})
