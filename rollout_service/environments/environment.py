"""What an environment is to the worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.protocol.facts import Sampling, Task
from penstock.protocol.trajectory import Trajectory
from penstock.rollout_service.engines.read_reply import Completion


class Sampler(Protocol):
    """Who samples: the version that was settled for these tasks."""

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int) -> list[list[Completion]]:
        """Sample ``n`` completions of every prompt; raises EngineError."""
        ...


class Environment(Protocol):
    """Generates whole groups; a task names its environment (`Task.environment`)."""

    async def rollout(self, tasks: Sequence[Task], sampler: Sampler) -> list[list[Trajectory]]:
        """Return ``task.group_size`` trajectories for each task, in order, all sampled by ``sampler``; raises EngineError."""
        ...
