"""Measure the memory that the export of a model takes on rank 0: written by all ranks, tensor by tensor, and gathered first.

    torchrun --nproc-per-node 2 -m benchmarks.export_memory [--zero-stage 3] [--hidden 768] [--layers 8]

Random weights in float32, one optimizer step. Printed for each way: seconds, and the peak of rank 0's resident memory above
that before it, sampled every 2 ms, anonymous pages alone: those of files that are read again are the kernel's to take back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ.update({"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "DS_ACCELERATOR": "cpu"})
if os.environ.get("PENSTOCK_BENCH_RESTARTED") is None:  # glibc reads its settings when the process starts
    os.environ["PENSTOCK_BENCH_RESTARTED"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.export_memory", *sys.argv[1:]])

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.deploy.quickstart_task import write_model
from penstock.trainer.algorithm.objective import CrossEntropy
from penstock.trainer.learner.export import _texts, export_model
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks


def anonymous_bytes() -> int:
    """Return the anonymous resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def peak_of(action: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of an action, and the peak of its memory above that before it, in MB."""
    before, peaks, over = anonymous_bytes(), [0], threading.Event()

    def sample() -> None:
        while not over.is_set():
            peaks[0] = max(peaks[0], anonymous_bytes())
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    started = time.monotonic()
    action()
    seconds = time.monotonic() - started
    over.set()
    thread.join()
    return seconds, (peaks[0] - before) / 1e6


def write_folder(folder: Path, options: argparse.Namespace) -> None:
    """Write a model of random weights, with the tokenizer of the quickstart."""
    write_model(folder, seed=0)
    config = Qwen3Config(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def gathered_first(policy: Policy, dims: ParallelDims, folder: Path) -> None:
    """Export as earlier releases did: the whole model on rank 0, then written."""
    tensors = policy.weights.snapshot()
    if dims.writes_files:
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero-stage", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16_384)
    parser.add_argument("--max-file-mb", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks()
    dims = ParallelDims(ranks)
    home = Path(ranks.broadcast(tempfile.mkdtemp() if ranks.is_leader else None))
    like = home / "model"
    if ranks.is_leader:
        write_folder(like, options)
    ranks.barrier()
    how = Optimisation(
        num_steps=10, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, warmup_steps=0, schedule="constant", min_lr_ratio=1.0,
        max_grad_norm=1.0, zero_stage=options.zero_stage, dtype="float32", keep_whole_below=0,
    )  # fmt: skip
    policy = load_policy(like, how, dims, temperature=1.0)
    policy.train_step([_texts(policy.vocab_size)], CrossEntropy("nll"))
    ways: dict[str, Callable[[], None]] = {
        "gathered on rank 0, then written": lambda: gathered_first(policy, dims, home / "gathered"),
        "by all ranks, tensor by tensor": lambda: export_model(
            policy, dims, home / "plain", like=like, verify=False, max_file_bytes=options.max_file_mb * 10**6
        ),
        "the same, loaded and compared": lambda: export_model(
            policy, dims, home / "verified", like=like, max_file_bytes=options.max_file_mb * 10**6
        ),
    }
    size = sum(spec.num_bytes for _, _, spec in policy.weights.layout().placed())
    largest = max(spec.num_bytes for _, _, spec in policy.weights.layout().placed())
    if ranks.is_leader:
        print(
            f"ZeRO {options.zero_stage}, {ranks.num_ranks} rank(s), load {os.getloadavg()[0]:.0f}: {size / 1e6:,.0f} MB of weights, "
            f"largest tensor {largest / 1e6:,.0f} MB\n| way | seconds | peak on rank 0, MB |\n|---|---|---|"
        )
    for name, way in ways.items():
        ranks.barrier()
        seconds, peak = peak_of(way)
        if ranks.is_leader:
            print(f"| {name} | {seconds:.1f} | {peak:,.0f} |", flush=True)
    ranks.barrier()
    if ranks.is_leader:
        shutil.rmtree(home)
    ranks.leave(0)


if __name__ == "__main__":
    main()
