"""Environments of several turns: a play for each episode, answered through the token-exact recorder of `proxy/`.

A new one is one file with an instance of `TurnEnvironment` at its top level, found like every environment (`environment.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from penstock.agents.environments.episode_environment import (
    Attempt,
    Begun,
    EpisodeEnvironment,
    NotStarted,
    RowUnfit,
    Site,
)
from penstock.agents.environments.play import Play, Played, Row, play_episode
from penstock.agents.proxy.session import EpisodeSession
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.environments.environment import Sampler


class PlayEnvironment(EpisodeEnvironment):
    """Plays each episode of a group turn by turn, all with the same seed."""

    @abstractmethod
    async def begin_play(self, episode: str, attempt: int, seed: int, row: Row) -> Play:
        """Return the play of an attempt at an episode, before its time begins; raises NotStarted, or anything for an unfit row."""

    async def attempt(self, site: Site, begun: Begun, sampler: Sampler) -> Attempt:
        session = EpisodeSession(
            begun.name, site.model, sampler, begun.task.sampling, self.limits(), begun.sampling_seed, self._images
        )
        try:
            play = await self.begin_play(begun.name, begun.attempt, begun.seed, Row.of(begun.task))
        except NotStarted as err:
            return Attempt(session, session.end(), Played("failed", problem=str(err)))
        except RowUnfit:
            raise
        except (Exception, SystemExit) as err:  # noqa: BLE001 - an author's code, which gets rows of any kind
            raise RowUnfit(f"{type(err).__name__}: {err}") from None
        try:
            played = await play_episode(session, play, self.settings, site.executor)
        finally:
            made = session.end()  # where it is cancelled too: what the engine samples for it is cancelled
        return Attempt(session, made, played, play.version)


class TurnEnvironment(PlayEnvironment):
    """Makes a play for each episode of a group."""

    @abstractmethod
    def play(self, seed: int, row: Row, options: Any) -> Play:
        """Return a new play; equal arguments give the same world. ``options`` is an instance of ``self.options``.

        Raises ValueError for a row that no play can be made of: the group is dead-lettered with the text.
        """

    async def begin_play(self, episode: str, attempt: int, seed: int, row: Row) -> Play:
        return self.play(seed, row, self.chosen or self.options())


class ServerEnvironment(TurnEnvironment):
    """An environment of servers: all its plays share the connections that ``sessions_class`` opens."""

    sessions_class: ClassVar[type[Any]]  # made of the options and the run's servers; has a coroutine ``close``
    play_class: ClassVar[type[Any]]  # made of seed, row, options and the sessions

    def __init__(self) -> None:
        super().__init__()
        self.sessions: Any = None

    def use_model(self, folder: Path, context_tokens: int | None) -> None:
        super().use_model(folder, context_tokens)
        if self.chosen is not None:
            self.sessions = self.sessions_class(self.chosen, self.own_servers)

    def play(self, seed: int, row: Row, options: Any) -> Play:
        if self.sessions is None:
            raise ValueError(self.needs_definition("options.url"))
        return self.play_class(seed, row, options, self.sessions)

    async def close(self) -> None:
        if self.sessions is not None:
            await self.sessions.close()


def check_reply_deadline(
    name: str, definition: EnvironmentDefinition, call_deadline_s: float, answers_within_s: float
) -> None:
    least = call_deadline_s + answers_within_s
    if definition.reply_deadline_s <= least:
        raise ConfigError(
            f"environment.define.{name}.reply_deadline_s = {definition.reply_deadline_s:g}: expected more than {least:g}, which is "
            f"options.call_deadline_s and {answers_within_s:g} s to see whether the server still answers; a call that takes too long "
            "is an error for the policy, a reply that does begins the episode again"
        )
