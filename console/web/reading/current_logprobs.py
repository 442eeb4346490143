"""The trainer's log-probabilities of one group's tokens beside those of the sampler; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.protocol.packs.step_logprobs import CLIPPED, DUAL_CLIPPED, OUTCOMES, REJECTED, KeptRow
from penstock.protocol.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Current:
    """The rows of one group that have log-probabilities of the trainer, by their number; ``problem`` says why there are none."""

    rows: Mapping[int, KeptRow] = field(default_factory=dict)
    problem: str = ""

    def columns(self, group: Group, number: int) -> dict[str, list[Any]] | None:
        """Return log-probability, ratio and outcome of every token of a row, None where none was sampled; None: no such row."""
        kept = self.rows.get(number)
        return None if kept is None else _columns(group.trajectories[number], kept)

    def summary(self, group: Group, numbers: range) -> dict[str, Any] | None:
        """Return mean, least and greatest ratio of a trajectory's tokens, and how many the loss clipped or rejected; None: none kept."""
        own = [(group.trajectories[number], self.rows[number]) for number in numbers if number in self.rows]
        if not own:
            return None
        found = np.concatenate([_ratios(row, kept) for row, kept in own])
        if not len(found):
            return None
        outcomes = np.concatenate([kept.outcomes for _, kept in own])
        return {
            "mean": float(f"{found.mean():.5g}"),
            "min": float(f"{found.min():.5g}"),
            "max": float(f"{found.max():.5g}"),
            "num_clipped": int((outcomes & (CLIPPED | DUAL_CLIPPED) > 0).sum()),
            "num_rejected": int((outcomes & REJECTED > 0).sum()),
        }


def _ratios(row: Trajectory, kept: KeptRow) -> npt.NDArray[np.float64]:
    """Return exp(current - behaviour) of each sampled token of a row, [n]."""
    return np.exp(kept.logprobs.astype(np.float64) - row.behaviour_logprobs[row.loss_mask])


def _columns(row: Trajectory, kept: KeptRow) -> dict[str, list[Any]]:
    """Return log-probability, ratio and outcome of every token of a row, None where none was sampled."""
    places = np.flatnonzero(row.loss_mask).tolist()
    found: dict[str, list[Any]] = {
        name: [None] * len(row.token_ids) for name in ("current_logprobs", "ratios", "outcomes")
    }
    values = zip(places, kept.logprobs.tolist(), _ratios(row, kept).tolist(), kept.outcomes.tolist(), strict=True)
    for place, logprob, ratio, outcome in values:
        found["current_logprobs"][place] = round(logprob, 5)
        found["ratios"][place] = float(f"{ratio:.5g}")
        found["outcomes"][place] = ", ".join(text for bit, text in OUTCOMES.items() if outcome & bit)
    return found
