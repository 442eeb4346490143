"""Draw `benchmarks/async.png` from rows that `python -m benchmarks.asynchrony --json FILE` wrote.

python -m benchmarks.asynchrony.plot FILE [FILE ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.asynchrony.job import MODES

PICTURE = Path(__file__).parents[1] / "async.png"


def draw(rows: list[dict[str, Any]], num_workers: int) -> None:
    """Draw the trained tokens of every mode with so many workers, and the ideal."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    order = [mode.name for mode in MODES]
    chosen = sorted((row for row in rows if row["workers"] == num_workers), key=lambda row: order.index(row["mode"]))
    figure, axes = plt.subplots(figsize=(8, 3.5))
    axes.barh([row["mode"] for row in chosen], [row["tokens_per_s"] for row in chosen], color="#4477aa")
    axes.axvline(chosen[0]["ideal_tokens_per_s"], color="#cc3311", linestyle="--", label="ideal: 1 / largest share")
    axes.invert_yaxis()
    axes.set_xlabel(f"trained tokens per second, {num_workers} workers")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    draw([json.loads(line) for file in sys.argv[1:] for line in Path(file).read_text().splitlines()], 8)
