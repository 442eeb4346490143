"""Register an endpoint at a reward service over HTTP, renew its lease, and unregister it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from penstock.protocol.errors import PenstockError
from penstock.serving import hosting
from penstock.serving.hosting import ServerRegistration, say
from penstock.serving.http_connections import PASSING, Answer, ConnectionFailed, HttpConnections, within

_TRY_S = 5.0
_KEEP_S = 1.0  # an idle connection


class NotRegistered(PenstockError):
    """The reward service refused the endpoint or could not be reached."""


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where a reward service's API is, and its bearer token.

    ``url`` may be several with commas between them, one of each replica: they share their endpoints, so that any of
    them registers one and renews its lease.
    """

    url: str
    token: str = ""

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url.strip().rstrip("/") for url in self.url.split(",") if url.strip())


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
        fields = {"name": self.name, "url": self.url, "version": self.version, "lease_s": self.lease_s, "replace": True}
        return {**self.more, **fields, "secrets": list(self.secrets)}


class RewardRegistration(ServerRegistration):
    hint = (
        "Its groups wait then. Where the reward service runs elsewhere now, start this with all its URLs: "
        "--register URL,URL"
    )

    def __init__(self, service: ServiceAddress, offer: Offer) -> None:
        self.what, self.lease_s = f"reward {offer.name}", offer.lease_s
        self._service, self._offer = service, offer

    async def register(self) -> None:
        """Register the endpoint, once the service answers; says on stderr what it waits for. Raises NotRegistered."""
        url, name = self._service.url, self._offer.name

        def waiting(err: ConnectionFailed) -> str:
            return (
                f"waiting for the reward service at {url}: {err.reason[:200]}; start it in another terminal with: "
                f"penstock reward service run.toml (gives up after {hosting.WAIT_S:.0f} s)"
            )

        try:
            self._check(await hosting.until_there(self._offered, ConnectionFailed, waiting))
        except ConnectionFailed as err:
            raise NotRegistered(
                f"reward {name!r} could not be registered at {url} within {hosting.WAIT_S:.0f} s: {err.reason}; "
                "is the reward service running there? (penstock reward service)"
            ) from None

    async def _renew(self) -> bool:
        """Renew the lease; register again where the service does not know the endpoint any more."""
        body = {"version": self._offer.version, "url": self._offer.url}
        answer = await self._ask("POST", f"/{self._offer.name}/lease", body)
        if answer.status == HTTPStatus.CONFLICT:
            say(f"{self.what} was taken over: {_text(answer)}")
            return False
        self._check(await self._offered() if answer.status == HTTPStatus.NOT_FOUND else answer)
        return True

    async def _remove(self) -> None:
        answer = await self._ask("DELETE", f"/{self._offer.name}?url={quote(self._offer.url, safe='')}")
        if answer.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
            self._check(answer)

    async def _offered(self) -> Answer:
        return await self._ask("POST", "", self._offer.to_json())

    def _check(self, answer: Answer) -> None:
        if not 200 <= answer.status < 300:
            raise NotRegistered(
                f"the reward service at {self._service.url} refused reward {self._offer.name!r}: HTTP {answer.status}: "
                f"{_text(answer)}"
            )

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Return the first replica's answer, unless it is busy; raises ConnectionFailed, of the last one, without any."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self._service.token}"} if self._service.token else {}
        connections = HttpConnections(keep_s=_KEEP_S, headers=headers)
        problem = "there is no URL of a reward service"
        try:
            for url in (f"{url}/v1/endpoints{path}" for url in self._service.urls):
                try:
                    async with within(_TRY_S, url):
                        answer = await connections.send(method, url, data)
                except PenstockError as err:
                    problem = f"no answer ({err})"
                else:
                    if answer.status not in PASSING:
                        return answer
                    problem = f"HTTP {answer.status}: {_text(answer)}"
        finally:
            await connections.close()
        raise ConnectionFailed(self._service.url, problem)


def _text(answer: Answer) -> str:
    return answer.body.decode("utf-8", "replace")[:300]
