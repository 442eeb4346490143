"""A model of the embedded engine in this process: its versions, runners, and transformers' forward of each version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.contracts.tiny_model import Dense, build_model, write_changed_copy

from penstock.rollout_service.embedded_engine.model.kv_cache import KVCache
from penstock.rollout_service.embedded_engine.model.model_config import read_model_config
from penstock.rollout_service.embedded_engine.model.transformer import Transformer
from penstock.rollout_service.embedded_engine.model.weights import prepare_weights, read_checkpoint
from penstock.rollout_service.embedded_engine.runner import Runner

CPU = torch.device("cpu")


class Model:
    def __init__(self, folder: Path, num_versions: int, **changes: Any) -> None:
        build_model(folder / "v0", **changes)
        folders = [folder / "v0"]
        for seed in range(1, num_versions):
            folders.append(write_changed_copy(folders[0], folder / f"v{seed}", seed=seed, scale=0.1))
        self.config = read_model_config(folders[0])
        with torch.inference_mode():
            self.weights = [
                prepare_weights(self.config, read_checkpoint(one, self.config), device=CPU, dtype=torch.float32)
                for one in folders
            ]
        self.dense = [Dense(one) for one in folders]

    def runner(self, *, max_running: int = 16, max_tokens: int = 10**5, max_kept_tokens: int = 10**5) -> Runner:
        """Return a runner with the first version."""
        with torch.inference_mode():
            return Runner(
                Transformer(self.config, device=CPU, dtype=torch.float32),
                self.weights[0],
                KVCache(self.config, max_tokens=max_tokens, device=CPU, dtype=torch.float32),
                max_running=max_running,
                find_stop_string=lambda _: None,
                max_kept_tokens=max_kept_tokens,
            )
