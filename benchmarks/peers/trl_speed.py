"""Training speed of Hugging Face's Trainer, TRL's SFTTrainer and DPOTrainer, and of Penstock, on the same model and rows.

Needs an environment that has both:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0 accelerate datasets transformers==5.23.0 -e .
    trl/bin/python -m benchmarks.peers.trl_speed            # some minutes of CPU time; --only sft dpo, --steps N, --rows N

Everyone makes the same optimizer steps (AdamW, float32, one thread, no gradient checkpointing) on rows that do not change, after one
step that is not counted; each in a process of its own, and the fastest step counts. Printed: tokens of whole rows, and trained
ones, per process CPU second. The rows are those of `benchmarks/trainer_packing.py`: 64 of log-normal length in batches of 8 for
SFT; for DPO 8 pairs of answers of about 256 tokens to prompts of 512, in one batch, with a precomputed reference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
from benchmarks.trainer_packing import CASES, VOCABULARY, scorer_of
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from penstock.deploy.quickstart_task import write_model
from penstock.trainer.algorithm.aggregation import Denominators, sequence_weight
from penstock.trainer.algorithm.batch import Row, build, plan_micro_batches
from penstock.trainer.algorithm.objective import CrossEntropy
from penstock.trainer.data.pairs import Pair
from penstock.trainer.dpo_settings import DpoSettings
from penstock.trainer.learner.pairs.pair_batches import answer_sums, build_pairs, plan_pairs
from penstock.trainer.learner.pairs.preference_objective import Preference, PreferenceObjective
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.trainable import Optimisation, Trainable
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks

LR = 1e-4
_PAD = 0


def model() -> Any:
    """Return the model that everyone trains: Qwen3's shape, 2 layers, hidden 256."""
    return scorer_of(CASES["mixed"]).language_model


class Clock(TrainerCallback):
    """The CPU seconds of each optimizer step, with the loading of its rows."""

    def __init__(self) -> None:
        """Measure nothing yet."""
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._started = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop it; called after the optimizer's step."""
        self.seconds.append(time.process_time() - self._started)


def common(steps: int, batch: int, parts: int) -> dict[str, Any]:
    """Return the arguments of all of Hugging Face's trainers."""
    return {
        "output_dir": tempfile.mkdtemp(), "max_steps": steps + 1, "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": parts, "learning_rate": LR, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "train_sampling_strategy": "sequential", "logging_steps": 100,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip


def timed(trainer: Any) -> float:
    """Train, and return the fastest step but the first."""
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    return min(clock.seconds[1:])


def ours(steps: int, make: Callable[[Policy], None]) -> float:
    """Return the fastest of our steps but the first."""
    from penstock.trainer.learner.logprobs import CompletionScorer

    how = Optimisation(
        num_steps=steps + 1, lr=LR, betas=(0.9, 0.999), weight_decay=0.0, warmup_steps=0, schedule="constant",
        min_lr_ratio=1.0, max_grad_norm=1.0, zero_stage=1, dtype="float32",
    )  # fmt: skip
    dims = ParallelDims(Ranks())
    scorer = CompletionScorer(model(), 1.0)
    policy = Policy(Trainable(scorer, how, dims), scorer, dims)
    seconds = []
    for _ in range(steps + 1):
        started = time.process_time()
        make(policy)
        seconds.append(time.process_time() - started)
    return min(seconds[1:])


def sft(steps: int, num_rows: int, tokenizer: Any) -> tuple[dict[str, Callable[[], float]], int, int]:
    """Return what measures the CPU seconds of a step over the first rows by system, and tokens, whole and trained."""
    rows = CASES["mixed"].rows()[:num_rows]
    given = [
        {"input_ids": row.token_ids.tolist(), "completion_mask": row.loss_mask.astype(int).tolist()} for row in rows
    ]

    def collate(some: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(one["input_ids"]) for one in some)
        ids = [one["input_ids"] + [_PAD] * (width - len(one["input_ids"])) for one in some]
        labels = [
            [token if trained else -100 for token, trained in zip(one["input_ids"], one["mask"], strict=True)]
            + [-100] * (width - len(one["input_ids"]))
            for one in some
        ]
        mask = [[1] * len(one["input_ids"]) + [0] * (width - len(one["input_ids"])) for one in some]
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "attention_mask": torch.tensor(mask)}

    def hugging_face() -> float:
        held = [{"input_ids": one["input_ids"], "mask": one["completion_mask"]} for one in given]
        arguments = TrainingArguments(**common(steps, 8, num_rows // 8), remove_unused_columns=False)
        return timed(
            Trainer(model=model(), args=arguments, train_dataset=Dataset.from_list(held), data_collator=collate)
        )

    def trl() -> float:
        config = SFTConfig(**common(steps, 8, num_rows // 8), max_length=None, completion_only_loss=True)
        return timed(
            SFTTrainer(model=model(), args=config, train_dataset=Dataset.from_list(given), processing_class=tokenizer)
        )

    counts = [int(row.loss_mask.sum()) for row in rows]
    whole = Denominators(sum(counts), len(rows), max(counts))

    def penstock() -> float:
        def step(policy: Policy) -> None:
            weighed = [
                Row(
                    row.token_ids,
                    row.loss_mask,
                    row.behaviour_logprobs,
                    0.0,
                    sequence_weight("token-mean", count, whole),
                )
                for row, count in zip(rows, counts, strict=True)
            ]
            lengths = [len(row.token_ids) for row in rows]
            plan = plan_micro_batches(lengths, budget_tokens=CASES["mixed"].budget, pair_cost=policy.pair_cost)
            batches = [build([weighed[number] for number in part]) for part in plan[0]]
            policy.train_step(batches, CrossEntropy("nll"))

        return ours(steps, step)

    found = {"Hugging Face's Trainer": hugging_face, "TRL's SFTTrainer": trl, "Penstock": penstock}
    return found, sum(len(row.token_ids) for row in rows), sum(counts)


def dpo(steps: int, num_rows: int, tokenizer: Any) -> tuple[dict[str, Callable[[], float]], int, int]:
    """Return what measures the CPU seconds of a step over an eighth as many pairs by system, and tokens, whole and trained."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return rng.integers(1, VOCABULARY, length).astype(np.int32)

    pairs = [Pair(ids(512), ids(rng.integers(128, 385)), ids(rng.integers(128, 385))) for _ in range(num_rows // 8)]
    given = [
        {"prompt_ids": one.prompt.tolist(), "chosen_ids": one.chosen.tolist(), "rejected_ids": one.rejected.tolist()}
        for one in pairs
    ]

    class AsGiven(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    def trl() -> float:
        config = DPOConfig(**common(steps, num_rows // 8, 1), max_length=None, precompute_ref_log_probs=True)
        return timed(
            AsGiven(model=model(), args=config, train_dataset=Dataset.from_list(given), processing_class=tokenizer)
        )

    chosen = DpoSettings()
    preference = Preference(chosen.losses, chosen.divergence, chosen.alpha, None, chosen.reward_scale)
    mean_tokens = sum(len(one.chosen) for one in pairs) / len(pairs)

    def penstock() -> float:
        references: list[torch.Tensor] = []
        plan = plan_pairs(pairs, budget_tokens=8192, num_shares=1)[0]

        def step(policy: Policy) -> None:
            parts = [[pairs[number] for number in part] for part in plan]
            if not references:  # in the step that is not counted
                for some in parts:
                    batch = build_pairs(some)
                    references.append(answer_sums(policy.logprobs(batch), batch, None)[1])
            batches = [build_pairs(some, reference) for some, reference in zip(parts, references, strict=True)]
            policy.train_step(batches, PreferenceObjective(preference, len(pairs), mean_tokens))

        return ours(steps, step)

    found = {"TRL's DPOTrainer": trl, "Penstock": penstock}
    trained = sum(len(one.chosen) + len(one.rejected) for one in pairs)
    return found, trained + sum(2 * len(one.prompt) for one in pairs), trained


TRAININGS = {"sft": sft, "dpo": dpo}
SYSTEMS = {"sft": ("Hugging Face's Trainer", "TRL's SFTTrainer", "Penstock"), "dpo": ("TRL's DPOTrainer", "Penstock")}


def measure(training: str, system: str, steps: int, num_rows: int) -> None:
    """Print the figures of one system, in this process."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", seed=0)
        tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "model")
    ways, tokens, trained = TRAININGS[training](steps, num_rows, tokenizer)
    print(json.dumps([ways[system](), tokens, trained]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["sft", "dpo"], default=["sft", "dpo"])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64, help="rows of SFT, eight for each pair of DPO; a multiple of 8")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        measure(*options.one, options.steps, options.rows)
        return
    print(
        "| training | system | CPU s a step | tokens of whole rows a CPU s | trained tokens a CPU s | Penstock beside it |"
    )
    print("|---|---|---|---|---|---|")
    for training in options.only:
        found = {}
        for system in SYSTEMS[training]:
            size = ["--steps", str(options.steps), "--rows", str(options.rows)]
            command = [sys.executable, "-m", "benchmarks.peers.trl_speed", *size, "--one", training, system]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[system] = json.loads(out.splitlines()[-1])
        for system, (seconds, tokens, trained) in found.items():
            ratio = seconds / found["Penstock"][0]
            print(
                f"| {training} | {system} | {seconds:.2f} | {tokens / seconds:,.0f} | {trained / seconds:,.0f} | {ratio:.2f}x |"
            )


if __name__ == "__main__":
    main()
