"""Measure the tokens and the CPU time saved by keeping the completions of a prompt in one micro-batch.

python -m benchmarks.micro_batches          # count tokens for several shapes of ragged groups; one second
python -m benchmarks.micro_batches --time   # also time forward and backward of a small model, in CPU seconds
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch

from penstock.trainer.algorithm.batch import Prompt, Row, build, num_computed, plan_micro_batches, prompt_of


@dataclass(frozen=True)
class Shape:
    """Groups with completions of log-normal length, which differs between easy and hard prompts and within a group."""

    shortest_prompt: int
    longest_prompt: int
    completion: int  # median
    longest_completion: int
    budget: int = 4096
    groups: int = 64
    size: int = 8

    @property
    def name(self) -> str:
        prompts = f"{self.shortest_prompt} to {self.longest_prompt}"
        return f"{prompts} | {self.completion}, at most {self.longest_completion} | {self.budget}"


SHAPES = (
    Shape(100, 200, 20, 100),
    Shape(30, 60, 30, 200),
    Shape(100, 200, 100, 1000),
    Shape(300, 500, 50, 300),
    Shape(300, 500, 50, 300, budget=16_384),
    Shape(20, 40, 200, 2000),
)


def rows_of(shape: Shape, vocabulary: int = 2000) -> tuple[list[Row], list[Prompt | None]]:
    """Return the random rows of a batch, and the prompt of each."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    prompts: list[Prompt | None] = []
    for number in range(shape.groups):
        size = int(rng.integers(shape.shortest_prompt, shape.longest_prompt + 1))
        hard, prompt = rng.lognormal(0, 0.5), rng.integers(0, vocabulary, size)
        for _ in range(shape.size):
            drawn = rng.lognormal(np.log(shape.completion * hard), 0.7)
            completion = rng.integers(0, vocabulary, int(np.clip(drawn, 1, shape.longest_completion)))
            tokens = np.concatenate([prompt, completion]).astype(np.int32)
            mask = np.arange(len(tokens)) >= size
            rows.append(Row(tokens, mask, np.zeros(len(tokens), np.float32), 1.0, 1.0))
            prompts.append(prompt_of(mask, number))
    return rows, prompts


def plans(shape: Shape, lengths: list[int], prompts: list[Prompt | None]) -> list[list[list[int]]]:
    """Return the micro-batches sorted by length, and those that keep prompts together where that costs no more."""
    known = ((), prompts)
    return [plan_micro_batches(lengths, budget_tokens=shape.budget, prompts=some)[0] for some in known]


def count() -> None:
    """Print the table of tokens."""
    print("| prompt | completion | budget | all rows | by length | together | ratio |\n|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        rows, prompts = rows_of(shape)
        lengths = [len(row.token_ids) for row in rows]
        found = plans(shape, lengths, prompts)
        before, after = (sum(num_computed(piece, lengths, prompts) for piece in plan) for plan in found)
        shown = (f"{before:,} in {len(found[0])}", f"{after:,} in {len(found[1])}", f"{after / before:.2f}")
        print(f"| {shape.name} | {sum(lengths):,} | {' | '.join(shown)} |")


def measure() -> None:
    """Print CPU seconds of both plans, alternating, and the sums that show that the results are equal."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from penstock.trainer.learner.logprobs import CompletionScorer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=2048,
    )  # fmt: skip
    scorer = CompletionScorer(Qwen3ForCausalLM(config), temperature=1.0)
    shape = Shape(100, 200, 20, 100, groups=24)
    rows, prompts = rows_of(shape)
    found = plans(shape, [len(row.token_ids) for row in rows], prompts)
    for name, plan in [("by length", found[0]), ("together", found[1])] * 2:
        scorer.zero_grad()
        started, total = time.process_time(), 0.0
        for piece in plan:
            batch = build([rows[number] for number in piece])
            logprobs = scorer(
                batch.input_ids, batch.predictors, batch.targets, position_ids=batch.position_ids,
                attention_mask=batch.attention_mask,
            )  # fmt: skip
            logprobs.sum().backward()
            total += float(logprobs.detach().sum())
        gradient = sum(float(p.grad.double().abs().sum()) for p in scorer.parameters() if p.grad is not None)
        cpu_s = time.process_time() - started
        print(f"{name}: {cpu_s:.1f} CPU s, sum of log-probabilities {total:.2f}, of absolute gradients {gradient:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="also time a small model")
    options = parser.parse_args()
    count()
    if options.time:
        measure()


if __name__ == "__main__":
    main()
