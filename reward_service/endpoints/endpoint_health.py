"""Active health checks of the endpoints that registered a health URL."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import structlog

from penstock.protocol.errors import PenstockError
from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.endpoint_client import EndpointClient
from penstock.reward_service.endpoints.endpoint_registry import EndpointRegistry
from penstock.reward_service.endpoints.wire import CALL_HEADER

log = structlog.get_logger("reward_service.health")

PERIOD_S = 3.0
_DEADLINE_S = 2.0
_FAILURES = 2  # in a row before the breaker opens


class HealthChecks:
    """Requests every health URL and reports the result to the endpoint's queue."""

    def __init__(self, registry: EndpointRegistry, client: EndpointClient) -> None:
        """Start with no check made."""
        self._registry = registry
        self._client = client
        self._failed: Counter[str] = Counter()

    async def run(self, done: asyncio.Event) -> None:
        """Check until ``done``."""
        while not done.is_set():
            endpoints = [endpoint for endpoint in self._registry.in_service().values() if endpoint.health_url]
            await asyncio.gather(*(self._check(endpoint) for endpoint in endpoints))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), PERIOD_S)

    async def _check(self, endpoint: Endpoint) -> None:
        problem = await self._problem(endpoint)
        if not problem:
            self._failed.pop(endpoint.scorer, None)
            self._client.queue(endpoint).healthy()
            return
        self._failed[endpoint.scorer] += 1
        if self._failed[endpoint.scorer] == _FAILURES:
            log.warning("endpoint is unhealthy", endpoint=endpoint.scorer, problem=problem)
        if self._failed[endpoint.scorer] >= _FAILURES:
            self._client.queue(endpoint).unhealthy(problem)

    async def _problem(self, endpoint: Endpoint) -> str:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                answer = await self._client.http.send("GET", endpoint.health_url or "", headers={CALL_HEADER: "1"})
        except TimeoutError:
            return f"{endpoint.health_url} did not answer within {_DEADLINE_S:g} s"
        except PenstockError as err:
            return f"{endpoint.health_url}: {err}"
        return "" if 200 <= answer.status < 300 else f"{endpoint.health_url}: HTTP {answer.status}"
