"""The objective of a step: from log-probabilities of a micro-batch to a loss and the sums it reports; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings, Anchor
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.corrections.interface import CorrectionFunction, Drift
from penstock.trainer.algorithm.corrections.m2po import m2po, m2po_clip_widths
from penstock.trainer.algorithm.corrections.ratios import (
    Level,
    divergence,
    interpolated,
    learning_rate_factor,
    log_weights,
    weigh_negatives,
)
from penstock.trainer.algorithm.kl import AnyKlForm, DistillTerm, kl_estimate, of_teacher
from penstock.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, LossTerms, PolicyLoss, Sequences, Tokens
from penstock.trainer.algorithm.mismatch import mismatch_figures


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutcomes:
    logprobs: Tensor  # [N] of the policy before the optimizer step
    clipped: Tensor  # [N] bool, as in `LossTerms`
    dual_clipped: Tensor  # [N] bool
    kept: Tensor  # [N] bool, False where a correction rejects the token


@dataclass(frozen=True, slots=True)
class Outcome:
    loss: Tensor  # scalar with gradient
    sums: Mapping[str, Tensor | float]
    maxima: Mapping[str, Tensor | float]
    tokens: TokenOutcomes | None = None  # None: the objective compares no policies


class Objective(Protocol):
    """The function that a policy minimises, with what the policy must compute for it."""

    @property
    def needs_entropy(self) -> bool: ...

    @property
    def needs_full_kl(self) -> bool:
        """Whether ``full_kl`` comes with them: the KL to the reference over the whole vocabulary."""
        ...

    @property
    def needs_teacher_kl(self) -> bool:
        """Whether ``teacher_kl`` comes with them: the KL from the teacher over its likeliest tokens."""
        ...

    def __call__(self, logprobs: Tensor, batch: MicroBatch, **scores: Tensor) -> Outcome:
        """Return the loss of a micro-batch from log-probabilities and the ``scores`` it needs, [N] with gradient."""
        ...

    def lr_factor(self, sums: Mapping[str, float]) -> float: ...

    def trains(self, sums: Mapping[str, float]) -> bool:
        """Whether an optimizer step with these sums, over all ranks, is made: False where no token is kept."""
        ...


@dataclass(frozen=True, slots=True)
class KlTerm:
    form: AnyKlForm
    coefficient: float
    unbiased: bool = False  # weigh by the ratio: on stale samples ``ratio * k3`` is unbiased (arXiv 2512.02556, TRL)


@dataclass(frozen=True, slots=True)
class EssRule:
    level: Level = "root"
    power: float = 0.5
    floor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """The objective of reinforcement learning: a loss, and the corrections around it.

    In this order: negative advantages are weighed; a teacher's are added; the loss takes its ratio against the anchor;
    every token's loss is multiplied by importance weights and rejections; KL and entropy are added; the weights of the
    aggregation sum it up; cross-entropy on successes, which has separate weights, is added.

    Its sums: ``tokens``, ``clipped``, ``dual_clipped``, ``rejected`` and ``rejected_NAME`` by correction, ``ratio``,
    ``ratio_squared``, ``surprise`` (minus the behaviour log-probability: its mean estimates the entropy of the
    sampler), ``kept`` (tokens that no correction rejects, and those of successes) with ``skips_rejected``, ``entropy``
    and ``kl_reference`` where they are computed, ``ess_count``, ``ess_weight``, ``ess_weight_squared`` (effective
    sample size), ``kl_teacher`` (k1, from the policy to the teacher on sampled tokens) and ``kl_from_teacher`` with a
    teacher, ``kl_proximal`` (k3, from the proximal to the current policy) where the proximal policy is computed, and
    those of `trainer/algorithm/mismatch.py`.
    """

    loss: PolicyLoss
    options: Mapping[str, Any] = field(default_factory=dict)
    anchor: Anchor = "behaviour"
    many_updates: bool = False  # a batch may have several optimizer steps: the policy before the first one is kept
    negative_weight: float = 1.0
    stale_weight: float = 1.0  # a further factor on negative advantages of tokens that an older version sampled
    corrections: Mapping[str, CorrectionFunction] = field(default_factory=dict)  # by name, their options bound
    m2po_budget: float | None = None  # the micro-batch carries the limit that meets it
    m2po_form: Literal["mask", "clip"] = "mask"  # leave out tokens above the limit, or clip ratios at it
    kl: KlTerm | None = None
    distill: DistillTerm | None = None
    entropy_coefficient: float = 0.0
    ess: EssRule | None = None
    skips_rejected: bool = False  # an optimizer step whose tokens are all rejected is not made

    @property
    def needs_proximal(self) -> bool:
        return self.anchor == "proximal" or (self.many_updates and self.anchor == "behaviour")

    @property
    def needs_reference(self) -> bool:
        return self.kl is not None and self.kl.form != "full"

    @property
    def needs_full_kl(self) -> bool:
        return self.kl is not None and self.kl.form == "full"

    @property
    def needs_teacher(self) -> bool:
        return self.distill is not None

    @property
    def needs_teacher_kl(self) -> bool:
        return self.distill is not None and self.distill.form == "forward"

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coefficient != 0.0

    def with_kl(self, coefficient: float | None) -> PolicyGradient:
        if self.kl is None or coefficient is None:
            return self
        return replace(self, kl=replace(self.kl, coefficient=coefficient))

    def taught(self, advantages: Tensor, held: Tensor, batch: MicroBatch) -> Tensor:
        """Return advantages [N] with what the teacher adds, of tokens with the log-probabilities ``held`` [N]."""
        return advantages if self.distill is None else advantages + self.distill.advantages(held, batch)

    def __call__(self, logprobs: Tensor, batch: MicroBatch, **scores: Tensor) -> Outcome:
        sequences, held = batch.sequences, logprobs.detach()
        if self.anchor == "interpolated":
            batch = replace(batch, proximal_logprobs=interpolated(batch.behaviour_logprobs, held, batch.ages))
        anchor = (
            batch.behaviour_logprobs if self.anchor == "behaviour" else required(batch.proximal_logprobs, "proximal")
        )
        advantages = weigh_negatives(
            batch.advantages, batch.ages, fresh=self.negative_weight, stale=self.negative_weight * self.stale_weight
        )
        advantages = self.taught(advantages, held, batch)
        tokens = Tokens(logprobs, anchor, batch.behaviour_logprobs, advantages, sequences, batch.turns)
        terms = self.loss(tokens, **self._options(batch))
        to_behaviour = held - batch.behaviour_logprobs
        weights, kept = self._corrected(held, batch, sequences)
        keep = torch.stack(list(kept.values())).all(0) if kept else torch.ones_like(weights, dtype=torch.bool)
        losses = terms.loss * (weights * keep)
        compared, maxima = mismatch_figures(held, batch.behaviour_logprobs, batch.ages, sequences)
        sums: dict[str, Tensor | float] = {
            **_figures(terms, batch, keep),
            **{f"rejected_{name}": (~those).sum() for name, those in kept.items()},
            **compared,
        }
        if self.skips_rejected:
            sums["kept"] = (keep | (batch.sft_weights != 0.0)).sum()
        if batch.proximal_logprobs is not None:
            sums["kl_proximal"] = divergence(held - batch.proximal_logprobs, "k3").sum()
        if self.kl is not None:
            penalty, measured = _kl_terms(self.kl, logprobs, batch, scores.get("full_kl"))
            losses = losses + self.kl.coefficient * penalty
            sums["kl_reference"] = measured.sum()
        if self.distill is not None:
            sums["kl_teacher"] = (held - of_teacher(batch)).sum()
        if self.distill is not None and self.needs_teacher_kl:
            forward = required(scores.get("teacher_kl"), "teacher KL")
            losses = losses + self.distill.coefficient * forward
            sums["kl_from_teacher"] = forward.detach().sum()
        if self.needs_entropy:
            bonus = required(scores.get("entropies"), "entropy")
            losses = losses - self.entropy_coefficient * bonus
            sums["entropy"] = bonus.detach().sum()
        if self.ess is not None:
            sums |= _effective_sums(to_behaviour, sequences, self.ess.level)
        ratio = terms.ratio
        return Outcome(
            loss=(losses * batch.weights).sum() - (logprobs * batch.sft_weights).sum(),
            sums=sums,
            maxima={"ratio": ratio.max() if len(ratio) else 0.0, **maxima},
            tokens=TokenOutcomes(held, terms.clipped, terms.dual_clipped, keep),
        )

    def lr_factor(self, sums: Mapping[str, float]) -> float:
        if self.ess is None or not sums.get("ess_weight_squared"):
            return 1.0
        share = sums["ess_weight"] ** 2 / (sums["ess_count"] * sums["ess_weight_squared"])
        return learning_rate_factor(share, power=self.ess.power, floor=self.ess.floor)

    def trains(self, sums: Mapping[str, float]) -> bool:
        return self.needs_teacher_kl or sums.get("kept") != 0.0

    def _options(self, batch: MicroBatch) -> Mapping[str, Any]:
        if self.m2po_budget is None or self.m2po_form == "mask":
            return self.options
        width = 0.0 if batch.drift_limit is None else batch.drift_limit
        low, high = m2po_clip_widths(width, floor_low=self.options["clip_low"], floor_high=self.options["clip_high"])
        return {**self.options, "clip_low": low, "clip_high": high}

    def _corrected(self, held: Tensor, batch: MicroBatch, sequences: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weight of every token [N], and for every correction which tokens it keeps [N] bool."""
        mismatch = to_behaviour = held - batch.behaviour_logprobs
        if batch.proximal_logprobs is not None:
            mismatch = batch.proximal_logprobs - batch.behaviour_logprobs
        advantages = self.taught(batch.advantages, held, batch)
        drift = Drift(mismatch, to_behaviour, advantages, batch.ages, sequences, batch.drift_limit)
        weights = torch.ones_like(mismatch)
        kept: dict[str, Tensor] = {}
        for name, correction in self.corrections.items():
            mask_or_weight = correction(drift)
            if mask_or_weight is None:
                continue
            if mask_or_weight.dtype == torch.bool:
                kept[name] = mask_or_weight
            else:
                weights = weights * mask_or_weight
                kept[name] = mask_or_weight > 0
        return weights, kept


def _kl_terms(term: KlTerm, logprobs: Tensor, batch: MicroBatch, full_kl: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the KL to the reference that the loss adds, [N] with gradient, and the one that is reported, [N]."""
    if term.form == "full":
        exact = required(full_kl, "full KL")
        return exact, exact.detach()
    reference = required(batch.reference_logprobs, "reference")
    penalty = kl_estimate(logprobs, reference, term.form)
    if term.unbiased:
        penalty = penalty * (logprobs - batch.behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return penalty, kl_estimate(logprobs.detach(), reference, "k3")


def required(values: Tensor | None, whose: str) -> Tensor:
    if values is None:
        raise ValueError(f"the objective needs {whose} values, and the micro-batch carries none")
    return values


def _figures(terms: LossTerms, batch: MicroBatch, keep: Tensor) -> dict[str, Tensor | float]:
    ratio = terms.ratio
    return {
        "tokens": float(len(ratio)),
        "clipped": terms.clipped.sum(),
        "dual_clipped": terms.dual_clipped.sum(),
        "rejected": (~keep).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "surprise": -batch.behaviour_logprobs.sum(),
    }


def _effective_sums(to_behaviour: Tensor, sequences: Sequences, level: Level) -> dict[str, Tensor | float]:
    weights = log_weights(to_behaviour.double(), sequences, level).exp()
    count: Tensor | float = float(len(weights))
    if level != "token":
        count = sequences.lengths(weights).count_nonzero()  # with tokens
        weights = sequences.mean(weights)
    return {"ess_count": count, "ess_weight": weights.sum(), "ess_weight_squared": weights.square().sum()}


class PlainObjective:
    """Base of objectives that read log-probabilities alone, at the schedule's learning rate."""

    needs_entropy = False
    needs_full_kl = False
    needs_teacher_kl = False

    def lr_factor(self, sums: Mapping[str, float]) -> float:
        return 1.0

    def trains(self, sums: Mapping[str, float]) -> bool:
        return True


class CrossEntropy(PlainObjective):
    def __init__(self, form: Literal["nll", "dft"] = "nll") -> None:
        """Choose cross-entropy, or `dft`: each token weighed by its probability, detached (arXiv 2508.05629)."""
        self._form = form

    def __call__(self, logprobs: Tensor, batch: MicroBatch, **scores: Tensor) -> Outcome:
        weights = batch.weights if self._form == "nll" else batch.weights * logprobs.detach().exp()
        return Outcome(loss=-(logprobs * weights).sum(), sums={"tokens": float(len(logprobs))}, maxima={})


def build_objective(settings: AlgorithmSettings) -> PolicyGradient:
    loss = settings.parts.loss.value
    drift_rule = settings.options_of(m2po)
    corrections: dict[str, CorrectionFunction] = {}
    for correction in settings.parts.corrections:
        if correction.value.name in corrections:
            raise ValueError(
                f"two corrections are named {correction.value.name!r}; rename the function of {correction.name}"
            )
        corrections[correction.value.name] = partial(
            correction.value.fn, **settings.options_of(correction.value).model_dump()
        )
    return PolicyGradient(
        loss=loss.fn,
        options=settings.options_of(loss).model_dump(),
        anchor=settings.anchor,
        many_updates=settings.many_updates,
        negative_weight=settings.negative_weight,
        stale_weight=settings.stale_negative_weight,
        corrections=corrections,
        m2po_budget=drift_rule.m2po_budget,
        m2po_form=drift_rule.m2po_form,
        kl=KlTerm(settings.kl_form, settings.kl_coefficient, settings.kl_unbiased) if settings.kl_coefficient else None,
        distill=DistillTerm(settings.distill_form, settings.distill_coefficient, settings.distill_clip)
        if settings.distill_coefficient
        else None,
        entropy_coefficient=settings.entropy_coefficient,
        ess=EssRule(settings.ess_level, settings.ess_power, settings.ess_floor)
        if settings.ess_level != "off"
        else None,
        skips_rejected=settings.empty_batch == "skip",
    )
