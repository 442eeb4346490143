"""All endpoints that this replica calls: a queue for each, replaced with the endpoint's version; and checks of their health URLs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping

import structlog

from penstock.protocol.errors import PenstockError
from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.endpoint_call import EndpointMetrics
from penstock.reward_service.endpoints.endpoint_queue import EndpointQueue
from penstock.reward_service.endpoints.endpoint_registry import EndpointRegistry, SecretStore
from penstock.reward_service.endpoints.wire import CALL_HEADER
from penstock.reward_service.errors import RewardUnavailable
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
            queue.endpoint.scorer: queue.counts.under_way
            for queue in self._finishing
            if queue.endpoint.name == endpoint.name and queue.counts.under_way
        }
        return self.queue(endpoint).metrics().model_copy(update={"state": state, "finishing": finishing})


async def check_health(registry: EndpointRegistry, client: EndpointClient, done: asyncio.Event) -> None:
    """Request the health URLs of the endpoints in service until ``done``; the breaker of an unhealthy one opens."""
    failed: Counter[str] = Counter()

    async def check(endpoint: Endpoint) -> None:
        problem = await _problem(client.http, endpoint.health_url or "")
        if not problem:
            failed.pop(endpoint.scorer, None)
            client.queue(endpoint).healthy()
            return
        failed[endpoint.scorer] += 1
        if failed[endpoint.scorer] == _FAILURES:
            log.warning("endpoint is unhealthy", endpoint=endpoint.scorer, problem=problem)
        if failed[endpoint.scorer] >= _FAILURES:
            client.queue(endpoint).unhealthy(problem)

    while not done.is_set():
        await asyncio.gather(*(check(endpoint) for endpoint in registry.in_service().values() if endpoint.health_url))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), PERIOD_S)


async def _problem(http: HttpConnections, url: str) -> str:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            answer = await http.send("GET", url, headers={CALL_HEADER: "1"})
    except TimeoutError:
        return f"{url} did not answer within {_DEADLINE_S:g} s"
    except PenstockError as err:
        return f"{url}: {err}"
    return "" if 200 <= answer.status < 300 else f"{url}: HTTP {answer.status}"
