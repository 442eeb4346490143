"""All endpoints that this replica calls: a queue for each, replaced with the endpoint's version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.endpoint_queue import EndpointMetrics, EndpointQueue
from penstock.reward_service.endpoints.secret_store import SecretStore
from penstock.reward_service.endpoints.wire import GroupToScore
from penstock.reward_service.errors import RewardUnavailable
from penstock.reward_service.metrics import Timings
from penstock.reward_service.scores import Outcome
from penstock.serving.http_connections import HttpConnections
from penstock.serving.target_policy import TargetPolicy

_KEEP_S = 5.0  # an idle connection


class EndpointClient:
    """Calls endpoints. Use it as an async context manager; one for the whole process."""

    def __init__(self, policy: TargetPolicy, *, max_response_bytes: int, secrets: SecretStore | None = None) -> None:
        """``policy`` decides which addresses may be called; longer answers than the maximum are not read."""
        self._secrets = secrets
        self._queues: dict[str, EndpointQueue] = {}
        self._finishing: list[EndpointQueue] = []  # earlier versions with calls in progress
        self.http = HttpConnections(
            keep_s=_KEEP_S,
            policy=policy,
            max_answer_bytes=max_response_bytes,
            max_answer_key="reward_service.max_response_bytes",
        )

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
        """Return the metrics of an endpoint; ``state`` comes from the registry."""
        finishing = {
            queue.endpoint.scorer: queue.num_in_progress
            for queue in self._finishing
            if queue.endpoint.name == endpoint.name and queue.num_in_progress
        }
        return self.queue(endpoint).metrics().model_copy(update={"state": state, "finishing": finishing})

    def timings(self, endpoint: Endpoint) -> Timings:
        """Return the durations of an endpoint's calls."""
        return self.queue(endpoint).timings

    async def call(self, endpoint: Endpoint, groups: Sequence[GroupToScore]) -> list[Outcome]:
        """Score a few rows at once, as a manual test does."""
        return await self.queue(endpoint).call_now(groups)
