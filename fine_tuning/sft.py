"""Supervised fine-tuning: the cross-entropy of given answers.

The loss is divided by the number of trained tokens in the whole step, over all micro-batches and ranks, so that neither
changes it. The validation loss is that of all held-out rows, by the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import structlog

from penstock.fine_tuning.loop import Made, Task
from penstock.fine_tuning.session import Plan, load_trained
from penstock.trainer.algorithm.aggregation import Denominators, sequence_weight
from penstock.trainer.algorithm.batch import MicroBatch, Row, build, plan_micro_batches
from penstock.trainer.algorithm.objective import CrossEntropy
from penstock.trainer.data.file_notes import end_of_turn_note
from penstock.trainer.data.row_checks import read_tokenizer
from penstock.trainer.data.turns import Turn, TurnSet
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer.sft")

_VALIDATED_TOGETHER = 2048  # rows whose micro-batches are planned, and held, together


class SftTask(Task[TurnSet]):
    def step(self, rows: Sequence[int]) -> Made:
        turns = [self.rows[row] for row in rows]
        figures = self.policy.train_step(self._micro_batches(turns), CrossEntropy(self.settings.sft.loss))
        return Made(figures, int(figures.sums["tokens"]), {})

    def validate(self) -> Mapping[str, float]:
        """Return loss and perplexity of the held-out turns; the loss is cross-entropy whatever is trained."""
        assert self.held_out is not None
        total, tokens = 0.0, 0
        with self.policy.without_dropout():
            for first in range(0, len(self.held_out), _VALIDATED_TOGETHER):
                rows = range(first, min(first + _VALIDATED_TOGETHER, len(self.held_out)))
                turns = [self.held_out[row] for row in rows]
                tokens += sum(int(turn.loss_mask.sum()) for turn in turns)
                for batch in self._micro_batches(turns):
                    total -= float(self.policy.logprobs(batch).double().sum())
        [total] = self.dims.sum([total])
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
            budget_tokens=self.budget_tokens,
            num_ranks=self.dims.rows.count,
            pair_cost=self.policy.pair_cost,
            padded=self.policy.pads_rows,
        )
        return [build([rows[number] for number in part]) for part in shares[self.dims.rows.index]]


def open_task(plan: Plan, rows: TurnSet, held_out: TurnSet | None) -> SftTask:
    return SftTask(load_trained(plan), rows, held_out, plan.settings, plan.dims)


def open_rows(settings: TrainerSettings, files: Sequence[Path], dims: ParallelDims) -> TurnSet:
    data, tokenizer = settings.data_of("sft"), read_tokenizer(settings)
    turns = TurnSet(
        files, data=data, tokenizer=tokenizer, max_tokens=settings.trainer.micro_batch_tokens, mask=settings.sft.mask
    )
    if dims.writes_files:
        if note := end_of_turn_note(tokenizer):
            log.warning(note)
        for notes in turns.notes:
            log.info("data read", file=str(notes.path), rows=notes.num_rows, notes=notes.describe())
        log.info("examples", kept=len(turns), dropped=dict(turns.dropped))
        if turns.num_endless:
            log.warning(
                "the chat template's generation blocks leave out the end token: the model does not learn to end its answer",
                examples=turns.num_endless,
            )
    return turns
