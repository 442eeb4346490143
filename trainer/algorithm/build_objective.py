"""From the algorithm section to the objective that the trainer minimises; resolved once, when a run starts."""

from __future__ import annotations

from functools import partial

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.corrections.interface import CorrectionFunction
from penstock.trainer.algorithm.corrections.m2po import m2po
from penstock.trainer.algorithm.distillation import DistillTerm
from penstock.trainer.algorithm.objective import EssRule, KlTerm, PolicyGradient


def build_objective(settings: AlgorithmSettings) -> PolicyGradient:
    """Return what the trainer minimises; raises ValueError when two corrections have one name."""
    loss = settings.parts.loss.value
    drift_rule = settings.options_of(m2po)
    return PolicyGradient(
        loss=loss.fn,
        options=settings.options_of(loss).model_dump(),
        anchor="proximal" if settings.uses_proximal else "behaviour",
        many_updates=settings.many_updates,
        negative_weight=settings.negative_weight,
        stale_weight=settings.stale_negative_weight,
        corrections=_corrections(settings),
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
    )


def _corrections(settings: AlgorithmSettings) -> dict[str, CorrectionFunction]:
    found: dict[str, CorrectionFunction] = {}
    for one in settings.parts.corrections:
        if one.value.name in found:
            raise ValueError(f"two corrections are named {one.value.name!r}; rename the function of {one.name}")
        found[one.value.name] = partial(one.value.fn, **settings.options_of(one.value).model_dump())
    return found
