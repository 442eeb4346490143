"""The result of a replay, as JSON and as text; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
        """Count a step by its groups' sampled tokens."""
        self.num_steps += 1
        self.num_groups += len(token_counts)
        self.num_tokens += sum(token_counts)

    @property
    def holds(self) -> bool:
        """True if every requested version is identical and there is no finding."""
        return self.difference is None and not self.findings and bool(self.same)

    def to_document(self) -> dict[str, Any]:
        """Return the verdict as plain JSON values."""
        document = {"surroundings" if k == "environment_differences" else k: v for k, v in asdict(self).items()}
        return {**document, "holds": self.holds}


def describe(verdict: Verdict) -> str:
    """Return the verdict as text: versions compared, the first difference, and what may explain it."""
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
