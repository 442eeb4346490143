"""An episode at an environment server, as a `Play`: started on one server, which keeps it until it is ended."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.agents.environments.over_http.client import (
    AnswerUnfit,
    EnvironmentClient,
    ServerRefused,
    ServerUnreachable,
)
from penstock.agents.environments.over_http.servers import Server, Servers, take_place
from penstock.agents.environments.over_http.wire import (
    Object,
    Score,
    Scored,
    Start,
    Started,
    Step,
    Stepped,
    WireRow,
    read,
    read_reply,
    written,
)
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.proxy.messages import Message, RequestRefused
from penstock.protocol.errors import PenstockError

Answer = TypeVar("Answer", Stepped, Scored)

_END_S = 5.0


class NotStarted(PenstockError):
    """No server started the episode; another attempt may succeed."""


class RowRefused(PenstockError):
    """The server can make no episode of the row; another attempt would not help."""


@dataclass(frozen=True, slots=True)
class Wanted:
    episode: str  # the same in every attempt
    attempt: int
    seed: int
    row: Row
    options: Object
    version: str  # of the rules; empty: any


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of each phase of an episode."""

    place_s: float  # to find a server with a place
    start_s: float  # of the server, for one start
    reply_s: float  # of the server, for one step, its repetitions included
    episode_s: float  # after the start


class HttpPlay(Play):
    def __init__(
        self, client: EnvironmentClient, server: Server, episode_id: str, first: Sequence[Message], limits: Limits
    ) -> None:
        self.version = ""
        self._client, self._server, self._id = client, server, episode_id
        self._first, self._limits = first, limits
        self._steps = 0
        self.scores = False  # True: the server says what the last step gets where a limit of the run ended the episode

    def start(self) -> Sequence[Message]:
        return self._first

    async def step(self, answer: Message) -> Reply:
        """Return the server's reply; the same step is sent until it is answered. Raises PenstockError."""
        self._steps += 1
        body = Step(step=self._steps, message=written(answer))
        url = f"{self._server.url}/episodes/{self._id}/step"
        stepped = await self._call(url, f"{self._id}.{self._steps}", body, Stepped)
        try:
            return read_reply(stepped)
        except RequestRefused as err:
            raise AnswerUnfit(f"{url} answers messages that are none: {err}") from None

    async def score(self) -> float:
        """Return the server's score, which is asked until it is answered; 0 where it has none. Raises PenstockError."""
        if not self.scores:
            return 0.0
        url = f"{self._server.url}/episodes/{self._id}/score"
        return (await self._call(url, f"{self._id}.score", Score(step=self._steps), Scored)).reward

    async def _call(self, url: str, call_id: str, body: Step | Score, expected: type[Answer]) -> Answer:
        try:
            return await self._client.call_until_answered(
                url, call_id, body, expected, self._limits.reply_s, lambda: self._server.is_leased
            )
        except ServerUnreachable:
            self._server.failed(time.monotonic())
            raise

    async def close(self) -> None:
        self._server.running -= 1
        await end_episode(self._client, self._server, self._id)


async def end_episode(client: EnvironmentClient, server: Server, episode_id: str) -> None:
    url = f"{server.url}/episodes/{episode_id}"
    try:
        async with asyncio.timeout(_END_S):
            await client.delete(url, f"{episode_id}.end")
    except TimeoutError:
        raise ServerUnreachable(f"{url} was not ended within {_END_S:g} s") from None


async def start_episode(client: EnvironmentClient, servers: Servers, wanted: Wanted, limits: Limits) -> HttpPlay:
    """Start an episode at a server that has a place, and wait for one; raises NotStarted, or RowRefused."""
    ends, last = time.monotonic() + limits.place_s, ""
    while True:
        server = await take_place(servers, ends)
        if server is None:
            raise NotStarted(
                f"no server had a place within {limits.place_s:g} s (place_deadline_s): {servers.why_none(last)}"
            )
        try:
            return await _start_at(server, client, wanted, limits)
        except ServerUnreachable as err:
            server.failed(time.monotonic())
            last = str(err)
        except ServerRefused as err:
            if err.code == "row_refused":
                raise RowRefused(str(err)) from None
            if err.is_passing:
                server.is_full(time.monotonic(), err.retry_after_s or 1.0)
            elif (
                err.code == "wrong_version" and server.version and not wanted.version
            ):  # it was replaced, not registered
                server.failed(time.monotonic())
            elif err.code:  # of this episode, and no reason to keep others away
                raise NotStarted(str(err)) from None
            else:  # of a gateway, before servers that are being replaced
                server.failed(time.monotonic())
            last = str(err)


async def _start_at(server: Server, client: EnvironmentClient, wanted: Wanted, limits: Limits) -> HttpPlay:
    body = Start(
        id=secrets.token_hex(16),
        episode=wanted.episode,
        attempt=wanted.attempt,
        seed=str(wanted.seed),
        version=wanted.version or server.version,
        deadline_s=limits.start_s + limits.episode_s,
        row=WireRow.of(wanted.row),
        options=wanted.options,
    )
    try:
        try:
            async with asyncio.timeout(limits.start_s):
                started = await client.call("POST", f"{server.url}/episodes", f"{body.id}.start", body, Started)
        except TimeoutError:
            raise ServerUnreachable(
                f"{server.url} did not start an episode within {limits.start_s:g} s (start_deadline_s)"
            ) from None
        play = _read_play(client, server, body.id, wanted.version, started, limits)
    except BaseException as err:
        server.running -= 1
        if not isinstance(err, ServerRefused):  # it may have been started
            with contextlib.suppress(PenstockError):
                await end_episode(client, server, body.id)
        if isinstance(err, PenstockError) and not isinstance(err, (ServerRefused, ServerUnreachable)):
            raise NotStarted(str(err)) from None
        raise
    server.works()
    return play


def _read_play(
    client: EnvironmentClient, server: Server, episode_id: str, version: str, started: Started, limits: Limits
) -> HttpPlay:
    if version not in ("", started.version):
        raise AnswerUnfit(
            f"{server.url} plays version {started.version!r}, and the run expects {version!r} (options.version)"
        )
    try:
        request = read(started.messages, started.tools)
    except RequestRefused as err:
        raise AnswerUnfit(f"{server.url} starts with messages or tools that are none: {err}") from None
    play = HttpPlay(client, server, episode_id, request.messages, limits)
    play.tools, play.version, play.scores = request.tools, started.version, started.scores
    return play
