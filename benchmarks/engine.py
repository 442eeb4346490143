"""Measure tokens per CPU second of the embedded engine and of Hugging Face ``generate``.

    python -m benchmarks.engine [--repeats 3]

Prints a Markdown table. All figures are process CPU seconds with one thread, engine and baseline
alternate in the same run, so that a ratio is valid on a shared machine. Each cell is the median.

Workloads: ``equal`` (B prompts of 32 tokens, 64 new tokens each), ``mixed`` (4 B requests, prompts of 8..64
tokens, log-uniform 8..256 new tokens; the baseline runs them in waves of B, each as long as its longest),
``quickstart`` (12 prompts x 8 samples, 21 prompt tokens, 9 new ones; also over HTTP), ``adapters`` (``equal``, its rows
split over 1, 2 or 4 adapters of all layers in one batch; compared with the weights alone, and with one batch per adapter
in sequence), ``sessions`` (episodes of several turns, 8 of a prompt, whose turns arrive one by one; with keys and values kept
from turn to turn and computed again each time).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from benchmarks.rig import ROOT, machine

from penstock.rollout_service.embedded_engine.model.kv_cache import KVCache
from penstock.rollout_service.embedded_engine.model.low_rank import Adapter, LowRank, prepare_adapter
from penstock.rollout_service.embedded_engine.model.model_config import read_model_config
from penstock.rollout_service.embedded_engine.model.transformer import Transformer
from penstock.rollout_service.embedded_engine.model.weights import expected_shapes, prepare_weights, read_checkpoint
from penstock.rollout_service.embedded_engine.process import keep_freed_memory
from penstock.rollout_service.embedded_engine.runner import Runner
from penstock.rollout_service.embedded_engine.scheduler import Limits, choose_admissions
from penstock.rollout_service.embedded_engine.sequence import Sampling, Sequence
from penstock.rollout_service.engines.engine_process import process_cpu_seconds

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


def run_engine(
    folder: Path,
    requests: list[Request],
    max_running: int,
    dtype: torch.dtype,
    adapters: tuple[Adapter | None, ...] = (None,),
) -> Callable[[], int]:
    """Return a function that serves all requests once, assigns ``adapters`` in turn, and returns the number of new tokens."""
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
                Sequence(
                    str(index),
                    prompt,
                    Sampling(max_new_tokens=new, seed=index),
                    adapter=adapters[index % len(adapters)],
                )
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


def random_adapter(folder: Path, rank: int, seed: int) -> Adapter:
    config = read_model_config(folder)
    generator = torch.Generator().manual_seed(seed)
    factors = {
        name.removesuffix(".weight"): LowRank(
            0.01 * torch.randn(rank, shape[1], generator=generator),
            0.01 * torch.randn(shape[0], rank, generator=generator),
        )
        for name, shape in expected_shapes(config).items()
        if name.endswith("_proj.weight")
    }
    return prepare_adapter(f"policy@{seed}", "", factors, config, device=torch.device("cpu"), dtype=torch.float32)


def adapters_table(folder: Path, batch: int, rank: int, repeats: int) -> list[str]:
    """Return rows of the table of adapters: tokens per CPU second, and their ratio to the weights alone."""
    four = tuple(random_adapter(folder, rank, seed) for seed in range(1, 5))
    mixes: list[tuple[Adapter | None, ...]] = [(None,), four[:1], (None, four[0]), four[:2], four]
    names = ["the weights alone", "1 adapter", "1 adapter and none", "2 adapters", "4 adapters"]
    functions = [run_engine(folder, equal(batch), batch, torch.float32, given) for given in mixes]

    def run_in_sequence() -> int:
        return sum(serve() for serve in separate)

    separate = [run_engine(folder, equal(batch // 4), batch // 4, torch.float32, (one,)) for one in four]
    rates = tokens_per_cpu_second([*functions, run_in_sequence], repeats)
    return [
        f"| B={batch}, rank {rank} | {name} | {rate:,.0f} | {rate / rates[0]:.2f} |"
        for name, rate in zip([*names, f"4 batches of {batch // 4}, an adapter each"], rates, strict=True)
    ]


def run_sessions(
    folder: Path, *, groups: int, turns: int, prompt: int, new: int, said: int, max_kept_tokens: int
) -> Callable[[], int]:
    """Return a function that plays all episodes and returns their sampled tokens.

    8 episodes of each of ``groups`` prompts of ``prompt`` tokens; in each of ``turns`` turns they sample ``new`` tokens and are told
    ``said``. A turn of an episode arrives at a random moment of the steps after the one before, as if a tool had answered.
    """
    config, device = read_model_config(folder), torch.device("cpu")
    limits = Limits(256, max_total_tokens=2**20, max_prefill_tokens=8192)
    with torch.inference_mode():
        weights = prepare_weights(config, read_checkpoint(folder, config), device=device, dtype=torch.float32)
        cache = KVCache(config, max_tokens=limits.max_total_tokens, device=device, dtype=torch.float32)
        model = Transformer(config, device=device, dtype=torch.float32)
        runner = Runner(
            model, weights, cache, max_running=256, find_stop_string=lambda _: None, max_kept_tokens=max_kept_tokens
        )

    def serve() -> int:
        draw = random.Random(3)
        with torch.inference_mode():
            runner.weights = weights  # a version begins: nothing is kept of the one before
            first = [tuple(draw.randrange(512) for _ in range(prompt)) for _ in range(groups)]
            due = [(draw.randrange(2 * new), n, first[n // 8], 0) for n in range(8 * groups)]
            waiting: deque[Sequence] = deque()
            turn_of: dict[str, int] = {}
            step = 0
            while due or waiting or runner.running:
                for one in sorted(one for one in due if one[0] <= step):
                    due.remove(one)
                    _, number, tokens, turn = one
                    turn_of[str(number)] = turn
                    waiting.append(
                        Sequence(str(number), tokens, Sampling(max_new_tokens=new, seed=draw.getrandbits(63)))
                    )
                newcomers = choose_admissions(waiting, runner.running, limits, runner.kept.num_known)
                for _ in newcomers:
                    waiting.popleft()
                ended = runner.start(newcomers) if newcomers else runner.step() if runner.running else []
                step += 1
                for one in ended:
                    if (turn := turn_of[one.rid] + 1) < turns:
                        told = tuple(draw.randrange(512) for _ in range(said))
                        due.append(
                            (step + draw.randrange(2 * new), int(one.rid), (*one.prompt, *one.output_ids, *told), turn)
                        )
        return 8 * groups * turns * new

    return serve


def sessions_table(folder: Path, repeats: int) -> Iterator[str]:
    """Yield rows of the table of sessions: tokens per CPU second without and with kept prefixes, alternating."""
    for turns, prompt, new, said in ((2, 24, 4, 4), (4, 200, 16, 40), (10, 200, 16, 40), (4, 1000, 32, 100)):
        shape = {"groups": 2, "turns": turns, "prompt": prompt, "new": new, "said": said}
        both = [run_sessions(folder, **shape, max_kept_tokens=kept) for kept in (0, 2**20)]
        before, after = tokens_per_cpu_second(both, repeats)
        yield f"| {turns} | {prompt} | {new} + {said} | {before:,.0f} | {after:,.0f} | {after / before:.2f} |"


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
        for function, found in zip(functions, rates, strict=True):
            before = time.process_time()
            tokens = function()
            if attempt:  # the first is a warm-up
                found.append(tokens / (time.process_time() - before))
    return [statistics.median(found) for found in rates]


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


def http_cost(folder: Path, num_requests: int) -> tuple[float, float]:
    """Return milliseconds of the engine process's CPU over HTTP: per quickstart request, and per weight update."""
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "penstock.rollout_service.embedded_engine", "--model-path", str(folder)),
                *("--port", "0", "--port-file", str(port_file), "--max-running", "256", "--die-with-parent"),
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not port_file.exists():
                assert process.poll() is None
                time.sleep(0.05)
            connection = http.client.HTTPConnection("127.0.0.1", int(port_file.read_text()))
            prompts = [list(prompt) for prompt, _ in quickstart()[::8]]
            params = {"n": 8, "max_new_tokens": 9, "temperature": 1.0}
            generate = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
            update = {"model_path": str(folder), "weight_version": "1"}
            costs = []
            for path, body in (("/generate", generate), ("/update_weights_from_disk", update)):
                before = 0.0
                for attempt in range(num_requests + 10):
                    if attempt == 10:  # the first ten warm up
                        before = process_cpu_seconds(process.pid)
                    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                    reply = connection.getresponse()
                    content = reply.read()
                    assert reply.status == 200, content
                costs.append((process_cpu_seconds(process.pid) - before) / num_requests * 1e3)
            return costs[0], costs[1]
        finally:
            process.kill()
            process.wait()


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
        if "adapters".startswith(options.only):
            print("\n| batch | adapters in it | tok/cpu-s | relative to the weights alone |\n|---|---|---|---|")
            for batch, rank in ((64, 8), (64, 32), (16, 8)):
                print(*adapters_table(small, batch, rank, options.repeats), sep="\n", flush=True)
        if "sessions".startswith(options.only):
            long = Path(scratch) / "long"
            build_model(long, **SMALL, max_position_embeddings=4096)
            print(
                "\n| turns | first prompt | sampled + told a turn | computed again, tok/cpu-s | kept, tok/cpu-s | ratio |"
                "\n|---|---|---|---|---|---|"
            )
            for row in sessions_table(long, options.repeats):
                print(row, flush=True)
        if "http".startswith(options.only):
            generate_ms, update_ms = http_cost(tiny, 100 * options.repeats)
            print(
                f"\nOver HTTP, engine process: {generate_ms:.2f} ms CPU per quickstart request (96 completions with logprobs)"
                f", {update_ms:.2f} ms CPU per weight update."
            )


if __name__ == "__main__":
    main()
