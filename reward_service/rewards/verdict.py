"""The result of a built-in reward for one completion."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.reward_service.errors import BadGroundTruth


class Verdict(NamedTuple):
    """The reward of one completion, and its named parts."""

    reward: float
    parts: Mapping[str, float] = MappingProxyType({})


def truth_text(truth: Any, reward: str) -> str:
    """Return a ground truth that is a text or a number as text; raises BadGroundTruth for anything else."""
    if isinstance(truth, bool) or not isinstance(truth, str | int | float):
        raise BadGroundTruth(
            f"{reward}: the row's ground_truth must be a text or a number, got {_kind(truth)}; "
            "map the right column with data.map"
        )
    return truth if isinstance(truth, str) else repr(truth)


def _kind(truth: Any) -> str:
    return "missing" if truth is None else f"{type(truth).__name__} {str(truth)[:80]!r}"
