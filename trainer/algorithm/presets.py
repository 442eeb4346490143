"""Algorithms by name: what each name sets, what it is called elsewhere, and what is not offered, with the reason.

A preset sets only what makes the algorithm; everything else keeps its default, and every part of a preset can be
overridden. A preset that belongs to one part is in that part's file; those here combine parts. docs/algorithms.md has
formulas, sources and differences from the papers. Imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from penstock.trainer.algorithm.chosen_parts import ALL

DEFAULT = "async_grpo"

COMBINED: dict[str, dict[str, Any]] = {
    "async_grpo": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "ppo_clip", "aggregation": "token-mean",
        "dual_clip": 1.2, "stale_negative_weight": 0.5, "ess_level": "token",
    },
    "dr_grpo": {
        "advantage": "grpo", "normalise_by_std": False, "loss": "ppo_clip", "aggregation": "seq-mean-token-sum-norm",
    },
    "dapo": {
        "advantage": "grpo", "normalise_by_std": True, "loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28,
        "aggregation": "token-mean", "dynamic_sampling": True, "overlong_buffer": 0.2,
    },
    "on_policy_distillation": {
        "advantage": "zero", "loss": "cispo", "weight_cap": 4.0, "aggregation": "token-mean", "distill_coefficient": 1.0,
    },
    "gkd": {
        "advantage": "zero", "loss": "reinforce", "aggregation": "token-mean", "distill_coefficient": 1.0,
        "distill_form": "forward",
    },
    "raft": {
        "advantage": "reinforce", "loss": "reinforce", "skip_non_positive_advantage": True, "aggregation": "token-mean",
    },
}  # fmt: skip

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
    "opd": "on_policy_distillation",
    "distillation": "on_policy_distillation",
    "generalized_knowledge_distillation": "gkd",
}

REFUSED: dict[str, str] = {
    "crossentropy": "supervised fine-tuning is `penstock sft`",
    "sft": "supervised fine-tuning is `penstock sft`",
    "dpo": "training on given answers is `penstock dpo`, with dpo.loss",
    "kto": "training on given answers is `penstock dpo`, with dpo.loss",
    "orpo": "training on given answers is `penstock dpo`, with dpo.loss",
}


def _presets() -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = dict(COMBINED)
    for registry in ALL:
        for part in registry.built_in.values():
            for name, values in part.presets.items():
                if name in found:
                    raise TypeError(f"two presets are named {name!r}; rename the one of {registry.kind} {part.name}")
                found[name] = values
    return dict(sorted(found.items()))


PRESETS: dict[str, Mapping[str, Any]] = _presets()


def canonical(name: str) -> str:
    """Return the preset that a name means in any project's spelling; raises ValueError with the reason or the list."""
    plain = name.lower().replace("-", "_").replace(" ", "_").replace(".", "")
    plain = ALIASES.get(plain, plain)
    if plain in PRESETS:
        return plain
    if plain in REFUSED:
        raise ValueError(f"{name!r} is not offered: {REFUSED[plain]}")
    near = difflib.get_close_matches(plain, [*PRESETS, *ALIASES], n=1)
    hint = f"did you mean {ALIASES.get(near[0], near[0])}? " if near else ""
    raise ValueError(f"unknown algorithm {name!r}; {hint}known are {', '.join(sorted(PRESETS))}")
