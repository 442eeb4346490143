"""Which layouts of the ranks a model allows: what is not possible is refused before its weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.errors import ConfigError
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.model_folder_check import check_layout
from penstock.trainer.learner.sequence_parallel import TokenShares
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.parallel_dims import ParallelDims, Share
from penstock.trainer.parallel_layout import ParallelLayout

HOW = Optimisation(
    num_steps=1, lr=1e-3, betas=(0.9, 0.9), weight_decay=0.0, warmup_steps=0, schedule="constant", min_lr_ratio=1.0,
    max_grad_norm=1.0, zero_stage=1, dtype="float32",
)  # fmt: skip


def dims(rank: int, num_ranks: int, sequence_parallel: int) -> ParallelDims:
    """The part of a rank, without processes."""
    ranks: Any = SimpleNamespace(
        rank=rank,
        num_ranks=num_ranks,
        subgroup=lambda size: None,
        sum=list,
        gather=lambda data: [b"%d" % one for one in range(num_ranks)],
    )
    return ParallelDims(ranks, ParallelLayout(sequence_parallel))


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
    """Ranks share the tokens of one stream; the reason is that of the padding."""
    write_model(tmp_path / "model", seed=0)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}))
    with pytest.raises(
        ConfigError, match=r"sequence_parallel = 2 needs rows in one stream.*sliding windows of 8 tokens"
    ):
        load_policy(tmp_path / "model", HOW, dims(0, 2, 2), temperature=1.0)
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"does not divide the 4 attention heads"):
        load_policy(tmp_path / "model", HOW, dims(0, 3, 3), temperature=1.0)


def test_ranks_that_compute_the_same_rows_count_once() -> None:
    """Six ranks in threes: two shares of the rows, six of the optimizer's states, and sums over the first of each three."""
    found = [dims(rank, 6, 3) for rank in range(6)]
    assert [one.rows for one in found] == [Share(0, 2)] * 3 + [Share(1, 2)] * 3
    assert [one.tokens for one in found] == [Share(0, 3), Share(1, 3), Share(2, 3)] * 2
    assert [one.states for one in found] == [Share(rank, 6) for rank in range(6)]
    assert [one.sum([1.0, 2.0]) for one in found] == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]] * 2
    assert found[0].gather(b"") == [b"0", b"3"]


class OneOfMany:
    """A group of ranks whose exchanges this process makes alone: what the others sent is what it would have sent."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    def sum(self, values: Tensor) -> Tensor:
        return values


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 12])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ranges_of_the_ranks_are_the_stream(num_tokens: int, size: int) -> None:
    """Each token is in one range, and each predictor belongs to the rank that has its token; the last ranges are filled up."""
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
