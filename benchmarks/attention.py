"""Peak memory and CPU seconds of a forward and backward pass with each attention of the CPU, in separate processes.

    python -m benchmarks.attention [--tokens 2040] [--rounds 3] [--window 512]

Two layers of Qwen3's attention (16 query heads of 128 dimensions, 8 key heads) in bfloat16 with gradient checkpointing, on a
narrow body and a small vocabulary, so that attention is most of the work. Four rows share a prompt. A ratio is the median of those
of the rounds, in which the two take turns. With a window in both layers, the other way is a batch of padded rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from benchmarks.rig import last_json

NAMES = ("cpu-flash", "dense", "padded")


def measure(name: str, num_tokens: int, window: int | None) -> dict[str, float]:
    """Return the tokens, the peak beyond what was there before in MB, and the CPU seconds of one pass in this process."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from penstock.trainer.algorithm.packed_rows import pack
    from penstock.trainer.learner import logprobs
    from penstock.trainer.learner.attention import backends

    torch.set_num_threads(1)
    config = Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=512,
        sliding_window=window, use_sliding_window=window is not None, max_window_layers=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if name == "padded":
        logprobs.use_packed_rows = lambda model: "measured as padded"
    else:
        backends.use(name)  # type: ignore[arg-type]
    scorer = logprobs.CompletionScorer(model.train(), 1.0)

    def run(prompt: int, answer: int) -> int:
        rows = [
            np.append(np.arange(prompt) % 500, (np.arange(answer) + 7 * n) % 500).astype(np.int32) for n in range(4)
        ]
        packed = pack(rows, [prompt] * 4)
        ids, depths = torch.from_numpy(packed.token_ids), torch.from_numpy(packed.layout.depths)
        predictors = torch.cat([torch.from_numpy(row[prompt - 1 : -1]) for row in packed.positions])
        targets = torch.cat([ids[torch.from_numpy(row[prompt:])] for row in packed.positions])
        scorer(ids[None], predictors, targets, position_ids=depths[None], layout=packed.layout).sum().backward()
        scorer.zero_grad(set_to_none=False)  # gradients stay, as in a step of several micro-batches
        return len(ids)

    run(20, 20)
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    before, began = _status("VmRSS"), time.process_time()
    tokens = run(num_tokens * 3 // 5, num_tokens // 10)
    return {"tokens": tokens, "MB": (_status("VmHWM") - before) / 1e3, "s": time.process_time() - began}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, default=2040, help="about the tokens of the stream (2040)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which the two take turns (3)")
    parser.add_argument("--window", type=int, help="of both layers (none)")
    parser.add_argument("--one", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.tokens, options.window)))
        return
    rounds, other = [], "dense" if options.window is None else "padded"
    for _ in range(options.rounds):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.attention", "--tokens", str(options.tokens)]
        command += [] if options.window is None else ["--window", str(options.window)]
        rounds.append({name: last_json([*command, "--one", name]) for name in (NAMES[0], other)})
        print(
            {
                name: {key: round(value, 2) for key, value in measurement.items()}
                for name, measurement in rounds[-1].items()
            },
            flush=True,
        )
    for key in ("MB", "s"):
        ratios = [figures["cpu-flash"][key] / figures[other][key] for figures in rounds]
        print(f"{key}: cpu-flash / {other} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
