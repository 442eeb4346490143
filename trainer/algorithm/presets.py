"""Algorithms by name: what each name sets, what it is called elsewhere, and what we do not offer, with the reason.

A preset sets only what makes the algorithm; everything else keeps the default of
`trainer/algorithm/algorithm_settings.py`, and every part of a preset can be overridden. docs/algorithms.md has
formulas, sources and differences from the papers. Imports no torch.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "normalise_by_std": True, "loss": "ppo_clip", "aggregation": "token-mean"},
    "dr_grpo": {
        "advantage": "grpo", "normalise_by_std": False, "loss": "ppo_clip", "aggregation": "seq-mean-token-sum-norm",
    },
    "dapo": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28,
        "aggregation": "token-mean", "dynamic_sampling": True, "overlong_buffer": 0.2,
    },
    "gspo": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4,
        "dual_clip": None, "aggregation": "seq-mean-token-mean",
    },
    "gspo_token": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "gspo_token", "clip_low": 3e-4, "clip_high": 4e-4,
        "dual_clip": None, "aggregation": "seq-mean-token-mean",
    },
    "cispo": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "cispo", "weight_cap": 4.0, "aggregation": "token-mean",
    },
    "minirl": {
        "advantage": "grpo", "normalise_by_std": False, "loss": "minirl", "clip_low": 0.2, "clip_high": 0.27,
        "weight_cap": 5.0, "aggregation": "seq-mean-token-sum",
    },
    "topr": {
        "advantage": "grpo", "normalise_by_std": False, "loss": "topr", "weight_cap": 1.0,
        "aggregation": "seq-mean-token-sum",
    },
    "topr_token": {
        "advantage": "grpo", "normalise_by_std": False, "loss": "topr_token", "weight_cap": 1.0,
        "aggregation": "token-mean",
    },
    "ppo": {
        "advantage": "gae", "loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "whiten_advantages": True,
        "aggregation": "token-mean",
    },
    "remax": {"advantage": "remax", "loss": "ppo_clip", "aggregation": "token-mean"},
    "rloo": {"advantage": "rloo", "loss": "ppo_clip", "aggregation": "seq-mean-token-sum"},
    "reinforce": {"advantage": "reinforce", "loss": "reinforce", "aggregation": "seq-mean-token-sum"},
    "reinforce_pp": {"advantage": "reinforce_pp", "loss": "ppo_clip", "aggregation": "token-mean"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "loss": "ppo_clip", "aggregation": "token-mean"},
    "opo": {"advantage": "opo", "loss": "ppo_clip", "aggregation": "token-mean"},
    "pass_at_k": {"advantage": "pass_at_k", "normalise_by_std": True, "loss": "ppo_clip", "aggregation": "token-mean"},
    "gpg": {"advantage": "gpg", "loss": "ppo_clip", "aggregation": "token-mean"},
    "sapo": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "sapo", "tau_positive": 1.0, "tau_negative": 1.05,
        "aggregation": "seq-mean-token-mean",
    },
    "ce_gppo": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "ce_gppo", "clip_low": 0.2, "clip_high": 0.28,
        "beta_low": 0.75, "beta_high": 1.0, "aggregation": "token-mean",
    },
    "gmpo": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4,
        "aggregation": "seq-mean-token-mean",
    },
    "dppo": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2,
        "weight_cap": 20.0, "aggregation": "token-mean",
    },
    "m2po": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "ppo_clip", "clip_low": 1.0, "clip_high": 1e6,
        "dual_clip": None, "m2po_budget": 0.04, "aggregation": "token-mean",
    },
    "m2po_released": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "ppo_clip", "clip_low": 0.3, "clip_high": 0.5,
        "dual_clip": None, "m2po_budget": 0.04, "m2po_form": "clip", "aggregation": "token-mean",
    },
    "opsm": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2,
        "opsm_delta": 1e-4, "aggregation": "token-mean",
    },
    "raft": {
        "advantage": "reinforce", "loss": "reinforce", "skip_non_positive_advantage": True, "aggregation": "token-mean",
    },
    "double_sided": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "double_sided", "clip_low": 0.2, "clip_high": 0.28,
        "aggregation": "token-mean",
    },
}  # fmt: skip

# Which settings each loss reads; any other that is set by hand would be ignored, and is refused.
_CLIP = ("clip_low", "clip_high")
LOSS_OPTIONS: dict[str, tuple[str, ...]] = {
    "ppo_clip": (*_CLIP, "dual_clip", "token_tis_cap"),
    "gspo": (*_CLIP, "dual_clip"),
    "gspo_token": (*_CLIP, "dual_clip"),
    "ce_gppo": (*_CLIP, "dual_clip", "beta_low", "beta_high"),
    "sapo": ("tau_positive", "tau_negative"),
    "cispo": ("weight_cap",),
    "minirl": (*_CLIP, "weight_cap"),
    "topr": ("weight_cap",),
    "topr_token": ("weight_cap",),
    "reinforce": (),
    "double_sided": _CLIP,
    "dppo_tv": (*_CLIP, "weight_cap"),
    "dppo_kl": (*_CLIP, "weight_cap"),
    "gmpo": _CLIP,
}
ADVANTAGE_OPTIONS: dict[str, tuple[str, ...]] = {
    "grpo": ("normalise_by_std",),
    "pass_at_k": ("normalise_by_std",),
    "rloo": (),
    "reinforce": (),
    "reinforce_pp": (),
    "reinforce_pp_baseline": (),
    "opo": (),
    "gpg": (),
    "remax": (),
    "gae": ("whiten_rewards",),
}

ALIASES: dict[str, str] = {
    "drgrpo": "dr_grpo",
    "reinforce++": "reinforce_pp",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "reinforce++_baseline": "reinforce_pp_baseline",
    "grpo_passk": "pass_at_k",
    "passk": "pass_at_k",
    "geo_mean": "gmpo",
    "tpro": "topr",
    "gppo": "ce_gppo",
    "dppo_tv": "dppo",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "vanilla": "grpo",
    "gae": "ppo",
    "critic": "ppo",
    "direct_double_sided": "double_sided",
    "glm_5": "double_sided",
    "off_policy_sequence_masking": "opsm",
    "rejection_sampling": "raft",
    "sft_on_positives": "raft",
}

REFUSED: dict[str, str] = {
    "crossentropy": "supervised fine-tuning is `penstock sft`",
    "sft": "supervised fine-tuning is `penstock sft`",
    "dpo": "it learns from pairs of given answers, not from rewards of sampled ones; this trainer samples",
    "kto": "it learns from labelled answers, not from rewards of sampled ones; this trainer samples",
    "orpo": "it learns from pairs of given answers, not from rewards of sampled ones; this trainer samples",
}


def canonical(name: str) -> str:
    """Return our name of an algorithm as anybody spells it; raises ValueError with the reason or the list."""
    plain = name.lower().replace("-", "_").replace(" ", "_").replace(".", "")
    plain = ALIASES.get(plain, plain)
    if plain in PRESETS:
        return plain
    if plain in REFUSED:
        raise ValueError(f"{name!r} is not offered: {REFUSED[plain]}")
    raise ValueError(f"unknown algorithm {name!r}; known are {', '.join(sorted(PRESETS))}")
