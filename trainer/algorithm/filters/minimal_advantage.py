"""A least advantage."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.filters.interface import Candidate, Options, trajectory_filter


class MinimalAdvantageOptions(Options):
    minimal_advantage: float | None = Field(default=None, description="Only above this advantage; none: all.")


@trajectory_filter(
    options=MinimalAdvantageOptions,
    source="AgentRL",
    reason="below_minimal_advantage",
    switch="minimal_advantage",
    precedence=1,
)
def minimal_advantage(candidate: Candidate, *, minimal_advantage: float | None) -> bool:
    """Leave out trajectories whose advantage is not above a bound."""
    return minimal_advantage is not None and candidate.advantage <= minimal_advantage
