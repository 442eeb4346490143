"""The model under training: log-probabilities, learning rate, refused models, export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.errors import ConfigError
from penstock.trainer.algorithm.batch import Row, build
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.export import ModelFiles, write_small_files
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.logprobs import CompletionScorer
from penstock.trainer.learner.optimizer_state import deepspeed_config, lr_factor
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing.weight_buckets import layout_of
from penstock.trainer.ranks import Ranks


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def model(model_folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


def rows(num: int = 5, seed: int = 0) -> list[Row]:
    random = np.random.default_rng(seed)
    made = []
    for _ in range(num):
        tokens = random.integers(3, 55, size=int(random.integers(6, 20))).astype(np.int32)
        mask = np.arange(len(tokens)) >= int(random.integers(1, len(tokens)))
        mask[int(random.integers(1, len(tokens)))] = True  # a gap, as from tool output
        made.append(Row(tokens, mask, np.zeros(len(tokens), dtype=np.float32), 1.0, 0.1))
    return made


def dense_logprobs(model: torch.nn.Module, some: list[Row], temperature: float) -> torch.Tensor:
    parts = []
    for row in some:
        ids = torch.from_numpy(row.token_ids).long()
        logprobs = torch.log_softmax(model(ids[None]).logits[0].float() / temperature, dim=-1)
        sampled = np.flatnonzero(row.loss_mask)
        parts.append(logprobs[sampled - 1, ids[sampled]])
    return torch.cat(parts)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_dense_forward(model: torch.nn.Module, temperature: float) -> None:
    """Packed, sliced and chunked log-probabilities and their gradients equal those of a plain forward pass."""
    some, found = rows(), []
    batch = build(some)
    for max_logits in (10**9, 7 * 55):  # one chunk; chunks of seven tokens
        scorer = CompletionScorer(model, temperature, max_logits=max_logits)
        logprobs = scorer(
            batch.input_ids, batch.predictors, batch.targets, position_ids=batch.position_ids, layout=batch.layout
        )
        torch.testing.assert_close(logprobs, dense_logprobs(model, some, temperature), rtol=1e-5, atol=1e-5)
        model.zero_grad()
        logprobs.sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_learning_rate_follows_the_schedule() -> None:
    """Warm-up starts above 0 and ends at the peak; linear and cosine end at the ratio, constant at the peak."""
    shape = {"num_steps": 11, "warmup_steps": 4, "min_lr_ratio": 0.1}
    for schedule, last in (("linear", 0.1), ("cosine", 0.1), ("constant", 1.0)):
        factors = [lr_factor(step, schedule=schedule, **shape) for step in range(11)]  # type: ignore[arg-type]
        assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
        assert factors[4] == 1.0
        assert factors[-1] == pytest.approx(last)
        assert lr_factor(50, schedule=schedule, **shape) == pytest.approx(last)  # type: ignore[arg-type]


def test_bfloat16_without_sharding_is_refused() -> None:
    """bfloat16 with ZeRO stage 0 drifts, so the run file is refused."""
    with pytest.raises(ConfigError, match=r"zero_stage = 1"):
        deepspeed_config(zero_stage=0, dtype="bfloat16", max_grad_norm=1.0)


@pytest.mark.parametrize("breakage", ["missing", "no weights", "not a model"])
def test_an_unusable_model_folder_is_refused(tmp_path: Path, model_folder: Path, breakage: str) -> None:
    folder = tmp_path / "broken"
    if breakage != "missing":
        folder.mkdir()
        text = (model_folder / "config.json").read_text() if breakage == "no weights" else '{"model_type": "toaster"}'
        (folder / "config.json").write_text(text)
    how = Optimisation(
        num_steps=1, lr=1e-3, betas=(0.9, 0.9), weight_decay=0.0, warmup_steps=0, schedule="constant",
        min_lr_ratio=1.0, max_grad_norm=1.0, zero_stage=1, dtype="float32",
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match=r"broken"):
        load_policy(folder, how, ParallelDims(Ranks.__new__(Ranks)), temperature=1.0)


def test_an_exported_folder_holds_the_model(tmp_path: Path, model_folder: Path, model: torch.nn.Module) -> None:
    """Config, tokenizer and sharded weights are written; transformers loads the same tensors."""
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
