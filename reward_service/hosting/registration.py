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
from penstock.protocol.transport import http_tls

_DEADLINE_S = 60.0  # the service may be starting at the same time
_TRY_S = 5.0
_PAUSE_S = 0.5
_RENEWALS_PER_LEASE = 3  # two consecutive renewals may fail
_PASSES = frozenset({429, 502, 503, 504})


class NotRegistered(PenstockError):
    """The reward service refused the endpoint or could not be reached."""


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where a reward service's API is, and its bearer token.

    ``url`` may be several with commas between them, one of each replica: they share their endpoints, so that any of them
    registers one and renews its lease.
    """

    url: str
    token: str = ""

    @property
    def urls(self) -> tuple[str, ...]:
        """The URL of each replica."""
        return tuple(one.strip().rstrip("/") for one in self.url.split(",") if one.strip())


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
                answer = await _ask(client, service, "POST", "/v1/endpoints", json=offer.to_json())
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
                _say(
                    f"waiting for the reward service at {service.url}: {problem[:200]}; start it in another terminal with: "
                    f"penstock reward service run.toml (gives up after {_DEADLINE_S:.0f} s)"
                )
            await asyncio.sleep(_PAUSE_S)


async def keep(service: ServiceAddress, offer: Offer) -> None:
    """Renew the lease until cancelled, or until another endpoint has taken over the name.

    While no replica answers, it is tried again, and stderr says so. The lease may expire meanwhile; the next successful
    renewal, or a new registration if the service no longer knows the endpoint, puts it back into service.
    """
    assert offer.lease_s is not None
    body = {"version": offer.version, "url": offer.url}
    failing = False
    async with _client(service) as client:
        while True:
            await asyncio.sleep(offer.lease_s / _RENEWALS_PER_LEASE)
            try:
                answer = await _ask(client, service, "POST", f"/v1/endpoints/{offer.name}/lease", json=body)
                if answer.status_code == httpx.codes.NOT_FOUND:
                    answer = await _ask(client, service, "POST", "/v1/endpoints", json=offer.to_json())
                elif answer.status_code == httpx.codes.CONFLICT:
                    _say(f"reward {offer.name} was taken over: {answer.text[:300]}")
                    return
                problem = "" if answer.is_success else f"HTTP {answer.status_code}: {answer.text[:200]}"
            except httpx.TransportError as err:
                problem = f"no answer ({type(err).__name__}: {err})"
            if problem and not failing:
                _say(
                    f"the lease of reward {offer.name} is not renewed: {service.url}: {problem}. Its groups wait once the lease has "
                    f"expired, {offer.lease_s:g} s after the last renewal; it is tried again. Where the reward service runs "
                    "elsewhere now, start this with all its URLs: --register URL,URL"
                )
            elif failing and not problem:
                _say(f"the lease of reward {offer.name} is renewed again")
            failing = bool(problem)


async def unregister(service: ServiceAddress, offer: Offer) -> None:
    """Unregister the endpoint if it still holds the name; if the service is unreachable, write one line to stderr."""
    async with _client(service) as client:
        try:
            await _ask(client, service, "DELETE", f"/v1/endpoints/{offer.name}", params={"url": offer.url})
        except httpx.TransportError as err:
            _say(
                f"reward {offer.name} was not unregistered: {service.url} is unreachable ({type(err).__name__}); its lease "
                "will expire"
            )


async def _ask(
    client: httpx.AsyncClient, service: ServiceAddress, method: str, path: str, **more: Any
) -> httpx.Response:
    """Return the first replica's answer that is no passing failure, else the last; raises TransportError if none answers."""
    failed: httpx.TransportError | None = None
    passing: httpx.Response | None = None
    for url in service.urls:
        try:
            answer = await client.request(method, f"{url}{path}", **more)
        except httpx.TransportError as err:
            failed = err
            continue
        if answer.status_code not in _PASSES:
            return answer
        passing = answer
    if passing is not None:
        return passing
    raise failed or httpx.ConnectError(f"{service.url!r} has no URL of a reward service")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _client(service: ServiceAddress) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {service.token}"} if service.token else {}
    tls = http_tls.trust_own_authority(httpx.create_ssl_context())
    return httpx.AsyncClient(headers=headers, timeout=_TRY_S, trust_env=False, verify=tls)
