"""When held-out prompts are evaluated, what is written of the results, and when a run ends early because of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from penstock.protocol.facts import KeptVersion
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.data_settings import DATA_EVAL, BestBy, EvalSettings
from penstock.trainer.evaluation.eval_result import EvalResult, LostEvaluation
from penstock.trainer.evaluation.evaluate import Evaluator
from penstock.trainer.publishing.weight_gc import KeptVersionsKey
from penstock.trainer.telemetry.event_writer import EventWriter

log = structlog.get_logger("trainer.evaluation.evaluation_log")


class EvaluationSchedule:
    """Starts evaluations and waits for them; for the training thread only."""

    def __init__(
        self, evaluator: Evaluator | None, settings: EvalSettings, names: Sequence[str], *, num_steps: int
    ) -> None:
        """``evaluator`` is None for a run without held-out prompts; ``names`` are the sources that are evaluated."""
        self.evaluator, self._settings = evaluator, settings
        self._names = tuple(names)
        self._num_steps = num_steps
        self._newest: PolicyVersion | None = None  # started last in this session
        self._unfinished: list[str] = []  # sources on which an earlier session began to evaluate the first version

    @property
    def is_enabled(self) -> bool:
        return self.evaluator is not None

    def is_due_at_start(self, step: int) -> bool:
        return self.evaluator is not None and self._settings.at_start and step == 0

    def is_due(self, step: int) -> bool:
        return bool(self._due(step))

    def _due(self, step: int) -> list[str]:
        if self.evaluator is None:
            return []
        if self.is_due_at_start(step) or (step == self._num_steps and self._settings.at_end):
            return list(self._names)
        every = {name: self._settings.of(name).every for name in self._names}
        return [name for name, steps in every.items() if steps > 0 and step % steps == 0]

    def is_newest(self, version: PolicyVersion) -> bool:
        return self._newest == version

    def resume(self, version: PolicyVersion, *, now: PolicyVersion, step: int) -> bool:
        """Continue earlier evaluations; True if one of these weights, ``version`` then, is unfinished."""
        if self.evaluator is None:
            return False
        self._unfinished = self.evaluator.resume(version, now=now, step=step)
        return bool(self._unfinished)

    def start(self, version: PolicyVersion, step: int) -> None:
        assert self.evaluator is not None
        self.evaluator.start(version, step, self._unfinished or self._due(step))
        self._unfinished = []
        self._newest = version

    def wait_for_newest(self, should_stop: Callable[[], bool]) -> None:
        assert self.evaluator is not None
        assert self._newest is not None
        self.evaluator.wait(self._newest, should_stop)

    def wait_for_all(self, should_stop: Callable[[], bool]) -> None:
        assert self.evaluator is not None
        self.evaluator.wait_for_all(should_stop)


class EvaluationLog:
    def __init__(
        self, events: EventWriter, best: BestBy | None, early_stop: EarlyStop, kept_versions: KeptVersionsKey
    ) -> None:
        self._events, self._best = events, best
        self._early_stop, self._kept_versions = early_stop, kept_versions
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
        is_primary = result.split == (self._best.source if self._best is not None else DATA_EVAL)
        if is_primary and self._best is not None:
            self._compare(result, self._best.metric)  # before the evaluator unpins the version
        self.results.append(result)
        fields = asdict(result)
        fields["pass_at"] = {str(k): share for k, share in result.pass_at.items()}
        if result.split != DATA_EVAL:
            fields["name"] = result.split  # trackers give a named evaluation a separate series
        self._events.write("eval", {**fields, "primary": is_primary})
        log.info(
            "evaluated",
            source=result.split,
            policy_version=result.version,
            accuracy=result.accuracy,
            reward=result.reward_mean,
        )

    def _compare(self, result: EvalResult, metric: str) -> None:
        if (scored := result.score_by(metric)) is None:
            log.warning("version not compared: the metric is not measured", metric=metric, source=result.split)
            return
        measure, score = scored
        version = KeptVersion(version=result.version, step=result.step, measure=measure, score=score)
        self._kept_versions.add_result(version)
        self._early_stop.add(result.step, measure, score)


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    step: int  # of the last evaluation that counted
    best_step: int
    best: float
    measure: str
    evaluations: int  # in a row without a better result

    @property
    def text(self) -> str:
        return (
            f"ended early: the last {self.evaluations} evaluations, up to step {self.step}, were not better than {self.best:.4g} "
            f"({self.measure}) of step {self.best_step}"
        )


class EarlyStop:
    """Counts evaluations without a better result; results come on the evaluator's thread."""

    def __init__(self, limit: int, earlier: Iterable[tuple[int, float]] = ()) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._scores: dict[int, float] = dict(earlier)
        self._measure = ""

    def add(self, step: int, measure: str, score: float) -> None:
        with self._lock:
            self._scores[step], self._measure = score, measure

    @property
    def ended(self) -> EarlyEnd | None:
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
        end = self.ended
        return None if end is None else {**asdict(end), "text": end.text}


def stored_scores(metrics: Path, by: BestBy | None) -> Iterator[tuple[int, float]]:
    if by is None:
        return
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
