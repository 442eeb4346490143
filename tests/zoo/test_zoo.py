"""Every family that people train, at its own shapes: rows, attention, engine, versions, adapters and memory, or a refusal by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contracts.engine_under_test import embedded_engine
from tests.contracts.tiny_model import write_tokenizer
from tests.zoo.families import FAMILIES, Family, fill, write
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from penstock.deploy.plan.memory.model_shape import shape_of
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, published_name
from penstock.protocol.weights.layout import BUCKET_BYTES
from penstock.protocol.weights.manifest import VersionManifest
from penstock.rollout_service.checks.check_weights import check_adapter
from penstock.rollout_service.embedded_engine.errors import UnsupportedModel as NotServed
from penstock.rollout_service.embedded_engine.model.model_config import read_model_config
from penstock.rollout_service.weights.mirror import Mirror
from penstock.trainer.algorithm.batch import MicroBatch, Row, build
from penstock.trainer.connections import Connections
from penstock.trainer.errors import NotEstimated, UnsupportedModel
from penstock.trainer.learner import adapter
from penstock.trainer.learner.attention.backends import DenseMask
from penstock.trainer.learner.export import export_model
from penstock.trainer.learner.load_model import check_attention, load_language_model, load_policy
from penstock.trainer.learner.logprobs import CompletionScorer
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.policy_weights import WeightCopies
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.parallel_dims import ParallelDims, ParallelLayout
from penstock.trainer.publishing.publication import read_head
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.weight_buckets import Snapshot
from penstock.trainer.ranks import Ranks

PROMPTS = ((24, 8, 3), (9, 12, 2))  # tokens of a prompt, of each of its completions, and their number
TARGETS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "fused": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
    "fused mlp": ["gate_up_proj", "down_proj"],
}
TRAINED = [family for family in FAMILIES.values() if not family.is_refused]
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
each_trained = pytest.mark.parametrize("family", TRAINED, ids=lambda family: family.name)
Folders = Callable[[Family], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    base = tmp_path_factory.mktemp("zoo")
    yield cache(lambda family: write(family, base / family.name))
    shutil.rmtree(base)  # a gigabyte


def how(dtype: str = "float32", lora: adapter.Lora | None = None) -> Optimisation:
    return Optimisation(
        num_steps=4, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, warmup_steps=0, schedule="constant", min_lr_ratio=0.1,
        max_grad_norm=1.0, zero_stage=1, dtype=dtype, lora=lora,
    )  # fmt: skip


@pytest.fixture(scope="module")
def dims() -> Iterator[ParallelDims]:
    """One rank in this process."""
    before, ranks = dict(os.environ), Ranks()
    yield ParallelDims(ranks, ParallelLayout(1, 1))
    ranks.leave(0)
    os.environ.clear()
    os.environ.update(before)


def scorer_of(folder: Path, dims: ParallelDims, dtype: str = "float32") -> CompletionScorer:
    """Load a model as the trainer does, in the mode in which it trains."""
    return CompletionScorer(load_language_model(folder, how(dtype), dims), 1.0).train()


def batch_of(family: Family) -> MicroBatch:
    rng, rows = np.random.default_rng(0), []
    for num_prompt, num_new, num_rows in PROMPTS:
        prompt = rng.integers(0, family.config["vocab_size"], num_prompt)
        for number in range(num_rows):
            tokens = np.append(prompt, rng.integers(0, family.config["vocab_size"], num_new)).astype(np.int32)
            sampled = np.arange(len(tokens)) >= num_prompt
            rows.append(Row(tokens, sampled, np.zeros(len(tokens), np.float32), 1.0, 0.1 + 0.1 * number))
    return build(rows)


def logprobs(scorer: Any, batch: MicroBatch) -> Tensor:
    return scorer(
        batch.input_ids, batch.predictors, batch.targets, position_ids=batch.position_ids, layout=batch.layout
    )


@each_family
def test_packed_rows_are_those_of_plain_transformers_or_refused(family: Family, folder_of: Folders, dims: ParallelDims) -> None:
    """Values and gradients of rows that share prompts, in training, beside each row alone in float32 with attention by its definition."""
    if family.is_refused:
        with pytest.raises(UnsupportedModel, match=family.rows.removeprefix("refused: ")):
            scorer_of(folder_of(family), dims)
        return
    scorer, batch = scorer_of(folder_of(family), dims), batch_of(family)
    assert scorer.padding_reason is None if family.rows == "packed" else family.rows in str(scorer.padding_reason)
    found = logprobs(scorer, batch)
    (found * batch.weights).sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32, attn_implementation="eager")
    true = _row_by_row(plain, batch)
    (true * batch.weights).sum().backward()
    torch.testing.assert_close(found, true, rtol=0, atol=5e-5)
    expected = dict(plain.named_parameters())
    for name, parameter in scorer.language_model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=0, atol=3e-5, msg=lambda m, n=name: f"{n}: {m}")


def _row_by_row(model: Any, batch: MicroBatch) -> Tensor:
    """Log-probabilities by the whole model of transformers, its head and what follows that included."""
    logits: dict[int, Tensor] = {}  # by place in the stream
    wanted = set(batch.predictors.tolist())
    assert batch.layout is not None
    for row in batch.layout.rows():
        at = [number for number, place in enumerate(row.tolist()) if place in wanted - logits.keys()]
        ids = batch.input_ids[:, torch.from_numpy(row)]
        found = model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor(at)).logits[0]
        logits |= {int(row[number]): one for number, one in zip(at, found, strict=True)}
    return -functional.cross_entropy(torch.stack([logits[n] for n in batch.predictors.tolist()]), batch.targets, reduction="none")


@each_trained
def test_the_fast_attention_computes_bfloat16_and_float32(
    family: Family, folder_of: Folders, dims: ParallelDims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition with its [T, T] matrices is used for the comparison when a model is loaded, and never for a model."""
    attend = DenseMask.attend
    for dtype in ("float32", "bfloat16"):
        scorer, batch = scorer_of(folder_of(family), dims, dtype), batch_of(family)
        monkeypatch.setattr(DenseMask, "attend", attend)
        used = check_attention(scorer.language_model, scorer.padding_reason, torch.device("cpu"), dims)
        assert used == ("cpu-flash" if family.rows == "packed" else "padded")
        monkeypatch.setattr(DenseMask, "attend", None)
        body = scorer.language_model.base_model
        few = replace(batch, predictors=batch.predictors[-3:], targets=batch.targets[-3:])
        logprobs(scorer, few).sum().backward()
        assert all(torch.isfinite(weight.grad).all() for weight in body.layers.parameters())


@each_trained
def test_a_shared_prompt_is_computed_once(family: Family, folder_of: Folders, dims: ParallelDims) -> None:
    """Where rows are padded, each is computed with its prompt, as the reason says."""
    scorer, batch, num_tokens = scorer_of(folder_of(family), dims), batch_of(family), []
    layer = scorer.language_model.base_model.layers[0]
    layer.register_forward_pre_hook(lambda _, inputs: num_tokens.append(inputs[0].shape[0] * inputs[0].shape[1]))
    with torch.no_grad():
        logprobs(scorer, replace(batch, predictors=batch.predictors[:1], targets=batch.targets[:1]))
    shared = sum(prompt + (new - 1) * rows for prompt, new, rows in PROMPTS)
    padded = sum(rows for *_, rows in PROMPTS) * max(prompt + new - 1 for prompt, new, _ in PROMPTS)
    assert num_tokens == [shared if family.rows == "packed" else padded]
