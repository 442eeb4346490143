"""Training of a reward model on preferences: Bradley and Terry's model of the last token's score.

The result is a folder that `penstock reward serve-model` serves. A text ends where the chat template ends it, as the server
renders it, and not after the end token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from penstock.fine_tuning.loop import Made, Task
from penstock.fine_tuning.session import Plan, seed_random_numbers
from penstock.trainer.algorithm.batch import MicroBatch, Row, build
from penstock.trainer.algorithm.objective import Outcome, PlainObjective
from penstock.trainer.algorithm.packed_rows import Layout
from penstock.trainer.data.pairs import Ids, Pair, PairSet
from penstock.trainer.data.row_checks import read_tokenizer
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.attention.models import WHOLE, pair_cost, read_rows, use_packed_rows
from penstock.trainer.learner.flops import pass_cost
from penstock.trainer.learner.load_model import attach_adapters, check_attention, check_loaded, from_folder, prepare
from penstock.trainer.learner.parallel_shares import TokenShares
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.preference_objective import plan_pairs
from penstock.trainer.learner.step_metrics import layer_groups
from penstock.trainer.learner.trainable import Optimisation, Trainable
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer.rm")

_HEAD = "score"

_SCORED_TOGETHER = 2048  # pairs whose micro-batches are planned together
_ANY_TOKEN = 0  # after a text, so that its last token predicts something; it is never read


class RewardScorer(nn.Module):
    """A sequence classifier of one label that scores the last token of texts; `Policy` calls it like a language model."""

    language_model: Any  # the part of the parameter names that `Policy` removes

    def __init__(self, classifier: nn.Module, shares: TokenShares = WHOLE) -> None:
        super().__init__()
        self._shares = shares
        self.pair_cost, self.pass_cost = pair_cost(classifier), pass_cost(classifier)  # of the whole model
        self.language_model = classifier
        self.padding_reason = use_packed_rows(classifier)  # why rows are padded; None: they are one stream

    def forward(  # noqa: PLR0913  the arguments of `CompletionScorer`
        self,
        input_ids: Tensor,
        predictors: Tensor,
        targets: Tensor,
        *,
        position_ids: Tensor | None = None,
        layout: Layout | None = None,
        with_entropy: bool = False,
        kl_to: None = None,
        kl_from: None = None,
        images: None = None,
    ) -> Tensor:
        """Return the reward [N] float32 at each of ``predictors``; the other arguments are those of `CompletionScorer`."""
        del targets, with_entropy, kl_to, kl_from, images  # models that read images are refused
        packed = self.padding_reason is None
        hidden = read_rows(self.language_model.base_model, input_ids, position_ids, layout, packed, self._shares)
        positions, places = self._shares.own_predictors(predictors, input_ids.shape[1])
        rewards = self.language_model.score(hidden.index_select(0, positions)).squeeze(-1).float()
        return self._shares.whole(rewards, places, len(predictors))

    def around(self, classifier: nn.Module) -> RewardScorer:
        return RewardScorer(classifier)


def load_reward_model(folder: Path, how: Optimisation, dims: ParallelDims) -> tuple[Policy, dict[str, Any]]:
    """Load a language model, or a reward model, to train its score; returns it with what differs in its config.json.

    A score that the folder does not have is 0 at first, so that the first loss is that of equal rewards. With adapters it is
    trained whole, beside them.

    Raises:
        UnsupportedModel: The folder is no usable model, transformers has no classifier of its kind, or adapters match no layer.
        ConfigError: The model cannot be computed in the layout of the ranks.
    """
    model, report = from_folder(
        "AutoModelForSequenceClassification",
        "a usable sequence classifier",
        folder,
        how.dtype,
        dims,
        zero=how,
        num_labels=1,
    )
    missing, weight = set(report["missing_keys"]), getattr(getattr(model, "score", None), "weight", None)
    width = model.config.get_text_config().hidden_size
    if weight is None or tuple(getattr(weight, "ds_shape", weight.shape)) != (1, width):
        raise UnsupportedModel(
            f"model.path = {folder}: {type(model).__name__} has no linear score; use a decoder model"
        )
    check_loaded(model, {**report, "missing_keys": missing - {f"{_HEAD}.weight"}}, folder)
    if f"{_HEAD}.weight" in missing:
        with torch.no_grad():
            model.score.weight.zero_()
    prepare(model, how)
    attach_adapters(model, how, head=_HEAD)
    scorer = RewardScorer(model, TokenShares(dims.token_group))
    changed = {
        "architectures": [type(model).__name__],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    layers = layer_groups(name for name, parameter in scorer.named_parameters() if parameter.requires_grad)
    trainable = Trainable(scorer, how, dims, layers, model=model)
    attention = check_attention(model, scorer.padding_reason, trainable.device, dims)
    policy = Policy(trainable, cast(Any, scorer), dims, attention=attention)
    policy.weights.check_adapters(how.lora.targets if how.lora is not None else ())
    return policy, changed


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBatch(MicroBatch):
    margins: Tensor | None = None  # [P] float32


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor | float = 0.0, *, center: float = 0.0) -> Tensor:
    """Return the loss of each pair from its rewards, [P]: ``-log sigmoid(c - r - margin) + center (c + r)²``.

    Bradley and Terry 1952; margins: arXiv 2307.09288; center: arXiv 2312.09244. TRL's RewardTrainer.
    """
    return -torch.nn.functional.logsigmoid(chosen - rejected - margins) + center * (chosen + rejected).square()


@dataclass(frozen=True, slots=True)
class RewardObjective(PlainObjective):
    num_pairs: int
    center: float

    def __call__(self, logprobs: Tensor, batch: MicroBatch, **scores: Tensor) -> Outcome:
        assert isinstance(batch, ScoredBatch)
        assert batch.margins is not None
        chosen, rejected = logprobs[0::2], logprobs[1::2]
        losses = bradley_terry(chosen, rejected, batch.margins, center=self.center)
        held = logprobs.detach()
        sums: dict[str, Tensor | float] = {
            "accuracy": (held[0::2] > held[1::2]).float().sum(),
            "margin": (held[0::2] - held[1::2]).sum(),
            "reward_mean": held.sum() / 2.0,
        }
        maxima = {"reward_max": held.max(), "reward_min": (-held).max()} if len(held) else {}
        empty = float("-inf")
        return Outcome(losses.sum() / self.num_pairs, sums, maxima or {"reward_max": empty, "reward_min": empty})


class RewardTask(Task[PairSet]):
    def step(self, rows: Sequence[int]) -> Made:
        pairs = [self.rows[row] for row in rows]
        objective = RewardObjective(len(pairs), self.settings.rm.center)
        figures = self.policy.train_step(list(self._micro_batches(pairs)), objective)
        means = {name: value / len(pairs) for name, value in figures.sums.items()}
        extremes = {"reward_max": figures.maxima["reward_max"], "reward_min": -figures.maxima["reward_min"]}
        tokens = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
        return Made(figures, tokens, {**means, **extremes})

    def validate(self) -> Mapping[str, float]:
        assert self.held_out is not None
        pairs = [self.held_out[row] for row in range(len(self.held_out))]
        objective = RewardObjective(len(pairs), self.settings.rm.center)
        names = ("loss", "accuracy", "margin")
        totals = dict.fromkeys(names, 0.0)
        with self.policy.without_dropout():
            for batch in self._micro_batches(pairs):
                outcome = objective(self.policy.logprobs(batch).cpu(), batch)
                totals["loss"] += float(outcome.loss)
                for name in names[1:]:
                    totals[name] += float(outcome.sums[name]) / len(pairs)
        return dict(zip(names, self.dims.sum([totals[name] for name in names]), strict=True))

    def _micro_batches(self, pairs: Sequence[Pair]) -> Iterator[ScoredBatch]:
        for first in range(0, len(pairs), _SCORED_TOGETHER):
            some = [_longer(pair) for pair in pairs[first : first + _SCORED_TOGETHER]]
            plan = plan_pairs(some, budget_tokens=self.budget_tokens, num_shares=self.dims.rows.count)
            for part in plan[self.dims.rows.index]:
                yield self._batch([some[number] for number in part])

    def _batch(self, pairs: Sequence[Pair]) -> ScoredBatch:
        rows = [_row(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
        plain = build(rows, prompts=[len(pair.prompt) for pair in pairs for _ in range(2)])
        margins = torch.tensor([pair.margin if self.settings.rm.use_margin else 0.0 for pair in pairs])
        return ScoredBatch(**{field.name: getattr(plain, field.name) for field in fields(MicroBatch)}, margins=margins)


def open_task(plan: Plan, rows: PairSet, held_out: PairSet | None) -> RewardTask:
    seed_random_numbers(plan)
    policy, changed = load_reward_model(plan.settings.model.path, plan.optimisation, plan.dims)
    task = RewardTask(policy, rows, held_out, plan.settings, plan.dims)
    task.changed_config = changed
    return task


def open_rows(settings: TrainerSettings, files: Sequence[Path], dims: ParallelDims) -> PairSet:
    data = settings.data_of("rm")
    longest = settings.trainer.micro_batch_tokens // 2 - 1  # both texts of a pair are in one micro-batch
    pairs = PairSet(files, data=data, tokenizer=read_tokenizer(settings), max_tokens=longest, ends="chat")
    if dims.writes_files:
        log.info("pairs", kept=len(pairs), dropped=dict(pairs.dropped), not_used=sorted(pairs.unread - {"margin"}))
    return pairs


def _longer(pair: Pair) -> Pair:
    """Return a pair whose answers are followed by a token that is never read."""
    after = np.array([_ANY_TOKEN], dtype=np.int32)
    chosen, rejected = (np.concatenate([answer, after]) for answer in (pair.chosen, pair.rejected))
    return replace(pair, chosen=chosen, rejected=rejected)


def _row(prompt: Ids, answer: Ids) -> Row:
    length = len(prompt) + len(answer)
    return Row(
        token_ids=np.concatenate([prompt, answer]),
        loss_mask=np.arange(length) == length - 1,
        behaviour_logprobs=np.zeros(length, dtype=np.float32),
        advantage=0.0,
        weight=0.0,
    )
