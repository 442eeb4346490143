"""Attention of families that `tests/zoo` does not hold: windows that come by another way, and latent attention, over rows of several windows."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.trainer.algorithm.packed_rows import PackedRows, pack
from penstock.trainer.learner.attention.backends import DenseMask
from penstock.trainer.learner.attention.models import attention_of, read_rows, use_packed_rows

WINDOW = 32
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 32, "kv_lora_rank": 32}
FAMILIES: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # heads, key heads, their size, and what else differs
    "exaone4": (4, 2, 128, MIXED),
    "ministral": (4, 1, 128, MIXED),
    "qwen2": (4, 1, 64, {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "phimoe": (4, 1, 64, {**MIXTURE, "sliding_window": WINDOW}),  # names the window in the mask alone
    "deepseek_v3": (
        4,
        4,
        192,
        {**LATENT, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32},
    ),
}


def _model(family: str) -> Any:
    heads, kv_heads, size, more = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, hidden_size=heads * size if "head_dim" not in more else 64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=128, pad_token_id=0, initializer_range=0.1,
        max_position_embeddings=4096, **({} if family == "deepseek_v3" else {"head_dim": size}), **more,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def _rows() -> tuple[list[np.ndarray], list[int]]:
    """Two groups of four rows with prompts longer than the window, and answers of several windows."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 120, size) for size in (80, 50) for _ in range(4)]
    prompts = [prompts[4 * (n // 4)] for n in range(8)]
    rows = [np.append(prompt, draw.integers(3, 120, 60 + 9 * n)).astype(np.int32) for n, prompt in enumerate(prompts)]
    return rows, list(map(len, prompts))


def _packed(body: Any, packed: PackedRows) -> Tensor:
    layout = packed.layout
    ids, places = torch.from_numpy(packed.token_ids)[None], torch.from_numpy(layout.depths)[None]
    return read_rows(body, ids, places, layout, packed=True)


def _gradients(model: Any, found: list[Tensor]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    model.zero_grad()
    torch.stack([(some * torch.randn(some.shape, generator=draw)).sum() for some in found]).sum().backward()
    return {name: held.grad.clone() for name, held in model.named_parameters() if held.grad is not None}


def _plain(model: Any, rows: list[np.ndarray], starts: list[int]) -> list[Tensor]:
    ids = [torch.from_numpy(row.astype(np.int64))[None] for row in rows]
    states = [model.base_model(input_ids=row, use_cache=False).last_hidden_state[0] for row in ids]
    return [some[start:] for some, start in zip(states, starts, strict=True)]


def _error(found: list[Tensor], true: list[Tensor]) -> float:
    one, other = torch.cat(found).detach().float(), torch.cat(true).detach().float()
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_plain_transformers_row_by_row(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states and gradients of the answers in float32; in bfloat16 as near, by the fast kernel and never by the definition."""
    model, (rows, starts) = _model(family), _rows()
    true = _plain(model, rows, starts)
    exact = _gradients(model, true)
    rough = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        plain_error = _error(_plain(rough, rows, starts), true)
    packed = pack(rows, starts)
    where = [torch.from_numpy(row[start:]) for row, start in zip(packed.positions, starts, strict=True)]
    assert (use_packed_rows(model), use_packed_rows(rough)) == (None, None)
    stream = _packed(model.base_model, packed)
    found = [stream[places] for places in where]
    assert max(map(_error, ([one] for one in found), ([other] for other in true))) < 5e-5
    gradients = _gradients(model, found)
    assert gradients.keys() == exact.keys()
    largest = max(float(some.norm()) for some in exact.values())
    for name, other in exact.items():
        assert float((gradients[name] - other).norm()) < 3e-5 * max(float(other.norm()), 1e-3 * largest), name
    assert attention_of(rough, torch.device("cpu")) == "cpu-flash"
    monkeypatch.setattr(DenseMask, "attend", None)
    with torch.no_grad():
        stream = _packed(rough.base_model, packed)
    assert _error([stream[places] for places in where], true) < 1.25 * plain_error


def test_padded_rows_of_a_model_without_a_longest_position_equal_plain_transformers() -> None:
    """The config.json of BLOOM, whose scores have a bias by distance, has no max_position_embeddings."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("bloom", hidden_size=128, n_layer=2, n_head=2, vocab_size=128)
    model, (rows, starts) = AutoModelForCausalLM.from_config(config).eval(), _rows()
    packed = pack(rows, starts)
    assert use_packed_rows(model) is not None
    stream = read_rows(model.base_model, torch.from_numpy(packed.token_ids)[None], None, packed.layout, packed=False)
    found = [stream[torch.from_numpy(row[start:])] for row, start in zip(packed.positions, starts, strict=True)]
    assert _error(found, _plain(model, rows, starts)) < 1e-5
