"""Write the table and the plot of the results of `benchmarks/staleness.py`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
LAGS = ("0", "1", "2", "4", "8", "16", "32", "mixed16", "mixed32")
_FRESH = "ppo"  # at lag 0 every ratio is 1: this is the plain policy gradient, whatever the method

Runs = dict[tuple[str, str, str], list[dict]]  # (task, method, lag) -> one run per seed
_HEAD = "| method | lag | seeds | end | mean | ends by seed | lr factor | KL to sampler |\n|---|---|---|---|---|---|---|---|"


def read(path: Path) -> Runs:
    """Read the runs; of several with one seed the newest is used."""
    newest: dict[tuple[str, str, str, int], dict] = {}
    for line in path.read_text().splitlines():
        run = json.loads(line)
        newest[run["task"], run["method"], run["lag"], run["seed"]] = run
    runs: Runs = defaultdict(list)
    for (task, method, lag, _), run in sorted(newest.items()):
        runs[task, method, lag].append(run)
    return runs


def _row(name: str, runs: list[dict]) -> str:
    ends = " ".join(f"{r['end']:.3f}" for r in runs)
    return (
        f"| {name} | {runs[0]['lag']} | {len(runs)} | {fmean(r['end'] for r in runs):.3f} "
        f"| {fmean(r['mean'] for r in runs):.3f} | {ends} | {fmean(r['lr_factor'] for r in runs):.2f} "
        f"| {fmean(r['kl'] for r in runs):.3f} |"
    )


def markdown(runs: Runs) -> str:
    parts = []
    for task in sorted({t for t, _, _ in runs}, reverse=True):
        rows = [_HEAD]
        fresh = runs.get((task, _FRESH, "0"), [])
        if fresh:
            rows.append(_row("**on-policy**", fresh))
        for method in sorted({m for t, m, _ in runs if t == task}, key=lambda m: (m != "default", m)):
            rows += [
                _row(f"**{method}**" if method == "default" else method, runs[task, method, lag])
                for lag in LAGS
                if (task, method, lag) in runs and not (method == _FRESH and lag == "0")
            ]
        parts.append(f"### {task}\n\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _curves(axes: Any, curves: Mapping[str, list[dict]]) -> None:
    for name, some in curves.items():
        values = [fmean(r["curve"][step] for r in some) for step in some[0]["curve"]]
        style = {"color": "black", "linestyle": ":"} if name == "on-policy" else {}
        axes.plot([int(step) for step in some[0]["curve"]], values, label=f"{name} ({len(some)})", **style)
    axes.legend(fontsize=8)


def plot(runs: Runs, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right, pretrained) = plt.subplots(1, 3, figsize=(16, 4.2))
    shown = [m for m in ("default", "ppo") if any(k[1] == m for k in runs)]
    fresh = runs["sort", _FRESH, "0"]
    left.axhline(fmean(r["end"] for r in fresh), color="black", linestyle=":", label="on-policy")
    for method in shown:
        lags = [lag for lag in LAGS if lag.isdigit() and lag != "0" and ("sort", method, lag) in runs]
        ends = [fmean(r["end"] for r in runs["sort", method, lag]) for lag in lags]
        left.plot([int(lag) for lag in lags], ends, marker="o", label=method)
    left.set(xscale="log", xlabel="age of the samples, in optimizer steps", ylabel="sort: held-out accuracy at the end")
    left.set_xticks([1, 2, 4, 8, 16, 32], labels=["1", "2", "4", "8", "16", "32"])
    left.legend()
    curves = {"on-policy": fresh} | {
        m: runs["sort", m, "16"] for m in ("default", "ppo", "gspo0.05", "minirl", "cispo") if ("sort", m, "16") in runs
    }
    _curves(right, curves)
    right.set(xlabel="optimizer step", ylabel="sort: held-out accuracy, samples 16 steps old")
    _curves(
        pretrained,
        {
            "on-policy" if (method, lag) == (_FRESH, "0") else f"{method}, lag {lag}": some
            for (task, method, lag), some in runs.items()
            if task == "sums"
        },
    )
    pretrained.set(xlabel="optimizer step", ylabel="sums, a pretrained model: held-out accuracy")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def write(results: Path) -> str:
    runs = read(results)
    tables = markdown(runs)
    page = HERE / "staleness.md"
    head, _, rest = page.read_text().partition("<!-- tables -->")
    _, _, tail = rest.partition("<!-- end of tables -->")
    page.write_text(f"{head}<!-- tables -->\n\n{tables}\n<!-- end of tables -->{tail}")
    plot(runs, HERE / "staleness.png")
    return tables
