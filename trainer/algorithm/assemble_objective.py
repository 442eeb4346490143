"""From the algorithm section to the objective that the trainer minimises: every name becomes a function here."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.losses import (
    PolicyLoss,
    ce_gppo,
    cispo,
    double_sided,
    dppo,
    gmpo,
    gspo,
    gspo_token,
    minirl,
    ppo_clip,
    reinforce,
    sapo,
    topr,
    topr_token,
)
from penstock.trainer.algorithm.objective import (
    AgeBand,
    EssRule,
    ImportanceCorrection,
    KlTerm,
    PolicyGradient,
    Rejection,
)
from penstock.trainer.algorithm.presets import LOSS_OPTIONS

LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "ce_gppo": ce_gppo,
    "sapo": sapo,
    "cispo": cispo,
    "minirl": minirl,
    "topr": topr,
    "topr_token": topr_token,
    "reinforce": reinforce,
    "double_sided": double_sided,
    "dppo_tv": partial(dppo, divergence="tv"),
    "dppo_kl": partial(dppo, divergence="kl"),
    "gmpo": gmpo,
}
# Where a loss calls a setting otherwise.
_ARGUMENTS: dict[str, dict[str, str]] = {
    "cispo": {"weight_cap": "cap"},
    "minirl": {"weight_cap": "cap"},
    "topr": {"weight_cap": "high"},
    "topr_token": {"weight_cap": "high"},
    "dppo_tv": {"weight_cap": "cap", "clip_low": "limit_low", "clip_high": "limit_high"},
    "dppo_kl": {"weight_cap": "cap", "clip_low": "limit_low", "clip_high": "limit_high"},
}


def objective(settings: AlgorithmSettings) -> PolicyGradient:
    """Return what the trainer minimises."""
    renamed = _ARGUMENTS.get(settings.loss, {})
    options: dict[str, Any] = {renamed.get(name, name): getattr(settings, name) for name in LOSS_OPTIONS[settings.loss]}
    importance = None
    if settings.importance != "none":
        importance = ImportanceCorrection(
            settings.importance, settings.importance_bound, settings.importance_high, settings.importance_low
        )
    return PolicyGradient(
        loss=LOSSES[settings.loss],
        options=options,
        anchor="proximal" if settings.uses_proximal else "behaviour",
        negative_weight=settings.negative_weight,
        stale_weight=settings.stale_negative_weight,
        importance=importance,
        rejection=Rejection(settings.rejection, settings.rejection_high, settings.rejection_low)
        if settings.rejection
        else None,
        veto=settings.veto,
        opsm_delta=settings.opsm_delta,
        age_band=AgeBand(settings.clip_low, settings.clip_high, settings.age_band_cap, settings.age_band_decay)
        if settings.age_band_cap
        else None,
        m2po_budget=settings.m2po_budget,
        m2po_form=settings.m2po_form,
        kl=KlTerm(settings.kl_form, settings.kl_coefficient, settings.kl_unbiased) if settings.kl_coefficient else None,
        entropy_coefficient=settings.entropy_coefficient,
        ess=EssRule(settings.ess_level, settings.ess_power, settings.ess_floor)
        if settings.ess_level != "off"
        else None,
    )
