"""All endpoints this replica calls: a line for each, and what happens when one is replaced or goes away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.endpoint_http import EndpointHttp
from penstock.reward_service.endpoints.endpoint_queue import Line, LiveFigures
from penstock.reward_service.endpoints.secret_store import SecretStore
from penstock.reward_service.endpoints.target_policy import TargetPolicy
from penstock.reward_service.endpoints.wire import GroupToScore
from penstock.reward_service.errors import RewardUnavailable
from penstock.reward_service.scores import Outcome


class EndpointClient:
    """Calls endpoints. Use it as an async context manager; one for the whole process."""

    def __init__(self, policy: TargetPolicy, *, max_response_bytes: int, secrets: SecretStore | None = None) -> None:
        """``policy`` says which addresses may be called; longer answers than the maximum are not read."""
        self._secrets = secrets
        self._lines: dict[str, Line] = {}
        self._finishing: list[Line] = []  # earlier versions with calls under way
        self.http = EndpointHttp(policy, max_response_bytes=max_response_bytes)

    async def __aenter__(self) -> EndpointClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for line in [*self._lines.values(), *self._finishing]:
            await line.close()
        await self.http.close()

    def follow(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Take note of what is registered now: lines of replaced and unregistered endpoints end."""
        for name, line in list(self._lines.items()):
            if name in endpoints:
                self.line(endpoints[name])
            elif not line.idle:
                line.turn_out(RewardUnavailable(f"endpoint {name} was unregistered or drained meanwhile"))

    def line(self, endpoint: Endpoint) -> Line:
        """Return the line before an endpoint, the scorer of its groups.

        When the endpoint was replaced, its new version takes over who waits; calls under way end where they began.
        """
        line = self._lines.get(endpoint.name)
        if line is None or (line.endpoint is not endpoint and line.endpoint != endpoint):
            secrets = self._secrets.of(endpoint) if self._secrets is not None else None
            new = Line(endpoint, secrets, self.http)
            self._lines[endpoint.name] = new
            if line is not None:
                self._finishing = [*(old for old in self._finishing if not old.idle), line]
                line.hand_over(new)
            return new
        return line

    def figures(self, endpoint: Endpoint, state: str = "ok") -> LiveFigures:
        """Return how an endpoint has been doing; ``state`` is what the registry says of it."""
        finishing = {
            line.endpoint.scorer: line.num_under_way
            for line in self._finishing
            if line.endpoint.name == endpoint.name and line.num_under_way
        }
        return self.line(endpoint).figures().model_copy(update={"state": state, "finishing": finishing})

    async def call(self, endpoint: Endpoint, groups: Sequence[GroupToScore]) -> list[Outcome]:
        """Ask an endpoint about a few rows at once, as a test by hand does."""
        return await self.line(endpoint).ask_now(groups)
