"""When a run ends early: after so many evaluations in a row without a better result of the source that versions are compared by."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.trainer.eval_settings import BestBy


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """Why a run ended early; stored in ``trainer.json``."""

    step: int  # of the last evaluation that counted
    best_step: int
    best: float
    measure: str
    evaluations: int  # in a row without a better result

    @property
    def text(self) -> str:
        """The reason as people read it."""
        return (
            f"ended early: the last {self.evaluations} evaluations, up to step {self.step}, were not better than {self.best:.4g} "
            f"({self.measure}) of step {self.best_step}"
        )


class EarlyStop:
    """Counts evaluations without a better result; results come on the evaluator's thread."""

    def __init__(self, limit: int, earlier: Iterable[tuple[int, float]] = ()) -> None:
        """End after ``limit`` evaluations, 0: never. ``earlier`` are steps and scores of earlier sessions."""
        self._limit = limit
        self._lock = threading.Lock()
        self._scores: dict[int, float] = dict(earlier)
        self._measure = ""

    def add(self, step: int, measure: str, score: float) -> None:
        """Count a result; the same step again replaces its result."""
        with self._lock:
            self._scores[step], self._measure = score, measure

    @property
    def ended(self) -> EarlyEnd | None:
        """Why the run ends now; None while it goes on."""
        if not self._limit:
            return None
        with self._lock:
            scores, measure = sorted(self._scores.items()), self._measure
        best_step, best, without = -1, float("-inf"), 0
        for step, score in scores:
            if score > best:
                best_step, best, without = step, score, 0
            else:
                without += 1
        if without < self._limit:
            return None
        return EarlyEnd(scores[-1][0], best_step, best, measure, without)

    def document(self) -> dict[str, Any] | None:
        """Return what ``trainer.json`` stores; None while the run goes on."""
        end = self.ended
        return None if end is None else {**asdict(end), "text": end.text}


def stored_scores(metrics: Path, by: BestBy) -> Iterator[tuple[int, float]]:
    """Yield steps and scores of the evaluations in a ``metrics.jsonl``, of the source and metric that decide."""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("kind") == "eval" and row.get("split") == by.source:
            step, score = row.get("step"), _score(row, by.metric)
            if isinstance(step, int) and isinstance(score, int | float):
                yield step, float(score)


def _score(row: Mapping[str, Any], metric: str) -> Any:
    if metric.startswith("pass@"):
        return (row.get("pass_at") or {}).get(metric.removeprefix("pass@"))
    if metric == "reward" or (not metric and row.get("accuracy") is None):
        return row.get("reward_mean")
    return row.get("accuracy")
