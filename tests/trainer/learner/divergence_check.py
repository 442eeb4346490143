"""One good and one bad optimizer step at each ZeRO stage: what is raised, and whether the weights changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import torch
from tests.trainer.learner.pass_check import HOW
from torch import nn

from penstock.trainer.errors import TrainingDiverged
from penstock.trainer.learner.trainable import Trainable
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks

FACTORS = {"nan": float("nan"), "inf": float("inf")}


def weights(trainable: Trainable) -> list[float]:
    (weight,) = trainable.module.parameters()
    with trainable.whole(weight):
        return weight.detach().flatten().tolist()


def make_step(trainable: Trainable, factor: float) -> None:
    trainable.begin(is_last=True)
    trainable.backward(trainable(torch.ones(2, 3)).sum() * factor)
    trainable.update()


def main(arguments: Sequence[str]) -> int:
    del arguments
    ranks, results = Ranks(), {}
    for stage in range(4):
        for name, factor in FACTORS.items():
            trainable = Trainable(nn.Linear(3, 3, bias=False), replace(HOW, zero_stage=stage), ParallelDims(ranks))
            first = weights(trainable)
            make_step(trainable, 1.0)
            good, raised = weights(trainable), ""
            try:
                make_step(trainable, factor)
            except TrainingDiverged as err:
                raised = str(err)
            results[f"{stage}-{name}"] = (raised, good != first, weights(trainable) == good)
    print(json.dumps(results))
    ranks.leave(0)
    return 0
