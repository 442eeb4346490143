"""Writes the results of evaluations as events, and keeps them for the summary."""

from __future__ import annotations

from dataclasses import asdict

import structlog

from penstock.trainer.evaluation.eval_result import EvalResult, LostEvaluation
from penstock.trainer.telemetry.event_writer import EventWriter

log = structlog.get_logger("trainer.evaluation.evaluation_log")


class EvaluationLog:
    """The results of this session."""

    def __init__(self, events: EventWriter) -> None:
        """Start empty."""
        self._events = events
        self.results: list[EvalResult] = []

    def add(self, result: EvalResult | LostEvaluation) -> None:
        """Write a result, or why there is none (called on the evaluator's thread, or when evaluations are resumed)."""
        if isinstance(result, LostEvaluation):
            at = "" if result.step is None else f" (step {result.step})"
            text = f"evaluation lost: version {result.version}{at}: {result.reason}"
            self._events.write("evaluation_lost", {"text": text, **asdict(result)})
            log.warning("evaluation lost", policy_version=result.version, step=result.step, reason=result.reason)
            return
        self.results.append(result)
        fields = asdict(result)
        fields["pass_at"] = {str(k): share for k, share in result.pass_at.items()}
        self._events.write("eval", {"split": "eval", **fields})
        log.info("evaluated", policy_version=result.version, accuracy=result.accuracy, reward=result.reward_mean)
