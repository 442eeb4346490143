"""Keys of verl, ROLL, TRL, AgentRL and their wrappers that Penstock accepts as aliases of its own keys.

Only keys with exactly the same meaning and values are listed. Keys that are similar but not equal are refused with
advice (`protocol/config/foreign_config.py`): nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "mse+": "k2+", "low_var_kl+": "k3+"}
_REWARD_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
_SCHEDULE = {"constant_with_warmup": "constant"}
_LINEAR = {"all-linear": []}


@dataclass(frozen=True, slots=True)
class Alias:
    """The Penstock keys that one foreign key sets, and the foreign values with another name here."""

    keys: tuple[str, ...]
    values: Mapping[Any, Any] = field(default_factory=dict)

    def value(self, theirs: Any) -> Any:
        """Return a foreign value as Penstock spells it."""
        return self.values.get(theirs, theirs) if isinstance(theirs, (str, int)) else theirs


def _alias(*keys: str, values: Mapping[Any, Any] | None = None) -> Alias:
    return Alias(keys, values or {})


ALIASES: dict[str, Alias] = {
    "actor_infer.generating_args.max_new_tokens": _alias("rollout.max_new_tokens"),
    "actor_infer.generating_args.temperature": _alias("rollout.temperature"),
    "actor_rollout_ref.actor.clip_ratio": _alias("algorithm.clip_low", "algorithm.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": _alias("algorithm.dual_clip"),
    "actor_rollout_ref.actor.clip_ratio_high": _alias("algorithm.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_low": _alias("algorithm.clip_low"),
    "actor_rollout_ref.actor.entropy_coeff": _alias("algorithm.entropy_coefficient"),
    "actor_rollout_ref.actor.grad_clip": _alias("trainer.max_grad_norm"),
    "actor_rollout_ref.actor.kl_loss_type": _alias("algorithm.kl_form", values=_KL),
    "actor_rollout_ref.actor.loss_agg_mode": _alias("algorithm.aggregation"),
    "actor_rollout_ref.actor.optim.betas": _alias("trainer.betas"),
    "actor_rollout_ref.actor.optim.lr": _alias("trainer.lr"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": _alias("trainer.warmup_steps"),
    "actor_rollout_ref.actor.optim.min_lr_ratio": _alias("trainer.min_lr_ratio"),
    "actor_rollout_ref.actor.optim.warmup_style": _alias("trainer.schedule", values=_SCHEDULE),
    "actor_rollout_ref.actor.optim.weight_decay": _alias("trainer.weight_decay"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": _alias("model.gradient_checkpointing"),
    "actor_rollout_ref.model.lora_alpha": _alias("model.lora.alpha"),
    "actor_rollout_ref.model.lora_rank": _alias("model.lora.rank"),
    "actor_rollout_ref.model.path": _alias("model.path"),
    "actor_rollout_ref.model.target_modules": _alias("model.lora.targets", values=_LINEAR),
    "actor_rollout_ref.ref.fsdp_config.param_offload": _alias(
        "algorithm.reference_device", values={True: "cpu", False: "same"}
    ),
    "actor_rollout_ref.rollout.n": _alias("rollout.group_size"),
    "actor_rollout_ref.rollout.response_length": _alias("rollout.max_new_tokens"),
    "actor_rollout_ref.rollout.temperature": _alias("rollout.temperature"),
    "actor_rollout_ref.rollout.val_kwargs.n": _alias("eval.samples"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": _alias("eval.temperature"),
    "actor_train.data_args.file_name": _alias("data.train"),
    "actor_train.data_args.messages": _alias("data.map.messages"),
    "actor_train.data_args.prompt": _alias("data.map.prompt"),
    "actor_train.model_args.dtype": _alias("model.dtype", values={"bf16": "bfloat16", "fp32": "float32"}),
    "actor_train.training_args.learning_rate": _alias("trainer.lr"),
    "actor_train.training_args.lr_scheduler_type": _alias("trainer.schedule", values=_SCHEDULE),
    "actor_train.training_args.warmup_steps": _alias("trainer.warmup_steps"),
    "actor_train.training_args.weight_decay": _alias("trainer.weight_decay"),
    "algorithm.filter_groups.enable": _alias("algorithm.dynamic_sampling"),
    "algorithm.gamma": _alias("critic.gamma"),
    "algorithm.kl_ctrl.horizon": _alias("algorithm.kl_horizon"),
    "algorithm.kl_penalty": _alias("algorithm.reward_kl_form", values=_REWARD_KL),
    "algorithm.lam": _alias("critic.lam"),
    "algorithm.norm_adv_by_std_in_grpo": _alias("algorithm.normalise_by_std"),
    "algorithm.rollout_correction.rollout_is": _alias("algorithm.importance"),
    "algorithm.rollout_correction.rollout_is_threshold": _alias("algorithm.importance_high"),
    "algorithm.rollout_correction.rollout_rs": _alias("algorithm.rejection"),
    "algorithm.rollout_correction.rollout_token_veto_threshold": _alias("algorithm.veto"),
    "critic.cliprange_value": _alias("critic.value_clip"),
    "critic.grad_clip": _alias("critic.max_grad_norm"),
    "critic.model.path": _alias("critic.path"),
    "critic.optim.lr": _alias("critic.lr"),
    "critic.optim.lr_warmup_steps": _alias("critic.warmup_steps"),
    "data.max_prompt_length": _alias("data.max_prompt_tokens"),
    "data.max_response_length": _alias("rollout.max_new_tokens"),
    "data.prompt_key": _alias("data.map.prompt"),
    "data.response_key": _alias("data.map.response"),
    "data.seed": _alias("run.seed"),
    "data.train_batch_size": _alias("rollout.groups_per_step"),
    "data.train_files": _alias("data.train"),
    "data.train_max_samples": _alias("data.max_samples"),
    "data.val_files": _alias("data.eval"),
    "model.enable_gradient_checkpointing": _alias("model.gradient_checkpointing"),
    "model.lora_alpha": _alias("model.lora.alpha"),
    "model.lora_rank": _alias("model.lora.rank"),
    "model.partial_pretrain": _alias("model.path"),
    "model.target_modules": _alias("model.lora.targets", values=_LINEAR),
    "optim.lr": _alias("trainer.lr"),
    "reward_model.overlong_buffer.penalty_factor": _alias("algorithm.overlong_factor"),
    "trainer.critic_warmup": _alias("critic.head_start_steps"),
    "trainer.experiment_name": _alias("run.id"),
    "trainer.max_actor_ckpt_to_keep": _alias("trainer.keep_checkpoints"),
    "trainer.save_freq": _alias("trainer.checkpoint_every"),
    "trainer.test_freq": _alias("eval.every", values={-1: 0}),
    "trainer.total_training_steps": _alias("trainer.steps"),
    "trainer.val_before_train": _alias("eval.at_start"),
    "advantage_clip": _alias("algorithm.advantage_clip"),
    "critic_warmup": _alias("critic.head_start_steps"),
    "delta": _alias("algorithm.dual_clip"),
    "difficulty_loss_weight": _alias("algorithm.difficulty_weight"),
    "drop_zero_advantage": _alias("algorithm.drop_zero_advantage"),
    "entropy_loss_coef": _alias("algorithm.entropy_coefficient"),
    "eval_steps": _alias("eval.every"),
    "exp_name": _alias("run.id"),
    "gamma": _alias("critic.gamma"),
    "gradient_checkpointing": _alias("model.gradient_checkpointing"),
    "importance_weight_cap_ratio": _alias("algorithm.age_band_cap"),
    "kl_horizon": _alias("algorithm.kl_horizon"),
    "kl_loss_type": _alias("algorithm.kl_form", values=_KL),
    "kl_penalty": _alias("algorithm.reward_kl_form", values=_REWARD_KL),
    "lambd": _alias("critic.lam"),
    "learning_rate": _alias("trainer.lr"),
    "length_loss_weight": _alias("algorithm.length_weight"),
    "lora_alpha": _alias("model.lora.alpha"),
    "lora_dropout": _alias("model.lora.dropout"),
    "lora_r": _alias("model.lora.rank"),
    "lora_rank": _alias("model.lora.rank"),
    "lora_target_modules": _alias("model.lora.targets", values=_LINEAR),
    "loss_agg_mode": _alias("algorithm.aggregation"),
    "loss_calculater": _alias("algorithm.name"),
    "lr": _alias("trainer.lr"),
    "lr_scheduler_type": _alias("trainer.schedule", values=_SCHEDULE),
    "mask_truncated_completions": _alias("algorithm.mask_truncated"),
    "max_completion_length": _alias("rollout.max_new_tokens"),
    "max_grad_norm": _alias("trainer.max_grad_norm"),
    "max_new_tokens": _alias("rollout.max_new_tokens"),
    "max_prompt_length": _alias("data.max_prompt_tokens"),
    "max_prompt_tokens": _alias("data.max_prompt_tokens"),
    "max_response_length": _alias("rollout.max_new_tokens"),
    "max_samples": _alias("data.max_samples"),
    "max_steps": _alias("trainer.steps"),
    "max_trained_count": _alias("algorithm.max_trained_count"),
    "minimal_advantage": _alias("algorithm.minimal_advantage"),
    "model_name": _alias("model.path"),
    "model_name_or_path": _alias("model.path"),
    "norm_adv_by_std": _alias("algorithm.normalise_by_std"),
    "num_generations": _alias("rollout.group_size"),
    "num_return_sequences_in_group": _alias("rollout.group_size"),
    "off_policy_mask_threshold": _alias("algorithm.opsm_delta"),
    "out_of_date_decay": _alias("algorithm.age_band_decay"),
    "pg_clip": _alias("algorithm.clip_low", "algorithm.clip_high"),
    "pretrain": _alias("model.path"),
    "prompt_length": _alias("data.max_prompt_tokens"),
    "response_length": _alias("rollout.max_new_tokens"),
    "retrained_interval": _alias("algorithm.retrained_interval"),
    "reward_clip": _alias("algorithm.reward_clip"),
    "reward_norm": _alias("algorithm.reward_norm"),
    "rollout_batch_size": _alias("rollout.groups_per_step"),
    "rollout_n": _alias("rollout.group_size"),
    "run_name": _alias("run.id"),
    "save_steps": _alias("trainer.checkpoint_every"),
    "seed": _alias("run.seed"),
    "sft_loss_coef": _alias("algorithm.sft_coefficient"),
    "skip_non_positive_advantage": _alias("algorithm.skip_non_positive_advantage"),
    "target_kl": _alias("algorithm.kl_target"),
    "temperature": _alias("rollout.temperature"),
    "train_batch_size": _alias("rollout.groups_per_step"),
    "value_clip": _alias("critic.value_clip"),
    "warmup_steps": _alias("trainer.warmup_steps"),
    "whiten_advantages": _alias("algorithm.whiten_advantages"),
    "whiten_rewards": _alias("algorithm.whiten_rewards"),
}
