"""State of an algorithm between steps; part of every checkpoint, so that a resumed run computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.kl import KlController
from penstock.trainer.algorithm.reward_shaping import RunningMoments
from penstock.trainer.errors import CheckpointError

_STATE_TAG = "algorithm_state.v1"


@dataclass(slots=True)
class AlgorithmState:
    """Moments of all rewards so far, and the adapted KL coefficient."""

    kl: KlController
    scaling: RunningMoments = field(default_factory=RunningMoments)  # of rewards before reward_scaling
    norm: RunningMoments = field(default_factory=RunningMoments)  # of rewards before reward_norm = "running"

    @classmethod
    def fresh(cls, settings: AlgorithmSettings) -> AlgorithmState:
        coefficient = settings.reward_kl_coefficient or settings.kl_coefficient
        return cls(KlController(coefficient, settings.kl_target, settings.kl_horizon))

    @classmethod
    def resumed(cls, settings: AlgorithmSettings, document: Mapping[str, Any]) -> AlgorithmState:
        """Return the state that `to_document` wrote; a fixed coefficient is the run file's, an adapted one the checkpoint's.

        Raises CheckpointError for a document of another kind. A checkpoint written before this state existed
        has an empty one: the run continues with a fresh state.
        """
        state = cls.fresh(settings)
        if not document:
            return state
        if document.get("schema_tag") != _STATE_TAG:
            raise CheckpointError(f"algorithm state: expected {_STATE_TAG}, got {document.get('schema_tag')!r}")
        try:
            state.scaling = RunningMoments(**document["scaling"])
            state.norm = RunningMoments(**document["norm"])
            if settings.kl_target is not None:
                state.kl.coefficient = float(document["kl_coefficient"])
        except (KeyError, TypeError, ValueError) as err:
            raise CheckpointError(
                f"algorithm state: {type(err).__name__}: {err}; the checkpoint's state.json was changed, restore it"
            ) from None
        return state

    def to_document(self) -> dict[str, Any]:
        """Return the state as plain JSON values; every number is written so that it reads back the same."""
        return {
            "schema_tag": _STATE_TAG,
            "scaling": asdict(self.scaling),
            "norm": asdict(self.norm),
            "kl_coefficient": self.kl.coefficient,
        }
