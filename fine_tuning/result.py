"""Writes what a training leaves: a model folder, and with LoRA the adapter beside it in PEFT's format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from penstock.protocol import files
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterConfig, published_name
from penstock.trainer.learner.export import export_model
from penstock.trainer.learner.policy import Policy
from penstock.trainer.parallel_dims import ParallelDims


@dataclass(frozen=True, slots=True)
class Result:
    """What a training left."""

    folder: Path
    num_steps: int
    weights_of_step: int
    num_tokens: int  # trained on
    first_loss: float
    last_loss: float


def adapter_folder(folder: Path) -> Path:
    """Return the folder of the adapter beside a result."""
    return folder.with_name(folder.name + "-adapter")


def write_result(
    policy: Policy,
    dims: ParallelDims,
    folder: Path | None,
    *,
    like: Path,
    changed: Mapping[str, Any] | None = None,
    verify: bool = True,
) -> None:
    """Write the whole model, adapters merged, and the adapters; collective. ``folder`` is that of the rank that writes small files.

    Raises ExportFailed as `export_model` does.
    """
    place = Path(dims.ranks.broadcast(None if folder is None else str(folder.absolute())))
    export_model(policy, dims, place, like=like, changed=changed, verify=verify)
    config = policy.weights.adapter_config()
    factors = policy.weights.adapter_tensors() if config is not None else {}
    if folder is None or config is None:
        return
    final = adapter_folder(folder)
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file({published_name(name): tensor for name, tensor in factors.items()}, partial / ADAPTER_WEIGHTS)
    (partial / ADAPTER_CONFIG).write_bytes(_config_json(config, policy.weights.modules_beside_adapters()))
    shutil.rmtree(final, ignore_errors=True)
    files.replace(partial, final)


def _config_json(config: AdapterConfig, saved: Sequence[str]) -> bytes:
    """Return the adapter's file for peft; with a score that is ``saved`` beside it, that of a sequence classifier."""
    if not saved:
        return config.to_json()
    fields = json.loads(config.to_json()) | {"task_type": "SEQ_CLS", "modules_to_save": list(saved)}
    return json.dumps(fields, indent=2).encode()


def move_result(source: Path, folder: Path) -> None:
    """Move what `write_result` wrote to another folder, and replace what is there."""
    for old, new in ((source, folder), (adapter_folder(source), adapter_folder(folder))):
        if old.exists():
            shutil.rmtree(new, ignore_errors=True)
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(old, new)
