"""Supervised fine-tuning: the cross-entropy of given answers.

The loss is divided by the number of trained tokens in the whole step, over all micro-batches and ranks, so that neither
changes it. The validation loss is that of all held-out rows, by the same rule.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import structlog

from penstock.fine_tuning.loop import Made, Training
from penstock.fine_tuning.session import load_trained, open_folder, plan_of
from penstock.fine_tuning.training_folder import Result
from penstock.trainer.algorithm.aggregation import Denominators, sequence_weight
from penstock.trainer.algorithm.batch import MicroBatch, Row, build, plan_micro_batches
from penstock.trainer.algorithm.objective import CrossEntropy
from penstock.trainer.data.row_checks import read_tokenizer
from penstock.trainer.data.turns import Turn, TurnSet
from penstock.trainer.learner.policy import Policy
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer.sft")

_VALIDATED_TOGETHER = 2048  # rows whose micro-batches are planned, and held, together


class SftTask:
    def __init__(
        self, policy: Policy, turns: TurnSet, held_out: TurnSet | None, settings: TrainerSettings, dims: ParallelDims
    ) -> None:
        self.policy = policy
        self.num_rows = len(turns)
        self.has_validation = held_out is not None
        self._turns, self._held_out = turns, held_out
        self._objective = CrossEntropy(settings.sft.loss)
        self._budget = settings.trainer.micro_batch_tokens
        self._dims = dims

    def step(self, rows: Sequence[int]) -> Made:
        turns = [self._turns[row] for row in rows]
        figures = self.policy.train_step(self._micro_batches(turns), self._objective)
        return Made(figures, int(figures.sums["tokens"]), {})

    def validate(self) -> Mapping[str, float]:
        """Return loss and perplexity of the held-out turns; the loss is cross-entropy whatever is trained."""
        assert self._held_out is not None
        total, tokens = 0.0, 0
        with self.policy.without_dropout():
            for first in range(0, len(self._held_out), _VALIDATED_TOGETHER):
                rows = range(first, min(first + _VALIDATED_TOGETHER, len(self._held_out)))
                turns = [self._held_out[row] for row in rows]
                tokens += sum(int(turn.loss_mask.sum()) for turn in turns)
                for batch in self._micro_batches(turns):
                    total -= float(self.policy.logprobs(batch).double().sum())
        [total] = self._dims.sum([total])
        loss = total / tokens
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": float(tokens)}

    def _micro_batches(self, turns: Sequence[Turn]) -> list[MicroBatch]:
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
        shares = plan_micro_batches(
            [len(row.token_ids) for row in rows],
            budget_tokens=self._budget,
            num_ranks=self._dims.rows.count,
            pair_cost=self.policy.pair_cost,
            padded=self.policy.pads_rows,
        )
        return [build([rows[number] for number in part]) for part in shares[self._dims.rows.index]]


def run(settings: TrainerSettings, ranks: Ranks, stop: threading.Event) -> Result | None:
    """Fine-tune ``model.path`` on the rows of ``sft.data`` on every rank; None if ``stop`` was set first."""
    dims = ParallelDims(ranks, settings.trainer.layout)
    with open_folder(settings, "sft", dims) as folder:
        turns = open_turns(settings, settings.sft.files or settings.data.train_files, dims)
        held_out = open_turns(settings, settings.sft.eval_files, dims) if settings.sft.eval_files else None
        data = {"sft.data": turns.fingerprint} | ({"sft.eval_data": held_out.fingerprint} if held_out else {})
        plan = plan_of(settings, "sft", dims, num_rows=len(turns), data=data)
        policy = load_trained(settings, settings.sft, plan.length, dims)
        return Training(plan, SftTask(policy, turns, held_out, settings, dims), folder, stop).run()


def open_turns(settings: TrainerSettings, files: Sequence[Path], dims: ParallelDims) -> TurnSet:
    data = settings.data
    turns = TurnSet.open(
        files,
        data=data,
        tokenizer=read_tokenizer(settings),
        max_tokens=settings.trainer.micro_batch_tokens,
        mask=settings.sft.mask,
    )
    if dims.writes_files:
        for notes in turns.notes:
            log.info("data read", file=str(notes.path), rows=notes.num_rows, notes=notes.describe())
        log.info("examples", kept=len(turns), dropped=dict(turns.dropped))
        if turns.num_endless:
            log.warning(
                "the chat template's generation blocks leave out the end token: the model does not learn to end its answer",
                examples=turns.num_endless,
            )
    return turns
