"""Plot an evaluation: pass@k over k for every source, with intervals, and maj@k; needs matplotlib (the extra ``report``)."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from penstock.console.evaluation.results import Estimate, EvaluationResult

_COLOURS = ("#2563a8", "#c2620a", "#2c7a4b", "#8a3ba0", "#666666")


def draw(path: Path, result: EvaluationResult) -> None:
    """Write the plot as PNG; without a definition of correct it shows the mean reward of each source."""
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if any(source.pass_at for source in result.sources):
            _curves(axes, result)
        else:
            _means(axes, result)
        name = result.model if result.version is None else f"{result.run} version {result.version}"
        axes.set_title(f"{name}, {result.k} samples of each prompt", loc="left", fontweight="bold")
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
        figure.savefig(path, dpi=130)


def _curves(axes: Axes, result: EvaluationResult) -> None:
    for source, colour in zip(result.sources, _COLOURS * len(result.sources), strict=False):
        ks = sorted(source.pass_at)
        if not ks:
            continue
        found = [source.pass_at[k] for k in ks]
        label = f"{source.source} ({source.complete} of {source.prompts} prompts)"
        axes.plot(ks, [one.value for one in found], color=colour, marker="o", linewidth=2, label=label)
        axes.fill_between(ks, [_low(one) for one in found], [_high(one) for one in found], color=colour, alpha=0.15)
        if source.maj is not None:
            axes.axhline(source.maj.value, color=colour, linestyle="dashed", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("k")
    axes.set_ylabel("pass@k (dashed: maj@k)")
    axes.set_ylim(0.0, 1.05)
    axes.legend(loc="best", frameon=False)


def _means(axes: Axes, result: EvaluationResult) -> None:
    shown = [(source.source, source.reward) for source in result.sources if source.reward is not None]
    for place, (_, one) in enumerate(shown):
        axes.errorbar(
            [place], [one.value], yerr=[[one.value - _low(one)], [_high(one) - one.value]], fmt="o", capsize=4
        )
    axes.set_xticks(range(len(shown)), [name for name, _ in shown])
    axes.set_ylabel("mean reward")


def _low(one: Estimate) -> float:
    return one.value if one.low is None else one.low


def _high(one: Estimate) -> float:
    return one.value if one.high is None else one.high
