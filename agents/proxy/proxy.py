"""The episodes of one worker by their secret, and the URL of each."""

from __future__ import annotations

from collections import OrderedDict

from penstock.agents.proxy.request_errors import RequestRefused
from penstock.agents.proxy.rows import TreeRows
from penstock.agents.proxy.session import AgentModel, EpisodeSession, Samples, episode_ended
from penstock.agents.proxy.settings import EpisodeLimits
from penstock.protocol.facts import Sampling
from penstock.rollout_service.run_images import RunImages

_ENDED_KEPT = 4096  # secrets of ended episodes, so that late requests are told so


class AgentProxy:
    """The open episodes. For one event loop."""

    def __init__(self, limits: EpisodeLimits, images: RunImages | None = None) -> None:
        """Start without episodes; ``images`` stores those of their messages, None: they are refused."""
        self.limits = limits
        self._images = images
        self.num_refused = 0  # requests with an unknown secret, or to an episode that has ended
        self._open: dict[str, EpisodeSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def begin(
        self, episode_id: str, model: AgentModel, sampler: Samples, sampling: Sampling, seed: int | None = None
    ) -> EpisodeSession:
        """Begin an episode; `path` is what its agent needs. Without a ``seed`` answers are random."""
        episode = EpisodeSession(episode_id, model, sampler, sampling, self.limits, seed, self._images)
        self._open[episode.secret] = episode
        return episode

    def end(self, episode: EpisodeSession) -> TreeRows:
        """End an episode: its secret is worth nothing from now on."""
        self._open.pop(episode.secret, None)
        self._ended[episode.secret] = episode.id
        while len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)
        return episode.end()

    def find(self, secret: str) -> EpisodeSession:
        """Return the episode of a secret; raises RequestRefused with 401, or 404 once it has ended."""
        episode = self._open.get(secret)
        if episode is not None:
            return episode
        self.num_refused += 1
        ended = self._ended.get(secret)
        if ended is not None:
            raise episode_ended(ended)
        raise RequestRefused(401, "invalid_api_key", "no episode has the secret of this URL")


def path(episode: EpisodeSession) -> str:
    """Return the path of an episode's base URL; an OpenAI client appends ``/chat/completions`` to it."""
    return f"/episodes/{episode.secret}/v1"
