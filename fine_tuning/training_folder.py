"""The folder of a training below its run's folder, ``runs/<id>/sft-training``: metrics, checkpoints, the best weights.

metrics.jsonl     one line for each step and each validation, as docs/metrics.md describes
checkpoints/      removed when the result is written
best/             model folder of the lowest validation loss, with keep_best; moved to the result
result.json       the outcome of the training; written when the model folder is complete, removed when it trains again
lock              held while a process trains

The result is a model folder, and with LoRA the adapter beside it in PEFT's format.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from penstock.protocol import files
from penstock.protocol.files import atomic_write
from penstock.protocol.record import pause_request
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterConfig, published_name
from penstock.trainer.errors import RunIsHeld
from penstock.trainer.learner.export import export_model
from penstock.trainer.learner.policy import Policy
from penstock.trainer.parallel_dims import ParallelDims

RESULT = "result.json"


class TrainingFolder:
    def __init__(self, path: Path) -> None:
        """Create the folder and lock it; raises RunIsHeld while another process of this machine trains in it."""
        path.mkdir(parents=True, exist_ok=True)
        self.checkpoints = path / "checkpoints"
        self._path = path
        self._lock = (path / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RunIsHeld(
                f"{path}: another process is training there; wait for it, or choose another run.id"
            ) from None
        self._metrics = (path / "metrics.jsonl").open("ab")

    def rewind(self, num_bytes: int) -> None:
        """Cut metrics.jsonl to its length at a checkpoint: the later steps are made again. An earlier result is no longer one."""
        (self._path / RESULT).unlink(missing_ok=True)
        self._metrics.truncate(num_bytes)

    def finish(self, outcome: Mapping[str, Any]) -> None:
        atomic_write(self._path / RESULT, json.dumps(outcome), sync=True)

    @property
    def is_pause_requested(self) -> bool:
        return pause_request.is_requested(self._path.parent)

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps({"kind": kind, "at": time.time(), **fields}).encode() + b"\n")
        self._metrics.flush()

    @property
    def metrics_bytes(self) -> int:
        return self._metrics.seek(0, 2)

    def best(self, step: int) -> Path:
        """Return the folder of the weights after ``step`` steps, if they are the best."""
        return self._path / "best" / f"step{step:08d}"

    def keep_best(self, steps: Collection[int]) -> None:
        kept = tuple(self.best(step).name for step in steps)
        for folder in (self._path / "best").glob("step*"):
            if not folder.name.startswith(kept):
                shutil.rmtree(folder)

    def close(self) -> None:
        self._metrics.close()
        self._lock.close()


@dataclass(frozen=True, slots=True)
class Result:
    folder: Path
    num_steps: int
    weights_of_step: int
    num_tokens: int  # trained on
    first_loss: float
    last_loss: float


def adapter_folder(folder: Path) -> Path:
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
    for written in (partial / ADAPTER_WEIGHTS, partial / ADAPTER_CONFIG, partial):
        files.fsync(written)
    shutil.rmtree(final, ignore_errors=True)
    files.replace(partial, final, sync_folder=True)


def _config_json(config: AdapterConfig, saved: Sequence[str]) -> bytes:
    if not saved:
        return config.to_json()
    fields = json.loads(config.to_json()) | {"task_type": "SEQ_CLS", "modules_to_save": list(saved)}
    return json.dumps(fields, indent=2).encode()


def move_result(source: Path, folder: Path) -> None:
    for old, new in ((source, folder), (adapter_folder(source), adapter_folder(folder))):
        if old.exists():
            shutil.rmtree(new, ignore_errors=True)
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(old, new)
            files.fsync(new.parent)
