"""What a replay came to, for programs and for people; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

EXPLANATION = "nothing that was written down differs: groups, settings, libraries, code and machine are the same"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first version that did not come out the same."""

    version: int
    step: int | None  # None: the weights that it began with
    recorded: str  # digests
    replayed: str
    figures: tuple[str, ...] = ()  # of the step, that are not those of metrics.jsonl


@dataclass(slots=True)
class Verdict:
    """What a replay came to."""

    run_id: str
    began_with: int = 0  # the version
    began_from: str = ""  # words
    same: list[int] = field(default_factory=list)  # versions that came out the same
    difference: Difference | None = None
    findings: list[str] = field(default_factory=list)  # what is wrong with record, settings or packs
    drift: list[str] = field(default_factory=list)  # what the run file says otherwise by now; the record goes
    environment_fingerprint: list[str] = field(default_factory=list)  # what is not as it was when the steps were made
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
        """Whether everything that was wanted came out the same and nothing else is wrong."""
        return self.difference is None and not self.findings and bool(self.same)


def describe(verdict: Verdict) -> str:
    """Return the verdict as text: how far it came, the first difference, and everything that may explain it."""
    lines = [f"run {verdict.run_id}: replayed from {verdict.began_from}, version {verdict.began_with}"]
    if verdict.same:
        rate = verdict.num_steps / verdict.wall_s if verdict.wall_s else 0.0
        lines.append(
            f"{len(verdict.same)} versions are the same, {verdict.same[0]} to {verdict.same[-1]}: {verdict.num_steps} steps, "
            f"{verdict.num_groups} groups, {verdict.num_tokens} tokens in {verdict.wall_s:.1f} s ({rate:.1f} steps/s)"
        )
    lines += [f"wrong: {finding}" for finding in verdict.findings]
    lines += [f"drifted, not used: {line}" for line in verdict.drift]
    if verdict.difference is not None:
        lines += _first_difference(verdict)
    elif verdict.environment_fingerprint:
        lines += [f"other than then, without effect: {line}" for line in verdict.environment_fingerprint]
    lines.append("the run is what its record says" if verdict.holds else "THE RUN IS NOT WHAT ITS RECORD SAYS")
    return "".join(f"{line}\n" for line in lines)


def _first_difference(verdict: Verdict) -> list[str]:
    found = verdict.difference
    assert found is not None
    made = f"made by step {found.step}" if found.step is not None else "the weights it began with"
    return [
        f"version {found.version}, {made}, differs: recorded {found.recorded[:16]}…, replayed {found.replayed[:16]}…",
        *(f"  that step's {line}" for line in found.figures),
        *(f"  may explain it: {line}" for line in verdict.environment_fingerprint or [EXPLANATION]),
    ]
