"""Pairs of answers that are trained on beside the groups of a step: which ones, and the objective of both together.

The loss of a step is that of reinforcement learning plus ``algorithm.dpo_coefficient`` times the preference loss of [dpo], each
with denominators of its own: the groups' tokens or trajectories, and the pairs. Which pairs a step has follows from ``run.seed``
and its number alone, so every rank reads them itself, and a resumed run, or a replay, trains on the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.errors import ConfigError
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.objective import Outcome, PolicyGradient
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.pairs import Pair, PairSet
from penstock.trainer.learner.pairs.pair_batches import PairBatch
from penstock.trainer.learner.pairs.pair_planner import PairPlanner
from penstock.trainer.learner.pairs.preference_objective import PreferenceObjective, mean_figures
from penstock.trainer.settings import TrainerSettings

_PREFIX = "pairs/"  # of the sums of pairs, which are beside those of the groups


@dataclass(frozen=True, slots=True)
class MixedObjective:
    """Minimises one objective on micro-batches of groups, and another one on those of pairs."""

    groups: PolicyGradient
    pairs: PreferenceObjective
    coefficient: float  # of the pairs' loss

    @property
    def needs_entropy(self) -> bool:
        """Whether entropies come with the log-probabilities; those of pairs are not read."""
        return self.groups.needs_entropy

    @property
    def needs_full_kl(self) -> bool:
        """Whether the KL over the whole vocabulary comes with them; that of pairs is not read."""
        return self.groups.needs_full_kl

    @property
    def needs_teacher_kl(self) -> bool:
        """Return False: settings refuse a teacher's likeliest tokens, which pairs have not."""
        return False

    def __call__(
        self,
        logprobs: Tensor,
        batch: MicroBatch,
        entropies: Tensor | None = None,
        full_kl: Tensor | None = None,
        teacher_kl: Tensor | None = None,
    ) -> Outcome:
        """Return the loss of a micro-batch of either kind."""
        if not isinstance(batch, PairBatch):
            return self.groups(logprobs, batch, entropies, full_kl, teacher_kl)
        found = self.pairs(logprobs, batch)
        sums = {"loss": found.loss.detach(), **found.sums}
        return Outcome(
            loss=self.coefficient * found.loss,
            sums={f"{_PREFIX}{name}": value for name, value in sums.items()},
            maxima={},
        )

    def lr_factor(self, sums: Mapping[str, float]) -> float:
        """Return the factor on the learning rate that the groups' objective asks for."""
        return self.groups.lr_factor(sums)


class MixedPairs:
    """The pairs of a run, a part of which every step trains on."""

    def __init__(
        self, pairs: PairSet, planner: PairPlanner, order: DataOrder, *, batch_size: int, coefficient: float
    ) -> None:
        """Train on ``batch_size`` pairs in each step, in an order."""
        self._pairs = pairs
        self._planner = planner
        self._order = order
        self._batch_size = batch_size
        self._coefficient = coefficient
        self.fingerprint = pairs.fingerprint

    def at(self, step: int) -> list[Pair]:
        """Return the pairs of a step; ``step`` counts the steps of the run before it."""
        first = step * self._batch_size
        return [self._pairs[self._order.at(place).prompt] for place in range(first, first + self._batch_size)]

    def prepare(self, step: int, groups: PolicyGradient) -> tuple[list[PairBatch], MixedObjective]:
        """Return this rank's micro-batches of a step's pairs, and the objective of both kinds; collective."""
        batches, objective = self._planner.prepare(self.at(step))
        return batches, MixedObjective(groups, objective, self._coefficient)


def open_mixed_pairs(settings: TrainerSettings) -> PairSet | None:
    """Read the pairs among the rows of ``data.train``; None if the run trains on none.

    Raises MalformedData for rows that are none and no prompts either, ConfigError for fewer than a step has.
    """
    if not settings.algorithm.dpo_coefficient:
        return None
    data, num_wanted = settings.data, settings.dpo.batch_size
    tokenizer = ChatTokenizer.read(
        settings.model.path, arguments=data.template_arguments, needs_template=data.text_prompts == "chat"
    )
    pairs = PairSet.open(
        data.train_files,
        data=data,
        tokenizer=tokenizer,
        max_tokens=settings.trainer.micro_batch_tokens // 2,  # both answers of a pair are in one micro-batch
        skips_prompts=True,
    )
    if len(pairs) < num_wanted:
        raise ConfigError(
            f"data.train has {len(pairs)} pairs that can be trained on (left out: {dict(pairs.dropped)}), and a step has "
            f"dpo.batch_size = {num_wanted}; lower it, or set algorithm.dpo_coefficient = 0"
        )
    return pairs


def pair_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Return what a step reports about its pairs, by the names of `telemetry/metrics.py`; empty for a step without pairs."""
    own = {name.removeprefix(_PREFIX): value for name, value in sums.items() if name.startswith(_PREFIX)}
    if not own:
        return {}
    means = mean_figures(own, int(own["num_chosen"]))
    return {
        "pair_loss": own["loss"],
        "pair_accuracy": means["rewards/accuracies"],
        "pair_margin": means["rewards/margins"],
        "pair_reward_chosen": means["rewards/chosen"],
        "pair_reward_rejected": means["rewards/rejected"],
        "pairs_trained": int(own["num_chosen"]),
    }
