"""Filters by the advantage of a trajectory: all but 0, all above a bound, successes alone."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.filters.interface import Candidate, Options, trajectory_filter


class MinimalAdvantageOptions(Options):
    minimal_advantage: float | None = Field(default=None, description="Only above this advantage; none: all.")


class SkipNonPositiveAdvantageOptions(Options):
    skip_non_positive_advantage: bool = Field(default=False, description="Only successes are trained on.")


class DropZeroAdvantageOptions(Options):
    drop_zero_advantage: bool = Field(default=False, description="Trajectories with advantage 0 do not count at all.")


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


@trajectory_filter(
    options=SkipNonPositiveAdvantageOptions,
    source="AgentRL; arXiv 2304.06767",
    reason="non_positive_advantage",
    switch="skip_non_positive_advantage",
    precedence=2,
)
def skip_non_positive_advantage(candidate: Candidate, *, skip_non_positive_advantage: bool = True) -> bool:
    """Leave out all but successes, as rejection sampling does."""
    return skip_non_positive_advantage and candidate.advantage <= 0.0


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
