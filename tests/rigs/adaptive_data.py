"""Measure how many groups reach a held-out score with prompts chosen by `data.adaptive`, and with every prompt as often.

    python -m tests.rigs.adaptive_data 0 1 2    # seeds

Task and warm-up are those of `benchmarks/staleness.py` (sort eight digits), the losses and advantages the trainer's, on-policy, in one
process. The data are fixed rows: of a third the warmed-up policy solves 14 to 16 of 16 samples, of a third 8 at most, and the answers
of a third are wrong, as in data with faults. Held-out problems are of all kinds, with right answers. Prints a JSON line a run.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from benchmarks import staleness, tiny_policy

from penstock.trainer.data.data_order import DataOrder, PromptChoice

LR, SCORES, ROWS, STEPS, CACHE = 5e-4, (0.85, 0.9, 0.93, 0.95), 200, 60, Path("/tmp/penstock-warm-ups")
TASK = dataclasses.replace(staleness.TASKS["sort"], sft_steps=110)


class Faulty(staleness.Codec):
    impossible: frozenset[str] = frozenset()

    def answers(self, problems):
        right, wrong = super().answers(problems), torch.tensor([problem in self.impossible for problem in problems])
        return torch.where(wrong[:, None], right.flip(1), right)


def rows(weights, codec, shape, generator):
    draw, kinds = TASK.problems(2000, held_out=False), ([], [], [])
    while min(map(len, kinds)) < ROWS:
        version = [(0, weights)]
        problems = draw(500)
        rewards = [staleness.roll_out(version, problems, codec, shape, generator).rewards for _ in range(2)]
        for problem, num in zip(problems, torch.cat([r.unflatten(0, (-1, 8)) for r in rewards], 1).sum(1), strict=True):
            kinds[0 if num >= 14 else 1 if num <= 8 else 2].append(problem)
    codec.impossible = frozenset(kinds[2][:ROWS])
    return [problem for kind in kinds for problem in kind[:ROWS]]


def run(seed: int, floor: float) -> dict:
    weights, shape, codec = staleness.warm_up(TASK, seed, CACHE)
    codec.__class__, generator = Faulty, torch.Generator().manual_seed(seed)
    data = rows(weights, codec, shape, generator)
    order, choice, position = DataOrder(len(data), seed), PromptChoice(floor, seed), 0
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    curve, signal = {0: staleness.accuracy(weights, codec, shape)}, []
    for step in range(STEPS):
        places = []
        while len(places) < TASK.prompts:
            place = order.at(position)
            places += [place] if choice.takes(position, place) else []
            position += 1
        version = [(0, {name: tensor.detach() for name, tensor in weights.items()})]
        batch = staleness.roll_out(version, [data[place.prompt] for place in places], codec, shape, generator)
        for place, right in zip(places, batch.rewards.unflatten(0, (-1, TASK.group)).sum(1).tolist(), strict=True):
            choice.record(place, int(right), TASK.group - int(right))
            signal.append(0 < right < TASK.group)
        micro, inside = staleness.micro_batch(batch, TASK.group, TASK.longest)
        logits = tiny_policy.completion_logits(weights, batch.prompts, batch.tokens, shape)
        logprobs = logits.log_softmax(-1).gather(2, batch.tokens[..., None])[..., 0][inside]
        optimizer.zero_grad()
        staleness.METHODS["default"](logprobs, micro).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / 10)
        optimizer.step()
        if (step + 1) % 5 == 0:
            curve[step + 1] = staleness.accuracy(weights, codec, shape)
    to = {s: next((n * TASK.prompts for n, score in curve.items() if score >= s), None) for s in SCORES}
    made = {"passes": order.at(position).epoch, "signal": round(sum(signal) / len(signal), 3)}
    return {"seed": seed, "floor": floor, "groups_to": to, "curve": curve, **made}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, floor in ((seed, floor) for seed in map(int, sys.argv[1:]) for floor in (0.0, 0.1)):
        sys.stdout.write(json.dumps(run(seed, floor)) + "\n")
        sys.stdout.flush()
