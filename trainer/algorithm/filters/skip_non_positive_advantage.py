"""Successes alone."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.filters.interface import Candidate, Options, trajectory_filter


class SkipNonPositiveAdvantageOptions(Options):
    skip_non_positive_advantage: bool = Field(default=False, description="Only successes are trained on.")


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
