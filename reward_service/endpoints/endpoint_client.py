"""All endpoints that this replica calls: a queue for each, replaced with the endpoint's version; and checks of their health URLs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence

import structlog

from penstock.protocol.errors import PenstockError
from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.endpoint_queue import EndpointMetrics, EndpointQueue
from penstock.reward_service.endpoints.endpoint_registry import EndpointRegistry, SecretStore
from penstock.reward_service.endpoints.wire import CALL_HEADER, GroupToScore
from penstock.reward_service.errors import RewardUnavailable
from penstock.reward_service.metrics import Timings
from penstock.reward_service.scores import Outcome
from penstock.serving.http_connections import HttpConnections
from penstock.serving.target_policy import TargetPolicy

_KEEP_S = 5.0  # an idle connection
log = structlog.get_logger("reward_service.health")
PERIOD_S = 3.0
_DEADLINE_S = 2.0
_FAILURES = 2  # in a row before the breaker opens


class EndpointClient:
    def __init__(self, policy: TargetPolicy, *, max_response_bytes: int, secrets: SecretStore | None = None) -> None:
        """``policy`` decides which addresses may be called; longer answers than the maximum are not read."""
        self._secrets = secrets
        self._queues: dict[str, EndpointQueue] = {}
        self._finishing: list[EndpointQueue] = []  # earlier versions with calls in progress
        self.http = HttpConnections(
            keep_s=_KEEP_S, policy=policy, max_answer_bytes=max_response_bytes,
            max_answer_key="reward_service.max_response_bytes",
        )  # fmt: skip

    async def __aenter__(self) -> EndpointClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for queue in [*self._queues.values(), *self._finishing]:
            await queue.close()
        await self.http.close()

    def follow(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Apply the registered endpoints: replace the queues of new versions, empty those of unregistered endpoints."""
        for name, queue in list(self._queues.items()):
            if name in endpoints:
                self.queue(endpoints[name])
            elif not queue.idle:
                queue.reject_waiting(RewardUnavailable(f"endpoint {name} was unregistered or drained meanwhile"))

    def queue(self, endpoint: Endpoint) -> EndpointQueue:
        """Return the queue of an endpoint, the scorer of its groups.

        A new version takes over the queue; calls in progress finish at the old one.
        """
        queue = self._queues.get(endpoint.name)
        if queue is None or (queue.endpoint is not endpoint and queue.endpoint != endpoint):
            secrets = self._secrets.of(endpoint) if self._secrets is not None else None
            new = EndpointQueue(endpoint, secrets, self.http)
            self._queues[endpoint.name] = new
            if queue is not None:
                self._finishing = [*(old for old in self._finishing if not old.idle), queue]
                queue.transfer_to(new)
            return new
        return queue

    def metrics(self, endpoint: Endpoint, state: str = "ok") -> EndpointMetrics:
        finishing = {
            queue.endpoint.scorer: queue.num_in_progress
            for queue in self._finishing
            if queue.endpoint.name == endpoint.name and queue.num_in_progress
        }
        return self.queue(endpoint).metrics().model_copy(update={"state": state, "finishing": finishing})

    def timings(self, endpoint: Endpoint) -> Timings:
        return self.queue(endpoint).timings

    async def call(self, endpoint: Endpoint, groups: Sequence[GroupToScore]) -> list[Outcome]:
        return await self.queue(endpoint).call_now(groups)


class HealthChecks:
    def __init__(self, registry: EndpointRegistry, client: EndpointClient) -> None:
        self._registry = registry
        self._client = client
        self._failed: Counter[str] = Counter()

    async def run(self, done: asyncio.Event) -> None:
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
