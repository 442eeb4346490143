"""Every loss of the field as a pure function on flat [N] tensors of sampled tokens.

A policy loss reads `Tokens` and returns its value for every token, before aggregation
(`trainer/algorithm/aggregation.py` weighs the tokens), with what the step reports about it. Which loss goes with
which advantages under which name is said in `trainer/algorithm/presets.py`.
"""

from penstock.trainer.algorithm.losses.clipped import (
    ce_gppo,
    clip_cov,
    clip_terms,
    dppo,
    dppo_tv_ratio,
    kl_cov,
    ppo_clip,
    sapo,
)
from penstock.trainer.algorithm.losses.sequence_level import gmpo, gspo, gspo_token, product_clip, topr, vespo
from penstock.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, LossTerms, PolicyLoss, Sequences, Tokens
from penstock.trainer.algorithm.losses.weighted import (
    cispo,
    directional_stop,
    double_sided,
    dro,
    minirl,
    reinforce,
    topr_token,
)

__all__ = [
    "MAX_LOG_RATIO",
    "LossTerms",
    "PolicyLoss",
    "Sequences",
    "Tokens",
    "ce_gppo",
    "cispo",
    "clip_cov",
    "clip_terms",
    "directional_stop",
    "double_sided",
    "dppo",
    "dppo_tv_ratio",
    "dro",
    "gmpo",
    "gspo",
    "gspo_token",
    "kl_cov",
    "minirl",
    "ppo_clip",
    "product_clip",
    "reinforce",
    "sapo",
    "topr",
    "topr_token",
    "vespo",
]
