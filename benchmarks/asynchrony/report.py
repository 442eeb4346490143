"""The table of `benchmarks/async.md`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.asynchrony.measure import Measured

_HEADER = (
    "| workers | mode | trained tokens/s | over synchronous | ideal over synchronous | trainer idle | engines idle "
    "| slots used | staleness mean, most | dropped of trained groups | s of a step | mean tokens trained | abandoned completions, tokens "
    "| CPU |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def table(rows: Sequence[Measured], *, header: bool = True) -> str:
    """Return rows as Markdown; ratios are to the synchronous row of as many workers, where there is one."""
    base = {row.workers: row.tokens_per_s for row in rows if row.mode == "synchronous"}
    lines = [_HEADER] if header else []
    for row in rows:
        slower = base.get(row.workers)
        ratios = f"{row.tokens_per_s / slower:.2f} | {row.ideal_tokens_per_s / slower:.2f}" if slower else "| "
        lines.append(
            f"| {row.workers} | {row.mode} | {row.tokens_per_s:.0f} | {ratios} | {row.trainer_idle:.1%} | {row.rollout_idle:.1%} "
            f"| {row.slots_used:.1%} | {row.staleness_mean:.2f}, {max(row.staleness)} | {row.dropped} of {row.trained} "
            f"| {row.step_s:.2f} | {fmean(row.lengths):.1f} | {row.abandoned[0]}, {row.abandoned[1]} | {row.cpu_share:.0%} |"
        )
    return "\n".join(lines)
