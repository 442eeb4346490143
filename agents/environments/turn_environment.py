"""Environments of several turns: a play for each episode, answered through the token-exact recorder of `proxy/`.

A new one is one file with an instance of `TurnEnvironment` at its top level, found like every environment (`environment.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from penstock.agents.environments.episode_environment import (
    Attempt,
    Begun,
    EpisodeEnvironment,
    RowUnfit,
    Site,
)
from penstock.agents.environments.play import Play, Row
from penstock.agents.environments.play_episode import play_episode
from penstock.agents.proxy.session import EpisodeSession
from penstock.rollout_service.environments.environment import Sampler


class TurnEnvironment(EpisodeEnvironment):
    """Makes a play for each episode of a group, all with the same seed."""

    @abstractmethod
    def play(self, seed: int, row: Row, options: Any) -> Play:
        """Return a new play; equal arguments give the same world. ``options`` is an instance of ``self.options``.

        Raises ValueError for a row that no play can be made of: the group is dead-lettered with the text.
        """

    async def attempt(self, site: Site, begun: Begun, sampler: Sampler) -> Attempt:
        """Play one episode; raises EngineError, or RowUnfit."""
        session = EpisodeSession(
            begun.name, site.model, sampler, begun.task.sampling, self.limits(), begun.sampling_seed, self._images
        )
        try:
            play = self.play(begun.seed, Row.of(begun.task), self.chosen or self.options())
        except Exception as err:  # noqa: BLE001 - an author's code, which gets rows of any kind
            raise RowUnfit(f"{type(err).__name__}: {err}") from None
        try:
            played = await play_episode(session, play, self.settings, site.executor)
        finally:
            made = session.end()  # where it is cancelled too: what the engine samples for it is cancelled
        return Attempt(session, made, played, play.version)
