"""Calls to environment servers, each safe to repeat, and which of several servers of one environment gets the next episode."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from penstock.agents.environments.over_http.registry import Listed
from penstock.agents.environments.over_http.wire import Problem
from penstock.protocol.errors import PenstockError
from penstock.protocol.groups import first_problem
from penstock.serving import signature, strict_json
from penstock.serving.http_connections import (
    PASSING,
    Answer,
    ConnectionFailed,
    HttpConnections,
    Retries,
    retry_after_s,
    within,
)

Body = TypeVar("Body", bound=BaseModel)
Session = TypeVar("Session")

_RETRIES = Retries(first_s=0.075, longest_s=3.0)
_FIRST_REST_S, _LONGEST_REST_S = 0.5, 30.0
_FULL_S = 1.0  # between two questions of a server that takes no session
_WAIT_S = 0.25  # for a registration, or for an episode to end


class ServerFull(PenstockError):
    """It takes no session now."""

    def __init__(self, text: str, rest_s: float | None = None) -> None:
        super().__init__(text)
        self.rest_s = rest_s  # as long as it says; None: it does not say


class ServerRefused(PenstockError):
    def __init__(self, url: str, answer: Answer) -> None:
        """Read the answer to a call; its ``code`` is that of `Problem`, empty if the answer was none."""
        try:
            problem = Problem.model_validate(strict_json.loads(answer.body))
            said = "".join(letter if letter.isprintable() else "?" for letter in problem.message[:500])
            self.code, text = problem.code, f": {problem.code}: {said}"
        except (strict_json.AmbiguousJson, ValidationError):
            self.code, text = "", f", {len(answer.body)} bytes that are no Problem"
        self.reason = f"answers HTTP {answer.status}{text}"
        super().__init__(f"{url} {self.reason}")
        self.status, self.retry_after_s = answer.status, retry_after_s(answer.headers)

    @property
    def is_passing(self) -> bool:
        """True where the server is busy, or something before it failed."""
        return self.status in PASSING


class AnswerUnfit(PenstockError):
    """The server answered what the protocol does not allow; no part of it is used."""


class EnvironmentClient:
    def __init__(self, connections: HttpConnections, secrets: Sequence[str] = ()) -> None:
        """With ``secrets`` (``whsec_...``) every call is signed by Standard Webhooks."""
        self._connections = connections
        self._secrets = tuple(secrets)

    async def close(self) -> None:
        await self._connections.close()

    async def call(self, method: str, url: str, call_id: str, body: BaseModel | None, expected: type[Body]) -> Body:
        """Return the answer to one call; the caller sets the deadline.

        ``call_id`` is signed with the body: it binds a call to its episode and its step.
        Raises ServerRefused, AnswerUnfit, and what `HttpConnections.send` raises.
        """
        return _read(await self._send(method, url, call_id, body), url, expected)

    async def call_until_answered(
        self, url: str, call_id: str, body: BaseModel, expected: type[Body], deadline_s: float,
        may_repeat: Callable[[], bool],
    ) -> Body:  # fmt: skip
        """Post a body until it is answered: the server knows a repeated one, and answers it without acting twice.

        Raises as `call` does; after ``deadline_s`` the last failure, and sooner if it is not to be repeated any more.
        """
        ends = time.monotonic() + deadline_s

        def failed(problem: Answer | ConnectionFailed, pause_s: float) -> None:
            if isinstance(problem, ConnectionFailed) and not may_repeat():
                raise ConnectionFailed(url, f"{problem.reason}; its lease has expired, or it is registered no more")
            if time.monotonic() + pause_s > ends:
                raise problem if isinstance(problem, ConnectionFailed) else ServerRefused(url, problem)

        async with within(deadline_s, url, "reply_deadline_s"):
            answer = await _RETRIES.send(partial(self._send, "POST", url, call_id, body), failed)
        return _read(answer, url, expected)

    async def delete(self, url: str, call_id: str) -> None:
        """Send a DELETE; one that does not find its target has succeeded. Raises as `call` does."""
        answer = await self._send("DELETE", url, call_id, None)
        if answer.status not in (200, 204, 404):
            raise ServerRefused(url, answer)

    async def _send(self, method: str, url: str, call_id: str, body: BaseModel | None) -> Answer:
        data = None if body is None else body.model_dump_json().encode()
        headers = signature.headers(self._secrets, message_id=call_id, body=data or b"")
        return await self._connections.send(method, url, data, headers)


def _read(answer: Answer, url: str, expected: type[Body]) -> Body:
    if answer.status != 200:
        raise ServerRefused(url, answer)
    try:
        return expected.model_validate(strict_json.loads(answer.body, strict_json.MAX_DEPTH))
    except strict_json.AmbiguousJson as err:
        problem = str(err)
    except ValidationError as err:
        problem = first_problem(err, "the body", most=200)
    raise AnswerUnfit(f"{url} answers what is no {expected.__name__}: {problem}")


@dataclass(slots=True)
class Server:
    url: str
    running: int = 0  # episodes of this worker
    failures: int = 0  # in a row
    rests_until: float = 0.0  # no new episode before this time
    version: str = ""  # that it was registered with; empty: the URL is from the run file
    capacity: int | None = None  # episodes at once, of all workers together; None: it is not known
    is_leased: bool = True  # False: it is registered no more, so what it does not answer is not repeated
    takes_new: bool = True  # False: it is drained or replaced; its episodes go on

    @property
    def has_place(self) -> bool:
        return self.takes_new and (self.capacity is None or self.running < self.capacity)

    def failed(self, now: float) -> None:
        """Give it no new episode for a while, twice as long after each failure in a row; those of calls in flight are one."""
        if now < self.rests_until:
            return
        self.failures += 1
        self.rests_until = now + min(_FIRST_REST_S * 2.0 ** (self.failures - 1), _LONGEST_REST_S)

    def is_full(self, now: float, retry_after_s: float) -> None:
        """Give it no new episode before it wants one; a server that is full has not failed."""
        self.rests_until = now + min(max(retry_after_s, 0.05), _LONGEST_REST_S)

    def works(self) -> None:
        self.failures, self.rests_until = 0, 0.0


class Servers:
    def __init__(self, urls: Sequence[str] = (), *, registered: str = "", version: str = "") -> None:
        """Start with the URLs of a run file, or with none of a name, to which `read` gives those that are registered.

        Of a name, only servers of ``version`` are used; empty: of any.
        """
        self.turn = asyncio.Lock()  # of those who wait for a place: they get it in the order in which they came
        self._servers = {("", url): Server(url) for url in urls}
        self._name, self._version = registered, version
        self._problem = ""

    def read(self, listed: Listed) -> None:
        """Take over what is registered; a server that is not any more keeps its episodes and gets no others."""
        servers = listed.registered.servers if listed.registered is not None else ()
        states = {(registered.version, registered.url): listed.state(registered) for registered in servers}
        for server in servers:
            known = self._servers.setdefault((server.version, server.url), Server(server.url, version=server.version))
            known.capacity = server.capacity
        for place, server in list(self._servers.items()):
            state = states.get(place, "lease expired")
            server.is_leased = state != "lease expired"
            server.takes_new = state == "in service" and self._version in ("", server.version)
            if place not in states and not server.running:
                del self._servers[place]
        self._problem = listed.problem or "; ".join(
            f"{url} (version {version}): {state}" for (version, url), state in states.items()
        )

    def choose(self, now: float) -> Server | None:
        ready = [server for server in self._servers.values() if server.has_place and server.rests_until <= now]
        return min(ready, key=lambda one: one.running / (one.capacity or 1)) if ready else None

    def ready_in_s(self, now: float) -> float:
        rests = [server.rests_until - now for server in self._servers.values() if server.has_place]
        soonest = max(0.0, min(rests)) if rests else _WAIT_S
        return min(soonest, _WAIT_S) if self._name else soonest  # another one may register meanwhile

    def why_none(self, last: str) -> str:
        if not self._name:
            return last or "all servers rest"
        wanted = f", of which the run expects version {self._version!r} (options.version)" if self._version else ""
        state = self._problem or "not read yet"
        return f"registered environment {self._name!r}: {state}{wanted}{'; ' if last else ''}{last}"


async def take_place(servers: Servers, ends: float) -> Server | None:
    """Return a server, of which a place is taken (``running``); None if there is none by the time ``ends``.

    Those who wait get a place in the order in which they came.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ends - time.monotonic()), servers.turn:
            while True:
                now = time.monotonic()
                server = servers.choose(now)
                if server is not None:
                    server.running += 1
                    return server
                wait_s = max(servers.ready_in_s(now), 0.01) * random.uniform(1.0, 1.2)  # noqa: S311 - not a secret
                await asyncio.sleep(wait_s)
    return None


async def open_session(
    servers: Servers,
    start: Callable[[Server, contextlib.AsyncExitStack], Awaitable[Session]],
    place_deadline_s: float,
    failed: type[PenstockError],
    rests: type[BaseException] = BaseException,
) -> Session:
    """Return what ``start`` returns of a server that takes a session, and wait for one; raises ``failed``.

    Another server is asked where ``start`` raises ServerFull or ConnectionFailed. Where it raises, the place is
    freed, and after an error that ``rests`` is, which may be a cancellation, the server rests first; what ``start`` pushed on its
    stack is closed then, which may take seconds.
    """
    ends, last = time.monotonic() + place_deadline_s, ""
    while (server := await take_place(servers, ends)) is not None:
        undo = contextlib.AsyncExitStack()
        try:
            session = await start(server, undo)
        except BaseException as err:
            server.running -= 1
            if isinstance(err, ServerFull):
                server.is_full(time.monotonic(), err.rest_s or _FULL_S)
            elif isinstance(err, rests):
                server.failed(time.monotonic())
            await undo.aclose()
            if not isinstance(err, (ServerFull, ConnectionFailed)):
                raise
            last = str(err)
        else:
            server.works()
            return session
    raise failed(f"no session within {place_deadline_s:g} s (options.place_deadline_s): {servers.why_none(last)}")
