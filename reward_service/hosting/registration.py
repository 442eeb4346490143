"""Register an endpoint at a reward service over HTTP, renew its lease, and unregister it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from penstock.protocol.errors import PenstockError

_DEADLINE_S = 60.0  # the service may be starting at the same time
_TRY_S = 5.0
_PAUSE_S = 0.5
_RENEWALS_PER_LEASE = 3  # two consecutive renewals may fail
_PASSES = frozenset({429, 502, 503, 504})


class NotRegistered(PenstockError):
    """The reward service refused the endpoint or could not be reached."""


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where a reward service's API is, and its bearer token."""

    url: str
    token: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """An endpoint's registration data; it is in service until ``lease_s`` seconds after its last renewal.

    ``more`` holds further fields of the registration (`reward_service/endpoints/endpoint.py`), such as ``timeout_s``.
    """

    name: str
    url: str
    version: str
    lease_s: float | None = None
    secrets: tuple[str, ...] = field(default=(), repr=False)
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the registration's body, which replaces one of an earlier process with the same name."""
        own = {"name": self.name, "url": self.url, "version": self.version, "lease_s": self.lease_s, "replace": True}
        return {**self.more, **own, "secrets": list(self.secrets)}


async def register(service: ServiceAddress, offer: Offer) -> None:
    """Register an endpoint, once the service answers; says on stderr what it waits for. Raises NotRegistered."""
    deadline, has_said = time.monotonic() + _DEADLINE_S, False
    async with _client(service) as client:
        while True:
            problem = ""
            try:
                answer = await client.post("/v1/endpoints", json=offer.to_json())
            except httpx.TransportError as err:
                problem = f"no answer ({type(err).__name__}: {err})"
            else:
                if answer.is_success:
                    return
                problem = f"HTTP {answer.status_code}: {answer.text[:300]}"
                if answer.status_code not in _PASSES:
                    raise NotRegistered(f"the reward service at {service.url} refused reward {offer.name!r}: {problem}")
            if time.monotonic() > deadline:
                raise NotRegistered(
                    f"reward {offer.name!r} could not be registered at {service.url} within {_DEADLINE_S:.0f} s: {problem}; "
                    "is the reward service running there? (penstock reward service)"
                )
            if not has_said:
                has_said = True
                sys.stderr.write(
                    f"waiting for the reward service at {service.url}: {problem[:200]}; start it in another terminal with: "
                    f"penstock reward service run.toml (gives up after {_DEADLINE_S:.0f} s)\n"
                )
                sys.stderr.flush()
            await asyncio.sleep(_PAUSE_S)


async def keep(service: ServiceAddress, offer: Offer) -> None:
    """Renew the lease until cancelled, or until another endpoint has taken over the name.

    An unreachable service is tried again. The lease may expire meanwhile; the next successful renewal, or a new
    registration if the service no longer knows the endpoint, puts it back into service.
    """
    assert offer.lease_s is not None
    async with _client(service) as client:
        while True:
            await asyncio.sleep(offer.lease_s / _RENEWALS_PER_LEASE)
            try:
                answer = await client.post(
                    f"/v1/endpoints/{offer.name}/lease", json={"version": offer.version, "url": offer.url}
                )
                if answer.status_code == httpx.codes.NOT_FOUND:
                    await client.post("/v1/endpoints", json=offer.to_json())
            except httpx.TransportError:
                continue
            if answer.status_code == httpx.codes.CONFLICT:
                sys.stderr.write(f"reward {offer.name} was taken over: {answer.text[:300]}\n")
                return


async def unregister(service: ServiceAddress, offer: Offer) -> None:
    """Unregister the endpoint if it still holds the name; if the service is unreachable, write one line to stderr."""
    async with _client(service) as client:
        try:
            await client.delete(f"/v1/endpoints/{offer.name}", params={"url": offer.url})
        except httpx.TransportError as err:
            sys.stderr.write(
                f"reward {offer.name} was not unregistered: {service.url} is unreachable ({type(err).__name__}); "
                "its lease will expire\n"
            )


def _client(service: ServiceAddress) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {service.token}"} if service.token else {}
    return httpx.AsyncClient(base_url=service.url, headers=headers, timeout=_TRY_S, trust_env=False)
