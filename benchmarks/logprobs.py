"""Measure memory and speed of chunked log-probabilities against full logits, forward and backward.

    python -m benchmarks.logprobs                      # a 151,936-token vocabulary on this machine's CPU
    python -m benchmarks.logprobs --tokens 8192 --hidden 2048

The baseline computes float32 logits of all tokens, and their softmax for the backward pass; the trainer
(`trainer/learner/logprobs.py`) applies the output head in chunks and recomputes each in the backward
pass. Each variant runs in a separate process, whose peak resident memory above the start is printed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

from penstock.trainer.learner.logprobs import MAX_LOGITS, CompletionScorer


def _model(vocabulary: int, hidden: int) -> Any:
    """Return a model of one layer, of which the output head alone is measured."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def _plain(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = model.lm_head(hidden).float()
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def measure(way: str, tokens: int, vocabulary: int, hidden: int, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = _model(vocabulary, hidden)
    states = torch.randn(tokens, hidden, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    scorer = CompletionScorer(model, 1.0, max_logits=MAX_LOGITS)
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)  # both variants need this memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    total = 0.0
    for _ in range(repeats):
        found = _plain(model, states, targets) if way == "plain" else scorer.scores(states, targets)
        found.sum().backward()
        total = float(found.detach().sum())
    seconds = (time.perf_counter() - started) / repeats
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"MiB": peak / 1024, "s": seconds, "sum": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--way", choices=("plain", "chunked"))
    options = parser.parse_args()
    shape = (options.tokens, options.vocabulary, options.hidden, options.repeats)
    if options.way:
        print(json.dumps(measure(options.way, *shape)))
        return
    print(f"{options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden}, forward and backward\n")
    print("| way | peak above start, MiB | s |\n|---|---|---|")
    for way in ("plain", "chunked"):
        flags = [f"--{n}={v}" for n, v in zip(("tokens", "vocabulary", "hidden", "repeats"), shape, strict=True)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.logprobs", f"--way={way}", *flags],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"| {way} | {found['MiB']:.0f} | {found['s']:.2f} |")


if __name__ == "__main__":
    main()
