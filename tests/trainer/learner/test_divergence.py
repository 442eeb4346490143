"""A gradient that is not finite ends the training; DeepSpeed trains on it, or leaves the step out silently."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.trainer.learner import forks
from tests.trainer.learner.tiny import HOW
from torch import nn

from penstock.trainer.errors import TrainingDiverged
from penstock.trainer.learner.trainable import Trainable
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks

CASES = [*((stage, "float32") for stage in range(4)), *((stage, "bfloat16") for stage in (1, 2, 3))]
FACTORS = {"nan": float("nan"), "inf": float("inf")}


def weights(trainable: Trainable) -> list[float]:
    (weight,) = trainable.module.parameters()
    with trainable.whole(weight):
        return weight.detach().flatten().tolist()


def make_step(trainable: Trainable, factor: float) -> None:
    trainable.begin(is_last=True)
    dtype = next(trainable.module.parameters()).dtype
    trainable.backward(trainable(torch.ones(2, 3, dtype=dtype)).sum() * factor)
    trainable.update()


def main(_: Sequence[str]) -> int:
    """Make one good and one bad optimizer step at each ZeRO stage; print what is raised, and if the weights changed."""
    ranks, results = Ranks(), {}
    for stage, dtype in CASES:
        for name, factor in FACTORS.items():
            module = nn.Linear(3, 3, bias=False, dtype=getattr(torch, dtype))
            trainable = Trainable(module, replace(HOW, zero_stage=stage, dtype=dtype, lr=1e-2), ParallelDims(ranks))
            first = weights(trainable)
            make_step(trainable, 1.0)
            good, raised = weights(trainable), ""
            try:
                make_step(trainable, factor)
            except TrainingDiverged as err:
                raised = str(err)
            results[f"{stage}-{dtype}-{name}"] = (raised, good != first, weights(trainable) == good)
    print(json.dumps(results))
    ranks.leave(0)
    return 0


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_the_training_and_changes_no_weight(tmp_path: Path) -> None:
    """At every ZeRO stage the error names optimizer step and norm, and the weights are those before the step."""
    results = forks.results(tmp_path, __name__)[1]
    assert results.keys() == {f"{stage}-{dtype}-{name}" for stage, dtype in CASES for name in FACTORS}
    for text, has_learned, is_unchanged in results.values():
        assert text.startswith("optimizer step 2 of this process: the gradient norm is ")
        assert (has_learned, is_unchanged) == (True, True)
