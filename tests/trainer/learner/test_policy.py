"""The model under training: its learning rate and its export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.learner.tiny import HOW
from transformers import AutoModelForCausalLM

from penstock.trainer.learner.export import ModelFiles, write_small_files
from penstock.trainer.learner.optimizer_state import lr_factor
from penstock.trainer.publishing.weight_buckets import layout_of


def test_learning_rate_follows_the_schedule() -> None:
    """Warm-up starts above 0 and ends at the peak; linear and cosine end at the ratio, constant at the peak."""
    for schedule, last in (("linear", 0.1), ("cosine", 0.1), ("constant", 1.0)):
        how = replace(HOW, num_steps=11, warmup_steps=4, min_lr_ratio=0.1, schedule=schedule)  # type: ignore[arg-type]
        factors = [lr_factor(how, step) for step in range(11)]
        assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
        assert factors[4] == 1.0
        assert factors[-1] == pytest.approx(last)
        assert lr_factor(how, 50) == pytest.approx(last)


def test_an_exported_folder_holds_the_model(tmp_path: Path, model_folder: Path) -> None:
    """Config, tokenizer and sharded weights are written; transformers loads the same tensors."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    for max_bytes, num_files in ((100_000, 6), (10**9, 1)):
        layout, folder = layout_of(tensors, max_bytes), tmp_path / str(num_files)
        folder.mkdir()
        write_small_files(folder, layout, like=model_folder, dtype="float32")
        count = len(layout.buckets)
        for numbers in (range(1, count), [0]):  # as two ranks do
            with ModelFiles(folder, layout, numbers) as files:
                for name in files.names:
                    files.put(name, tensors[name].to(torch.float64))
        written = [load_file(path) for path in folder.glob("*.safetensors")]
        assert len(written) == count == num_files
        assert {name for part in written for name in part} == set(tensors)
        again = AutoModelForCausalLM.from_pretrained(folder)
        for name, parameter in again.named_parameters():
            assert torch.equal(parameter, tensors[name])
