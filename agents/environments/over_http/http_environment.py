"""`http`: an environment of several turns that a server plays, in any language (docs/environments_over_http.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, JsonValue, model_validator

from penstock.agents.environments.episode_environment import (
    Attempt,
    Begun,
    EpisodeEnvironment,
    PlayOptions,
    RowUnfit,
    Site,
)
from penstock.agents.environments.over_http.client import EnvironmentClient
from penstock.agents.environments.over_http.http_play import (
    HttpPlay,
    Limits,
    NotStarted,
    RowRefused,
    Wanted,
    start_episode,
)
from penstock.agents.environments.over_http.registry import NAME_PATTERN, RegistryFollower
from penstock.agents.environments.over_http.servers import Servers
from penstock.agents.environments.play import Row
from penstock.agents.environments.play_episode import Played, play_episode
from penstock.agents.environments.server_urls import AllowedTargets, ServerUrls, urls_of
from penstock.agents.proxy.session import EpisodeSession
from penstock.protocol.errors import ConfigError
from penstock.protocol.transport import http_tls
from penstock.protocol.transport.key_value import KeyValue
from penstock.rollout_service.environments.environment import Sampler, ServerRegistry
from penstock.serving import signature
from penstock.serving.http_connections import HttpConnections
from penstock.serving.target_policy import PRIVATE_TARGETS, OwnServer, TargetPolicy

_KEEP_S = 60.0  # an idle connection; a server that closes it earlier costs a repeated call, and no episode


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
        900.0,
        gt=0,
        le=86_400,
        description="Seconds that an episode waits for a server with a place, before its time begins.",
    )
    start_deadline_s: float = Field(
        120.0,
        gt=0,
        le=86_400,
        description="Seconds that a server may take to start an episode, before its time begins.",
    )
    max_reply_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, le=64 * 1024 * 1024, description="Longest answer of a server that is read."
    )
    allowed_targets: AllowedTargets = Field(
        PRIVATE_TARGETS,
        description="Networks (CIDR) and host names of servers that may be called; loopback and private ranges unless given. "
        "Link-local and metadata addresses are always refused.",
    )

    @property
    def urls(self) -> tuple[str, ...]:
        return urls_of(self.url)

    @model_validator(mode="after")
    def _has_servers(self) -> HttpOptions:
        if bool(self.urls) == bool(self.registered):
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
        """The name under which its servers are registered; empty: the run file has their URLs."""
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
            keep_s=_KEEP_S,
            policy=TargetPolicy(chosen.allowed_targets, self._own, key="options.allowed_targets"),
            max_answer_bytes=chosen.max_reply_bytes,
            ca_file=chosen.ca_file,
            ca_key="options.ca_file" if chosen.ca_file else http_tls.AUTHORITY,
        )
        self._client = EnvironmentClient(connections, chosen.secrets())
        self._servers = Servers(chosen.urls, registered=chosen.registered, version=chosen.version)
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
        """Return an episode that a server has started; raises NotStarted, RowRefused, or RowUnfit without a server."""
        if self._client is None or self._servers is None:
            raise RowUnfit(
                'http needs a server: write [environment.define.NAME] with type = "http" and options = { url = "http://..." }, '
                "and name that"
            )
        chosen: HttpOptions = self.chosen
        limits = Limits(
            chosen.place_deadline_s,
            chosen.start_deadline_s,
            self.settings.reply_deadline_s,
            self.settings.episode_deadline_s,
        )
        wanted = Wanted(episode, attempt, seed, row, chosen.options, chosen.version)
        return await start_episode(self._client, self._servers, wanted, limits)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


HTTP = Http()
