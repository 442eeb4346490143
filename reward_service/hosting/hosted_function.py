"""A reward of user code as it is served over HTTP: by `reward serve FILE.py`, and by the Python client for a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.user_code.user_function import UserReward


@dataclass(frozen=True, slots=True)
class HostedFunction:
    """A loaded function, its version and the terms of its registration; see `served_reward.Hosted`."""

    reward: UserReward
    version: str  # a hash of the source that was loaded, whatever its file holds later
    terms: Mapping[str, Any]

    @property
    def title(self) -> str:
        """File and function."""
        return f"{self.reward.file.name}: {self.reward.name}"

    @property
    def batched(self) -> bool:
        """True if the function takes many groups at once."""
        return self.reward.batched

    @property
    def figures(self) -> Mapping[str, float]:
        """No metrics."""
        return {}

    async def open(self) -> None:
        """Call the reward's ``setup``; raises UserFileError."""
        await self.reward.open()

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        """Call the function; what it raises is the error of the score."""
        return await self.reward.score_all(groups)

    async def close(self) -> None:
        """Call the reward's ``close``."""
        await self.reward.close()
