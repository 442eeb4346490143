"""Train a tiny model to sort eight digits: first on examples (SFT), then with a user-defined reward (GRPO); then ask it.

python examples/python/sft_then_grpo.py    # about a minute, on this machine, no GPU and no download
"""

from __future__ import annotations

import random

import penstock


def problem(digits: str) -> dict:
    return {"prompt": [{"role": "user", "content": f"sort {digits}"}], "ground_truth": "".join(sorted(digits))}


def example(digits: str) -> dict:
    row = problem(digits)
    return {"messages": [*row["prompt"], {"role": "assistant", "content": row["ground_truth"]}]}


def right_digits(completions, ground_truth, **columns):
    """The reward: the share of the digits that are in their place."""
    return [
        sum(a == b for a, b in zip(text, truth, strict=False)) / 8
        for text, truth in zip(completions, ground_truth, strict=True)
    ]


if __name__ == "__main__":
    numbers = [f"{n:08d}" for n in random.Random(0).sample(range(10**8), 9000)]
    client = penstock.Client()
    sft = client.sft(
        model="quickstart",
        data=[example(digits) for digits in numbers[:7000]],
        sft={"steps": 60, "batch_size": 128, "lr": 3e-3, "betas": [0.9, 0.98], "warmup_steps": 20},
    ).wait()
    run = client.train(
        model=sft.model,
        data={"train": map(problem, numbers[7000:8800]), "eval": map(problem, numbers[8800:])},
        reward=right_digits,
        algorithm="grpo",
        rollout={"groups_per_step": 48, "group_size": 8, "groups_per_message": 12, "max_new_tokens": 12},
        trainer={"steps": 40, "lr": 5e-4, "betas": [0.9, 0.98], "warmup_steps": 5},
    ).wait()
    print("held-out reward:", run.metrics("eval")["reward_mean"])
    print("sort 31415926:", run.chat("sort 31415926"))
    print("report:", run.report)
