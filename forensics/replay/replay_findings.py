"""The result of a replay of a run, or of one saved batch, and problems with its input: changed settings, missing packs, other figures.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.protocol import blob_keys
from penstock.protocol.config.run_file import config_document, load
from penstock.protocol.errors import BlobMissing, SignatureRefused, WireError
from penstock.protocol.files import json_value, read_regular, regular_lines
from penstock.protocol.record.lineage import RecordedStep
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import VersionManifest
from penstock.trainer.recovery.resume_checks import Flat, differences, flat
from penstock.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import TrustedKeys  # its library is imported where keys are named
    from penstock.trainer.learner.step_metrics import StepMetrics  # imports torch
    from penstock.trainer.learner.step_plan import ReadyGroup, StepPlan


EXPLANATION = "no recorded difference: groups, settings, libraries, code and machine are the same"
_SHOWN_IDS = 4


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
    began_with: int = 0  # the first version that was replayed
    began_from: str = ""  # the checkpoint or folder that it was read from, in words
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
    difference = verdict.difference
    assert difference is not None
    made = (
        f"made by step {difference.step}" if difference.step is not None else "the weights that the replay started from"
    )
    return [
        f"version {difference.version}, {made}, differs: recorded {difference.recorded[:16]}…, replayed {difference.replayed[:16]}…",
        *(f"  step {difference.step}: {line}" for line in difference.figures),
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
    for group in verdict.groups:
        means = f"{group.logprob_mean:>9.4g} {group.engine_mean:>9.4g} {group.largest_gap:>9.3g}"
        rewards = " ".join(f"{reward:.3g}" for reward in group.rewards)
        lines.append(f"  {group.group_id:<24} {group.tokens:>7} {group.not_finite:>11} {means}  {rewards}")
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
        return {name: _finite(element) for name, element in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def config_findings(path: Path, recorded: Flat) -> list[str]:
    """Return one line for every setting in which ``config.json`` differs from the record of the last session.

    Empty if the file does not exist.
    """
    if not path.is_file():
        return []
    try:
        here = flat(json_value(read_regular(path))["settings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        return [f"{path} does not hold the settings of a run ({type(err).__name__}: {err})"]
    return [f"{path}: {line}" for line in differences(recorded, here, ignoring={"run.dir"})]


def drift(run_files: Sequence[Path], recorded: Flat) -> list[str]:
    """Return one line for every setting of run files that differs from the run's last session.

    Raises ConfigError for run files that the trainer would refuse.
    """
    if not run_files:
        return []
    loaded = load(TrainerSettings, files=run_files)
    now = flat(config_document(loaded)["settings"])
    run_file_values = {
        key: value for key, value in now.items() if loaded.origins[key].startswith(tuple(map(str, run_files)))
    }
    return [
        f"{loaded.origins[key]}: {line}"
        for key in sorted(run_file_values)
        for line in differences({key: recorded.get(key)}, {key: run_file_values[key]}, ignoring={"run.dir"})
    ]


def missing_packs(steps: Sequence[RecordedStep], blobs: Blobs) -> list[str]:
    packs = {pack.key: pack for step in steps for pack in step.packs}
    stored: set[str] = set()
    for owner in sorted({blob_keys.owner_of_pack(key) for key in packs}):
        stored |= {stat.key for stat in blobs.list(blob_keys.groups_prefix(owner))}
    return [f"pack {key} is not in the object store: {_groups_of(key, steps)}" for key in packs if key not in stored]


def signed_versions(
    run_id: str, roots: Mapping[int, str], blobs: Blobs, trusted_keys: TrustedKeys
) -> tuple[int, list[str]]:
    """Return how many of the replayed versions (their roots, by number) are stored as a trusted key has signed them.

    Also return one line for each version that has stored manifests, none of which has this root and a trusted signature. A
    version that retention has removed counts as neither. Several manifests may share a number after a trainer was killed;
    one valid manifest is enough.
    """
    num_signed, findings = 0, list[str]()
    for version, root in roots.items():
        stored = blobs.list(blob_keys.weights_prefix(run_id, PolicyVersion(version)))
        keys = [stat.key for stat in stored if stat.key.endswith("/manifest.json")]
        problems = [_signature_problem(run_id, version, root, key, blobs, trusted_keys) for key in keys]
        if "" in problems:
            num_signed += 1
        elif problems:
            findings.append(f"version {version}: no stored manifest is trusted; {'; '.join(problems[:_SHOWN_IDS])}")
    return num_signed, findings


def _signature_problem(run_id: str, version: int, root: str, key: str, blobs: Blobs, trusted_keys: TrustedKeys) -> str:
    """Return why a stored manifest is not the one that a trusted key has signed for a version; "" when it is."""
    try:
        data = blobs.get_unverified(key)
        trusted_keys.verify(data, key)
        manifest = VersionManifest.from_json(data)
    except (BlobMissing, SignatureRefused, WireError) as err:
        return str(err)
    if (manifest.run_id, manifest.version, manifest.state_root) != (run_id, version, root):
        return (
            f"{key}: signed for version {manifest.version} of run {manifest.run_id} with root "
            f"{manifest.state_root[:16]}…, replayed {root[:16]}…"
        )
    return ""


def _groups_of(key: str, steps: Sequence[RecordedStep]) -> str:
    uses = [(s.step, g.group_id) for s in steps for g in s.groups if s.packs[g.pack].key == key]
    ids = [group_id for _, group_id in uses]
    more = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
    return f"step {uses[0][0]} needs its groups {', '.join(ids[:_SHOWN_IDS])}{more}"


def differing_updates(step: RecordedStep, made: Sequence[Sequence[int]], left_out: Sequence[int] = ()) -> list[str]:
    """Return one line for the first optimizer step whose groups differ from the record.

    Also one if others were ``left_out`` than the record says.
    """
    for number, (recorded, replayed) in enumerate(zip_longest(step.updates, made), start=1):
        if recorded != replayed:
            before, after = ("none" if places is None else f"groups {list(places)}" for places in (recorded, replayed))
            return [
                f"step {step.step}, optimizer step {number}: replayed {after}, recorded {before}; restore the record"
            ]
    if tuple(left_out) != step.left_out:
        return [
            f"step {step.step}: the replay left out the optimizer steps {list(left_out)}, recorded {list(step.left_out)}; "
            "restore the record"
        ]
    return []


def figure_differences(metrics: Path, step: int | None, replayed: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one line for every figure of a step that differs in ``metrics.jsonl``; none if it has no such step.

    A file that cannot be read gives none: these lines only explain a difference, and `penstock audit` reports the damage.
    """
    try:
        rows = [json_value(line) for line in regular_lines(metrics)]
    except (OSError, ValueError, RecursionError):
        return ()
    steps = [row for row in rows if isinstance(row, dict) and row.get("kind") == "step"]
    recorded = next((row for row in steps if row.get("step") == step), {})
    return tuple(
        f"{name}: recorded {recorded[name]}, replayed {value}"
        for name, value in replayed.items()
        if name in recorded and recorded[name] != value
    )
