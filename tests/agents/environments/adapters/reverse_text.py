"""A taskset of the real verifiers: say a word backwards. A module that verifiers imports by its name."""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["ReverseTaskset"]

WORDS = ("sun", "moon")


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData]):
    @vf.reward(weight=1.0)
    async def is_reversed(self, trace: Any) -> float:
        if trace.last_reply == "break":
            raise OSError("the judge is gone")
        return float(trace.last_reply == self.data.answer)


class ReverseTaskset(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self) -> Iterable[ReverseTask]:
        for word in WORDS:
            yield ReverseTask(ReverseData(prompt=f"Reverse {word}.", answer=word[::-1]), self.config.task)
