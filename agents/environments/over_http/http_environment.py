"""`http`: an environment of several turns that a server plays, in any language (docs/environments_over_http.md).

An episode is started on one server, which keeps it until it is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import Field, JsonValue, model_validator

from penstock.agents.environments.episode_environment import (
    Attempt,
    Begun,
    EpisodeEnvironment,
    PlayOptions,
    RowUnfit,
    Site,
)
from penstock.agents.environments.over_http import wire
from penstock.agents.environments.over_http.registry import NAME_PATTERN, RegistryFollower
from penstock.agents.environments.over_http.servers import (
    AnswerUnfit,
    EnvironmentClient,
    Server,
    ServerRefused,
    Servers,
    ServerUnreachable,
    take_place,
)
from penstock.agents.environments.play import Play, Played, Reply, Row, play_episode
from penstock.agents.environments.server_urls import AllowedTargets, ServerUrls, urls_of
from penstock.agents.proxy.messages import Message, RequestRefused
from penstock.agents.proxy.session import EpisodeSession
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.transport import tls
from penstock.protocol.transport.key_value import KeyValue
from penstock.rollout_service.environments.environment import Sampler, ServerRegistry
from penstock.serving import signature
from penstock.serving.http_connections import HttpConnections
from penstock.serving.target_policy import PRIVATE_TARGETS, OwnServer, TargetPolicy

Answer = TypeVar("Answer", wire.Stepped, wire.Scored)

_END_S = 5.0
_KEEP_S = 60.0  # an idle connection; a server that closes it earlier costs a repeated call, and no episode


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
    options: wire.Object
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
        self._steps += 1
        body = wire.Step(step=self._steps, message=wire.written(answer))
        url = f"{self._server.url}/episodes/{self._id}/step"
        stepped = await self._call(url, f"{self._id}.{self._steps}", body, wire.Stepped)
        try:
            return wire.read_reply(stepped)
        except RequestRefused as err:
            raise AnswerUnfit(f"{url} answers messages that are none: {err}") from None

    async def score(self) -> float:
        if not self.scores:
            return 0.0
        url = f"{self._server.url}/episodes/{self._id}/score"
        return (await self._call(url, f"{self._id}.score", wire.Score(step=self._steps), wire.Scored)).reward

    async def _call(self, url: str, call_id: str, body: wire.Step | wire.Score, expected: type[Answer]) -> Answer:
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
    body = wire.Start(
        id=secrets.token_hex(16), episode=wanted.episode, attempt=wanted.attempt, seed=str(wanted.seed),
        version=wanted.version or server.version, deadline_s=limits.start_s + limits.episode_s,
        row=wire.WireRow.of(wanted.row), options=wanted.options,
    )  # fmt: skip
    try:
        try:
            async with asyncio.timeout(limits.start_s):
                started = await client.call("POST", f"{server.url}/episodes", f"{body.id}.start", body, wire.Started)
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
    client: EnvironmentClient, server: Server, episode_id: str, version: str, started: wire.Started, limits: Limits
) -> HttpPlay:
    if version not in ("", started.version):
        raise AnswerUnfit(
            f"{server.url} plays version {started.version!r}, and the run expects {version!r} (options.version)"
        )
    try:
        request = wire.read(started.messages, started.tools)
    except RequestRefused as err:
        raise AnswerUnfit(f"{server.url} starts with messages or tools that are none: {err}") from None
    play = HttpPlay(client, server, episode_id, request.messages, limits)
    play.tools, play.version, play.scores = request.tools, started.version, started.scores
    return play


class HttpOptions(PlayOptions):
    """Where an environment is served, and how."""

    url: ServerUrls = Field(
        default_factory=list,
        description="URL of its server, or a list of the URLs of servers that play the same environment.",
    )
    registered: str = Field(
        "",
        pattern=f"{NAME_PATTERN}|^$",
        description="In place of url: the name under which its servers are registered (penstock env register).",
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="Options of the environment that is served."
    )
    version: str = Field("", max_length=100, description="Version of its rules that this run expects; empty: any.")
    secret_file: Path | None = Field(
        None, description="File with one or two signing keys `whsec_...`; with it every call is signed."
    )
    ca_file: Path | None = Field(
        None,
        description="Certificates (PEM) of the only authorities that https servers are trusted by, such as the ca.pem of penstock certs; "
        "none: those of the system, and PENSTOCK_TLS_CA_FILE.",
    )
    place_deadline_s: float = Field(
        900.0, gt=0, le=86_400,
        description="Seconds that an episode waits for a server with a place, before its time begins.",
    )  # fmt: skip
    start_deadline_s: float = Field(
        120.0, gt=0, le=86_400,
        description="Seconds that a server may take to start an episode, before its time begins.",
    )  # fmt: skip
    max_reply_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, le=64 * 1024 * 1024, description="Longest answer of a server that is read."
    )
    allowed_targets: AllowedTargets = Field(
        PRIVATE_TARGETS,
        description="Networks (CIDR) and host names of servers that may be called; loopback and private ranges unless given. "
        "Link-local and metadata addresses are always refused.",
    )

    @model_validator(mode="after")
    def _has_servers(self) -> HttpOptions:
        if bool(self.url) == bool(self.registered):
            raise ValueError("give either url, or the name under which servers are registered (registered)")
        return self

    def secrets(self) -> tuple[str, ...]:
        return () if self.secret_file is None else signature.read_secrets(self.secret_file, "options.secret_file")


class Http(EpisodeEnvironment):
    name = "http"
    options = HttpOptions

    def __init__(self) -> None:
        super().__init__()
        self._own: tuple[OwnServer, ...] = ()
        self._registry: ServerRegistry | None = None
        self._servers: Servers | None = None
        self._client: EnvironmentClient | None = None

    def never_call(self, servers: Sequence[OwnServer]) -> None:
        self._own = tuple(servers)

    @property
    def registered(self) -> str:
        return "" if self.chosen is None else self.chosen.registered

    def new_registry(self, store: KeyValue) -> RegistryFollower:
        return RegistryFollower(store)

    def use_registry(self, registry: ServerRegistry) -> None:
        self._registry = registry

    def use_model(self, folder: Path, context_tokens: int | None) -> None:
        super().use_model(folder, context_tokens)
        if self.chosen is not None:
            self.connect()

    def connect(self) -> None:
        chosen: HttpOptions = self.chosen
        connections = HttpConnections(
            keep_s=_KEEP_S, policy=TargetPolicy(chosen.allowed_targets, self._own, key="options.allowed_targets"),
            max_answer_bytes=chosen.max_reply_bytes, ca_file=chosen.ca_file,
            ca_key="options.ca_file" if chosen.ca_file else tls.AUTHORITY,
        )  # fmt: skip
        self._client = EnvironmentClient(connections, chosen.secrets())
        self._servers = Servers(urls_of(chosen.url), registered=chosen.registered, version=chosen.version)
        if chosen.registered:
            if self._registry is None:
                raise ConfigError(f"options.registered = {chosen.registered!r}: servers are found on NATS, in a run")
            self._registry.follow(chosen.registered, self._servers.read)

    async def attempt(self, site: Site, begun: Begun, sampler: Sampler) -> Attempt:
        try:
            row = Row.of(begun.task)
        except ValueError as err:
            raise RowUnfit(str(err)) from None
        session = EpisodeSession(
            begun.name, site.model, sampler, begun.task.sampling, self.limits(), begun.sampling_seed
        )
        version = ""
        try:
            play = await self.start(begun.name, begun.attempt, begun.seed, row)
            version = play.version
            played = await play_episode(session, play, self.settings, site.executor)
        except RowRefused as err:
            raise RowUnfit(str(err)) from None
        except NotStarted as err:
            played = Played("failed", problem=str(err))
        finally:
            made = session.end()
        return Attempt(session, made, played, version)

    async def start(self, episode: str, attempt: int, seed: int, row: Row) -> HttpPlay:
        if self._client is None or self._servers is None:
            raise RowUnfit(
                'http needs a server: write [environment.define.NAME] with type = "http" and options = { url = "http://..." }, '
                "and name that"
            )
        chosen: HttpOptions = self.chosen
        limits = Limits(
            chosen.place_deadline_s, chosen.start_deadline_s, self.settings.reply_deadline_s,
            self.settings.episode_deadline_s,
        )  # fmt: skip
        wanted = Wanted(episode, attempt, seed, row, chosen.options, chosen.version)
        return await start_episode(self._client, self._servers, wanted, limits)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


HTTP = Http()
