"""The embedded engine serves a mixture of experts, and says which experts computed each token."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contracts.engine_under_test import embedded_engine
from tests.contracts.tiny_model import (
    MIXTURE,
    Adapter,
    Dense,
    build_model,
    read_tensors,
    write_changed_copy,
    write_tensors,
)
from transformers import AutoModelForCausalLM

from penstock.rollout_service.embedded_engine.errors import CheckpointRefused, UnsupportedModel
from penstock.rollout_service.embedded_engine.model.low_rank import read_adapter
from penstock.rollout_service.embedded_engine.model.model_config import read_model_config
from penstock.rollout_service.embedded_engine.model.weights import read_checkpoint

PROMPT = [5, 17, 88, 250, 31, 9]


def chosen_by_transformers(folder: Path, tokens: list[int]) -> np.ndarray:
    """Return the experts [tokens, layers with experts, k] that the routers of transformers choose, sorted."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model.model(torch.tensor([tokens]), output_router_logits=True).router_logits
    top_k = model.config.num_experts_per_tok
    return np.stack([logit.topk(top_k, dim=-1).indices.sort(dim=-1).values.numpy() for logit in logits], axis=1)


def returned(reply: dict[str, Any], num_layers: int, top_k: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4").reshape(-1, num_layers, top_k)


@pytest.mark.slow
def test_a_mixture_is_exact_and_its_experts_are_returned(tmp_path: Path) -> None:
    """Log-probabilities, greedy tokens and chosen experts are those of transformers, before and after an update."""
    build_model(tmp_path / "model", "qwen3_moe", **MIXTURE)
    changed = write_changed_copy(tmp_path / "model", tmp_path / "changed", seed=1)
    draw = random.Random(0)
    prompts = [[draw.randrange(320) for _ in range(length)] for length in (1, 7, 7, 40, 130)]
    with embedded_engine(tmp_path / "model", tmp_path, "--weight-version", "0") as engine:
        for folder in (tmp_path / "model", changed):
            if folder == changed:
                assert engine.update(changed, "1")["success"]
            dense = Dense(folder)
            body = {"input_ids": prompts, "return_logprob": True, "return_routed_experts": True}
            params = [{"n": 2, "max_new_tokens": 10 + 7 * number, "ignore_eos": True} for number in range(len(prompts))]
            replies = engine.post("/generate", {**body, "sampling_params": params})
            for index, reply in enumerate(replies):  # of different lengths: rows move in the cache
                prompt = prompts[index // 2]
                dense.check_reply(prompt, reply)
                found = returned(reply, 3, 2)
                tokens = prompt + reply["output_ids"]
                assert found.shape == (len(tokens) - 1, 3, 2)
                assert not found[:, 1].any()  # a dense layer
                expected = chosen_by_transformers(folder, tokens[:-1])
                np.testing.assert_array_equal(np.sort(found[:, [0, 2]], axis=-1), expected)
            # The next turns of two episodes: of what was computed before, the experts are known as keys and values are.
            turns = [prompts[index // 2] + replies[index]["output_ids"] + PROMPT for index in (6, 9)]
            for turn, reply in zip(turns, engine.post("/generate", {**body, "input_ids": turns}), strict=True):
                assert reply["meta_info"]["cached_tokens"] >= len(turn) - len(PROMPT) - 1
                tokens = turn + reply["output_ids"]
                found = np.sort(returned(reply, 3, 2)[:, [0, 2]], axis=-1)
                np.testing.assert_array_equal(found, chosen_by_transformers(folder, tokens[:-1]))
            greedy = engine.generate(prompts, max_new_tokens=10, temperature=0, ignore_eos=True)
            assert [reply["output_ids"] for reply in greedy] == [dense.greedy(prompt, 10) for prompt in prompts]
            assert "routed_experts" not in greedy[0]["meta_info"]


def test_experts_of_a_model_without_any_are_refused(tmp_path: Path) -> None:
    """A request that wants to know them is told that there are none; an incomplete folder names the expert's tensor."""
    build_model(tmp_path / "dense")
    build_model(tmp_path / "model", "qwen3_moe", **MIXTURE)
    with embedded_engine(tmp_path / "dense", tmp_path) as engine:
        body = {"input_ids": PROMPT, "return_routed_experts": True}
        assert "has no experts" in str(engine.post("/generate", body, expect=400))
    tensors = read_tensors(tmp_path / "model")
    assert tensors["model.layers.2.mlp.experts.7.up_proj.weight"].shape == (32, 64)
    assert "model.layers.1.mlp.gate_proj.weight" in tensors  # the dense layer
    del tensors["model.layers.2.mlp.experts.7.up_proj.weight"]
    incomplete = write_tensors(tmp_path / "model", tmp_path / "incomplete", tensors)
    with pytest.raises(
        CheckpointRefused, match=r"1 tensors missing, e\.g\. model\.layers\.2\.mlp\.experts\.7\.up_proj"
    ):
        read_checkpoint(incomplete, read_model_config(incomplete))


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    build_model(tmp_path / "model", "qwen3_moe", **MIXTURE)
    config = read_model_config(tmp_path / "model")
    attention = Adapter.random(tmp_path / "model", tmp_path / "ok", seed=0, targets=["q_proj", "v_proj"]).write()
    assert len(read_adapter(attention.folder, config, max_rank=8)) == 6
    for target in ("down_proj", "gate"):
        other = Adapter.random(tmp_path / "model", tmp_path / target, seed=0, targets=[target]).write()
        with pytest.raises(CheckpointRefused, match=r"adapters of experts and routers are not computed"):
            read_adapter(other.folder, config, max_rank=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9: expected a number from 1 to 8"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0, expected a positive number"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    """The numbers of experts in config.json are checked before weights are read."""
    build_model(tmp_path / "model", "qwen3_moe", **MIXTURE)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModel, match=message):
        read_model_config(tmp_path / "model")
