"""Machines with GPUs for tests: what their driver lists, the shapes of models, and a Python that writes down how it was started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.metrics.nvml import Card, Nvml
from tests.servers import wait_for

from penstock.protocol import seals
from penstock.protocol.config.run_file import load
from penstock.protocol.metrics import gpu
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.settings import RolloutSettings

_QWEN = {"vocab_size": 151_936, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {**_QWEN, "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072, "tie_word_embeddings": True},
    "7B": {**_QWEN, "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18_944},
    "32B": {**_QWEN, "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 25_600},
    "unknown": {"model_type": "mamba"},
}  # fmt: skip
_STAND_IN = """#!{python} -I
import json, os, pathlib, sys, time
file = pathlib.Path({folder!r}) / f"{{os.getpid()}}.json"
file.with_suffix(".part").write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
file.with_suffix(".part").rename(file)
time.sleep({sleep_s})
"""


def cards(count: int, *, total: float = 80, used: float = 0.5) -> list[Card]:
    return [Card(f"GPU-{number}f", used, total) for number in range(count)]


def see(monkeypatch: pytest.MonkeyPatch, found: Sequence[Card], visible: str | None = None) -> None:
    """Let this process see GPUs, as a driver and CUDA_VISIBLE_DEVICES say."""
    monkeypatch.setattr(gpu, "_package", lambda **_: Nvml(found))
    monkeypatch.setenv("PENSTOCK_PLACEMENT__LOCK_DIR", str(Path(os.environ[seals.KEY_FILE]).with_name("gpus")))
    monkeypatch.delenv(gpu.ORDER, raising=False)
    monkeypatch.delenv(gpu.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(gpu.VISIBLE, visible)


def model_of(folder: Path, shape: str) -> Path:
    (folder / shape).mkdir(exist_ok=True)
    (folder / shape / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder / shape


@dataclass(frozen=True)
class Started:
    """A process by what its stand-in wrote down."""

    words: list[str]
    environ: dict[str, str]

    @property
    def role(self) -> str:
        return next(
            name for name in ("trainer", "rollout_service", "reward_service") if f"penstock.{name}" in self.words
        )

    @property
    def visible(self) -> list[str]:
        return [name for name in self.environ[gpu.VISIBLE].split(",") if name]

    @property
    def ranks(self) -> int:
        return next((int(word.partition("=")[2]) for word in self.words if word.startswith("--nproc-per-node=")), 1)

    @property
    def overrides(self) -> list[str]:
        return self.words[self.words.index(f"penstock.{self.role}") + 1 :]

    def servers(self) -> list[tuple[list[str], list[str]]]:
        """Return, for each server that this worker would start, its GPUs by what CUDA calls them, and its command line."""
        files = [Path(word) for word in self.overrides if word.endswith(".toml")]
        overrides = [word for word in self.overrides if "=" in word]
        settings = load(RolloutSettings, files=files, overrides=overrides, environ=self.environ).settings
        kind, options = settings.worker.kind, settings.engine_options
        assert kind.launches is not None
        found = []
        for launch in kind.launches(options, self.environ):
            words = launch.command(Path("/w"), PolicyVersion(1), Path("/p"))
            visible = (launch.environ or self.environ)[gpu.VISIBLE].split(",")
            first = int(words[words.index("--base-gpu-id") + 1]) if "--base-gpu-id" in words else 0
            found.append((visible[first : first + options.gpus], words))
        return found


def stand_in(folder: Path, *, sleep_s: float = 600.0) -> Path:
    """Return a Python that starts nothing: each start is written down in ``folder``."""
    (folder / "started").mkdir()
    file = folder / "python"
    file.write_text(_STAND_IN.format(python=sys.executable, folder=str(folder / "started"), sleep_s=sleep_s))
    file.chmod(0o755)
    return file


def started(folder: Path, count: int) -> list[Started]:
    wait_for(lambda: len(list((folder / "started").glob("*.json"))) >= count, f"{count} processes")
    return [Started(*json.loads(file.read_text())) for file in (folder / "started").glob("*.json")]
