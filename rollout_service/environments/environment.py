"""What an environment is to the worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from protocol.facts import Task
from protocol.trajectory import Trajectory


class Environment(Protocol):
    """Generates whole groups; a task names its environment (`Task.environment`)."""

    async def rollout(self, tasks: Sequence[Task]) -> list[list[Trajectory]]:
        """Return ``task.group_size`` trajectories for each task, in order; raises EngineError."""
        ...
