"""Signing keys and API keys of endpoints, in a bucket that only this service may read.

They are written by a registration and never returned by the API. One key per endpoint name, bound to the URL it was
registered for: registering the name at another URL needs the secrets again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import structlog

from penstock.protocol.transport.key_value import KeyValue
from penstock.reward_service.endpoints.endpoint import Endpoint

log = structlog.get_logger("reward_service.secret_store")


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
        """Return the secrets of an endpoint that `fetch` has read."""
        return self._known.get(_identity(endpoint), NOTHING)

    async def keep(self, endpoint: Endpoint, secrets: EndpointSecrets) -> None:
        """Store the secrets of an endpoint before it is registered."""
        document = {"signing": list(secrets.signing), "api_key": secrets.api_key, "for": list(_identity(endpoint))}
        await self._store.put(_key(endpoint), json.dumps(document).encode())
        self._known[_identity(endpoint)] = secrets

    async def fetch(self, endpoint: Endpoint) -> bool:
        """Read the secrets of an endpoint that has some; False when they are missing or for another URL."""
        if not endpoint.has_secrets or _identity(endpoint) in self._known:
            return True
        entry = await self._store.get(_key(endpoint))
        try:
            document = json.loads(entry.value if entry is not None else b"{}")
            if document["for"] != list(_identity(endpoint)):
                return False
            found = EndpointSecrets(tuple(document["signing"]), document["api_key"])
        except (ValueError, KeyError, TypeError):
            log.error("the secrets of an endpoint are missing or unreadable", endpoint=endpoint.name)  # noqa: TRY400 its value is secret
            return False
        self._known[_identity(endpoint)] = found
        return True

    async def forget(self, endpoint: Endpoint) -> None:
        self._known.pop(_identity(endpoint), None)
        if endpoint.has_secrets:
            await self._store.delete(_key(endpoint))


def _key(endpoint: Endpoint) -> str:
    return f"endpoint.{endpoint.name}"


def _identity(endpoint: Endpoint) -> tuple[str, str, str]:
    return (endpoint.name, endpoint.url, endpoint.secret_id)
