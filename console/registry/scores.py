"""The scores of a run's versions by name; pure.

``SOURCE.METRIC`` is of an evaluation during the run (``eval`` is data.eval), ``eval:SOURCE.METRIC`` of `penstock eval`, the newest one
of the version. Metrics are accuracy, reward, pass@K, and of `penstock eval` maj@K.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.console.evaluation.estimates import Estimate
from penstock.console.evaluation.results import EvaluationResult
from penstock.console.report.event_fields import number
from penstock.protocol.errors import ConfigError

OFFLINE = "eval:"


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one version."""

    value: float
    conditions: str = ""  # how it was measured: scores of other conditions cannot be compared
    low: float | None = None
    high: float | None = None


Scores = dict[int, dict[str, Score]]  # by version and name


def of_run(rows: Iterable[Mapping[str, Any]], results: Iterable[EvaluationResult]) -> Scores:
    """Return the scores of all versions, from the rows of ``metrics.jsonl`` and the results of `penstock eval`, oldest first."""
    found: Scores = {}
    for row in rows:
        version = row.get("version")
        if row.get("kind") == "eval" and isinstance(version, int):
            found.setdefault(version, {}).update(_during(row))
    for result in results:
        if result.version is not None:
            found.setdefault(result.version, {}).update(_offline(result))
    return found


def _during(row: Mapping[str, Any]) -> Iterator[tuple[str, Score]]:
    source = str(row.get("split") or "eval")
    conditions = f"{row.get('num_prompts')} prompts, {row.get('num_samples')} samples, {row.get('success', '')}"
    values = {"accuracy": row.get("accuracy"), "reward": row.get("reward_mean")}
    pass_at = row.get("pass_at")
    values |= {f"pass@{k}": value for k, value in pass_at.items()} if isinstance(pass_at, dict) else {}
    for name, value in values.items():
        if (value := number(value)) is not None:
            yield f"{source}.{name}", Score(value, conditions)


def _offline(result: EvaluationResult) -> Iterator[tuple[str, Score]]:
    data = " ".join(sorted(one.sha256[:12] for one in result.data))
    sampling = " ".join(f"{key}={value}" for key, value in sorted(result.sampling.items()))
    for source in result.sources:
        conditions = f"data {data}, {source.prompts} prompts, {result.k} samples, {sampling}, {result.success}"
        estimates: dict[str, Estimate | None] = {"accuracy": source.accuracy, "reward": source.reward}
        estimates |= {f"pass@{k}": one for k, one in source.pass_at.items()}
        estimates[f"maj@{result.k}"] = source.maj
        incomplete = "" if source.complete == source.prompts else f", {source.complete} complete"
        for name, one in estimates.items():
            if one is not None:
                yield f"{OFFLINE}{source.source}.{name}", Score(one.value, conditions + incomplete, one.low, one.high)


def names(scores: Scores) -> list[str]:
    """Return the names of all scores, in order."""
    return sorted({name for own in scores.values() for name in own})


def select(scores: Scores, stored: Sequence[int], by: str, least: float | None = None) -> tuple[int, Score]:
    """Return the stored version with the highest score, of equal ones the newest.

    Raises ConfigError when no stored version has the score, when scores were measured under different conditions, or when
    the highest is below ``least``.
    """
    scored = {version: scores[version][by] for version in stored if by in scores.get(version, {})}
    if not scored:
        known = ", ".join(names({version: scores.get(version, {}) for version in stored})) or "none"
        raise ConfigError(f"no stored version has the score {by}; scores of stored versions: {known}")
    conditions = {one.conditions: version for version, one in scored.items()}
    if len(conditions) > 1:
        (one, first), (other, second) = sorted(conditions.items(), key=lambda item: item[1])[:2]
        raise ConfigError(
            f"{by} was measured under different conditions and cannot be compared: version {first} with {one}; version {second} with "
            f"{other}; evaluate both alike with penstock eval"
        )
    version = max(scored, key=lambda one: (scored[one].value, one))
    if least is not None and scored[version].value < least:
        raise ConfigError(
            f"no stored version reaches {by} = {least:g}; the best is version {version} with {scored[version].value:.4g}"
        )
    return version, scored[version]
