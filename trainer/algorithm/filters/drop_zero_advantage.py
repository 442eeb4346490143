"""Trajectories without an advantage."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.filters.interface import Candidate, Options, trajectory_filter


class DropZeroAdvantageOptions(Options):
    drop_zero_advantage: bool = Field(default=False, description="Trajectories with advantage 0 do not count at all.")


@trajectory_filter(
    options=DropZeroAdvantageOptions,
    source="AgentRL",
    reason="zero_advantage",
    switch="drop_zero_advantage",
    precedence=3,
)
def drop_zero_advantage(candidate: Candidate, *, drop_zero_advantage: bool = True) -> bool:
    """Leave out trajectories whose advantage is 0 (AgentRL's default)."""
    return drop_zero_advantage and candidate.advantage == 0.0
