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
class Same:
    """The Penstock keys that one foreign key sets, and the foreign values with another name here."""

    ours: tuple[str, ...]
    values: Mapping[Any, Any] = field(default_factory=dict)

    def value(self, theirs: Any) -> Any:
        """Return a foreign value as Penstock spells it."""
        return self.values.get(theirs, theirs) if isinstance(theirs, (str, bool)) else theirs


def _same(*ours: str, values: Mapping[Any, Any] | None = None) -> Same:
    return Same(ours, values or {})


SAME: dict[str, Same] = {
    "actor_infer.generating_args.max_new_tokens": _same("rollout.max_new_tokens"),
    "actor_infer.generating_args.temperature": _same("rollout.temperature"),
    "actor_rollout_ref.actor.clip_ratio": _same("algorithm.clip_low", "algorithm.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": _same("algorithm.dual_clip"),
    "actor_rollout_ref.actor.clip_ratio_high": _same("algorithm.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_low": _same("algorithm.clip_low"),
    "actor_rollout_ref.actor.entropy_coeff": _same("algorithm.entropy_coefficient"),
    "actor_rollout_ref.actor.grad_clip": _same("trainer.max_grad_norm"),
    "actor_rollout_ref.actor.kl_loss_type": _same("algorithm.kl_form", values=_KL),
    "actor_rollout_ref.actor.loss_agg_mode": _same("algorithm.aggregation"),
    "actor_rollout_ref.actor.optim.betas": _same("trainer.betas"),
    "actor_rollout_ref.actor.optim.lr": _same("trainer.lr"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": _same("trainer.warmup_steps"),
    "actor_rollout_ref.actor.optim.min_lr_ratio": _same("trainer.min_lr_ratio"),
    "actor_rollout_ref.actor.optim.warmup_style": _same("trainer.schedule", values=_SCHEDULE),
    "actor_rollout_ref.actor.optim.weight_decay": _same("trainer.weight_decay"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": _same("model.gradient_checkpointing"),
    "actor_rollout_ref.model.lora_alpha": _same("model.lora.alpha"),
    "actor_rollout_ref.model.lora_rank": _same("model.lora.rank"),
    "actor_rollout_ref.model.path": _same("model.path"),
    "actor_rollout_ref.model.target_modules": _same("model.lora.targets", values=_LINEAR),
    "actor_rollout_ref.ref.fsdp_config.param_offload": _same(
        "algorithm.reference_device", values={True: "cpu", False: "same"}
    ),
    "actor_rollout_ref.rollout.n": _same("rollout.group_size"),
    "actor_rollout_ref.rollout.response_length": _same("rollout.max_new_tokens"),
    "actor_rollout_ref.rollout.temperature": _same("rollout.temperature"),
    "actor_rollout_ref.rollout.val_kwargs.n": _same("eval.samples"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": _same("eval.temperature"),
    "actor_train.data_args.file_name": _same("data.train"),
    "actor_train.data_args.messages": _same("data.map.messages"),
    "actor_train.data_args.prompt": _same("data.map.prompt"),
    "actor_train.model_args.dtype": _same("model.dtype", values={"bf16": "bfloat16", "fp32": "float32"}),
    "actor_train.training_args.learning_rate": _same("trainer.lr"),
    "actor_train.training_args.lr_scheduler_type": _same("trainer.schedule", values=_SCHEDULE),
    "actor_train.training_args.warmup_steps": _same("trainer.warmup_steps"),
    "actor_train.training_args.weight_decay": _same("trainer.weight_decay"),
    "algorithm.filter_groups.enable": _same("algorithm.dynamic_sampling"),
    "algorithm.gamma": _same("critic.gamma"),
    "algorithm.kl_ctrl.horizon": _same("algorithm.kl_horizon"),
    "algorithm.kl_penalty": _same("algorithm.reward_kl_form", values=_REWARD_KL),
    "algorithm.lam": _same("critic.lam"),
    "algorithm.norm_adv_by_std_in_grpo": _same("algorithm.normalise_by_std"),
    "algorithm.rollout_correction.rollout_is": _same("algorithm.importance"),
    "algorithm.rollout_correction.rollout_is_threshold": _same("algorithm.importance_high"),
    "algorithm.rollout_correction.rollout_rs": _same("algorithm.rejection"),
    "algorithm.rollout_correction.rollout_token_veto_threshold": _same("algorithm.veto"),
    "critic.cliprange_value": _same("critic.value_clip"),
    "critic.grad_clip": _same("critic.max_grad_norm"),
    "critic.model.path": _same("critic.path"),
    "critic.optim.lr": _same("critic.lr"),
    "critic.optim.lr_warmup_steps": _same("critic.warmup_steps"),
    "data.max_prompt_length": _same("data.max_prompt_tokens"),
    "data.max_response_length": _same("rollout.max_new_tokens"),
    "data.prompt_key": _same("data.map.prompt"),
    "data.response_key": _same("data.map.response"),
    "data.seed": _same("run.seed"),
    "data.train_batch_size": _same("rollout.groups_per_step"),
    "data.train_files": _same("data.train"),
    "data.train_max_samples": _same("data.max_samples"),
    "data.val_files": _same("data.eval"),
    "model.enable_gradient_checkpointing": _same("model.gradient_checkpointing"),
    "model.lora_alpha": _same("model.lora.alpha"),
    "model.lora_rank": _same("model.lora.rank"),
    "model.partial_pretrain": _same("model.path"),
    "model.target_modules": _same("model.lora.targets", values=_LINEAR),
    "optim.lr": _same("trainer.lr"),
    "reward_model.overlong_buffer.penalty_factor": _same("algorithm.overlong_factor"),
    "trainer.critic_warmup": _same("critic.head_start_steps"),
    "trainer.experiment_name": _same("run.id"),
    "trainer.max_actor_ckpt_to_keep": _same("trainer.keep_checkpoints"),
    "trainer.save_freq": _same("trainer.checkpoint_every"),
    "trainer.test_freq": _same("eval.every"),
    "trainer.total_training_steps": _same("trainer.steps"),
    "trainer.val_before_train": _same("eval.at_start"),
    "advantage_clip": _same("algorithm.advantage_clip"),
    "critic_warmup": _same("critic.head_start_steps"),
    "delta": _same("algorithm.dual_clip"),
    "difficulty_loss_weight": _same("algorithm.difficulty_weight"),
    "drop_zero_advantage": _same("algorithm.drop_zero_advantage"),
    "entropy_loss_coef": _same("algorithm.entropy_coefficient"),
    "eval_steps": _same("eval.every"),
    "exp_name": _same("run.id"),
    "gamma": _same("critic.gamma"),
    "gradient_checkpointing": _same("model.gradient_checkpointing"),
    "importance_weight_cap_ratio": _same("algorithm.age_band_cap"),
    "kl_horizon": _same("algorithm.kl_horizon"),
    "kl_loss_type": _same("algorithm.kl_form", values=_KL),
    "kl_penalty": _same("algorithm.reward_kl_form", values=_REWARD_KL),
    "lambd": _same("critic.lam"),
    "learning_rate": _same("trainer.lr"),
    "length_loss_weight": _same("algorithm.length_weight"),
    "lora_alpha": _same("model.lora.alpha"),
    "lora_dropout": _same("model.lora.dropout"),
    "lora_r": _same("model.lora.rank"),
    "lora_rank": _same("model.lora.rank"),
    "lora_target_modules": _same("model.lora.targets", values=_LINEAR),
    "loss_agg_mode": _same("algorithm.aggregation"),
    "loss_calculater": _same("algorithm.name"),
    "lr": _same("trainer.lr"),
    "lr_scheduler_type": _same("trainer.schedule", values=_SCHEDULE),
    "mask_truncated_completions": _same("algorithm.mask_truncated"),
    "max_completion_length": _same("rollout.max_new_tokens"),
    "max_grad_norm": _same("trainer.max_grad_norm"),
    "max_new_tokens": _same("rollout.max_new_tokens"),
    "max_prompt_length": _same("data.max_prompt_tokens"),
    "max_prompt_tokens": _same("data.max_prompt_tokens"),
    "max_response_length": _same("rollout.max_new_tokens"),
    "max_samples": _same("data.max_samples"),
    "max_steps": _same("trainer.steps"),
    "max_trained_count": _same("algorithm.max_trained_count"),
    "minimal_advantage": _same("algorithm.minimal_advantage"),
    "model_name": _same("model.path"),
    "model_name_or_path": _same("model.path"),
    "norm_adv_by_std": _same("algorithm.normalise_by_std"),
    "num_generations": _same("rollout.group_size"),
    "num_return_sequences_in_group": _same("rollout.group_size"),
    "off_policy_mask_threshold": _same("algorithm.opsm_delta"),
    "out_of_date_decay": _same("algorithm.age_band_decay"),
    "pg_clip": _same("algorithm.clip_low", "algorithm.clip_high"),
    "pretrain": _same("model.path"),
    "prompt_length": _same("data.max_prompt_tokens"),
    "response_length": _same("rollout.max_new_tokens"),
    "retrained_interval": _same("algorithm.retrained_interval"),
    "reward_clip": _same("algorithm.reward_clip"),
    "reward_norm": _same("algorithm.reward_norm"),
    "rollout_batch_size": _same("rollout.groups_per_step"),
    "rollout_n": _same("rollout.group_size"),
    "run_name": _same("run.id"),
    "save_steps": _same("trainer.checkpoint_every"),
    "seed": _same("run.seed"),
    "sft_loss_coef": _same("algorithm.sft_coefficient"),
    "skip_non_positive_advantage": _same("algorithm.skip_non_positive_advantage"),
    "target_kl": _same("algorithm.kl_target"),
    "temperature": _same("rollout.temperature"),
    "train_batch_size": _same("rollout.groups_per_step"),
    "value_clip": _same("critic.value_clip"),
    "warmup_steps": _same("trainer.warmup_steps"),
    "whiten_advantages": _same("algorithm.whiten_advantages"),
    "whiten_rewards": _same("algorithm.whiten_rewards"),
}
