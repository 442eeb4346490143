"""Supervised fine-tuning: the loss falls, does not depend on the micro-batches, and the folder loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.trainer.learner.forks import Command
from transformers import AutoModelForCausalLM

from penstock.deploy.quickstart_task import write_data, write_model


def sft(folder: Path, name: str, *, steps: int, micro_batch_tokens: int) -> Command:
    run_file = folder / f"{name}.toml"
    run_file.write_text(
        f'[run]\nid = "{name}"\ndir = "{folder / "runs"}"\n[model]\npath = "{folder / "model"}"\n'
        f"[data]\nmax_prompt_tokens = 64\n[rollout]\nmax_new_tokens = 8\n"
        f"[trainer]\nmicro_batch_tokens = {micro_batch_tokens}\n"
        f'[sft]\ndata = "{folder / "sft.jsonl"}"\nsteps = {steps}\nbatch_size = 32\nlr = 3e-3\nwarmup_steps = 2\n'
    )
    return Command(folder, "sft", str(run_file))


@pytest.mark.slow
def test_fine_tuning_learns_the_same_with_any_micro_batches(tmp_path: Path) -> None:
    """The loss falls, one micro-batch or many give the same weights, and transformers loads the result."""
    write_model(tmp_path / "model", seed=0)
    write_data(tmp_path, seed=0, num_sft=100, num_train=1, num_eval=1)
    weights = []
    for name, budget in (("whole", 4096), ("cut", 128)):
        done = sft(tmp_path, name, steps=12, micro_batch_tokens=budget)
        assert done.wait().strip() == str(tmp_path / "runs" / name / "sft")
        losses = [float(json.loads(line)["loss"]) for line in done.err.splitlines() if '"loss"' in line]
        assert losses[-1] < losses[0] - 0.5
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / name / "sft")
        weights.append({key: p.detach() for key, p in model.named_parameters()})
    for key, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][key], rtol=1e-3, atol=2e-4)
