"""The registered endpoints, shared by all replicas and runs, kept in the registry bucket.

All of them stand under one key, moved by compare-and-swap: a replica learns of a change by reading
one key each heartbeat, and two people who register at the same moment cannot overwrite each other.
Names that were unregistered are remembered for a while, so that groups which still ask for them
wait instead of dying at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import structlog
from pydantic import ValidationError

from protocol.errors import CompareAndSwapFailed
from protocol.transport.key_value import KeyValue
from reward_service.endpoint import Endpoint
from reward_service.errors import EndpointRefused, NameTaken

log = structlog.get_logger("reward_service.registry")

KEY = "endpoints"
MAX_ENDPOINTS = 256
MAX_RETIRED = 256
_SWAP_TRIES = 16  # as many people would have to register in the same few milliseconds


class Registry:
    """What endpoints there are, as of the last look; `refresh` looks again."""

    def __init__(self, store: KeyValue) -> None:
        """Start empty; call `refresh` before use."""
        self._store = store
        self._revision: int | None = None
        self.endpoints: dict[str, Endpoint] = {}
        self.retired: tuple[str, ...] = ()

    async def refresh(self) -> None:
        """Read what is registered now."""
        entry = await self._store.get(KEY)
        if entry is None:
            self._revision, self.endpoints, self.retired = None, {}, ()
        elif entry.revision != self._revision:
            self._take(entry.value, entry.revision)

    def _take(self, value: bytes, revision: int) -> None:
        try:
            document = json.loads(value)
            found = [Endpoint.model_validate(row) for row in document["endpoints"]]
            retired = tuple(str(name) for name in document["retired"])
        except (ValueError, KeyError, TypeError, ValidationError) as err:
            log.error("unreadable registry, what was known stays", bucket=self._store.bucket, error=str(err))  # noqa: TRY400
            return
        self._revision, self.retired = revision, retired
        self.endpoints = {endpoint.name: endpoint for endpoint in found}

    async def add(self, endpoint: Endpoint, *, replace: bool) -> None:
        """Register an endpoint; raises EndpointRefused when the name is taken and ``replace`` is not set."""

        def change(
            endpoints: dict[str, Endpoint], retired: tuple[str, ...]
        ) -> tuple[dict[str, Endpoint], tuple[str, ...]]:
            known = endpoints.get(endpoint.name)
            if known is not None and known != endpoint and not replace:
                raise NameTaken(
                    f"reward {endpoint.name!r} is registered at {known.url}; set replace, or take another name"
                )
            if known is None and len(endpoints) >= MAX_ENDPOINTS:
                raise EndpointRefused(f"{MAX_ENDPOINTS} endpoints are registered; delete one first")
            return {**endpoints, endpoint.name: endpoint}, tuple(n for n in retired if n != endpoint.name)

        await self._change(change)

    async def remove(self, name: str, *, url: str | None = None) -> bool:
        """Unregister a name (only if it is at ``url``, when one is given); False when it was not there."""
        found = False

        def change(
            endpoints: dict[str, Endpoint], retired: tuple[str, ...]
        ) -> tuple[dict[str, Endpoint], tuple[str, ...]]:
            nonlocal found
            known = endpoints.get(name)
            found = known is not None and url in {None, known.url}
            if not found:
                return endpoints, retired
            rest = {other: endpoint for other, endpoint in endpoints.items() if other != name}
            return rest, (*(n for n in retired if n != name), name)[-MAX_RETIRED:]

        await self._change(change)
        return found

    async def _change(
        self,
        change: Callable[[dict[str, Endpoint], tuple[str, ...]], tuple[dict[str, Endpoint], tuple[str, ...]]],
    ) -> None:
        for attempt in range(_SWAP_TRIES):
            await self.refresh()
            endpoints, retired = change(self.endpoints, self.retired)
            if (endpoints, retired) == (self.endpoints, self.retired):
                return
            document: dict[str, Any] = {
                "endpoints": [endpoint.model_dump(mode="json") for endpoint in endpoints.values()],
                "retired": list(retired),
            }
            try:
                self._revision = await self._store.swap(KEY, json.dumps(document).encode(), self._revision)
            except CompareAndSwapFailed:
                if attempt == _SWAP_TRIES - 1:
                    raise
                continue
            self.endpoints, self.retired = endpoints, retired
            return
