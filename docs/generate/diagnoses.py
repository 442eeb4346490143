"""Describe what panel and report say about a run that does not learn: every rule, applied to metrics that it reports."""

from __future__ import annotations

from penstock.console.report.diagnoses import RunMetrics, diagnose
from penstock.console.report.run_summary import Diagnosis

_STEPS = 60


def _run(**figures: float) -> RunMetrics:
    steps = [{"reward_mean": 0.4 + 0.01 * (step % 5), "reward_std": 0.3, **figures} for step in range(_STEPS)]
    return RunMetrics(steps)


def _constant(reward: float) -> RunMetrics:
    return RunMetrics([{"reward_mean": reward, "reward_std": 0.0}] * _STEPS)


def _course(name: str, first: float, last: float) -> RunMetrics:
    half = _STEPS // 2
    return RunMetrics([{"reward_mean": 0.4 + 0.01 * (n % 5), name: first if n < half else last} for n in range(_STEPS)])


def _rose_and_fell() -> RunMetrics:
    third = _STEPS // 3
    return RunMetrics([{"reward_mean": value, "reward_std": 0.3} for value in (0.1, 0.8, 0.2) for _ in range(third)])


RUNS: tuple[RunMetrics, ...] = (
    _run(loss_not_finite=1.0), _constant(0.0), _constant(1.0), _run(zero_signal_groups=0.8), _run(truncated_share=0.4),
    _rose_and_fell(), _course("entropy", 1.2, 0.01), _run(ess_share=0.3), _run(kl_behaviour=0.2), _run(engine_gap=0.08),
    _run(lr=2e-7, lr_set=1e-6), RunMetrics(_run().steps, issued=1000, dropped={"stale": 300}),
)  # fmt: skip


def text() -> str:
    """Return symptom, cause and cure of each rule, in the order in which the rules are asked."""
    return "\n".join(
        f"`{one.key}`\n: **{one.what}** {one.cause} *Cure:* {one.cure}\n" for run in RUNS for one in shown(run)
    )


def shown(run: RunMetrics) -> tuple[Diagnosis, ...]:
    return diagnose(run)[:1]
