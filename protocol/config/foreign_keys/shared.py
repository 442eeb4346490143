"""Keys without a section that several systems have with one meaning."""

from __future__ import annotations

from penstock.protocol.config.foreign_keys.answers import KL, STEPS, Alias, taken

TAKEN: dict[str, Alias] = {
    "algorithm.ppo_epochs": taken("algorithm.epochs"),
    "clip_ratio": taken("algorithm.clip_low", "algorithm.clip_high"),
    "clip_ratio_c": taken("algorithm.dual_clip"),
    "clip_ratio_high": taken("algorithm.clip_high"),
    "clip_ratio_low": taken("algorithm.clip_low"),
    "entropy_coef": taken("algorithm.entropy_coefficient"),
    "entropy_loss_coef": taken("algorithm.entropy_coefficient"),
    "eval_steps": taken("eval.every"),
    "gamma": taken("critic.gamma"),
    "gradient_checkpointing": taken("model.gradient_checkpointing"),
    "kl_loss_type": taken("algorithm.kl_form", values=KL),
    "lambd": taken("critic.lam"),
    "learning_rate": taken("trainer.lr"),
    "lora_alpha": taken("model.lora.alpha"),
    "lora_rank": taken("model.lora.rank"),
    "loss_agg_mode": taken("algorithm.aggregation"),
    "lr": taken("trainer.lr"),
    "max_new_tokens": taken("rollout.max_new_tokens"),
    "max_prompt_length": taken("data.max_prompt_tokens"),
    "max_response_length": taken("rollout.max_new_tokens"),
    "max_samples": taken("data.max_samples"),
    "model_name": taken("model.path"),
    "model_name_or_path": taken("model.path"),
    "norm_adv_by_std": taken("algorithm.normalise_by_std"),
    "num_generations": taken("rollout.group_size"),
    "rollout_batch_size": taken("rollout.groups_per_step"),
    "rollout_n": taken("rollout.group_size"),
    "save_steps": taken("trainer.checkpoint_every"),
    "seed": taken("run.seed"),
    "stop": taken("rollout.stop", as_list=True),
    "stop_sequences": taken("rollout.stop", as_list=True),
    "stop_strings": taken("rollout.stop", as_list=True),
    "temperature": taken("rollout.temperature"),
    "train_batch_size": taken("rollout.groups_per_step"),
    "warmup_steps": taken("trainer.warmup_steps"),
    "weight_decay": taken("trainer.weight_decay"),
}

RENAMED: dict[str, str] = {
    "adv_estimator": "algorithm.name",
    "beta": "algorithm.kl_coefficient",
    "epsilon": "algorithm.clip_low",
    "init_kl_coef": "algorithm.reward_kl_coefficient",
    "kl_coef": "algorithm.kl_coefficient",
    "kl_loss_coef": "algorithm.kl_coefficient",
    "model": "model.path",
    "n": "rollout.group_size",
    "n_gpus": "trainer.num_ranks",
    "reward_func": "`penstock reward serve FILE` and its name in reward.name",
    "use_kl_loss": "algorithm.kl_coefficient (above 0: on)",
}

ABSENT: dict[str, str] = {
    "nproc_per_node": "an option of torchrun, which `penstock train` starts by itself: trainer.num_ranks",
    "nnodes": "an option of torchrun, which `penstock train` starts by itself: trainer.num_ranks",
    "node_rank": "an option of torchrun, which `penstock train` starts by itself: trainer.num_ranks",
    "master_addr": "an option of torchrun, which `penstock train` starts by itself: trainer.num_ranks",
    "master_port": "an option of torchrun, which `penstock train` starts by itself: trainer.num_ranks",
    "standalone": "an option of torchrun, which `penstock train` starts by itself: trainer.num_ranks",
    "action": "a command instead: `penstock train`, `penstock sft` or `penstock data check`",
    "batch_size": "prompts per step are rollout.groups_per_step, rows per supervised step sft.batch_size",
    "context_length": "set data.max_prompt_tokens and rollout.max_new_tokens separately",
    "dataset": "use data.train: a file or a list of files",
    "epochs": STEPS,
    "format": "the format of data rows is data.format",
    "gradient_accumulation_steps": "it follows from rollout.groups_per_step and trainer.micro_batch_tokens",
    "num_epochs": STEPS,
    "num_gpus": "trainer.num_ranks is the number of training processes",
    "per_device_train_batch_size": "micro-batches are cut by trainer.micro_batch_tokens",
    "split": "the splits are separate files: data.train and data.eval",
    "total_epochs": STEPS,
}

PREFIXES: dict[str, str] = {}
