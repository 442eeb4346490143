"""A few steps for each of several algorithms, in a process of its own; prints what they came to.

python -m tests.trainer.parts_check MODEL '{"name": ["algorithm.name=gspo", ...], ...}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from protocol.facts import BlobRef, ScoredGroup
from protocol.runfile import load
from tests.trainer.rank_check import how
from tests.trainer.stored_groups import invent_group
from trainer.algorithms import objective
from trainer.credit import credit_rule
from trainer.crew import Crew
from trainer.policy import load_policy, load_reference
from trainer.ranks import Ranks
from trainer.settings import TrainerSettings
from trainer.step_plan import ReadyGroup, make_plan

NUM_STEPS = 3


def figures(model: str, overrides: list[str], ranks: Ranks) -> list[dict[str, Any]]:
    """Train a fresh policy and say what each step did."""
    settings = load(TrainerSettings, overrides=[f"model.path={model}", *overrides]).settings.algorithm
    policy = load_policy(Path(model), how(1, "float32"), ranks, temperature=1.0)
    reference = None
    if settings.kl_coefficient:
        reference = load_reference(Path(model), how(1, "float32"), policy.device, temperature=1.0)
    nothing: Any = None  # a rank that is given its groups fetches none
    crew = Crew(policy, ranks, nothing, objective(settings), reference)
    pack = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)
    groups = []
    for number in range(3):
        group = invent_group(f"e0.p{number}.a0", version=2, seed=number)
        scored = ScoredGroup(generated=group.summary(number), rewards=(1.0, 0.0, 1.0, 0.0), scorer="test")
        groups.append(ReadyGroup(scored, pack, group))
    found = []
    for _ in range(NUM_STEPS):
        plan = make_plan(
            groups, credit=credit_rule(settings, longest=10), aggregation=settings.aggregation,
            max_completion_tokens=10, budget_tokens=120, num_ranks=1, version=5,
            sft_coefficient=settings.sft_coefficient,
        )  # fmt: skip
        done = crew.step(plan, groups)
        found.append({"loss": done.loss, "lr": done.lr, "sums": done.sums})
    return found


def main() -> None:
    model, cases = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = Ranks()
    print(json.dumps({name: figures(model, overrides, ranks) for name, overrides in json.loads(cases).items()}))
    ranks.leave(0)


if __name__ == "__main__":
    main()
