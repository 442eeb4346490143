"""Supervised fine-tuning with the same data and policy code, but without services; writes a model folder.

The loss is the cross-entropy of the completions' tokens, divided by their number in the whole step, over all
micro-batches and ranks. Every rank reads the same data and computes the same plan.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.trainer.algorithm.aggregation import Denominators, sequence_weight
from penstock.trainer.algorithm.batch import Row, build, plan_micro_batches
from penstock.trainer.algorithm.objective import CrossEntropy
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import Turn, TurnSet
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.policy import Policy, StepFigures
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.progress import ProgressLine
from penstock.trainer.publishing.model_folder import write_model_folder
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer.sft")


@dataclass(frozen=True, slots=True)
class SftResult:
    """The result of the fine-tuning."""

    folder: Path
    num_steps: int
    num_tokens: int  # completion tokens trained on
    first_loss: float
    last_loss: float


def output_folder(settings: TrainerSettings) -> Path:
    """Return the folder that the model is written to."""
    return settings.sft.output or settings.run.folder / "sft"


def run(settings: TrainerSettings, ranks: Ranks) -> SftResult:
    """Fine-tune ``model.path`` on the assistant turns of ``sft.data`` and write the result; on every rank."""
    turns = open_turns(settings)
    if ranks.is_leader:
        for notes in turns.notes:
            log.info("data read", file=str(notes.path), rows=notes.num_rows, notes=notes.describe())
    order = DataOrder(len(turns), settings.run.seed, settings.data.shuffle)
    dims = ParallelDims(ranks)
    policy = load_policy(settings.model.path, _optimisation(settings), dims, temperature=1.0)
    progress = ProgressLine("sft", settings.sft.steps)
    losses: list[float] = []
    num_tokens, started = 0, time.monotonic()
    for step in range(settings.sft.steps):
        first = step * settings.sft.batch_size
        batch = [turns[order.at(first + offset).prompt] for offset in range(settings.sft.batch_size)]
        figures = train_on(policy, batch, budget_tokens=settings.trainer.micro_batch_tokens, dims=dims)
        losses.append(figures.loss)
        num_tokens += int(figures.sums["tokens"])
        if dims.writes_files:
            seconds = time.monotonic() - started
            progress.show(step + 1, loss=figures.loss, lr=figures.lr, tokens_per_s=num_tokens / seconds)
    folder = output_folder(settings)
    tensors = policy.snapshot()
    if dims.writes_files:
        write_model_folder(folder, tensors, like=settings.model.path, dtype=policy.dtype)
        log.info("fine-tuned", folder=str(folder), num_turns=len(turns), dropped=dict(turns.dropped))
    return SftResult(folder, settings.sft.steps, num_tokens, losses[0], losses[-1])


def open_turns(settings: TrainerSettings) -> TurnSet:
    """Open the rows to imitate; raises MalformedData or ConfigError."""
    files = settings.sft.files or settings.data.train_files
    data = settings.data
    tokenizer = ChatTokenizer.read(
        settings.model.path, arguments=data.template_arguments, needs_template=data.text_prompts == "chat"
    )
    return TurnSet.open(files, data=settings.data, tokenizer=tokenizer, max_tokens=settings.trainer.micro_batch_tokens)


def train_on(policy: Policy, turns: list[Turn], *, budget_tokens: int, dims: ParallelDims) -> StepFigures:
    """Make one step on turns, of which this rank computes its share."""
    counts = [int(turn.loss_mask.sum()) for turn in turns]
    batch = Denominators(sum(counts), len(turns), max(counts))
    rows = [
        Row(
            token_ids=turn.token_ids,
            loss_mask=turn.loss_mask,
            behaviour_logprobs=np.zeros(len(turn.token_ids), dtype=np.float32),
            advantage=0.0,
            weight=sequence_weight("token-mean", count, batch),
        )
        for turn, count in zip(turns, counts, strict=True)
    ]
    plan = plan_micro_batches(
        [len(row.token_ids) for row in rows], budget_tokens=budget_tokens, num_ranks=dims.rows.count
    )
    micro_batches = [build([rows[number] for number in part]) for part in plan[dims.rows.index]]
    return policy.train_step(micro_batches, CrossEntropy())


def _optimisation(settings: TrainerSettings) -> Optimisation:
    return Optimisation(
        num_steps=settings.sft.steps,
        lr=settings.sft.lr,
        betas=settings.sft.betas,
        weight_decay=settings.trainer.weight_decay,
        warmup_steps=settings.sft.warmup_steps,
        schedule=settings.sft.schedule,
        min_lr_ratio=settings.trainer.min_lr_ratio,
        max_grad_norm=settings.trainer.max_grad_norm,
        zero_stage=settings.trainer.zero_stage,
        dtype=settings.model.dtype,
        gradient_checkpointing=settings.model.gradient_checkpointing,
    )
