"""`http`: an environment of several turns that a server plays, in any language (docs/environments_over_http.md).

An episode is started on one server, which keeps it until it is ended.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import Field, JsonValue, model_validator

from penstock.agents.environments.episode_environment import NotStarted, RowUnfit
from penstock.agents.environments.over_http import wire
from penstock.agents.environments.over_http.registry import NAME_PATTERN, RegistryFollower
from penstock.agents.environments.over_http.servers import (
    AnswerUnfit,
    EnvironmentClient,
    Server,
    ServerFull,
    ServerRefused,
    Servers,
    open_session,
)
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.environments.shared_options import ServerUrls, TargetOptions, urls_of
from penstock.agents.environments.turn_environment import PlayEnvironment
from penstock.agents.proxy.messages import Message, RequestRefused
from penstock.protocol.config.environment_settings import EpisodeSettings
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.transport import tls
from penstock.protocol.transport.key_value import KeyValue
from penstock.rollout_service.environments.environment import ServerRegistry
from penstock.serving import signature
from penstock.serving.http_connections import ConnectionFailed, HttpConnections, within
from penstock.serving.target_policy import OwnServer

Answer = TypeVar("Answer", wire.Stepped, wire.Scored)

_END_S = 5.0
_KEEP_S = 60.0  # an idle connection; a server that closes it earlier costs a repeated call, and no episode


class HttpOptions(TargetOptions):
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

    @model_validator(mode="after")
    def _has_servers(self) -> HttpOptions:
        if bool(self.url) == bool(self.registered):
            raise ValueError("give either url, or the name under which servers are registered (registered)")
        return self

    def secrets(self) -> tuple[str, ...]:
        return signature.read_secrets(self.secret_file, "options.secret_file")


class Sessions:
    """The servers that play an environment, and the episodes that are started there."""

    def __init__(self, options: HttpOptions, settings: EpisodeSettings, own_servers: Sequence[OwnServer]) -> None:
        connections = HttpConnections(
            keep_s=_KEEP_S, policy=options.policy(own_servers),
            max_answer_bytes=options.max_reply_bytes, ca_file=options.ca_file,
            ca_key="options.ca_file" if options.ca_file else tls.AUTHORITY,
        )  # fmt: skip
        self.client = EnvironmentClient(connections, options.secrets())
        self.servers = Servers(urls_of(options.url), registered=options.registered, version=options.version)
        self.settings = settings
        self._options = options

    async def open(self, episode: str, attempt: int, seed: int, row: Row) -> HttpPlay:
        """Start an episode at a server that has a place, and wait for one; raises NotStarted, or RowUnfit."""

        async def start(server: Server, undo: contextlib.AsyncExitStack) -> HttpPlay:
            body = wire.Start(
                id=secrets.token_hex(16), episode=episode, attempt=attempt, seed=str(seed),
                version=self._options.version or server.version,
                deadline_s=self._options.start_deadline_s + self.settings.episode_deadline_s,
                row=wire.WireRow.of(row), options=self._options.options,
            )  # fmt: skip
            return await self._start_at(server, body, undo)

        place_s = self._options.place_deadline_s
        try:
            return await open_session(self.servers, start, place_s, NotStarted, rests=ConnectionFailed)
        except PenstockError as err:
            raise NotStarted(str(err)) from None

    async def _start_at(self, server: Server, body: wire.Start, undo: contextlib.AsyncExitStack) -> HttpPlay:
        url, version = f"{server.url}/episodes", self._options.version
        undo.push_async_callback(self._end_quietly, server, body.id)  # it may have been started
        try:
            async with within(self._options.start_deadline_s, url, "options.start_deadline_s"):
                started = await self.client.call("POST", url, f"{body.id}.start", body, wire.Started)
        except ServerRefused as err:
            undo.pop_all()
            raise self._refused(err, server) from None
        if version not in ("", started.version):
            raise AnswerUnfit(
                f"{server.url} plays version {started.version!r}, and the run expects {version!r} (options.version)"
            )
        return HttpPlay(self, server, body.id, started)

    def _refused(self, err: ServerRefused, server: Server) -> Exception:
        """Return what a refused start means: of the row, of this attempt, or of the server."""
        if err.code == "row_refused":
            return RowUnfit(str(err))
        if err.is_passing:
            return ServerFull(str(err), err.retry_after_s or None)
        if not err.code or (err.code == "wrong_version" and server.version and not self._options.version):
            # a gateway before servers that are being replaced; an old registration
            return ConnectionFailed(server.url, err.reason)
        return NotStarted(str(err))

    async def _end_quietly(self, server: Server, episode_id: str) -> None:
        with contextlib.suppress(PenstockError):
            await self.end(server, episode_id)

    async def end(self, server: Server, episode_id: str) -> None:
        url = f"{server.url}/episodes/{episode_id}"
        async with within(_END_S, url):
            await self.client.delete(url, f"{episode_id}.end")


class HttpPlay(Play):
    def __init__(self, sessions: Sessions, server: Server, episode_id: str, started: wire.Started) -> None:
        """Take over an episode that was started; raises AnswerUnfit."""
        try:
            request = wire.read(started.messages, started.tools)
        except RequestRefused as err:
            raise AnswerUnfit(f"{server.url} starts with messages or tools that are none: {err}") from None
        self._first, self.tools, self.version = request.messages, request.tools, started.version
        self._scores = started.scores
        self._sessions, self._server, self._id = sessions, server, episode_id
        self._steps = 0

    def start(self) -> Sequence[Message]:
        return self._first

    async def step(self, answer: Message) -> Reply:
        self._steps += 1
        body = wire.Step(step=self._steps, message=wire.written(answer))
        stepped = await self._call("step", str(self._steps), body, wire.Stepped)
        try:
            return wire.read_reply(stepped)
        except RequestRefused as err:
            raise AnswerUnfit(f"{self._url('step')} answers messages that are none: {err}") from None

    async def score(self) -> float:
        if not self._scores:
            return 0.0
        return (await self._call("score", "score", wire.Score(step=self._steps), wire.Scored)).reward

    def _url(self, action: str) -> str:
        return f"{self._server.url}/episodes/{self._id}/{action}"

    async def _call(self, action: str, call: str, body: wire.Step | wire.Score, expected: type[Answer]) -> Answer:
        try:
            return await self._sessions.client.call_until_answered(
                self._url(action), f"{self._id}.{call}", body, expected, self._sessions.settings.reply_deadline_s,
                lambda: self._server.is_leased,
            )  # fmt: skip
        except ConnectionFailed:
            self._server.failed(time.monotonic())
            raise

    async def close(self) -> None:
        self._server.running -= 1
        await self._sessions.end(self._server, self._id)


class Http(PlayEnvironment):
    name = "http"
    options = HttpOptions

    def __init__(self) -> None:
        super().__init__()
        self._registry: ServerRegistry | None = None
        self.sessions: Sessions | None = None

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
        self.sessions = Sessions(self.chosen, self.settings, self.own_servers)
        if self.registered:
            if self._registry is None:
                raise ConfigError(f"options.registered = {self.registered!r}: servers are found on NATS, in a run")
            self._registry.follow(self.registered, self.sessions.servers.read)

    async def begin_play(self, episode: str, attempt: int, seed: int, row: Row) -> HttpPlay:
        if self.sessions is None:
            raise RowUnfit(self.needs_definition('options = { url = "http://..." }'))
        return await self.sessions.open(episode, attempt, seed, row)

    async def close(self) -> None:
        if self.sessions is not None:
            await self.sessions.client.close()


HTTP = Http()
