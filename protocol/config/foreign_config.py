"""Keys of verl, ROLL, TRL and their wrappers that Penstock refuses, each with the key or setting to use instead.

For users who migrate a configuration. These keys differ in meaning or values from the key they are answered with;
keys with exactly the same meaning are accepted (`protocol/config/config_aliases.py`).
"""

from __future__ import annotations

RENAMED: dict[str, str] = {
    # verl, and what wrappers around it pass through
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_coefficient (above 0: on)",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coefficient",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "algorithm.loss",
    "algorithm.rollout_correction.rollout_rs_threshold": "algorithm.rejection_high and algorithm.rejection_low",
    "reward_model.overlong_buffer.len": "algorithm.overlong_buffer (a fraction of rollout.max_new_tokens)",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "algorithm.adv_estimator": "algorithm.name",
    "critic.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "critic.ppo_epochs": "critic.updates",
    "algorithm.use_kl_in_reward": "algorithm.reward_kl_coefficient (above 0: on)",
    "algorithm.kl_ctrl.type": "algorithm.kl_target (none: fixed; a KL: adaptive)",
    "algorithm.kl_ctrl.kl_coef": "algorithm.reward_kl_coefficient",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "algorithm.filter_groups.metric": "algorithm.dynamic_sampling (by the reward)",
    "data.filter_overlong_prompts": 'data.overlong ("drop" or "error")',
    "data.truncation": 'data.overlong ("drop" or "error")',
    "trainer.n_gpus_per_node": "trainer.num_ranks",
    "trainer.project_name": "run.id",
    "trainer.default_local_dir": "run.dir",
    "trainer.resume_mode": "trainer.resume",
    "custom_reward_function.path": "`penstock reward serve FILE` and its name in reward.name",
    # flags of the wrapper around verl, typed without a section
    "reward_func": "`penstock reward serve FILE` and its name in reward.name",
    "n_gpus": "trainer.num_ranks",
    "model": "model.path",
    # ROLL
    "output_dir": "run.dir",
    "resume_from_checkpoint": "trainer.resume",
    "dual_clip_loss": "algorithm.dual_clip (ROLL's constant is 1 + 2 x pg_clip)",
    "add_token_level_kl": "algorithm.reward_kl_coefficient (above 0: on)",
    "init_kl_coef": "algorithm.reward_kl_coefficient",
    "use_reward_scaling": 'algorithm.reward_scaling (set it to "std"; with use_reward_norm to "mean_std")',
    "use_reward_norm": 'algorithm.reward_scaling (set it to "mean_std")',
    "use_kl_loss": "algorithm.kl_coefficient (above 0: on)",
    "kl_loss_coef": "algorithm.kl_coefficient",
    "kl_coef": "algorithm.kl_coefficient",
    "use_topr_loss": 'algorithm.name (set it to "topr")',
    "reward_shift": "algorithm.reward_scale (ROLL's reward_shift is shift only: set it to false)",
    "reward_scale": "algorithm.reward_shift (ROLL's reward_scale is scale only: set it to false)",
    "grouping": 'algorithm.reward_norm (state is "group", batch is "batch", inductive is "source")',
    "method": 'algorithm.reward_norm and algorithm.asym_clip (identity is reward_norm = "none")',
    "adv_estimator": "algorithm.name",
    # TRL and AgentRL, whose flags have no sections
    "beta": "algorithm.kl_coefficient",
    "n": "rollout.group_size",
    "model.name": "model.path",
    "use_lora": "model.lora.rank (above 0: on)",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "epsilon_higher": "algorithm.clip_high (the whole upper width, not the increment over epsilon)",
    "beta1": "algorithm.beta_low",
    "beta2": "algorithm.beta_high",
    "importance_sampling_level": "algorithm.loss (sequence is gspo)",
    "loss_type": "algorithm.aggregation",
    "scale_rewards": "algorithm.normalise_by_std",
}

_OTHER_ENGINES = ("actor_train.strategy_args.", "actor_infer.strategy_args.", "reference.strategy_args.")

ABSENT: dict[str, str] = {
    # AgentRL
    "enable_sampling": "rollout workers always sample: start them with `python -m penstock.rollout_service`",
    "sync_sampling": "set rollout.max_staleness = 0: sampling then waits for every step",
    "dynamic_batching": "micro-batches are cut by trainer.micro_batch_tokens",
    "target_concurrency": "the load of an engine is set by worker.packs_in_flight and worker.max_running",
    "max_concurrent_samples_per_process": "the load of an engine is set by worker.packs_in_flight",
    "inf_tp_size": "an option of the engine; pass it to the SGLang server (sglang.extra_args)",
    "inf_ep_size": "an option of the engine; pass it to the SGLang server (sglang.extra_args)",
    "inf_mem_ratio": "an option of the engine; pass it to the SGLang server (sglang.extra_args)",
    "loss_seq_chunk_size": "logits are always computed in chunks; their size is set in trainer/learner/logprobs.py",
    "activation_offloading": "not offered; model.gradient_checkpointing saves activations by computing them again",
    "db_connection_string": "there is no database: services communicate through nats.url and s3.endpoint",
    "enable_oss": "large objects always go to the object store: s3.endpoint",
    "oss_connection_string": "large objects always go to the object store: s3.endpoint",
    "eval_strategy": "eval.every = 0 evaluates at the start and the end only",
    "strict_in_bound": "set algorithm.age_band_cap = 1.0: a band of one clip width",
    # ROLL
    "l2": "AdamW's decay: trainer.weight_decay",
    "rl_loss_coef": "the policy loss has weight 1; what is mixed in has algorithm.sft_coefficient and algorithm.kl_coefficient",
    "add_len_reward": "it does nothing in ROLL either; algorithm.overlong_buffer lowers the reward of long answers",
    "format_penalty": "part of a reward: see the built-in rewards format and think_format, or write a reward function",
    "is_use_additional_prompts": "algorithm.dynamic_sampling issues other prompts for groups with zero advantage",
    "max_additional_running_prompts": "rollout.max_staleness bounds the groups in flight; algorithm.dynamic_sampling replaces groups without a signal",
    "is_num_return_sequences_expand": "the completions of a group are always requested together: rollout.group_size",
    "generate_opt_level": "requests are always scheduled individually",
    "max_running_requests": "an option of the engine; the load of an engine is set by worker.packs_in_flight",
    "val_batch_size": "evaluation takes eval.num_prompts prompts with eval.samples completions each",
    "sequence_length": "data.max_prompt_tokens + rollout.max_new_tokens; nothing is padded to it",
    "infer_batch_size": "micro-batches are cut by trainer.micro_batch_tokens",
    "model_update_frequency": "every step is published; rollout.max_staleness bounds how old samples may be",
    "rpc_timeout": "every wait has its own deadline, such as trainer.collect_deadline_s",
    "logging_steps": "every step is logged",
    "track_with": "all metrics are in the run folder's metrics.jsonl and on the event stream",
    "tracker_kwargs": "all metrics are in the run folder's metrics.jsonl and on the event stream",
    "env_groups": "no environments are simulated here; a row is a prompt: rollout.groups_per_step",
    "group_size": "the completions per prompt are rollout.group_size; ROLL's group_size counts environments",
    "n_groups": "no environments are simulated here; a row is a prompt: rollout.groups_per_step",
    "tags": "no environments are simulated here; a row is a prompt, and its reward is named by data_source",
    "max_traj_per_env": "no environments are simulated here; algorithm.max_trained_count bounds the uses of a group",
    "worker_cls": "no environments are simulated here; rewards are services: `penstock reward serve FILE`",
    # TRL wrappers, and the training platform
    "action": "a command instead: `penstock train`, `penstock sft` or `penstock data check`",
    "format": "the format of data rows is data.format",
    "split": "the splits are separate files: data.train and data.eval",
    "dataset": "use data.train: a file or a list of files",
    "num_epochs": "the length of a run is set in optimizer steps: trainer.steps",
    "batch_size": "prompts per step are rollout.groups_per_step, rows per supervised step sft.batch_size",
    "epochs": "the length of a run is set in optimizer steps: trainer.steps",
    "stop": "not offered: a completion ends at a stop token of the model or at rollout.max_new_tokens",
    "stop_strings": "not offered: a completion ends at a stop token of the model or at rollout.max_new_tokens",
    "total_epochs": "the length of a run is set in optimizer steps: trainer.steps",
    "context_length": "set data.max_prompt_tokens and rollout.max_new_tokens separately",
    "num_gpus": "trainer.num_ranks is the number of training processes",
    "algorithm.beta": "preference losses train on given answers; this trainer samples its own (a KL: algorithm.kl_coefficient)",
    "algorithm.loss_type": "preference losses train on given answers; this trainer samples its own",
    "data.max_length": "set data.max_prompt_tokens and rollout.max_new_tokens separately",
    "reward_model.path": "a reward model is a service: `penstock reward serve FILE`, and its name in reward.name",
    "critic.ppo_mini_batch_size": "an update of the critic uses the whole batch; critic.updates sets how many there are",
    "actor_rollout_ref.model.use_remove_padding": "padding is never computed where completions can share a prompt",
    "actor_rollout_ref.rollout.mode": "rollouts are always asynchronous: rollout.max_staleness bounds the staleness",
    "actor_rollout_ref.rollout.disable_log_stats": "an option of the engine; pass it to the SGLang server (sglang.extra_args)",
    "actor_rollout_ref.rollout.prometheus.enable": "metrics are on the event stream; `penstock watch` shows them",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "not offered; trainer.zero_stage shards instead",
    "bitsandbytes": "no quantised training; model.lora.rank saves most of the optimizer's memory",
    "tp_size": "not offered: trainer.zero_stage shards the model over trainer.num_ranks",
    "pp_size": "not offered: trainer.zero_stage shards the model over trainer.num_ranks",
    "ep_size": "not offered: trainer.zero_stage shards the model over trainer.num_ranks",
    "cp_size": "not offered: trainer.zero_stage shards the model over trainer.num_ranks",
    "trainer.nnodes": "the number of nodes is an option of torchrun; trainer.num_ranks is the number of ranks",
    "trainer.logger": "all metrics are in the run folder's metrics.jsonl and on the event stream",
    "trainer.total_epochs": "the length of a run is set in optimizer steps: trainer.steps",
    "num_train_epochs": "the length of a run is set in optimizer steps: trainer.steps",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "an option of the engine; pass it to the SGLang server",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "an option of the engine; pass it to the SGLang server",
    "actor_rollout_ref.rollout.name": "the engine is set by worker.engine",
    "actor_rollout_ref.rollout.top_p": "not offered: it makes the recorded log-probabilities inexact",
    "actor_rollout_ref.rollout.top_k": "not offered: it makes the recorded log-probabilities inexact",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "one optimizer step uses all of rollout.groups_per_step",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "micro-batches are cut by trainer.micro_batch_tokens",
    "per_device_train_batch_size": "micro-batches are cut by trainer.micro_batch_tokens",
    "ppo_epochs": "one update per batch; algorithm.max_trained_count trains on a group again in a later batch",
    "actor_rollout_ref.actor.ppo_epochs": "one update per batch; algorithm.max_trained_count trains on a group again in "
    "a later batch",
    "gradient_accumulation_steps": "it follows from rollout.groups_per_step and trainer.micro_batch_tokens",
}


_INEXACT = (
    "tokens would come from another distribution than the one whose log-probabilities the engine reports and the "
    "trainer computes, which makes the importance ratio wrong; remove it (rollout.temperature is applied on both sides)"
)

# Settings of other systems that would make the training data wrong here.
REFUSED: dict[str, str] = {
    f"rollout.{name}": _INEXACT
    for name in (
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "logit_bias",
        "sampling_params",
    )
}


# Values of accepted keys that have no counterpart here.
_ABSENT_VALUES: dict[tuple[str, object], str] = {
    ("trainer.save_freq", -1): "a run is resumed from its checkpoints, so they are always made; set "
    "trainer.checkpoint_every to trainer.steps for one at the end",
}


def value_advice(dotted: str, value: object) -> str | None:
    """Return what to write instead of another project's value of a key; None for any other value."""
    return _ABSENT_VALUES.get((dotted, value)) if isinstance(value, (str, int)) else None


def advice(dotted: str) -> str | None:
    """Return what to use instead of another project's key; None for an unknown key."""
    if dotted in RENAMED:
        return f"use {RENAMED[dotted]}"
    if dotted.startswith(_OTHER_ENGINES):
        return "an option of another engine or trainer; Penstock starts SGLang and DeepSpeed with its own settings"
    return ABSENT.get(dotted)
