"""The result of a replay of a run, or of one saved batch, as JSON and as text; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from penstock.trainer.learner.step_metrics import StepMetrics
from penstock.trainer.learner.step_plan import ReadyGroup, StepPlan

EXPLANATION = "no recorded difference: groups, settings, libraries, code and machine are the same"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first version whose replayed weights differ."""

    version: int
    step: int | None  # None: the weights that the replay started from
    recorded: str  # digests
    replayed: str
    figures: tuple[str, ...] = ()  # of the step, that differ from metrics.jsonl


@dataclass(slots=True)
class Verdict:
    """The result of a replay; its fields are the keys of ``--json``, except where noted."""

    run_id: str
    began_with: int = 0  # the version
    began_from: str = ""  # for people
    same: list[int] = field(default_factory=list)  # versions with identical weights
    difference: Difference | None = None
    findings: list[str] = field(default_factory=list)  # what is wrong with record, settings or packs
    drift: list[str] = field(default_factory=list)  # settings in which the run file differs now; the record is used
    environment_differences: list[str] = field(default_factory=list)  # from the recorded steps; "surroundings" in JSON
    num_signed: int | None = None  # versions that are still stored, signed by a trusted key; None: not verified
    num_steps: int = 0
    num_groups: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def count(self, token_counts: Sequence[int]) -> None:
        self.num_steps += 1
        self.num_groups += len(token_counts)
        self.num_tokens += sum(token_counts)

    @property
    def holds(self) -> bool:
        return self.difference is None and not self.findings and bool(self.same)

    def to_document(self) -> dict[str, Any]:
        document = {"surroundings" if k == "environment_differences" else k: v for k, v in asdict(self).items()}
        return {**document, "holds": self.holds}


def describe(verdict: Verdict) -> str:
    lines = [f"run {verdict.run_id}: replayed from {verdict.began_from}, version {verdict.began_with}"]
    if verdict.same:
        rate = verdict.num_steps / verdict.wall_s if verdict.wall_s else 0.0
        lines.append(
            f"{len(verdict.same)} versions are identical, {verdict.same[0]} to {verdict.same[-1]}: {verdict.num_steps} steps, "
            f"{verdict.num_groups} groups, {verdict.num_tokens} tokens in {verdict.wall_s:.1f} s ({rate:.1f} steps/s)"
        )
    if verdict.num_signed is not None:
        lines.append(f"{verdict.num_signed} of them are still stored, with the signature of a trusted key")
    lines += [f"wrong: {finding}" for finding in verdict.findings]
    lines += [f"changed since, not used: {line}" for line in verdict.drift]
    if verdict.difference is not None:
        lines += _first_difference(verdict)
    elif verdict.environment_differences:
        lines += [f"different environment, no effect: {line}" for line in verdict.environment_differences]
    lines.append("the replay matches the record" if verdict.holds else "THE REPLAY DOES NOT MATCH THE RECORD")
    return "".join(f"{line}\n" for line in lines)


def _first_difference(verdict: Verdict) -> list[str]:
    found = verdict.difference
    assert found is not None
    made = f"made by step {found.step}" if found.step is not None else "the weights that the replay started from"
    return [
        f"version {found.version}, {made}, differs: recorded {found.recorded[:16]}…, replayed {found.replayed[:16]}…",
        *(f"  step {found.step}: {line}" for line in found.figures),
        *(f"  may explain it: {line}" for line in verdict.environment_differences or [EXPLANATION]),
    ]


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    group_id: str
    rewards: tuple[float, ...]
    tokens: int  # that are trained
    not_finite: int  # of them, whose log-probability is no finite number
    logprob_mean: float  # of the trainer, in nats per token
    engine_mean: float  # of the sampler
    largest_gap: float  # between both, of a token


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """What a replay of a saved batch found; its fields are the keys of ``--json``."""

    run_id: str
    step: int
    version: int
    recorded: str  # why the run stopped
    recorded_error: str  # its kind; empty: saved by an earlier release
    weights_from: str  # for people
    failure: str  # of the replay; empty: none
    error: str  # its kind
    figures: Mapping[str, Any]  # of the step, by the names of metrics.jsonl
    groups: tuple[GroupMetrics, ...]

    @property
    def is_reproduced(self) -> bool:
        return bool(self.failure) and self.error == self.recorded_error

    def to_document(self) -> dict[str, Any]:
        """Return the verdict as plain JSON values; numbers that are not finite are texts."""
        return _finite({**asdict(self), "is_reproduced": self.is_reproduced})


def group_metrics(plan: StepPlan, figures: StepMetrics, batch: Sequence[ReadyGroup]) -> tuple[GroupMetrics, ...]:
    kept = figures.kept
    assert kept is not None
    ends = np.cumsum(kept.counts)
    by_row = {
        int(row): kept.logprobs[end - count : end] for row, count, end in zip(kept.rows, kept.counts, ends, strict=True)
    }
    places = {(group.pack.key, group.scored.generated.row_group): number for number, group in enumerate(batch)}
    held: list[list[np.ndarray]] = [[] for _ in batch]
    sampled: list[list[np.ndarray]] = [[] for _ in batch]
    for number, row in enumerate(plan.rows):
        place = places[plan.packs[row.pack].key, row.row_group]
        trajectory = batch[place].group.trajectories[row.trajectory]
        held[place].append(by_row[number])
        sampled[place].append(trajectory.behaviour_logprobs[trajectory.loss_mask])
    return tuple(_of_group(group, held[place], sampled[place]) for place, group in enumerate(batch))


def _of_group(group: ReadyGroup, held: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> GroupMetrics:
    ours, theirs = (np.concatenate([*rows, np.empty(0, np.float32)]).astype(np.float64) for rows in (held, sampled))
    is_finite = np.isfinite(ours) & np.isfinite(theirs)
    gaps = np.abs(ours - theirs)[is_finite]
    return GroupMetrics(
        group_id=group.group_id,
        rewards=tuple(group.scored.rewards),
        tokens=len(ours),
        not_finite=int((~np.isfinite(ours)).sum()),
        logprob_mean=float(ours[is_finite].mean()) if is_finite.any() else math.nan,
        engine_mean=float(theirs[is_finite].mean()) if is_finite.any() else math.nan,
        largest_gap=float(gaps.max(initial=0.0)),
    )


def describe_batch(verdict: BatchVerdict) -> str:
    lines = [
        f"run {verdict.run_id}: the batch of step {verdict.step} alone, from {verdict.weights_from} (version {verdict.version})",
        *(f"  {name:<24} {_shown(value)}" for name, value in verdict.figures.items() if _shown(value)),
        f"  {'group':<24} {'tokens':>7} {'not finite':>11} {'log p':>9} {'engine':>9} {'gap':>9}  rewards",
    ]
    for one in verdict.groups:
        means = f"{one.logprob_mean:>9.4g} {one.engine_mean:>9.4g} {one.largest_gap:>9.3g}"
        rewards = " ".join(f"{reward:.3g}" for reward in one.rewards)
        lines.append(f"  {one.group_id:<24} {one.tokens:>7} {one.not_finite:>11} {means}  {rewards}")
    lines.append(f"the run stopped: {verdict.recorded}")
    lines.append(f"the replay: {verdict.failure or 'no failure'}")
    if verdict.is_reproduced:
        lines.append(f"the batch alone reproduces the failure ({verdict.error})")
    else:
        lines.append("THE BATCH ALONE DOES NOT REPRODUCE THE FAILURE")
    return "".join(f"{line}\n" for line in lines)


def _shown(value: Any) -> str:
    """Return a number as text; what has several is in the JSON form alone."""
    return f"{value:.6g}" if isinstance(value, int | float) else ""


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
