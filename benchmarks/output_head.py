"""CPU time and memory of forward and backward of an output head: the trainer's, and one checkpoint of autograd for each chunk.

    python -m benchmarks.output_head [--hidden 896] [--tokens 2048] [--dtype float32] [--rounds 1]

Each measurement has a process of its own; the two take turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.trainer.learner.logprobs import CompletionScorer
from penstock.trainer.learner.output_head import MAX_LOGITS

VOCABULARY = 151_936
WAYS = ("checkpoints", "trainer")


def of_checkpoints(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    def score(some: Tensor, sampled: Tensor) -> Tensor:
        return -nn.functional.cross_entropy(head(some).float(), sampled, reduction="none")

    size = MAX_LOGITS // VOCABULARY
    pairs = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.cat([checkpoint(score, *pair, use_reentrant=False) for pair in pairs])


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0])


def measure(way: str, hidden_size: int, tokens: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden_size, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(dtype)
    hidden = torch.randn(tokens, hidden_size).to(dtype).requires_grad_()
    targets, scorer = torch.randint(0, VOCABULARY, (tokens,)), CompletionScorer(model, 1.0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak so far is that of making the model
    before, start = _peak_kib(), time.process_time()
    scores = of_checkpoints(model.lm_head, hidden, targets) if way == "checkpoints" else scorer.scores(hidden, targets)
    (scores * torch.linspace(-1, 1, tokens)).sum().backward()
    seconds, peak = time.process_time() - start, _peak_kib()
    print(f"{way}: {seconds:.1f} CPU s, {(peak - before) / 1024:.0f} MiB above the start", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--way", choices=WAYS)
    given = parser.parse_args()
    if given.way:
        measure(given.way, given.hidden, given.tokens, getattr(torch, given.dtype))
        return
    for number in range(given.rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            subprocess.run([sys.executable, "-m", "benchmarks.output_head", *sys.argv[1:], "--way", way], check=True)


if __name__ == "__main__":
    main()
