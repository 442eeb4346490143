"""The table of an evaluation's result; pure but for the console that prints it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from penstock.console import terminal
from penstock.console.evaluation.results import Estimate, EvaluationResult, SourceResult


def table(result: EvaluationResult) -> Table:
    """Return one row for each source: complete prompts, means, pass@k and maj@k, each with its 95 % interval."""
    ks = sorted({k for source in result.sources for k in source.pass_at if k > 1})
    has_accuracy = any(source.accuracy for source in result.sources)
    has_majority = any(source.maj for source in result.sources)
    names = ["prompts", f"reward avg@{result.k}"]
    names += [f"correct avg@{result.k}"] if has_accuracy else []
    names += [f"pass@{k}" for k in ks]
    names += [f"maj@{result.k}"] if has_majority else []
    names += ["tokens", "cut off"]
    rows = terminal.table("source", *names, right=names)
    for source in result.sources:
        cells = [source.source, _prompts(source), text(source.reward, as_share=False)]
        cells += [text(source.accuracy)] if has_accuracy else []
        cells += [text(source.pass_at.get(k)) for k in ks]
        cells += [text(source.maj)] if has_majority else []
        tokens, cut = source.completion_tokens_mean, source.truncated_share
        rows.add_row(*cells, "–" if tokens is None else f"{tokens:.1f}", "–" if cut is None else f"{cut:.1%}")
    return rows


def notes(result: EvaluationResult) -> Iterator[str]:
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


def text(estimate: Estimate | None, *, as_share: bool = True) -> str:
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
