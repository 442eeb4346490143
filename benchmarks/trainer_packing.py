"""Measure packed rows against padded ones: tokens per CPU second, peak memory and the error of gradients.

python -m benchmarks.trainer_packing                    # every case; about five minutes of CPU time
python -m benchmarks.trainer_packing --only 4:1 mixed   # some of them
python -m benchmarks.trainer_packing --memory           # peak memory at 4:1, a process for each way
python -m benchmarks.trainer_packing --error            # gradients compared with one row at a time
python -m benchmarks.trainer_packing --only 4:1 --model FOLDER --scale 8   # the model in FOLDER, lengths divided by 8

Every way runs forward and backward of the same rows through the same model and the same output head, which computes
logits in chunks and of sampled tokens only. The ways differ in how rows reach the layers:

- padded: batches of eight rows in their order, padded to the longest, with an attention mask, as Hugging Face's Trainer does
- packed: one stream without padding, nothing shared
- tree: one stream without padding, a common prefix once; what the trainer does

The ways take turns within one process, in the other order in every second round, and a ratio is the median of those of the rounds: what
disturbs the machine for a while disturbs all ways. All have huge pages, as the trainer's processes do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as `process_memory.use_huge_pages`; torch reads it once

import numpy as np
import torch
from benchmarks.rig import Peak
from torch import Tensor

from penstock.trainer.algorithm.batch import Row, build, plan_micro_batches, prefixes_of
from penstock.trainer.algorithm.packed_rows import Layout, Node
from penstock.trainer.learner.logprobs import CompletionScorer

VOCABULARY = 2048
WAYS = ("padded", "packed", "tree")


@dataclass(frozen=True)
class Case:
    what: str
    rows: Callable[[int], list[Row]]  # with lengths divided by a number
    layers: int = 2
    hidden: int = 384
    budget: int = 12_000
    model: Path | None = None
    scale: int = 1

    def scaled(self, model: Path | None, scale: int) -> Case:
        what = self.what if scale == 1 else f"{self.what}; lengths divided by {scale}"
        return replace(self, what=what, model=model, scale=scale, budget=self.budget // scale)

    def made(self) -> list[Row]:
        return self.rows(self.scale)


def row(prompt: np.ndarray, completion: np.ndarray) -> Row:
    tokens = np.concatenate([prompt, completion]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Row(tokens, mask, np.zeros(len(tokens), np.float32), 1.0, 1.0 / len(completion))


def group(prompt: int, completion: int, size: int = 8) -> list[Row]:
    """One prompt and answers of uniformly distributed length, half to one and a half of ``completion``."""
    rng = np.random.default_rng(0)
    prompt_ids = rng.integers(0, VOCABULARY, prompt)
    lengths = rng.integers(completion // 2, completion * 3 // 2 + 1, size)
    return [row(prompt_ids, rng.integers(0, VOCABULARY, length)) for length in lengths]


def log_normal(rng: np.random.Generator, median: float, most: float, num: int) -> np.ndarray:
    return np.clip(rng.lognormal(np.log(median), 0.7, num), 16, most)


def mixed(scale: int) -> list[Row]:
    """64 rows of log-normal length, median 245, at most 2,048; no two share a prompt."""
    rng = np.random.default_rng(0)
    lengths = log_normal(rng, 245 / scale, 2048 / scale, 64).astype(int)
    return [row(rng.integers(0, VOCABULARY, 8), rng.integers(0, VOCABULARY, length - 8)) for length in lengths]


def equal(scale: int) -> list[Row]:
    """16 rows of 512 tokens without a common prompt: nothing to save."""
    rng = np.random.default_rng(0)
    prompt, answer = 128 // scale, 384 // scale
    return [row(rng.integers(0, VOCABULARY, prompt), rng.integers(0, VOCABULARY, answer)) for _ in range(16)]


CASES = {
    "mixed": Case("64 rows, log-normal, median 245, at most 2,048", mixed, hidden=256, budget=4096),
    "4:1": Case("8 answers of about 256 to a prompt of 1,024", lambda n: group(1024 // n, 256 // n)),
    "1:1": Case("8 answers of about 512 to a prompt of 512", lambda n: group(512 // n, 512 // n)),
    "1:4": Case("8 answers of about 1,024 to a prompt of 256", lambda n: group(256 // n, 1024 // n)),
    "equal": Case("16 rows of 512, nothing in common; all ways 8 at a time", equal, budget=4200),
    "equal-16": Case("the same, 16 at a time where rows are planned", equal),
}


def scorer_of(case: Case) -> CompletionScorer:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if case.model is not None:
        return CompletionScorer(AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32), 1.0)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=case.hidden, intermediate_size=3 * case.hidden, num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 64, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    return CompletionScorer(Qwen3ForCausalLM(config), 1.0)


def pieces(way: str, rows: Sequence[Row], budget: int) -> list[list[Row]]:
    lengths = [len(r.token_ids) for r in rows]
    if way == "row by row":
        return [[r] for r in rows]
    if way == "padded":
        return [list(rows[n : n + 8]) for n in range(0, len(rows), 8)]
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
    model: Any = scorer.language_model
    if way in ("tree", "row by row"):
        batch = build(rows)
        inputs, at = (
            {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "layout": batch.layout},
            batch.predictors,
        )
    elif way == "packed":
        ids, positions, layout, at = unshared(rows)
        inputs = {"input_ids": ids, "position_ids": positions, "layout": layout}
    else:
        lengths = torch.tensor([len(r.token_ids) - 1 for r in rows])  # the last token predicts nothing
        longest = int(lengths.max())
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        for number, r in enumerate(rows):
            ids[number, : len(r.token_ids) - 1] = torch.from_numpy(r.token_ids[:-1])
        inputs = {"input_ids": ids, "attention_mask": (torch.arange(longest)[None] < lengths[:, None]).long()}
        predicting = [number * longest + np.flatnonzero(r.loss_mask) - 1 for number, r in enumerate(rows)]
        at = torch.from_numpy(np.concatenate(predicting))
    out = model.base_model(use_cache=False, **inputs).last_hidden_state
    return out.flatten(0, 1).index_select(0, at), inputs["input_ids"].numel()


def run(scorer: CompletionScorer, way: str, rows: Sequence[Row], budget: int) -> tuple[float, int]:
    model: Any = scorer.language_model
    model.set_attn_implementation("sdpa" if way == "padded" else "penstock_packed")
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


def measure(case: Case, rounds: int) -> dict[str, tuple[list[float], int]]:
    scorer, rows = scorer_of(case), case.made()
    for way in WAYS:
        run(scorer, way, rows[:2], case.budget)
    timings: dict[str, tuple[list[float], int]] = {way: ([], 0) for way in WAYS}
    for number in range(rounds):
        for way in WAYS[:: -1 if number % 2 else 1]:
            seconds, computed = run(scorer, way, rows, case.budget)
            timings[way] = ([*timings[way][0], seconds], computed)
    return timings


def report(cases: dict[str, Case], rounds: int) -> Iterator[str]:
    heads = [f"{way}, tok/cpu-s (computed)" for way in WAYS]
    yield f"| case | {' | '.join(heads)} | tree / padded | / packed |"
    yield "|---" * (len(WAYS) + 3) + "|"
    for name, case in cases.items():
        timings = measure(case, rounds)
        real = sum(len(r.token_ids) for r in case.made())
        rates = [f"{real / statistics.median(cpu):,.0f} ({computed:,})" for cpu, computed in timings.values()]
        yield f"| {name}: {case.what} | {' | '.join([*rates, *(paired(timings, way) for way in WAYS[:2])])} |"


def paired(timings: dict[str, tuple[list[float], int]], way: str) -> str:
    return ratio(timings[way][0], timings["tree"][0])


def ratio(others: Sequence[float], tree_seconds: Sequence[float]) -> str:
    ratios = sorted(other / mine for other, mine in zip(others, tree_seconds, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def peak_memory_mb(case: Case, way: str) -> float:
    scorer, rows = scorer_of(case), case.made()
    run(scorer, way, rows[:1], case.budget)
    scorer.zero_grad(set_to_none=True)
    peak = Peak()
    with peak.watching():
        run(scorer, way, rows, case.budget)
    return peak.peaks[""] / 2**20


def memory(chosen: Sequence[str]) -> None:
    small = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "THP_MEM_ALLOC_ENABLE": "0"}
    environment = os.environ | small
    peaks = {}
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.trainer_packing", *chosen, "--memory-of", way]
        peaks[way] = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    print("| way | peak memory at 4:1, MB | of padded |\n|---|---|---|")
    for way, peak in peaks.items():
        print(f"| {way} | {peak:,.0f} | {peak / peaks['padded']:.2f} |")


def error(case: Case) -> None:
    scorer, rows = scorer_of(case), case.made()
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
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which each measures all ways")
    parser.add_argument("--model", type=Path, help="a model folder instead of small random models")
    parser.add_argument("--scale", type=int, default=1, help="divide the lengths of all rows by this")
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead")
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--error", action="store_true", help="measure the error of gradients instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {name: CASES[name].scaled(options.model, options.scale) for name in options.only or CASES}
    if options.memory_of:
        print(json.dumps(peak_memory_mb(CASES["4:1"].scaled(options.model, options.scale), options.memory_of)))
    elif options.memory:
        model = ["--model", str(options.model)] if options.model else []
        memory(["--scale", str(options.scale), *model])
    elif options.error:
        error(CASES["4:1"].scaled(options.model, options.scale))
    else:
        for line in report(cases, options.repeats):
            print(line, flush=True)


if __name__ == "__main__":
    main()
