"""States that are moved to host memory between two steps, while an engine has the device."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.trainer.learner import forks
from tests.trainer.learner.tiny import HOW
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.trainer.learner.adapter import Lora, attach
from penstock.trainer.learner.trainable import Optimisation, Trainable
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks

LARGE = 64 * 1024  # bytes of a storage
CASES: dict[str, dict] = {
    **{f"{stage}-float32": {"zero_stage": stage} for stage in range(4)},
    **{f"{stage}-bfloat16": {"zero_stage": stage, "dtype": "bfloat16"} for stage in (1, 2, 3)},
    "1-as-trained": {"zero_stage": 1, "dtype": "bfloat16", "gradient_dtype": "as-trained"},
    "2-lora": {"zero_stage": 2, "dtype": "bfloat16", "lora": Lora(16, 32.0)},
    "3-lora": {"zero_stage": 3, "dtype": "bfloat16", "lora": Lora(16, 32.0)},
    "2-offload": {"zero_stage": 2, "dtype": "bfloat16", "offload": "optimizer"},
}


def cases_of(num_ranks: int) -> dict[str, dict]:
    """Return all for several ranks; for one, which divides nothing, those of stage 1 and those of no stage."""
    return {
        name: case for name, case in CASES.items() if num_ranks > 1 or name[0] == "1" or name[2:] in ("lora", "offload")
    }


class Scores(nn.Module):
    def __init__(self, how: Optimisation) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        )  # fmt: skip
        self.model = Qwen3ForCausalLM(config).to(getattr(torch, how.dtype))
        if how.lora is not None:
            attach(self.model, how.lora)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits.float().logsumexp(-1).mean()


def large_bytes() -> int:
    """Return the bytes of all large storages of this process that tensors refer to."""
    gc.collect()
    tensors = [
        item for item in gc.get_objects() if issubclass(type(item), Tensor) and not item.is_meta
    ]  # isinstance asks objects for their class
    held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for size in held.values() if size >= LARGE)


def train(ranks: Ranks, how: Optimisation, *, moves: bool) -> dict[str, object]:
    before = large_bytes()
    module = Scores(how)
    trainable, seen = Trainable(module, how, ParallelDims(ranks)), {"left": 0, "moved": 0, "resident": 0}
    norms, captured = [], None
    for step in range(3):
        for micro_batch in range(2):
            trainable.begin(is_last=micro_batch == 1)
            trainable.backward(trainable(torch.arange(32).view(2, 16) + step + ranks.rank))
        norms.append(trainable.update().grad_norm)
        if moves:
            seen["resident"] = large_bytes() - before
            seen["moved"] = trainable.leave_device()
            captured = trainable.capture({})
            # what is left beside the copies in host memory and those of the checkpoint
            shard = sum(t.nbytes for f in captured.fragments for t in f.tensors.values() if t.nbytes >= LARGE)
            seen["left"] = large_bytes() - before - seen["moved"] - shard
            trainable.host.move_back()
    after = trainable.capture({})
    same = captured is None or all(
        torch.equal(one.tensors[kind], other.tensors[kind])
        for one, other in zip(captured.fragments, after.fragments, strict=True)
        for kind in one.tensors
    )
    values = [float(t.double().sum()) for f in after.fragments for t in f.tensors.values()]
    return {**seen, "norms": norms, "values": values, "captured_while_out": same}


def main(_: Sequence[str]) -> int:
    """Train each case with and without moving its states between the steps; print what each gave."""
    ranks, results = Ranks(), {}
    gc.freeze()  # what is imported is not looked through each time
    for name, changes in cases_of(ranks.num_ranks).items():
        how = replace(HOW, lr=1e-3, keep_whole_below=0, **changes)
        results[name] = {"moved": train(ranks, how, moves=True), "stayed": train(ranks, how, moves=False)}
    if ranks.is_leader:
        print(json.dumps(results))
    ranks.leave(0)
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_was_moved_out_and_back_trains_on_bit_for_bit(tmp_path: Path, num_ranks: int) -> None:
    """At every ZeRO stage the device is free of it meanwhile, and a checkpoint is captured from the copies."""
    results = forks.results(tmp_path, __name__, ranks=(num_ranks,), deadline_s=800.0)[num_ranks]
    assert results.keys() == cases_of(num_ranks).keys()
    for name, both in results.items():
        moved, stayed = both["moved"], both["stayed"]
        assert (moved["norms"], moved["values"]) == (stayed["norms"], stayed["values"]), name
        assert moved["captured_while_out"], name
        assert moved["moved"] > 0, (name, moved)
        assert moved["left"] < 0.1 * moved["resident"], (name, moved)
