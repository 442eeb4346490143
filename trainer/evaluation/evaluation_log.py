"""Writes the results of evaluations as events, and keeps them for the summary."""

from __future__ import annotations

from dataclasses import asdict

import structlog

from penstock.trainer.eval_settings import DATA_EVAL
from penstock.trainer.evaluation.eval_result import EvalResult, LostEvaluation
from penstock.trainer.telemetry.event_writer import EventWriter

log = structlog.get_logger("trainer.evaluation.evaluation_log")


class EvaluationLog:
    """The results of this session."""

    def __init__(self, events: EventWriter, primary: str = DATA_EVAL) -> None:
        """Start empty; ``primary`` is the source that versions are compared by."""
        self._events = events
        self._primary = primary
        self.results: list[EvalResult] = []

    def add(self, result: EvalResult | LostEvaluation) -> None:
        """Write a result, or why there is none (called on the evaluator's thread, or when evaluations are resumed)."""
        if isinstance(result, LostEvaluation):
            at = "" if result.step is None else f" (step {result.step})"
            of = "" if result.split == DATA_EVAL else f" on {result.split}"
            text = f"evaluation lost: version {result.version}{at}{of}: {result.reason}"
            self._events.write("evaluation_lost", {"text": text, **asdict(result)})
            log.warning("evaluation lost", policy_version=result.version, step=result.step, reason=result.reason)
            return
        self.results.append(result)
        fields = asdict(result)
        fields["pass_at"] = {str(k): share for k, share in result.pass_at.items()}
        if result.split != DATA_EVAL:
            fields["name"] = result.split  # trackers give a named evaluation a series of its own
        self._events.write("eval", {**fields, "primary": result.split == self._primary})
        log.info(
            "evaluated",
            source=result.split,
            policy_version=result.version,
            accuracy=result.accuracy,
            reward=result.reward_mean,
        )
