"""Overlong filtering: answers that were cut."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.filters.interface import Candidate, Options, trajectory_filter


class MaskTruncatedOptions(Options):
    mask_truncated: bool = Field(default=False, description="Answers cut at rollout.max_new_tokens are left out.")


@trajectory_filter(
    options=MaskTruncatedOptions,
    source="arXiv 2503.14476",
    reason="truncated",
    switch="mask_truncated",
    reads_advantage=False,
    precedence=0,
)
def mask_truncated(candidate: Candidate, *, mask_truncated: bool = True) -> bool:
    """Leave out answers cut at rollout.max_new_tokens (DAPO's overlong filtering)."""
    return mask_truncated and candidate.truncated
