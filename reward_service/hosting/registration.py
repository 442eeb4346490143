"""Register an endpoint at a reward service over HTTP, renew its lease, and unregister it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from penstock.protocol.errors import PenstockError
from penstock.serving import lease
from penstock.serving.http_connections import Answer, AnswerRefused, ConnectionFailed, HttpConnections
from penstock.serving.lease import say

_TRY_S = 5.0
_KEEP_S = 1.0  # an idle connection
_PASSES = frozenset({429, 502, 503, 504})


class NotRegistered(PenstockError):
    """The reward service refused the endpoint or could not be reached."""


class _NotYet(PenstockError):
    """No replica answers, or those that do are busy."""


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


async def register(service: ServiceAddress, offer: Offer) -> None:
    """Register an endpoint, once the service answers; says on stderr what it waits for. Raises NotRegistered."""

    async def attempt() -> None:
        try:
            answer = await ask("POST", "/v1/endpoints", offer.to_json())
        except ConnectionFailed as err:
            raise _NotYet(f"no answer ({err.reason})") from None
        if problem := _problem(answer, 300):
            if answer.status in _PASSES:
                raise _NotYet(problem)
            raise NotRegistered(f"the reward service at {service.url} refused reward {offer.name!r}: {problem}")

    def waiting(err: PenstockError) -> str:
        return (
            f"waiting for the reward service at {service.url}: {str(err)[:200]}; start it in another terminal with: "
            f"penstock reward service run.toml (gives up after {lease.WAIT_S:.0f} s)"
        )

    async with _asking(service) as ask:
        try:
            await lease.until_there(attempt, _NotYet, waiting)
        except _NotYet as err:
            raise NotRegistered(
                f"reward {offer.name!r} could not be registered at {service.url} within {lease.WAIT_S:.0f} s: {err}; "
                "is the reward service running there? (penstock reward service)"
            ) from None


async def keep(service: ServiceAddress, offer: Offer) -> None:
    """Renew the lease until cancelled, or until another endpoint has taken over the name.

    While no replica answers, it is tried again, and stderr says so. The lease may expire meanwhile; the next successful
    renewal, or a new registration if the service no longer knows the endpoint, puts it back into service.
    """
    assert offer.lease_s is not None
    renewals = lease.Renewals()
    hint = (
        f"Its groups wait once the lease has expired, {offer.lease_s:g} s after the last renewal; it is tried again. "
        "Where the reward service runs elsewhere now, start this with all its URLs: --register URL,URL"
    )

    async def renew() -> bool:
        try:
            body = {"version": offer.version, "url": offer.url}
            answer = await ask("POST", f"/v1/endpoints/{offer.name}/lease", body)
            if answer.status == HTTPStatus.NOT_FOUND:
                answer = await ask("POST", "/v1/endpoints", offer.to_json())
            elif answer.status == HTTPStatus.CONFLICT:
                say(f"reward {offer.name} was taken over: {_text(answer)[:300]}")
                return False
            problem = _problem(answer, 200)
        except ConnectionFailed as err:
            problem = f"no answer ({err.reason})"
        renewals.tried(f"reward {offer.name}", problem and f"{service.url}: {problem}", hint)
        return True

    async with _asking(service) as ask:
        await lease.keep(offer.lease_s, renew)


async def unregister(service: ServiceAddress, offer: Offer) -> None:
    """Unregister the endpoint if it still holds the name; if the service is unreachable, write one line to stderr."""
    async with _asking(service) as ask:
        try:
            await ask("DELETE", f"/v1/endpoints/{offer.name}?url={quote(offer.url, safe='')}", None)
        except ConnectionFailed as err:
            where = f"{service.url} is unreachable ({err.reason})"
            say(f"reward {offer.name} was not unregistered: {where}; its lease will expire")


_Ask = Callable[[str, str, Mapping[str, Any] | None], Awaitable[Answer]]  # method, path, body


@contextlib.asynccontextmanager
async def _asking(service: ServiceAddress) -> AsyncIterator[_Ask]:
    """Yield a call that returns the first replica's answer that is no passing failure, else the last.

    It raises ConnectionFailed if no replica answers.
    """
    headers = {"authorization": f"Bearer {service.token}"} if service.token else {}
    connections = HttpConnections(keep_s=_KEEP_S, headers=headers)

    async def ask(method: str, path: str, body: Mapping[str, Any] | None) -> Answer:
        failed = ConnectionFailed(service.url, "there is no URL of a reward service")
        passing: Answer | None = None
        for url in service.urls:
            try:
                async with asyncio.timeout(_TRY_S):
                    answer = await connections.send(
                        method, url + path, None if body is None else json.dumps(body).encode()
                    )
            except TimeoutError:
                failed = ConnectionFailed(url, f"within {_TRY_S:g} s")
            except (ConnectionFailed, AnswerRefused) as err:
                failed = err if isinstance(err, ConnectionFailed) else ConnectionFailed(url, str(err))
            else:
                if answer.status not in _PASSES:
                    return answer
                passing = answer
        if passing is None:
            raise failed
        return passing

    try:
        yield ask
    finally:
        await connections.close()


def _problem(answer: Answer, num_chars: int) -> str:
    return "" if 200 <= answer.status < 300 else f"HTTP {answer.status}: {_text(answer)[:num_chars]}"


def _text(answer: Answer) -> str:
    return answer.body.decode("utf-8", "replace")
