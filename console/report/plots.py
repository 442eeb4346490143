"""Plot the curves of a run and the result of an evaluation; the only file that imports matplotlib (the extra ``report``)."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from penstock.console.evaluation_results import Estimate, EvaluationResult
from penstock.console.report.curves import Curves
from penstock.console.report.run_summary import RunSummary

_BLUE, _ORANGE, _GREEN, _GREY = "#2563a8", "#c2620a", "#2c7a4b", "#666666"
_PART_STYLES = ("dashed", "dotted", "dashdot", (0, (5, 1)), (0, (1, 3)))  # at most this many parts are drawn
_FRESH, _OLDER = "#7fb08f", "#dfa35f"
_COLOURS = ("#2563a8", "#c2620a", "#2c7a4b", "#8a3ba0", "#666666")


def draw_run(path: Path, summary: RunSummary, curves: Curves) -> None:
    """Write the plot as PNG: curves on the left, staleness of the trained tokens and idle shares on the right."""
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, 2, width_ratios=(2.1, 1))
        _curves(figure.add_subplot(grid[:, 0]), summary, curves)
        _staleness(figure.add_subplot(grid[0, 1]), summary)
        _idle(figure.add_subplot(grid[1, 1]), summary)
        figure.savefig(path, dpi=130)


def _curves(axes: Axes, summary: RunSummary, curves: Curves) -> None:
    if curves.rewards:
        steps, rewards = zip(*curves.rewards, strict=True)
        axes.plot(steps, rewards, color=_BLUE, alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(rewards), color=_BLUE, linewidth=2, label="training reward (mean of 9 steps)")
    drawn = {name: points for name, points in curves.parts.items() if "." not in name}
    for (name, points), style in zip(drawn.items(), _PART_STYLES, strict=False):
        steps, means = zip(*points, strict=True)
        axes.plot(steps, _smooth(means), color=_GREY, linewidth=1, linestyle=style, label=f"part {name}")
    held_out = curves.held_out
    if held_out.points:
        steps, values = zip(*held_out.points, strict=True)
        axes.plot(steps, values, color=_ORANGE, linewidth=1.5, marker="o", markersize=5, label=held_out.name)
        for step, value, height in ((steps[0], values[0], -17), (steps[-1], values[-1], 9)):
            axes.annotate(
                f"{value:.2f}", (step, value), (0, height), textcoords="offset points", ha="center", color=_ORANGE
            )
    values_drawn = [value for _, value in (*curves.rewards, *held_out.points, *chain(*drawn.values()))]
    if values_drawn and min(values_drawn) >= 0.0 and max(values_drawn) <= 1.0:
        axes.set_ylim(0.0, 1.08)
    axes.set_xlabel("optimizer step")
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(f"{summary.run_id}: {summary.steps} steps in {summary.wall_s:.0f} s", loc="left", fontweight="bold")
    if values_drawn:
        axes.legend(loc="best", frameon=False)


def _staleness(axes: Axes, summary: RunSummary) -> None:
    tokens = sorted((int(k), n) for k, n in summary.staleness_tokens.items())
    whole = sum(n for _, n in tokens) or 1
    colours = [_FRESH if k == 0 else _OLDER for k, _ in tokens]
    bars = axes.bar([str(k) for k, _ in tokens], [100 * n / whole for _, n in tokens], color=colours, width=0.7)
    axes.bar_label(bars, fmt="%.0f%%", padding=2, color=_GREY)
    axes.set_title("staleness of trained tokens", loc="left", fontsize=10)
    axes.set_xlabel("versions behind the trainer")
    _bare(axes, horizontal=False)


def _idle(axes: Axes, summary: RunSummary) -> None:
    roles = list(summary.idle_share)[::-1]
    idle = [100 * summary.idle_share[role] for role in roles]
    axes.barh(roles, [100 - share for share in idle], color=_GREEN, alpha=0.6, height=0.6, label="busy")
    axes.barh(roles, idle, left=[100 - share for share in idle], color="#d9d9d9", height=0.6, label="waiting")
    for row, share in enumerate(idle):
        axes.annotate(f"waits {share:.0f}%", (101, row), va="center", color=_GREY, annotation_clip=False)
    axes.set_xlim(0, 130)
    axes.set_title("share of time waiting", loc="left", fontsize=10)
    _bare(axes, horizontal=True)


def _bare(axes: Axes, *, horizontal: bool) -> None:
    axes.spines["bottom" if horizontal else "left"].set_visible(False)
    axes.set_xticks([]) if horizontal else axes.set_yticks([])
    axes.tick_params(length=0)
    axes.margins(y=0.18)


def _smooth(values: tuple[float, ...]) -> list[float]:
    windows = (values[max(i - 4, 0) : i + 5] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def draw_result(path: Path, result: EvaluationResult) -> None:
    """Write the plot as PNG; without a definition of correct it shows the mean reward of each source."""
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if any(source.pass_at for source in result.sources):
            _pass_curves(axes, result)
        else:
            _means(axes, result)
        name = result.model if result.version is None else f"{result.run} version {result.version}"
        axes.set_title(f"{name}, {result.k} samples of each prompt", loc="left", fontweight="bold")
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
        figure.savefig(path, dpi=130)


def _pass_curves(axes: Axes, result: EvaluationResult) -> None:
    for source, colour in zip(result.sources, _COLOURS * len(result.sources), strict=False):
        ks = sorted(source.pass_at)
        if not ks:
            continue
        estimates = [source.pass_at[k] for k in ks]
        label = f"{source.source} ({source.complete} of {source.prompts} prompts)"
        axes.plot(ks, [estimate.value for estimate in estimates], color=colour, marker="o", linewidth=2, label=label)
        axes.fill_between(
            ks,
            [_low(estimate) for estimate in estimates],
            [_high(estimate) for estimate in estimates],
            color=colour,
            alpha=0.15,
        )
        if source.maj is not None:
            axes.axhline(source.maj.value, color=colour, linestyle="dashed", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("k")
    axes.set_ylabel("pass@k (dashed: maj@k)")
    axes.set_ylim(0.0, 1.05)
    axes.legend(loc="best", frameon=False)


def _means(axes: Axes, result: EvaluationResult) -> None:
    shown = [(source.source, source.reward) for source in result.sources if source.reward is not None]
    for place, (_, estimate) in enumerate(shown):
        axes.errorbar(
            [place],
            [estimate.value],
            yerr=[[estimate.value - _low(estimate)], [_high(estimate) - estimate.value]],
            fmt="o",
            capsize=4,
        )
    axes.set_xticks(range(len(shown)), [name for name, _ in shown])
    axes.set_ylabel("mean reward")


def _low(estimate: Estimate) -> float:
    return estimate.value if estimate.low is None else estimate.low


def _high(estimate: Estimate) -> float:
    return estimate.value if estimate.high is None else estimate.high
