"""The verbs of `penstock model`: tools for model folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from cyclopts import App

from penstock.console.cli.verb_parts import INSPECT

app = App(name="model", help="Merge model folders.", help_format="plaintext", group=INSPECT)


@app.command
def merge(
    *models: Path,
    to: Path,
    method: Literal["linear", "slerp", "task_arithmetic", "ties", "dare"] = "linear",
    weights: str | None = None,
    base: Path | None = None,
    t: float = 0.5,
    density: float = 0.5,
    scale: float = 1.0,
    seed: int = 0,
) -> int:
    """Merge model folders of one architecture into a new one, tensor by tensor, without a GPU and without torch.

    Folders of a run's versions come from `penstock weights export`. Memory: one tensor of each model.

    Example:  penstock model merge models/v80 models/v90 models/v100 --to models/average
              penstock model merge math code --base start --method ties --density 0.3 --to both
    Then:     penstock chat RUN --model models/average

    Parameters
    ----------
    models
        Model folders, at least two; the first gives dtype, config and tokenizer.
    to
        Folder to create; it must not exist.
    method
        linear: weighted mean. slerp: arc between two. task_arithmetic, ties, dare: changes against --base, added.
    weights
        One number for each model, comma-separated; default 1 each.
    base
        Model that the others were trained from.
    t
        Of slerp: 0 is the first model, 1 the second.
    density
        Of ties and dare: share of the changes that is kept.
    scale
        Of task_arithmetic, ties and dare: factor of the added changes.
    seed
        Of dare's random choice.
    """
    from penstock.console.models.merge import merge_folders
    from penstock.console.models.merge_methods import Recipe, parse_weights

    recipe = Recipe(method, parse_weights(weights, len(models)), t=t, density=density, scale=scale, seed=seed)
    count = merge_folders(models, base, to, recipe)
    print(f"{count} tensors of {len(models)} models merged ({method}): {to}", file=sys.stderr)
    return 0
