"""Which layouts of the ranks a model allows: what is not possible is refused before its weights are read."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.trainer.learner.tiny import HOW, qwen3
from torch import Tensor

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.errors import ConfigError
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.model_folder_check import check_layout
from penstock.trainer.learner.parallel_shares import TokenShares, WeightShares
from penstock.trainer.parallel_dims import ParallelDims, ParallelLayout, Share


def dims(rank: int, num_ranks: int, sequence_parallel: int, tensor_parallel: int = 1) -> ParallelDims:
    ranks: Any = SimpleNamespace(
        rank=rank,
        num_ranks=num_ranks,
        subgroup=lambda size, stride=1: None,
        sum=list,
        gather=lambda data: [b"%d" % one for one in range(num_ranks)],
    )
    return ParallelDims(ranks, ParallelLayout(sequence_parallel, tensor_parallel))


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "says"),
    [
        (3, 4, 2, r"sequence_parallel = 3 does not divide the 4 attention heads of m.*set it to 2 or 4"),
        (5, 5, 3, r"sequence_parallel = 5 neither divides the 3 key heads of m"),
        (4, 12, 6, r"neither divides the 6 key heads"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused(ranks: int, heads: int, kv_heads: int, says: str) -> None:
    """With the numbers that are possible; fewer key heads than ranks are repeated if they divide them."""
    with pytest.raises(ConfigError, match=says):
        ParallelLayout(ranks).check_heads(heads, kv_heads, "m")
    for possible in ((4, 8, 2), (2, 4, 4), (4, 4, 1), (1, 7, 3)):
        ParallelLayout(possible[0]).check_heads(*possible[1:], "m")


def test_a_folder_is_checked_by_its_config(tmp_path: Path) -> None:
    """Also where the language model is a part of another; a config without heads is left to transformers."""
    for content in ({"num_attention_heads": 4}, {"text_config": {"num_attention_heads": 4, "num_key_value_heads": 2}}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        check_layout(tmp_path, ParallelLayout(2))
        with pytest.raises(ConfigError, match=r"does not divide the 4 attention heads"):
            check_layout(tmp_path, ParallelLayout(3))
    (tmp_path / "config.json").write_text("{}")
    check_layout(tmp_path, ParallelLayout(3))


def test_a_model_whose_rows_are_padded_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    write_model(tmp_path / "model", seed=0)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "layer_types": ["chunked_attention"] * config["num_hidden_layers"]}))
    with pytest.raises(
        ConfigError, match=r"sequence_parallel = 2 needs rows in one stream.*layers of chunked_attention"
    ):
        load_policy(tmp_path / "model", HOW, dims(0, 2, 2), temperature=1.0)
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"does not divide the 4 attention heads"):
        load_policy(tmp_path / "model", HOW, dims(0, 3, 3), temperature=1.0)


def test_ranks_that_compute_the_same_rows_count_once() -> None:
    """Six ranks in threes: two shares of the rows, six of the states, and sums over the first of each three."""
    found = [dims(rank, 6, 3) for rank in range(6)]
    assert [one.rows for one in found] == [Share(0, 2)] * 3 + [Share(1, 2)] * 3
    assert [one.tokens for one in found] == [Share(0, 3), Share(1, 3), Share(2, 3)] * 2
    assert [one.states for one in found] == [Share(rank, 6) for rank in range(6)]
    assert [one.sum([1.0, 2.0]) for one in found] == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]] * 2
    assert found[0].gather(b"") == [b"0", b"3"]


def test_ranks_that_share_weights_are_next_to_each_other() -> None:
    """Eight ranks: two shares of the rows, of two ranges of tokens, of two parts of the weights and their states."""
    found = [dims(rank, 8, 2, 2) for rank in range(8)]
    assert [one.weights.index for one in found] == [0, 1] * 4
    assert [one.tokens.index for one in found] == [0, 0, 1, 1] * 2
    assert [one.rows for one in found] == [Share(0, 2)] * 4 + [Share(1, 2)] * 4
    assert [one.states for one in found] == [Share(rank // 2, 4) for rank in range(8)]
    assert [one.files for one in found] == [Share(rank, 8) for rank in range(8)]
    assert [one.sum([1.0]) for one in found] == [[1.0], [0.0], [0.0], [0.0]] * 2


LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12}


@pytest.mark.parametrize(
    ("config", "layout", "says"),
    [
        (LLAMA, (1, 3), r"tensor_parallel = 3 does not divide the 4 attention heads of m.*set it to 2 or 4"),
        (LLAMA, (1, 4), r"tensor_parallel = 4 does not divide the 2 key heads of m"),
        (LLAMA | {"intermediate_size": 13}, (1, 2), r"does not divide intermediate_size = 13 of m"),
        (LLAMA, (4, 2), r"sequence_parallel = 4 does not divide the 2 attention heads that a rank has of m"),
        (
            LLAMA | {"model_type": "qwen3_moe"},
            (1, 2),
            r"m is a qwen3_moe model: only the weights of llama, qwen2, qwen3",
        ),
        ({"text_config": LLAMA | {"model_type": "gemma"}}, (1, 2), r"m is a gemma model"),
    ],
)
def test_weights_that_cannot_be_divided_are_refused(config: dict[str, Any], layout: tuple[int, int], says: str) -> None:
    """Experts, families that were not compared, heads and widths that do not divide; with sequence parallelism too."""
    with pytest.raises(ConfigError, match=says):
        ParallelLayout(*layout).check(config, "m")
    assert not ParallelLayout(*layout).allows(config)
    for possible in ((1, 2), (2, 2), (4, 1), (1, 1)):
        ParallelLayout(*possible).check(LLAMA, "m")


class Cutting:
    """What a test says that DeepSpeed did with a parameter."""

    def __init__(self, *, cut: Collection[str], summed: Collection[str]) -> None:
        self.cut, self.summed = cut, summed

    def module(self) -> Any:
        module: Any = torch.nn.Module()
        module.language_model = qwen3(num_hidden_layers=1)
        for name, parameter in module.named_parameters():
            kind = name.split(".")[-2]
            if kind in self.cut:
                parameter.tensor_model_parallel = True
                parameter.ds_autotp_universal_checkpoint_meta = {"partition_dim": 0, "partition_sizes": (4, 4)}
            if kind in self.summed:
                parameter._ds_grad_allreduce_registered = True
        return module


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_what_deepspeed_made_of_the_plan_is_checked() -> None:
    """Its silent fallback cuts by names and does not add up gradients of norms of heads: refused by name."""
    group: Any = SimpleNamespace(index=0, size=2)
    removed: list[bool] = []
    engine = SimpleNamespace(first_dataloader_check=SimpleNamespace(remove=lambda: removed.append(True)))
    for cutting, says in (
        (Cutting(cut=LINEARS, summed=["q_norm", "k_norm"]), ""),
        (Cutting(cut=LINEARS, summed=[]), r"q_norm.weight: the plan says replicated_with_grad_allreduce, and DeepS"),
        (Cutting(cut=LINEARS[:-1], summed=["q_norm", "k_norm"]), r"down_proj.weight: the plan says rowwise.* it whole"),
        (Cutting(cut=[*LINEARS, "lm_head"], summed=["q_norm", "k_norm"]), r"lm_head.weight: the plan says whole"),
    ):  # fmt: skip
        shares, module = WeightShares(group), cutting.module()
        shares.expose_plan(module, module.language_model)
        if says:
            with pytest.raises(UnsupportedModel, match=says):
                shares.check(engine, module)
        else:
            shares.check(engine, module)
    assert removed == [True] * 4


class OneOfMany:
    """A group of ranks whose exchanges this process makes alone: what the others sent is what it would have sent."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    def sum(self, values: Tensor) -> Tensor:
        return values


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 12])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ranges_of_the_ranks_are_the_stream(num_tokens: int, size: int) -> None:
    """Each token is in one range, each predictor on the rank that has its token; the last ranges are filled up."""
    stream = torch.arange(num_tokens)[None] + 1
    predictors = torch.tensor([num_tokens - 1, 0, num_tokens // 2, 0])
    ranges, scored = [], torch.zeros(len(predictors))
    for index in range(size):
        group: Any = OneOfMany(index, size)
        shares = TokenShares(group)
        own = shares.own(stream)
        ranges.append(own)
        positions, places = shares.own_predictors(predictors, num_tokens)
        assert places is not None
        scored += shares.whole(own[0][positions].float(), places, len(predictors))
    assert len({one.shape for one in ranges}) == 1
    whole = torch.cat(ranges, dim=1)
    assert torch.equal(whole[:, :num_tokens], stream)
    assert not whole[:, num_tokens:].any()
    assert torch.equal(scored, stream[0][predictors].float())
