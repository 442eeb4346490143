"""Measure packed rows against padded ones: tokens per CPU second, peak memory and the error of gradients.

python -m benchmarks.trainer_packing                    # every case; about two minutes of CPU time
python -m benchmarks.trainer_packing --only 4:1 mixed   # some of them
python -m benchmarks.trainer_packing --memory           # peak memory at 4:1, a process for each way
python -m benchmarks.trainer_packing --error            # gradients compared with one row at a time

Every way runs forward and backward of the same rows through the same model and the same output head, which computes
logits in chunks and of sampled tokens only. The ways differ in how rows reach the layers:

- padded: batches of eight rows in their order, padded to the longest, with an attention mask, as Hugging Face's Trainer does
- landed: the trainer's own plan before it packed rows (`padded_rows`): sorted by length, prompts shared by a mask up to 1,024 tokens
- packed: one stream without padding, nothing shared
- tree: one stream without padding, a common prefix once; what the trainer does
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from benchmarks import padded_rows
from torch import Tensor

from penstock.trainer.algorithm.batch import Row, build, plan_micro_batches, prefixes_of
from penstock.trainer.algorithm.packed_rows import Layout, Node
from penstock.trainer.learner.logprobs import CompletionScorer

VOCABULARY = 2048
WAYS = ("padded", "landed", "packed", "tree")


@dataclass(frozen=True)
class Case:
    """Rows and the model that reads them."""

    what: str
    rows: Callable[[], list[Row]]
    layers: int = 2
    hidden: int = 384
    budget: int = 12_000


def row(prompt: np.ndarray, completion: np.ndarray) -> Row:
    tokens = np.concatenate([prompt, completion]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Row(tokens, mask, np.zeros(len(tokens), np.float32), 1.0, 1.0 / len(completion))


def group(prompt: int, completion: int, size: int = 8) -> list[Row]:
    """One prompt and answers of uniformly distributed length, half to one and a half of ``completion``."""
    rng = np.random.default_rng(0)
    given = rng.integers(0, VOCABULARY, prompt)
    lengths = rng.integers(completion // 2, completion * 3 // 2 + 1, size)
    return [row(given, rng.integers(0, VOCABULARY, length)) for length in lengths]


def mixed() -> list[Row]:
    """64 rows of log-normal length, median 245, at most 2,048; no two share a prompt."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(245), 0.7, 64), 16, 2048).astype(int)
    return [row(rng.integers(0, VOCABULARY, 8), rng.integers(0, VOCABULARY, length - 8)) for length in lengths]


def equal() -> list[Row]:
    """16 rows of 512 tokens without a common prompt: nothing to save."""
    rng = np.random.default_rng(0)
    return [row(rng.integers(0, VOCABULARY, 128), rng.integers(0, VOCABULARY, 384)) for _ in range(16)]


CASES = {
    "mixed": Case("64 rows, log-normal, median 245, at most 2,048", mixed, hidden=256, budget=4096),
    "4:1": Case("8 answers of about 256 to a prompt of 1,024", lambda: group(1024, 256)),
    "1:1": Case("8 answers of about 512 to a prompt of 512", lambda: group(512, 512)),
    "1:4": Case("8 answers of about 1,024 to a prompt of 256", lambda: group(256, 1024)),
    "equal": Case("16 rows of 512, nothing in common", equal),
}


def scorer_of(case: Case) -> CompletionScorer:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=case.hidden, intermediate_size=3 * case.hidden, num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 64, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    return CompletionScorer(Qwen3ForCausalLM(config), 1.0)


def pieces(way: str, rows: Sequence[Row], budget: int) -> list[list[Row]]:
    """Return the micro-batches of a way."""
    lengths = [len(r.token_ids) for r in rows]
    if way == "row by row":
        return [[r] for r in rows]
    if way == "padded":
        return [list(rows[n : n + 8]) for n in range(0, len(rows), 8)]
    if way == "landed":
        prompts = [padded_rows.prompt_of(r.loss_mask, int.from_bytes(r.token_ids[:8].tobytes(), "big")) for r in rows]
        plan = padded_rows.plan_micro_batches(lengths, budget_tokens=budget, prompts=prompts)
    else:
        prefixes = prefixes_of([r.token_ids for r in rows], [r.loss_mask for r in rows])
        plan = plan_micro_batches(lengths, budget_tokens=budget, prefixes=prefixes if way == "tree" else None)
    return [[rows[n] for n in piece] for piece in plan[0] if piece]


def unshared(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Layout, Tensor]:
    """Return a stream of whole rows: ids, positions, layout, predictors."""
    ends = np.cumsum([len(r.token_ids) - 1 for r in rows])
    starts = ends - [len(r.token_ids) - 1 for r in rows]
    depths = np.concatenate([np.arange(end - start) for start, end in zip(starts, ends, strict=True)])
    ids = np.concatenate([r.token_ids[:-1] for r in rows]).astype(np.int64)
    at = [start + np.flatnonzero(r.loss_mask) - 1 for start, r in zip(starts, rows, strict=True)]
    nodes = tuple(Node(int(start), int(end), int(end)) for start, end in zip(starts, ends, strict=True))
    return (
        torch.from_numpy(ids)[None], torch.from_numpy(depths)[None], Layout(nodes, depths),
        torch.from_numpy(np.concatenate(at)),
    )  # fmt: skip


def hidden_states(scorer: CompletionScorer, way: str, rows: Sequence[Row]) -> tuple[Tensor, int]:
    """Return the hidden states that predict the sampled tokens, and the number of tokens computed."""
    model: Any = scorer.language_model
    if way in ("tree", "row by row"):
        batch = build(rows)
        given, at = (
            {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "layout": batch.layout},
            batch.predictors,
        )
    elif way == "packed":
        ids, positions, layout, at = unshared(rows)
        given = {"input_ids": ids, "position_ids": positions, "layout": layout}
    else:
        sampled = [np.flatnonzero(r.loss_mask) for r in rows]
        layout = padded_rows.build(rows) if way == "landed" else padded_rows.row_by_row(rows, sampled)
        ids = torch.from_numpy(layout.input_ids)
        given = {"input_ids": ids}
        if way == "padded":
            lengths = torch.tensor([len(r.token_ids) - 1 for r in rows])
            given["attention_mask"] = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
        elif layout.attention_mask is not None:
            given |= {
                "attention_mask": torch.from_numpy(layout.attention_mask[:, None]),
                "position_ids": torch.from_numpy(layout.position_ids),
            }
        at = torch.from_numpy(np.concatenate(layout.predictors))
    out = model.base_model(use_cache=False, **given).last_hidden_state
    return out.flatten(0, 1).index_select(0, at), given["input_ids"].numel()


def run(scorer: CompletionScorer, way: str, rows: Sequence[Row], budget: int) -> tuple[float, int]:
    """Run forward and backward of all rows; returns CPU seconds and tokens computed."""
    model: Any = scorer.language_model
    model.set_attn_implementation("sdpa" if way in ("padded", "landed") else "penstock_packed")
    scorer.zero_grad(set_to_none=True)
    started, computed = time.process_time(), 0
    for piece in pieces(way, rows, budget):
        targets = np.concatenate([r.token_ids[r.loss_mask] for r in piece]).astype(np.int64)
        weights = np.concatenate([np.full(int(r.loss_mask.sum()), r.weight) for r in piece])
        hidden, count = hidden_states(scorer, way, piece)
        computed += count
        (scorer.scores(hidden, torch.from_numpy(targets)) * torch.from_numpy(weights).float()).sum().backward()
    return time.process_time() - started, computed


def gradient(scorer: CompletionScorer) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in scorer.parameters() if p.grad is not None])


def measure(name: str, repeats: int) -> dict[str, dict[str, Any]]:
    """Return figures of every way; the ways alternate, and the best of the repetitions counts."""
    case = CASES[name]
    scorer, rows = scorer_of(case), case.rows()
    run(scorer, "tree", rows[:1], case.budget)
    best: dict[str, tuple[float, int]] = {}
    for _ in range(repeats):
        for way in WAYS:
            found = run(scorer, way, rows, case.budget)
            best[way] = min(best.get(way, found), found)
    real = sum(len(r.token_ids) for r in rows)
    return {w: {"computed": n, "tokens_per_cpu_s": real / cpu} for w, (cpu, n) in best.items()}


def report(names: Sequence[str], repeats: int) -> Iterator[str]:
    """Yield the table of rates and ratios, each line when it has been measured."""
    heads = [f"{way}, tok/cpu-s (computed)" for way in WAYS]
    yield f"| case | {' | '.join(heads)} | tree / padded | / landed | / packed |"
    yield "|---" * (len(WAYS) + 4) + "|"
    for name in names:
        ways = measure(name, repeats)
        rates = [f"{ways[w]['tokens_per_cpu_s']:,.0f} ({ways[w]['computed']:,})" for w in WAYS]
        ratios = [f"{ways['tree']['tokens_per_cpu_s'] / ways[w]['tokens_per_cpu_s']:.2f}" for w in WAYS[:3]]
        yield f"| {name}: {CASES[name].what} | {' | '.join([*rates, *ratios])} |"


def peak_memory_mb(way: str) -> float:
    """Return how much memory a pass at 4:1 needs at most beyond model and libraries; of this process, sampled every 2 ms."""
    case = CASES["4:1"]
    scorer, rows = scorer_of(case), case.rows()
    run(scorer, way, rows[:1], case.budget)
    scorer.zero_grad(set_to_none=True)
    page, peak, done = resource.getpagesize(), 0, threading.Event()

    def resident() -> int:
        with open("/proc/self/statm") as held:  # noqa: PTH123
            return int(held.read().split()[1]) * page

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident())

    base = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    run(scorer, way, rows, case.budget)
    done.set()
    watcher.join()
    return (peak - base) / 2**20


def memory() -> None:
    """Print the peak memory of each way, each in a process of its own."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    peaks = {}
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.trainer_packing", "--memory-of", way]
        peaks[way] = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    print("| way | peak memory at 4:1, MB | of padded |\n|---|---|---|")
    for way, peak in peaks.items():
        print(f"| {way} | {peak:,.0f} | {peak / peaks['padded']:.2f} |")


def error() -> None:
    """Print the relative error of the gradient, in float32, against one row at a time."""
    case = CASES["4:1"]
    scorer, rows = scorer_of(case), case.rows()
    run(scorer, "row by row", rows, case.budget)
    true = gradient(scorer)
    for way in WAYS:
        run(scorer, way, rows, case.budget)
        print(
            f"{way}: relative error of the gradient {float((gradient(scorer) - true).norm() / true.norm()):.1e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, help="measure these cases only")
    parser.add_argument("--repeats", type=int, default=1, help="the best of so many is reported")
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead")
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--error", action="store_true", help="measure the error of gradients instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print(json.dumps(peak_memory_mb(options.memory_of)))
    elif options.memory:
        memory()
    elif options.error:
        error()
    else:
        for line in report(options.only or list(CASES), options.repeats):
            print(line, flush=True)


if __name__ == "__main__":
    main()
