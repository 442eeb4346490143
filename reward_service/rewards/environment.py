"""The reward that the environment of an episode gave."""

from __future__ import annotations

from penstock.protocol.packs.group_texts import EpisodeTexts
from penstock.reward_service.rewards.reward import GivenReward, Verdict

NAME = "environment"


def judge(episodes: tuple[EpisodeTexts, ...]) -> list[Verdict]:
    return [Verdict(episode.reward or 0.0, dict(episode.reward_parts)) for episode in episodes]


REWARD = GivenReward(
    name=NAME,
    description="the reward that the episode's environment gave, with its parts",
    judge=judge,
    notes="only for episodes; an episode without a reward fails its group",
)
