"""A checkpoint is resumed with the model it was made of: checked from the model folders, before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.protocol.errors import ConfigError

_SHAPE = (
    "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip


def check_same_model(run_folder: Path, model_path: Path) -> None:
    """Raise ConfigError if a run with a checkpoint is resumed with a model of another shape.

    The model of the earlier sessions is the one in the run's ``config.json``. Where it cannot be read any more nothing is
    checked here: the checkpoint is refused when it is loaded.
    """
    if not any((run_folder / "checkpoints").glob("step*")):
        return
    recorded = _read(run_folder / "config.json").get("settings")
    model = recorded.get("model") if isinstance(recorded, dict) else None
    earlier = model.get("path") if isinstance(model, dict) else None
    if not isinstance(earlier, str) or Path(earlier) == model_path:
        return
    before, now = _read(Path(earlier) / "config.json"), _read(model_path / "config.json")
    if not before or not now:
        return
    other = [key for key in _SHAPE if before.get(key) != now.get(key)]
    if other:
        raise ConfigError(
            f"run {run_folder.name} has checkpoints of the model {earlier} ({other[0]} = {before.get(other[0])}), and model.path = "
            f"{model_path} has {other[0]} = {now.get(other[0])}: set model.path back to resume the run, or start another one "
            "from this model with another run.id"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
