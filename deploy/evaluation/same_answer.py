"""Group the answers of maj@k: mathematical ones by the equality of the reward `math`, others by their value."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import NamedTuple

from penstock.reward_service.errors import RewardError
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.rewards import math_answer

_CPU_S = 5.0


class MathAnswer(NamedTuple):
    text: str


class SameAnswer:
    """Called with two answers, returns True if they are the same; asks a grader process, which starts when it is needed."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._pool = GraderPool(1, cpu_s=_CPU_S)

    def __call__(self, one: Hashable, other: Hashable) -> bool:
        if one == other or not (isinstance(one, MathAnswer) and isinstance(other, MathAnswer)):
            return one == other
        return self._runner.run(self._is_right(one, other)) or self._runner.run(self._is_right(other, one))

    async def _is_right(self, truth: MathAnswer, answer: MathAnswer) -> bool:
        try:
            (verdict,) = await math_answer.judge((answer.text,), truth.text, self._pool.equal, find=str)
        except RewardError:
            return False  # an answer that cannot be read equals only itself
        return verdict.reward == 1.0

    def close(self) -> None:
        self._runner.run(self._pool.close())
        self._runner.close()
