"""Measure tokens per CPU second of the embedded engine and of Hugging Face ``generate``.

    python -m benchmarks.engine [--repeats 3]

Prints a Markdown table. All figures are process CPU seconds with one thread, engine and baseline
alternate in the same run, so that a ratio is valid on a shared machine. Each cell is the median.

Workloads: ``equal`` (B prompts of 32 tokens, 64 new tokens each), ``mixed`` (4 B requests, prompts of 8..64
tokens, log-uniform 8..256 new tokens; the baseline runs them in waves of B, each as long as its longest),
``quickstart`` (12 prompts x 8 samples, 21 prompt tokens, 9 new ones).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from benchmarks.rig import machine

from penstock.rollout_service.embedded_engine.model.kv_cache import KVCache
from penstock.rollout_service.embedded_engine.model.model_config import read_model_config
from penstock.rollout_service.embedded_engine.model.transformer import Transformer
from penstock.rollout_service.embedded_engine.model.weights import prepare_weights, read_checkpoint
from penstock.rollout_service.embedded_engine.process import keep_freed_memory
from penstock.rollout_service.embedded_engine.runner import Runner
from penstock.rollout_service.embedded_engine.scheduler import Limits, choose_admissions
from penstock.rollout_service.embedded_engine.sequence import Sampling, Sequence

SMALL = {
    "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 512,
}  # fmt: skip
Request = tuple[tuple[int, ...], int]  # prompt, new tokens


def build_model(folder: Path, **shape: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **{"max_position_embeddings": 512, **shape}, tie_word_embeddings=True, eos_token_id=None, pad_token_id=0
    )
    config.bos_token_id = None
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


def run_engine(folder: Path, requests: list[Request], max_running: int, dtype: torch.dtype) -> Callable[[], int]:
    config = read_model_config(folder)
    device = torch.device("cpu")
    limits = Limits(max_running, max_total_tokens=max_running * 512, max_prefill_tokens=8192)
    with torch.inference_mode():
        weights = prepare_weights(config, read_checkpoint(folder, config), device=device, dtype=dtype)
        cache = KVCache(config, max_tokens=limits.max_total_tokens, device=device, dtype=dtype)
        model = Transformer(config, device=device, dtype=dtype)
    runner = Runner(model, weights, cache, max_running=max_running, find_stop_string=lambda _: None)

    def serve() -> int:
        with torch.inference_mode():
            waiting = deque(
                Sequence(str(index), prompt, Sampling(max_new_tokens=new, seed=index))
                for index, (prompt, new) in enumerate(requests)
            )
            while waiting or runner.running:
                newcomers = choose_admissions(waiting, runner.running, limits)
                for _ in newcomers:
                    waiting.popleft()
                if newcomers:
                    runner.start(newcomers)
                else:
                    runner.step()
        return sum(new for _, new in requests)

    return serve


def run_transformers(model: Any, requests: list[Request], wave: int, dtype: torch.dtype) -> Callable[[], int]:
    """Return a function that serves all requests in static waves and returns the number of *useful* tokens."""
    model = model.to(dtype)

    def serve() -> int:
        for start in range(0, len(requests), wave):
            batch = requests[start : start + wave]
            width = max(len(prompt) for prompt, _ in batch)
            ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt, _ in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            new = max(new for _, new in batch)
            with torch.inference_mode():
                model.generate(
                    ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new
                )
        return sum(new for _, new in requests)

    return serve


def tokens_per_cpu_second(functions: list[Callable[[], int]], repeats: int) -> list[float]:
    """Run the functions alternately; return the median rate of each."""
    rates: list[list[float]] = [[] for _ in functions]
    for attempt in range(repeats + 1):
        for function, samples in zip(functions, rates, strict=True):
            before = time.process_time()
            tokens = function()
            if attempt:  # the first is a warm-up
                samples.append(tokens / (time.process_time() - before))
    return [statistics.median(samples) for samples in rates]


def equal(batch: int) -> list[Request]:
    draw = random.Random(0)
    return [(tuple(draw.randrange(512) for _ in range(32)), 64) for _ in range(batch)]


def mixed(batch: int) -> list[Request]:
    draw = random.Random(1)
    return [
        (tuple(draw.randrange(512) for _ in range(draw.randint(8, 64))), round(8 * 32 ** draw.random()))
        for _ in range(4 * batch)
    ]


def quickstart() -> list[Request]:
    draw = random.Random(2)
    prompts = [tuple(draw.randrange(55) for _ in range(21)) for _ in range(12)]
    return [(prompt, 9) for prompt in prompts for _ in range(8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="run only the workloads whose name starts with this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # for both, so that neither includes the cost of the allocator
    print(f"{machine()}, torch {torch.__version__}, one thread\n")
    print("| workload | type | HF generate, tok/cpu-s | embedded engine, tok/cpu-s | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        small, tiny = Path(scratch) / "small", Path(scratch) / "tiny"
        model = build_model(small, **SMALL)
        shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
        tiny_model = build_model(tiny, **shape, num_key_value_heads=2, head_dim=32, vocab_size=55)
        cases = [
            ("equal B=16", small, model, equal(16), 16, torch.float32),
            ("equal B=64", small, model, equal(64), 64, torch.float32),
            ("mixed B=16", small, model, mixed(16), 16, torch.float32),
            ("mixed B=64", small, model, mixed(64), 64, torch.float32),
            ("equal B=64", small, model, equal(64), 64, torch.bfloat16),
            ("quickstart 12 x 8 x 9", tiny, tiny_model, quickstart(), 96, torch.float32),
        ]
        for name, folder, hf, requests, batch, dtype in cases:
            if not name.startswith(options.only):
                continue
            functions = [run_transformers(hf, requests, batch, dtype), run_engine(folder, requests, batch, dtype)]
            baseline, engine_rate = tokens_per_cpu_second(functions, options.repeats)
            print(
                f"| {name} | {str(dtype).split('.')[1]} | {baseline:,.0f} | {engine_rate:,.0f} | {engine_rate / baseline:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
