"""Defaults of other systems: the keys of a file that only repeat them, and what a system does where its file is silent.

``trl_defaults.json`` has what TRL 1.16's ``GRPOConfig(...).to_dict()`` holds for arguments that were not given. `DEFAULTS` are those of verl's
`_generated_ppo_trainer.yaml` (2025), TRL 1.16's `GRPOConfig` and OpenRLHF's `train_ppo_ray.py` (2025), where they differ from those
here. ROLL, slime and AgentRL leave most of them to Megatron or to the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.deploy.config_import.rule_forms import ACTOR, ROLLOUT

_FILES = {"trl": "trl_defaults.json"}
_WHOLE = 60  # so many keys at their defaults are a configuration that was written out; fewer were typed by a person


def at_default(system: str, values: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys at their defaults, or without a value, in a file with all of them; none for a file of chosen keys."""
    known = _defaults(system)
    found = frozenset(k for k, value in values.items() if value is None or (k in known and _same(value, known[k])))
    return found if len(found) >= _WHOLE else frozenset()


@cache
def _defaults(system: str) -> Mapping[str, Any]:
    if system not in _FILES:
        return {}
    return json.loads((Path(__file__).parent / _FILES[system]).read_text(encoding="utf-8"))


def _same(value: Any, default: Any) -> bool:
    return value == default and isinstance(value, bool) == isinstance(default, bool)


@dataclass(frozen=True, slots=True)
class SilentDefault:
    """A key that a file does not name: what its system does then, and the settings that do the same here."""

    key: str
    value: Any
    settings: Mapping[str, Any]
    also: tuple[str, ...] = ()  # other keys of that system that decide the same


DEFAULTS: dict[str, tuple[SilentDefault, ...]] = {
    "verl": (
        SilentDefault(f"{ACTOR}.optim.betas", [0.9, 0.999], {"trainer.betas": [0.9, 0.999]}),
        SilentDefault(f"{ACTOR}.optim.weight_decay", 0.01, {"trainer.weight_decay": 0.01}),
        SilentDefault(f"{ACTOR}.optim.lr", 1e-6, {"trainer.lr": 1e-6}),
        SilentDefault(f"{ACTOR}.grad_clip", 1.0, {"trainer.max_grad_norm": 1.0}),
        SilentDefault(f"{ACTOR}.clip_ratio_c", 3.0, {"algorithm.dual_clip": 3.0}),
        SilentDefault(
            f"{ACTOR}.clip_ratio", 0.2, {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2},
            (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"),
        ),
        SilentDefault(f"{ACTOR}.loss_agg_mode", "token-mean", {"algorithm.aggregation": "token-mean"}),
        SilentDefault("algorithm.adv_estimator", "gae", {"algorithm.name": "ppo"}),
        SilentDefault("critic.optim.lr", 1e-5, {"critic.lr": 1e-5}),
        SilentDefault("critic.cliprange_value", 0.5, {"critic.value_clip": 0.5}),
        SilentDefault("data.max_prompt_length", 512, {"data.max_prompt_tokens": 512}),
        SilentDefault("data.max_response_length", 512, {"rollout.max_new_tokens": 512}, (f"{ROLLOUT}.response_length",)),
        SilentDefault("data.train_batch_size", 1024, {"rollout.groups_per_step": 1024}),
        SilentDefault("data.truncation", "error", {"data.overlong": "error"}, ("data.filter_overlong_prompts",)),
        SilentDefault(f"{ROLLOUT}.n", 1, {"rollout.group_size": 1}),
        SilentDefault(f"{ROLLOUT}.temperature", 1.0, {"rollout.temperature": 1.0}),
        SilentDefault("trainer.total_epochs", 30, {"trainer.epochs": 30}, ("trainer.total_training_steps",)),
    ),
    "trl": (
        SilentDefault("adam_beta2", 0.999, {"trainer.betas": [0.9, 0.999]}, ("adam_beta1",)),
        SilentDefault("weight_decay", 0.0, {"trainer.weight_decay": 0.0}),
        SilentDefault("learning_rate", 1e-6, {"trainer.lr": 1e-6}),
        SilentDefault("lr_scheduler_type", "linear", {"trainer.schedule": "linear", "trainer.min_lr_ratio": 0.0}),
        SilentDefault("max_grad_norm", 1.0, {"trainer.max_grad_norm": 1.0}),
        SilentDefault("epsilon", 0.2, {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}, ("epsilon_high",)),
        SilentDefault("delta", None, {"algorithm.dual_clip": None}),
        SilentDefault("loss_type", "dapo", {"algorithm.aggregation": "token-mean"}),
        SilentDefault("scale_rewards", "group", {"algorithm.normalise_by_std": True}),
        SilentDefault("beta", 0.0, {"algorithm.kl_coefficient": 0.0}),
        SilentDefault("max_completion_length", 512, {"rollout.max_new_tokens": 512}),
        SilentDefault("num_generations", 8, {"rollout.group_size": 8}),
        SilentDefault("temperature", 1.0, {"rollout.temperature": 1.0}),
        SilentDefault("num_train_epochs", 3.0, {"trainer.epochs": 3.0}, ("max_steps",)),
    ),
    "openrlhf": (
        SilentDefault("adam_betas", [0.9, 0.95], {"trainer.betas": [0.9, 0.95]}),
        SilentDefault("l2", 0.0, {"trainer.weight_decay": 0.0}),
        SilentDefault("actor_learning_rate", 1e-6, {"trainer.lr": 1e-6}),
        SilentDefault("lr_scheduler", "cosine_with_min_lr", {"trainer.schedule": "cosine", "trainer.min_lr_ratio": 0.1}),
        SilentDefault("max_norm", 1.0, {"trainer.max_grad_norm": 1.0}),
        SilentDefault("eps_clip", 0.2, {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}, ("eps_clip_low_high",)),
        SilentDefault("dual_clip", None, {"algorithm.dual_clip": None}),
        SilentDefault("advantage_estimator", "gae", {"algorithm.name": "ppo"}),
        SilentDefault("critic_learning_rate", 9e-6, {"critic.lr": 9e-6}),
        SilentDefault("value_clip", 0.5, {"critic.value_clip": 0.5}),
        SilentDefault("init_kl_coef", 0.01, {"algorithm.reward_kl_coefficient": 0.01}),
        SilentDefault("reward_clip_range", [-10, 10], {"algorithm.reward_clip": 10.0}),
        SilentDefault("prompt_max_len", 1024, {"data.max_prompt_tokens": 1024}),
        SilentDefault("generate_max_len", 1024, {"rollout.max_new_tokens": 1024}),
        SilentDefault("rollout_batch_size", 1024, {"rollout.groups_per_step": 1024}, ("train_batch_size",)),
        SilentDefault("n_samples_per_prompt", 1, {"rollout.group_size": 1}),
        SilentDefault("temperature", 1.0, {"rollout.temperature": 1.0}),
        SilentDefault("num_episodes", 1, {"trainer.epochs": 1}),
    ),
}  # fmt: skip


def differing(
    system: str, named: Mapping[str, Any], effective: Mapping[str, Any]
) -> list[tuple[SilentDefault, Mapping[str, Any]]]:
    """Return the defaults that a file does not name and that hold otherwise in the run file, with the settings that differ.

    ``named`` are the keys of the file, ``effective`` all settings of the run file by dotted key.
    """
    found, has_critic = [], effective.get("algorithm.advantage") == "gae"
    for one in DEFAULTS.get(system, ()):
        if any(key in named for key in (one.key, *one.also)):
            continue
        others = {
            ours: value
            for ours, value in one.settings.items()
            if effective.get(ours) != value and (has_critic or not ours.startswith("critic."))
        }
        if others:
            found.append((one, others))
    return found
