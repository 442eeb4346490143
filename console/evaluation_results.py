"""Compute the result of an evaluation from the groups of its prompts, store it in ``evaluations/ID`` of a run's folder, and tabulate it.

Prompts are drawn at random, samples of one prompt are not independent: every interval of avg@k, pass@k and maj@k is over prompts,
each with the mean of its samples (a cluster), as in "Adding Error Bars to Evals", arXiv 2411.00640. A value that is 0 or 1 for every
prompt is a share, with Wilson's interval (E. B. Wilson, 1927); any other has the normal interval of a mean.

A prompt whose samples or scores failed is counted as failed, with the reason, and enters no mean: a failure is no score of
0. While prompts are missing, the means are over the complete ones alone, which may be easier than the others.

| file           | holds                                                                                       |
|----------------|---------------------------------------------------------------------------------------------|
| groups.jsonl   | one `Outcome` a line, written as prompts end: an evaluation that was killed continues there |
| rules.json     | the rewards' values from which on a sample is correct, as the reward services offered them  |
| result.json    | the `EvaluationResult`                                                                      |
| result.png     | the plot, if matplotlib is installed                                                        |
| ../metrics.jsonl | a line for each complete evaluation, which trackers read |
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.table import Table

from penstock.console import terminal
from penstock.protocol.files import atomic_write, read_document, regular_lines

Z95 = 1.959963984540054  # two-sided, 95 %
Method = Literal["wilson", "normal", "none"]
ALL = "all"
Extract = Callable[[str], Hashable | None]
Equal = Callable[[Hashable, Hashable], bool]
FOLDER = "evaluations"
GROUPS, RULES, RESULT, PLOT = "groups.jsonl", "rules.json", "result.json", "result.png"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its 95 % confidence interval."""

    value: float
    low: float | None  # None with `method` none: a single prompt has no interval
    high: float | None
    method: Method
    num_prompts: int


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of ``k`` samples, drawn without replacement, is correct.

    1 - C(n-c, k) / C(n, k), unbiased (arXiv 2107.03374). Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} samples is not defined")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority(answers: Sequence[Hashable | None], correct: Sequence[bool], equal: Equal = operator.eq) -> float:
    """Return the chance that the most frequent answer is correct; ties are broken at random. ``equal`` groups the answers.

    A sample without an answer (None) does not vote; without any vote the result is 0. Where equal answers were scored
    differently, the share of correct ones counts.
    """
    votes: dict[Hashable, list[bool]] = {}
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None:
            same = answer if answer in votes else next((known for known in votes if equal(known, answer)), answer)
            votes.setdefault(same, []).append(is_correct)
    most = max(map(len, votes.values()), default=0)
    elected = [sum(vote) / len(vote) for vote in votes.values() if len(vote) == most]
    return sum(elected) / len(elected) if elected else 0.0


def powers_of_two(num_samples: int) -> list[int]:
    """Return the k for which pass@k is reported: 1, 2, 4, … and the number of samples itself."""
    ks = [2**i for i in range(num_samples.bit_length())]
    return ks if ks[-1] == num_samples else [*ks, num_samples]


def estimate(values: Sequence[float], *, bounded: bool) -> Estimate:
    """Return the mean of one value for each prompt; ``bounded`` values are between 0 and 1. Raises ValueError for none."""
    if not values:
        raise ValueError("an estimate needs at least one prompt")
    if bounded and all(value in {0.0, 1.0} for value in values):
        return _share(round(sum(values)), len(values))
    return _mean(values, bounded=bounded)


def _share(successes: int, count: int) -> Estimate:
    share, z2 = successes / count, Z95 * Z95
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == count else centre + half
    return Estimate(share, low, high, "wilson", count)


def _mean(values: Sequence[float], *, bounded: bool) -> Estimate:
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, None, "none", 1)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    low, high = mean - Z95 * error, mean + Z95 * error
    return Estimate(mean, max(0.0, low) if bounded else low, min(1.0, high) if bounded else high, "normal", count)


class Outcome(BaseModel):
    """One prompt of an evaluation: its scored samples, or why there are none. One line of ``groups.jsonl``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt: Annotated[int, Field(ge=0)]
    source: str
    reward: str = ""  # name that was asked for
    data_source: str = ""
    rewards: tuple[float, ...] = ()
    parts: dict[str, tuple[float, ...]] = {}
    completions: tuple[str, ...] = ()
    completion_tokens: tuple[int, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    scorer: str = ""
    failed: str | None = None  # the reason
    detail: str = ""  # of the failure


@dataclass(frozen=True, slots=True)
class Correctness:
    """Which samples of a prompt are correct: ``None`` where nothing says so."""

    rule: str  # as people read it; why there is none, if there is none
    of: Mapping[int, tuple[bool, ...]] | None  # by prompt


@dataclass(frozen=True, slots=True)
class Answers:
    """How the answer of a completion is found, for maj@k: or why it is not."""

    rule: str
    extract: Callable[[Outcome], Extract | None] | None  # the extraction for a prompt; None: no maj@k
    equal: Equal = operator.eq  # what makes two answers one vote


class SourceResult(BaseModel):
    """The estimates of one source of prompts, or of all together."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: str
    prompts: int
    complete: int
    failed: int
    reasons: dict[str, int] = {}  # of failed prompts
    missing: int = 0  # neither complete nor failed: the evaluation was stopped
    reward: Estimate | None = None  # avg@k of the reward
    accuracy: Estimate | None = None  # avg@k of correct samples
    pass_at: dict[int, Estimate] = {}
    maj: Estimate | None = None
    completion_tokens_mean: float | None = None
    truncated_share: float | None = None


class DataFile(BaseModel):
    """A file that prompts came from."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: str
    sha256: str
    source: str


class EvaluationResult(BaseModel):
    """One evaluation of one model, as it is stored in ``result.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_tag: Literal["evaluation.v1"] = "evaluation.v1"
    evaluation_id: str
    model: str
    run: str | None = None
    version: int | None = None
    state_root: str = ""
    data: tuple[DataFile, ...] = ()
    k: int
    sampling: dict[str, float | int | str | tuple[str, ...] | tuple[int, ...]] = {}
    rewards: tuple[str, ...] = ()
    success: str = ""
    answer: str = ""  # how the answers of maj@k are found, or why there is no maj@k
    sources: tuple[SourceResult, ...] = ()
    finished_at: float | None = None
    wall_s: float | None = None

    @property
    def overall(self) -> SourceResult:
        """The estimates over the prompts of all sources."""
        return next((source for source in self.sources if source.source == ALL), self.sources[0])

    @property
    def is_complete(self) -> bool:
        return self.overall.complete == self.overall.prompts


def summarise(
    outcomes: Sequence[Outcome], prompts: Mapping[str, int], *, k: int, correct: Correctness, answers: Answers
) -> tuple[SourceResult, ...]:
    """Return the estimates of every source, and of all where there are several.

    Args:
        outcomes: One for each prompt that is over.
        prompts: How many prompts each source has.
        k: Samples of each prompt.
        correct: Which samples are correct.
        answers: How answers are found.
    """
    by_source = {source: [outcome for outcome in outcomes if outcome.source == source] for source in prompts}
    results = [
        _one(name, prompts[name], source_outcomes, k, correct, answers) for name, source_outcomes in by_source.items()
    ]
    if len(results) > 1:
        results.append(_one(ALL, sum(prompts.values()), list(outcomes), k, correct, answers))
    return tuple(results)


def _one(
    source: str, num_prompts: int, outcomes: Sequence[Outcome], k: int, correct: Correctness, answers: Answers
) -> SourceResult:
    complete = [outcome for outcome in outcomes if outcome.failed is None]
    failed = [outcome for outcome in outcomes if outcome.failed is not None]
    result = SourceResult(
        source=source,
        prompts=num_prompts,
        complete=len(complete),
        failed=len(failed),
        reasons=dict(Counter(group.failed or "" for group in failed)),
        missing=num_prompts - len(outcomes),
    )
    if not complete:
        return result
    tokens = [count for group in complete for count in group.completion_tokens]
    finishes = [reason for group in complete for reason in group.finish_reasons]
    updates: dict[str, object] = {
        "reward": estimate([math.fsum(group.rewards) / len(group.rewards) for group in complete], bounded=False),
        "completion_tokens_mean": sum(tokens) / len(tokens) if tokens else None,
        "truncated_share": finishes.count("length") / len(finishes) if finishes else None,
    }
    if correct.of is not None:
        samples = [(group, correct.of[group.prompt]) for group in complete]
        updates["accuracy"] = estimate(
            [sum(correctness) / len(correctness) for _, correctness in samples], bounded=True
        )
        updates["pass_at"] = {
            n: estimate([pass_at_k(len(correctness), sum(correctness), n) for _, correctness in samples], bounded=True)
            for n in powers_of_two(k)
        }
        updates["maj"] = _majority(samples, answers)
    return result.model_copy(update=updates)


def _majority(samples: Sequence[tuple[Outcome, tuple[bool, ...]]], answers: Answers) -> Estimate | None:
    if answers.extract is None:
        return None
    values = []
    for outcome, correctness in samples:
        extract = answers.extract(outcome)
        if extract is None:
            return None
        values.append(majority([extract(text) for text in outcome.completions], correctness, answers.equal))
    return estimate(values, bounded=True)


def read_outcomes(folder: Path) -> dict[int, Outcome]:
    """Return the outcomes of an evaluation by prompt, the last one of each; a line that was cut off is left out."""
    outcomes: dict[int, Outcome] = {}
    with contextlib.suppress(OSError):
        for line in regular_lines(folder / GROUPS):
            with contextlib.suppress(ValidationError):
                outcome = Outcome.model_validate_json(line)
                outcomes[outcome.prompt] = outcome
    return outcomes


def append_outcomes(folder: Path, outcomes: Iterable[Outcome]) -> None:
    with (folder / GROUPS).open("a", encoding="utf-8") as file:
        for outcome in outcomes:
            file.write(outcome.model_dump_json() + "\n")
        file.flush()
        os.fsync(file.fileno())


def rewrite_outcomes(folder: Path, outcomes: Iterable[Outcome]) -> None:
    atomic_write(folder / GROUPS, "".join(outcome.model_dump_json() + "\n" for outcome in outcomes))


def write_result(folder: Path, result: EvaluationResult) -> Path:
    return atomic_write(folder / RESULT, result.model_dump_json(indent=1) + "\n")


def read_result(folder: Path) -> EvaluationResult | None:
    """Return the result in the folder of an evaluation; None when there is none that can be read."""
    try:
        return EvaluationResult.model_validate_json(read_document(folder / RESULT))
    except (OSError, ValueError):
        return None


def results_of(run_folder: Path) -> Iterator[EvaluationResult]:
    """Yield the results stored with a run, oldest first; a file that cannot be read is left out."""
    read = [read_result(path.parent) for path in (run_folder / FOLDER).glob(f"*/{RESULT}")]
    results = [result for result in read if result is not None]
    yield from sorted(results, key=lambda one: (one.finished_at or 0.0, one.evaluation_id))


def result_table(result: EvaluationResult) -> Table:
    """Return one row for each source: complete prompts, means, pass@k and maj@k, each with its 95 % interval."""
    sources, k = result.sources, result.k
    columns: dict[str, Iterable[str]] = {"prompts": map(_prompts, sources)}
    columns[f"reward avg@{k}"] = (estimate_text(source.reward, as_share=False) for source in sources)
    if any(source.accuracy for source in sources):
        columns[f"correct avg@{k}"] = (estimate_text(source.accuracy) for source in sources)
    for n in sorted({n for source in sources for n in source.pass_at if n > 1}):
        columns[f"pass@{n}"] = map(estimate_text, [source.pass_at.get(n) for source in sources])
    if any(source.maj for source in sources):
        columns[f"maj@{k}"] = (estimate_text(source.maj) for source in sources)
    columns["tokens"] = (_known(source.completion_tokens_mean, ".1f") for source in sources)
    columns["cut off"] = (_known(source.truncated_share, ".1%") for source in sources)
    rows = terminal.table("source", *columns, right=list(columns))
    for source, *cells in zip(sources, *columns.values(), strict=True):
        rows.add_row(source.source, *cells)
    return rows


def _known(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def result_notes(result: EvaluationResult) -> Iterator[str]:
    everything = result.overall
    if not result.is_complete:
        yield (
            f"{everything.complete} of {everything.prompts} prompts are complete, {everything.failed} failed, "
            f"{everything.missing} missing: the means are over the complete ones only, which may be easier than the others"
        )
    for reason, count in sorted(everything.reasons.items()):
        yield f"{count} failed: {reason}"
    yield f"correct: {result.success or 'not defined'}"
    yield f"maj@{result.k}: {result.answer}"
    yield "intervals: 95 %, over prompts; Wilson for shares, normal for means of several samples"


def estimate_text(estimate: Estimate | None, *, as_share: bool = True) -> str:
    """Return an estimate with its interval, such as ``62.5% [41.0, 80.1]``."""
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.1%}" if as_share else f"{estimate.value:.3f}"
    if as_share:
        return f"{estimate.value:.1%} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _prompts(source: SourceResult) -> str:
    return str(source.prompts) if source.complete == source.prompts else f"{source.complete} of {source.prompts}"
