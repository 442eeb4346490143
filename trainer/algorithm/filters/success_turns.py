"""A least number of turns of a success."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.filters.interface import Candidate, Options, trajectory_filter


class SuccessTurnsOptions(Options):
    success_turns: int = Field(
        default=0, ge=0, description="Only successes (a reward above 0) of more turns than this; 0: all."
    )


@trajectory_filter(
    options=SuccessTurnsOptions,
    source="AgentRL min_turns",
    reason="too_few_turns",
    switch="success_turns",
    reads_advantage=False,
    precedence=4,
)
def success_turns(candidate: Candidate, *, success_turns: int) -> bool:
    """Leave out successes that took no more turns than this: right answers without a call of a tool, for example."""
    return candidate.reward > 0.0 and candidate.num_turns <= success_turns
