"""Measure how many groups reach a held-out score with prompts chosen by `data.adaptive`, and with every prompt as often.

    python -m tests.rigs.adaptive_data --seeds 0 1 2 --floors 0 0.1

The task and the warm-up are those of `benchmarks/staleness.py` (sort eight digits), the losses and advantages the trainer's, on-policy,
in one process. The data are fixed rows: of a third the warmed-up policy solves 14 to 16 of 16 samples, of a third 8 at most,
and the answers of a third are wrong, as in data with faults. Held-out problems are of all kinds, with right answers. Prints a JSON line a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch
from benchmarks import staleness, tiny_policy
from torch import Tensor

from penstock.trainer.data.data_order import DataOrder, PromptChoice

LR, SCORES = 5e-4, (0.85, 0.9, 0.93, 0.95)


class Faulty(staleness.Codec):
    impossible: frozenset[str] = frozenset()

    def answers(self, problems: list[str]) -> Tensor:
        right = super().answers(problems)
        wrong = torch.tensor([problem in self.impossible for problem in problems])
        return torch.where(wrong[:, None], right.flip(1), right)


def rows(task: staleness.Task, weights, codec: Faulty, shape, generator: torch.Generator, third: int) -> list[str]:
    draw, solved, learnable, others = task.problems(2000, held_out=False), [], [], []
    while min(len(solved), len(learnable), len(others)) < third:
        problems = draw(500)
        tokens, _, _ = tiny_policy.generate(
            weights, codec.prompts(problems), groups=16, longest=task.longest, end=codec.end, shape=shape,
            generator=generator,
        )  # fmt: skip
        right = staleness.exact(tokens, codec.answers(problems).repeat_interleave(16, 0)).unflatten(0, (-1, 16)).sum(1)
        for problem, num in zip(problems, right.tolist(), strict=True):
            (solved if num >= 14 else learnable if num <= 8 else others).append(problem)
    codec.impossible = frozenset(others[:third])
    return [*solved[:third], *learnable[:third], *others[:third]]


def run(seed: int, floor: float, *, third: int, steps: int, cache: Path) -> dict:
    torch.set_num_threads(1)
    started, task = time.process_time(), dataclasses.replace(staleness.TASKS["sort"], sft_steps=110)
    weights, shape, codec = staleness.warm_up(task, seed, cache)
    codec.__class__, generator = Faulty, torch.Generator().manual_seed(seed)
    data = rows(task, weights, codec, shape, generator, third)
    order, choice, position = DataOrder(len(data), seed), PromptChoice(floor, seed) if floor else None, 0
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    curve, signal = {0: staleness.accuracy(weights, codec, shape)}, []
    for step in range(steps):
        places = []
        while len(places) < task.prompts:
            place = order.at(position)
            if choice is None or choice.takes(position, place):
                places.append(place)
            position += 1
        version = [(0, {name: tensor.detach() for name, tensor in weights.items()})]
        batch = staleness.roll_out(version, [data[place.prompt] for place in places], codec, shape, generator)
        for place, right in zip(places, batch.rewards.unflatten(0, (-1, task.group)).sum(1).tolist(), strict=True):
            if choice is not None:
                choice.record(place, int(right), task.group - int(right))
            signal.append(0 < right < task.group)
        micro, inside = staleness.micro_batch(batch, task.group, task.longest)
        logits = tiny_policy.completion_logits(weights, batch.prompts, batch.tokens, shape)
        logprobs = logits.log_softmax(-1).gather(2, batch.tokens[..., None])[..., 0][inside]
        optimizer.zero_grad()
        staleness.METHODS["default"](logprobs, micro).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 10)
        optimizer.step()
        if (step + 1) % 5 == 0:
            curve[step + 1] = staleness.accuracy(weights, codec, shape)
    to = {s: next((n * task.prompts for n, score in curve.items() if score >= s), None) for s in SCORES}
    return {
        "seed": seed, "floor": floor, "groups_to": to, "curve": curve, "passes": order.at(position).epoch,
        "signal": round(sum(signal) / len(signal), 3), "cpu_s": round(time.process_time() - started, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--floors", type=float, nargs="+", default=[0.0, 0.1], help="data.adaptive of each run; 0: off")
    parser.add_argument("--third", type=int, default=200, help="rows of each kind")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/penstock-warm-ups"))
    options = parser.parse_args()
    for seed in options.seeds:
        for floor in options.floors:
            result = run(seed, floor, third=options.third, steps=options.steps, cache=options.cache)
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
