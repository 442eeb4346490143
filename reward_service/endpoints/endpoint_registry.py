"""The registered endpoints, shared by all replicas and runs, stored in the registry bucket.

All of them are one value, changed by compare-and-swap: a replica learns of a change by reading one key each heartbeat, and two
registrations at the same moment cannot overwrite each other. Leases have separate keys, which only their endpoint renews. Unregistered
names are kept for a while, so that groups which still request them wait instead of being dead-lettered at once.

Signing keys and API keys are in a bucket that only this service may read: written by a registration, never returned by the API. One
key per endpoint name, bound to the URL it was registered for: registering the name at another URL needs the secrets again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import structlog
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from penstock.protocol.transport.key_value import KeyValue, change_value
from penstock.reward_service.endpoints.endpoint import Caller, Endpoint
from penstock.reward_service.errors import EndpointDrained, EndpointRefused, LeaseExpired, NameTaken, NotCalled
from penstock.serving.hosting import PREFIX, Leases

log_of_secrets = structlog.get_logger("reward_service.secret_store")
log = structlog.get_logger("reward_service.registry")
KEY = "endpoints"
MAX_ENDPOINTS = 256
MAX_RETIRED = 256
_MAX_BYTES = 900_000  # a value of the bucket is a message, and the broker takes one of 1 MiB
_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class EndpointSecrets:
    """Signing keys (``whsec_...``; two while one replaces the other) and the bearer token for the endpoint."""

    signing: tuple[str, ...] = field(default=(), repr=False)
    api_key: str = field(default="", repr=False)

    def __bool__(self) -> bool:
        return bool(self.signing or self.api_key)


NOTHING = EndpointSecrets()


class SecretStore:
    def __init__(self, store: KeyValue) -> None:
        self._store = store
        self._known: dict[tuple[str, str, str], EndpointSecrets] = {}

    def of(self, endpoint: Endpoint) -> EndpointSecrets:
        return self._known.get(_identity(endpoint), NOTHING)

    async def keep(self, endpoint: Endpoint, secrets: EndpointSecrets) -> None:
        document = {"signing": list(secrets.signing), "api_key": secrets.api_key, "for": list(_identity(endpoint))}
        await self._store.put(_secrets_key(endpoint), json.dumps(document).encode())
        self._known[_identity(endpoint)] = secrets

    async def fetch(self, endpoint: Endpoint) -> bool:
        """Read the secrets of an endpoint that has some; False when they are missing or for another URL."""
        if not endpoint.has_secrets or _identity(endpoint) in self._known:
            return True
        entry = await self._store.get(_secrets_key(endpoint))
        try:
            document = json.loads(entry.value if entry is not None else b"{}")
            if document["for"] != list(_identity(endpoint)):
                return False
            secrets = EndpointSecrets(tuple(document["signing"]), document["api_key"])
        except (ValueError, KeyError, TypeError):
            # without the error, which shows them
            log_of_secrets.error("the secrets of an endpoint are missing or unreadable", endpoint=endpoint.name)  # noqa: TRY400
            return False
        self._known[_identity(endpoint)] = secrets
        return True

    async def forget(self, endpoint: Endpoint) -> None:
        self._known.pop(_identity(endpoint), None)
        if endpoint.has_secrets:
            await self._store.delete(_secrets_key(endpoint))


def _secrets_key(endpoint: Endpoint) -> str:
    return f"endpoint.{endpoint.name}"


def _identity(endpoint: Endpoint) -> tuple[str, str, str]:
    return (endpoint.name, endpoint.url, endpoint.secret_id)


def _by_name(listed: Any) -> Any:
    return listed if isinstance(listed, Mapping) else {row["name"]: row for row in listed}


class Directory(BaseModel):
    """All registrations, as they are stored."""

    model_config = ConfigDict(frozen=True)

    endpoints: Annotated[
        Mapping[str, Endpoint], BeforeValidator(_by_name), PlainSerializer(lambda named: list(named.values()))
    ]
    retired: tuple[str, ...]
    draining: Annotated[frozenset[str], PlainSerializer(sorted)] = frozenset()

    def with_endpoint(self, endpoint: Endpoint) -> Directory:
        return Directory(
            endpoints={**self.endpoints, endpoint.name: endpoint},
            retired=tuple(name for name in self.retired if name != endpoint.name),
            draining=self.draining - {endpoint.name},
        )

    def without(self, name: str) -> Directory:
        return Directory(
            endpoints={other: endpoint for other, endpoint in self.endpoints.items() if other != name},
            retired=(*(n for n in self.retired if n != name), name)[-MAX_RETIRED:],
            draining=self.draining - {name},
        )

    def with_drained(self, name: str, *, on: bool) -> Directory:
        others = self.draining - {name}
        return self.model_copy(update={"draining": others | {name} if on else others})

    def to_json(self) -> bytes:
        return self.model_dump_json().encode()


_EMPTY = Directory(endpoints={}, retired=())


class EndpointRegistry:
    def __init__(
        self, store: KeyValue, secrets: SecretStore, on_change: Callable[[Mapping[str, Endpoint]], None] | None = None
    ) -> None:
        """Start empty; call `refresh` before use. ``on_change`` is called with every new state."""
        self._store = store
        self._secrets = secrets
        self._on_change = on_change
        self._revision: int | None = None
        self._directory = _EMPTY
        self._leases = Leases()

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        return self._directory.endpoints

    @property
    def retired(self) -> tuple[str, ...]:
        return self._directory.retired

    def in_service(self) -> dict[str, Endpoint]:
        return {name: endpoint for name, endpoint in self.endpoints.items() if self.problem(endpoint) is None}

    def problem(self, endpoint: Endpoint) -> NotCalled | None:
        if endpoint.name in self._directory.draining:
            return EndpointDrained(
                f"endpoint {endpoint.name} is drained; put it back into service with: "
                f"penstock reward resume {endpoint.name}",
                retry_in_s=_RETRY_S,
            )
        over_s = self._leases.expired_for_s(endpoint.lease_key, endpoint.lease_s, time.monotonic())
        if over_s > 0:
            return LeaseExpired(
                f"endpoint {endpoint.name} ({endpoint.url}) did not renew its lease within "
                f"{endpoint.lease_s:g} s; start it again, or register it without a lease",
                retry_in_s=_RETRY_S,
            )
        return None

    async def refresh(self) -> None:
        entry = await self._store.get(KEY)
        if entry is None:
            self._take(_EMPTY, None)
        elif entry.revision != self._revision:
            try:
                directory = Directory.model_validate_json(entry.value)
            except (ValueError, KeyError, TypeError) as err:
                log.error("registry unreadable; keeping the last state", bucket=self._store.bucket, error=str(err))  # noqa: TRY400
                self._revision = entry.revision  # so that the next registration replaces it
                return
            for endpoint in directory.endpoints.values():
                await self._secrets.fetch(endpoint)
            self._take(directory, entry.revision)
        if any(endpoint.lease_s is not None for endpoint in self.endpoints.values()):
            lease_entries = await self._store.entries(PREFIX)
            self._leases.saw({entry.key: entry.revision for entry in lease_entries}, time.monotonic())

    async def add(
        self, endpoint: Endpoint, *, replace_other: bool, caller: Caller, secrets: EndpointSecrets = NOTHING
    ) -> None:
        """Register an endpoint, or renew it; raises NameTaken or EndpointRefused."""
        await self.refresh()
        self._admit(self._directory, endpoint, replace_other=replace_other, caller=caller)
        if secrets:
            await self._secrets.keep(endpoint, secrets)
        if endpoint.lease_s is not None:
            await self._renew(endpoint)
        before = self.endpoints.get(endpoint.name)
        await self._change(lambda state: self._admit(state, endpoint, replace_other=replace_other, caller=caller))
        if before is not None and before.address_id != endpoint.address_id:
            await self._forget_lease(before)

    def _admit(self, state: Directory, endpoint: Endpoint, *, replace_other: bool, caller: Caller) -> Directory:
        known = state.endpoints.get(endpoint.name)
        if known is not None:
            caller.check_owns(known)
        if known is not None and known != endpoint and not replace_other and self._is_valid(known):
            raise NameTaken(
                f"reward {endpoint.name!r} is registered at {known.url}; set replace, or choose another name"
            )
        for source in endpoint.data_sources:
            for other in state.endpoints.values():
                if source in other.data_sources and other.name != endpoint.name:
                    raise NameTaken(f"rows of data source {source!r} are scored by endpoint {other.name!r} already")
        if known is None and len(state.endpoints) >= MAX_ENDPOINTS:
            over = [other for other in state.endpoints.values() if not self._is_valid(other)]
            if not over:
                raise EndpointRefused(f"{MAX_ENDPOINTS} endpoints are registered; delete one first")
            state = state.without(over[0].name)
        new_state = state.with_endpoint(endpoint)
        if known == endpoint:  # a renewal does not end a drain
            new_state = new_state.with_drained(endpoint.name, on=endpoint.name in state.draining)
        if len(new_state.to_json()) > _MAX_BYTES:
            raise EndpointRefused(f"the registry would be larger than {_MAX_BYTES} bytes; delete an endpoint first")
        return new_state

    def _is_valid(self, endpoint: Endpoint) -> bool:
        return self._leases.expired_for_s(endpoint.lease_key, endpoint.lease_s, time.monotonic()) == 0.0

    async def renew(self, name: str, *, version: str, url: str, caller: Caller) -> Endpoint | None:
        """Renew a lease and return its endpoint; None when the name is registered for another version or URL, or not at all."""
        known = self.endpoints.get(name)
        if known is None or (known.version, known.url) != (version, url):
            await self.refresh()
            known = self.endpoints.get(name)
        if known is None or (known.version, known.url) != (version, url):
            return None
        caller.check_owns(known)
        if known.lease_s is not None:
            await self._renew(known)
        return known

    async def _renew(self, endpoint: Endpoint) -> None:
        revision = await self._store.put(endpoint.lease_key, b"")
        self._leases.renewed(endpoint.lease_key, revision, time.monotonic())

    async def remove(self, name: str, *, caller: Caller, url: str | None = None) -> bool:
        """Unregister a name (only if it is at ``url``, when that is set); False when it was not there."""
        removed = await self._change_known(name, caller, lambda state: state.without(name), url)
        if removed is not None:
            await self._secrets.forget(removed)
            await self._forget_lease(removed)
        return removed is not None

    async def drain(self, name: str, *, caller: Caller, on: bool) -> bool:
        return await self._change_known(name, caller, lambda state: state.with_drained(name, on=on)) is not None

    async def _change_known(
        self, name: str, caller: Caller, change: Callable[[Directory], Directory], url: str | None = None
    ) -> Endpoint | None:
        """Change the state of an endpoint of the caller's; None: none has the name (at ``url``, if set)."""
        known: Endpoint | None = None

        def checked(state: Directory) -> Directory:
            nonlocal known
            known = state.endpoints.get(name)
            if known is None or url not in {None, known.url}:
                known = None
                return state
            caller.check_owns(known)
            return change(state)

        await self._change(checked)
        return known

    async def _forget_lease(self, endpoint: Endpoint) -> None:
        if endpoint.lease_s is not None:
            await self._store.delete(endpoint.lease_key)

    async def _change(self, change: Callable[[Directory], Directory]) -> None:
        async def read() -> tuple[Directory, int | None]:
            await self.refresh()
            return self._directory, self._revision

        directory, revision = await change_value(self._store, KEY, read, change, Directory.to_json)
        if revision != self._revision:
            self._take(directory, revision)

    def _take(self, directory: Directory, revision: int | None) -> None:
        self._directory, self._revision = directory, revision
        if self._on_change is not None:
            self._on_change({name: e for name, e in directory.endpoints.items() if name not in directory.draining})
