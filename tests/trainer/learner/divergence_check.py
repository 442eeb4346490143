"""One good and one bad optimizer step at each ZeRO stage: what is raised, and whether the weights changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import torch
from tests.trainer.learner.batch_check import HOW
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


def main(arguments: Sequence[str]) -> int:
    del arguments
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
