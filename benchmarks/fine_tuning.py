"""Training speed of Hugging Face's Trainer, TRL's trainers, and of Penstock, on the same model and rows, in turn.

Needs an environment that has both:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0 accelerate datasets transformers==5.23.0 -e .
    trl/bin/python -m benchmarks.fine_tuning                  # some minutes of CPU time
    trl/bin/python -m benchmarks.fine_tuning --only dpo --lengths mixed --rounds 5 --model FOLDER

Everyone makes the same optimizer steps (AdamW, clipping to 1, float32, one thread, no gradient checkpointing) on rows that do not
change. A measurement is a process of its own, forked from one that has imported the libraries: one step that is not counted, then some,
of which the fastest counts, from the end of one step to the end of the next. In each round every system is measured once, in the other
order than in the round before; ratios are taken round by round, and their median is printed with the smallest and the largest. All
processes ask for huge pages, as `penstock` does by itself and the peers do not.

Rows: *mixed* lengths are log-normal; *equal* ones leave nothing to pad. SFT has rows of 8 (mixed) or 64 (equal) given tokens, for the peers in
batches of 8; preferences have pairs of a prompt and two answers, a quarter as many, for the peers in batches of 4. DPO has a precomputed
reference.
"""

# pyright: reportMissingImports=false
# trl and datasets are in an environment of their own.

from __future__ import annotations

import argparse
import faulthandler
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import numpy as np
import torch
from benchmarks.trainer_packing import CASES, log_normal, ratio, scorer_of
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from penstock.deploy.quickstart_task import write_model
from penstock.fine_tuning.dpo import PreferenceTask
from penstock.fine_tuning.loop import Task
from penstock.fine_tuning.rm import RewardTask, load_reward_model
from penstock.fine_tuning.sft import SftTask
from penstock.trainer.data.pairs import Pair
from penstock.trainer.data.turns import Turn
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.trainable import import_deepspeed, optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings

LR = 1e-4
PENSTOCK, TRL, HUGGING_FACE = "Penstock", "TRL", "Hugging Face"
SYSTEMS = {"sft": (HUGGING_FACE, TRL, PENSTOCK), "dpo": (TRL, PENSTOCK), "rm": (TRL, PENSTOCK)}
_ROWS_TOGETHER, _PAIRS_TOGETHER = 8, 4  # in the peers' micro-batches
_MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Work:
    """What is trained: the model's folder and the rows; ``scratch`` is a folder that the trainers may write into."""

    model: Path
    scratch: Path
    tokenizer: Any
    turns: list[Turn]
    pairs: list[Pair]
    steps: int

    def num_tokens(self, training: str) -> int:
        """Tokens of whole rows in one optimizer step; a prompt counts with both of its answers."""
        if training == "sft":
            return sum(len(turn.token_ids) for turn in self.turns)
        return sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in self.pairs)


def rows_of(lengths: str, num_rows: int, scale: int, vocabulary: int) -> tuple[list[Turn], list[Pair]]:
    """Return rows of SFT, and a quarter as many pairs; their lengths divided by ``scale``."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return rng.integers(1, vocabulary, max(2, int(length) // scale)).astype(np.int32)

    def sizes(median: int, most: int, num: int) -> np.ndarray:
        return log_normal(rng, median, most, num) if lengths == "mixed" else np.full(num, median)

    given = max(1, (8 if lengths == "mixed" else 64) // scale)
    turns = []
    for size in sizes(245, 2048, num_rows):
        tokens = ids(size)
        turns.append(Turn(tokens, np.arange(len(tokens)) >= given))
    num_pairs = num_rows // 4
    three = zip(sizes(128, 512, num_pairs), sizes(128, 512, num_pairs), sizes(128, 512, num_pairs), strict=True)
    return turns, [Pair(ids(prompt), ids(chosen), ids(rejected)) for prompt, chosen, rejected in three]


class Clock(TrainerCallback):
    """The CPU seconds when each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.process_time())


def fastest(ends: Sequence[float]) -> float:
    """Return the CPU seconds of the fastest step after the first."""
    return min(end - start for start, end in itertools.pairwise(ends))


def timed(trainer: Any) -> float:
    """Train, and return the fastest step but the first."""
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    return fastest(clock.ends)


def common(work: Work, batch: int, num_rows: int) -> dict[str, Any]:
    """Return the arguments of all of Hugging Face's trainers."""
    return {
        "output_dir": tempfile.mkdtemp(dir=work.scratch), "max_steps": work.steps + 1, "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": num_rows // batch, "learning_rate": LR, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "train_sampling_strategy": "sequential", "logging_steps": 100,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip


def language_model(work: Work) -> Any:
    return AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)


def hugging_face_sft(work: Work) -> float:
    pad = work.tokenizer.pad_token_id or 0

    def collate(some: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(one["input_ids"]) for one in some)
        ids = [one["input_ids"] + [pad] * (width - len(one["input_ids"])) for one in some]
        labels = [one["labels"] + [-100] * (width - len(one["labels"])) for one in some]
        mask = [[1] * len(one["input_ids"]) + [0] * (width - len(one["input_ids"])) for one in some]
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "attention_mask": torch.tensor(mask)}

    rows = [
        {"input_ids": turn.token_ids.tolist(), "labels": np.where(turn.loss_mask, turn.token_ids, -100).tolist()}
        for turn in work.turns
    ]
    arguments = TrainingArguments(**common(work, _ROWS_TOGETHER, len(rows)))
    return timed(
        Trainer(
            model=language_model(work), args=arguments, train_dataset=Dataset.from_list(rows), data_collator=collate
        )
    )


def trl_sft(work: Work) -> float:
    rows = [
        {"input_ids": turn.token_ids.tolist(), "completion_mask": turn.loss_mask.astype(int).tolist()}
        for turn in work.turns
    ]
    config = SFTConfig(**common(work, _ROWS_TOGETHER, len(rows)), max_length=None, completion_only_loss=True)
    return timed(
        SFTTrainer(
            model=language_model(work),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=work.tokenizer,
        )
    )


class DpoAsGiven(DPOTrainer):
    """Takes rows of token ids as they are."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset


def trl_dpo(work: Work) -> float:
    rows = [
        {"prompt_ids": pair.prompt.tolist(), "chosen_ids": pair.chosen.tolist(), "rejected_ids": pair.rejected.tolist()}
        for pair in work.pairs
    ]
    config = DPOConfig(**common(work, _PAIRS_TOGETHER, len(rows)), max_length=None, precompute_ref_log_probs=True)
    return timed(
        DpoAsGiven(
            model=language_model(work),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=work.tokenizer,
        )
    )


def trl_rm(work: Work) -> float:
    rows = [
        {"chosen_ids": [*pair.prompt.tolist(), *pair.chosen.tolist()], "rejected_ids": [*pair.prompt.tolist(), *pair.rejected.tolist()]}
        for pair in work.pairs
    ]  # fmt: skip
    config = RewardConfig(**common(work, _PAIRS_TOGETHER, len(rows)), max_length=None)
    classifier = AutoModelForSequenceClassification.from_pretrained(work.model, num_labels=1, dtype=torch.float32)
    classifier.config.pad_token_id = work.tokenizer.pad_token_id or 0
    return timed(
        RewardTrainer(
            model=classifier, args=config, train_dataset=Dataset.from_list(rows), processing_class=work.tokenizer
        )
    )


def penstock(training: str) -> Callable[[Work], float]:
    """Return what makes the steps of `penstock sft`, `dpo` or `rm`: its task, without the loop's files."""

    def measured(work: Work) -> float:
        own = {"steps": work.steps + 1, "lr": LR, "betas": [0.9, 0.999], "schedule": "linear"}
        settings = TrainerSettings.model_validate(
            {
                "run": {"id": "speed", "dir": work.scratch},
                "model": {"path": work.model},
                "trainer": {"micro_batch_tokens": _MICRO_BATCH_TOKENS},
                training: {"batch_size": len(work.turns if training == "sft" else work.pairs), **own},
            }
        )
        dims = ParallelDims(Ranks())
        task = task_of(training, work, settings, dims)
        ends = []
        for _ in range(work.steps + 1):
            task.step(range(task.num_rows))
            ends.append(time.process_time())
        return fastest(ends)

    return measured


def task_of(training: str, work: Work, settings: TrainerSettings, dims: ParallelDims) -> Task:
    length: Any = argparse.Namespace(num_steps=work.steps + 1)
    how = optimisation(settings, getattr(settings, training), length.num_steps)
    turns: Any = work.turns
    pairs: Any = work.pairs
    if training == "rm":
        return RewardTask(load_reward_model(work.model, how, dims)[0], pairs, None, settings, dims)
    policy = load_policy(work.model, how, dims, temperature=1.0)
    if training == "sft":
        return SftTask(policy, turns, None, settings, dims)
    task = PreferenceTask(policy, pairs, None, settings, dims)
    task.precompute(policy, range(len(work.pairs)))
    return task


WAYS: dict[tuple[str, str], Callable[[Work], float]] = {
    ("sft", HUGGING_FACE): hugging_face_sft, ("sft", TRL): trl_sft, ("dpo", TRL): trl_dpo, ("rm", TRL): trl_rm,
    **{(training, PENSTOCK): penstock(training) for training in SYSTEMS},
}  # fmt: skip


def _child(way: Callable[[Work], float], work: Work, deadline_s: float, result: Connection) -> None:
    faulthandler.dump_traceback_later(deadline_s, exit=True)  # says where it hung
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  the trainers print their figures
    result.send(way(work))
    os._exit(0)


def measure(training: str, system: str, work: Work, deadline_s: float) -> float:
    """Return the CPU seconds of a step, measured in a process of its own; raises SystemExit if it gives no answer."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(WAYS[training, system], work, deadline_s, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit(
            f"{system} gave no figure of {training} within {deadline_s:.0f} s, or failed; see above"
        ) from None
    finally:
        child.join()


def compare(training: str, lengths: str, work: Work, rounds: int, deadline_s: float) -> None:
    found: dict[str, list[float]] = {system: [] for system in SYSTEMS[training]}
    for number in range(rounds):
        for system in SYSTEMS[training][:: -1 if number % 2 else 1]:
            found[system].append(measure(training, system, work, deadline_s))
    tokens = work.num_tokens(training)
    for system, seconds in found.items():
        beside = ratio(seconds, found[PENSTOCK]) if system != PENSTOCK else ""
        middle = statistics.median(seconds)
        print(
            f"| {training}, {lengths} | {tokens:,} | {system} | {middle:.2f} | {tokens / middle:,.0f} | {beside} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--lengths", nargs="+", choices=["mixed", "equal"], default=["mixed", "equal"])
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a measurement")
    parser.add_argument("--rows", type=int, default=32, help="rows of SFT, four for each pair; a multiple of 16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--model", type=Path, help="a model folder; default: Qwen3's shape, 2 layers, hidden 256, random"
    )
    parser.add_argument("--scale", type=int, default=1, help="divide the lengths of all rows by this")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="of one measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    import_deepspeed()
    with tempfile.TemporaryDirectory(prefix="penstock-speed-") as scratch:
        write_model(Path(scratch) / "tokenizer", seed=0)
        model = options.model
        if model is None:
            model = Path(scratch) / "model"
            scorer_of(CASES["mixed"]).language_model.save_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(options.model or Path(scratch) / "tokenizer")
        vocabulary = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
        print("| training | tokens a step | system | CPU s a step | tokens a CPU s | CPU s beside Penstock's |")
        print("|---|---|---|---|---|---|")
        for training in options.only:
            for lengths in options.lengths:
                turns, pairs = rows_of(lengths, options.rows, options.scale, vocabulary)
                work = Work(model, Path(scratch), tokenizer, turns, pairs, options.steps)
                compare(training, lengths, work, options.rounds, options.deadline_s)


if __name__ == "__main__":
    main()
