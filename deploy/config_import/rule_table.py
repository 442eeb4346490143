"""Which rule each key has, by its name, and by its system where systems differ; data.

Keys without a rule are answered by the table `protocol/config/foreign_keys.json`.
"""

from __future__ import annotations

from penstock.deploy.config_import.rules import (
    ACTOR,
    OFF,
    READ,
    REWARD_ARGUMENTS,
    ROLLOUT,
    Rule,
    aggregation,
    as_rule,
    batch_rule,
    betas,
    clip_low,
    completions_per_step,
    dual_clip_rule,
    engine,
    engine_option,
    engines,
    epochs,
    estimator,
    evaluation_freq,
    filter_overlong,
    first,
    fixed_gpus,
    gpus,
    if_on,
    is_on,
    kl_loss,
    loss_mode,
    low_high,
    method_rule,
    min_lr,
    never_rule,
    only,
    overlong,
    passes,
    positive,
    reward_argument,
    reward_code,
    reward_file,
    reward_kl,
    run_folder,
    run_name,
    save_freq,
    scale_rewards,
    scaling_rule,
    share_of_steps,
    trl_batch,
    truncation,
    unless_on,
    use_kl_loss,
    with_engine,
    with_rule,
)
from penstock.deploy.config_import.translation import decide, ignored, set_to

_PASSES = only((1,), "set only rollout.temperature: this makes the recorded log-probabilities inexact")
_RULES: dict[str, Rule] = {
    # verl
    "algorithm.adv_estimator": estimator,
    f"{ACTOR}.policy_loss.loss_mode": loss_mode,
    f"{ACTOR}.use_kl_loss": use_kl_loss,
    f"{ACTOR}.kl_loss_coef": kl_loss,
    "algorithm.use_kl_in_reward": with_rule("algorithm.kl_ctrl.kl_coef"),
    "algorithm.kl_ctrl.kl_coef": lambda given, values: (
        reward_kl(given, values) if is_on(values.get("algorithm.use_kl_in_reward")) else ignored("no KL in the reward")
    ),
    "algorithm.kl_ctrl.type": with_rule("algorithm.kl_ctrl.target_kl"),
    "algorithm.kl_ctrl.target_kl": lambda given, values: (
        set_to(algorithm__kl_target=given)
        if values.get("algorithm.kl_ctrl.type") == "adaptive"
        else ignored("the coefficient is fixed")
    ),
    "algorithm.filter_groups.metric": with_rule("algorithm.filter_groups.enable"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": as_rule("trainer.micro_batch_tokens"),
    f"{ACTOR}.ppo_mini_batch_size": with_rule("data.train_batch_size"),
    f"{ACTOR}.ppo_epochs": passes,
    f"{ACTOR}.optim.lr_warmup_steps": positive("trainer.warmup_steps", OFF),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": share_of_steps("trainer.warmup_steps"),
    "critic.optim.lr_warmup_steps_ratio": share_of_steps("critic.warmup_steps"),
    "critic.optim.lr_warmup_steps": positive("critic.warmup_steps", OFF),
    "critic.ppo_epochs": as_rule("critic.updates"),
    f"{ROLLOUT}.name": lambda given, values: set_to(worker__engine=engine(given)),
    f"{ROLLOUT}.tensor_model_parallel_size": engine_option("sglang.tp_size", "vllm.tensor_parallel_size"),
    f"{ROLLOUT}.gpu_memory_utilization": engine_option("sglang.mem_fraction_static", "vllm.gpu_memory_utilization"),
    f"{ROLLOUT}.max_model_len": engine_option("sglang.context_length", "vllm.max_model_len"),
    f"{ROLLOUT}.max_num_seqs": engine_option("sglang.max_running_requests", "vllm.max_num_seqs"),
    f"{ROLLOUT}.top_p": _PASSES,
    f"{ROLLOUT}.top_k": only((-1, 0), "set only rollout.temperature: this makes the recorded log-probabilities inexact"),
    "data.train_batch_size": batch_rule("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
    "data.filter_overlong_prompts": filter_overlong,
    "data.truncation": truncation,
    "reward_model.overlong_buffer.enable": with_rule("its length"),
    "reward_model.overlong_buffer.len": overlong,
    "custom_reward_function.path": reward_code,
    "custom_reward_function.name": with_rule("custom_reward_function.path"),
    f"{ACTOR}.strategy": only(("fsdp", "fsdp2"), "there is no other sharding than DeepSpeed's ZeRO: set trainer.zero_stage (0 to 3)"),
    "actor_rollout_ref.model.use_shm": only((False, None), "copy the model below /dev/shm and set model.path to it"),
    "reward_model.reward_manager": only(("naive",), "set reward.name, and [reward.define] for a reward of several parts"),
    "reward_model.enable": only((False, None), "serve the reward model with `python -m penstock.reward_model`; set reward.name"),
    "trainer.total_epochs": epochs,
    "trainer.total_training_steps": positive("trainer.steps", OFF),
    "trainer.n_gpus_per_node": lambda given, values: set_to(trainer__num_ranks=1) if given == 1 else gpus(given, values),
    "trainer.nnodes": lambda given, values: ignored("one machine") if given == 1 else gpus(given, values),
    "trainer.project_name": lambda given, values: (
        ignored("the run is named by trainer.experiment_name") if values.get("trainer.experiment_name") else run_name(given, values)
    ),
    "trainer.experiment_name": run_name,
    "trainer.default_local_dir": run_folder,
    "trainer.save_freq": save_freq,
    "trainer.test_freq": evaluation_freq,
    "trainer.max_actor_ckpt_to_keep": positive("trainer.keep_checkpoints", OFF),
    "trainer.resume_mode": lambda given, values: set_to(trainer__resume=str(given) != "disable"),
    # without sections
    "adv_estimator": estimator,
    "advantage_estimator": estimator,
    "use_kl_loss": use_kl_loss,
    "kl_loss_coef": kl_loss,
    "kl_coef": kl_loss,
    "init_kl_coef": reward_kl,
    "add_token_level_kl": with_rule("init_kl_coef"),
    "beta": lambda given, values: set_to(algorithm__kl_coefficient=given) if given else ignored(OFF),
    "epsilon": clip_low,
    "epsilon_high": lambda given, values: (
        ignored(f"{READ} epsilon") if "epsilon" in values else set_to(algorithm__clip_high=given)
    ),
    "epsilon_higher": with_rule("epsilon"),
    "beta1": as_rule("algorithm.beta_low"),
    "beta2": as_rule("algorithm.beta_high"),
    "num_iterations": passes,
    "ppo_epochs": passes,
    "max_epochs": passes,
    "steps_per_generation": with_rule("per_device_train_batch_size"),
    "generation_batch_size": lambda given, values: (
        ignored(f"{READ} per_device_train_batch_size")
        if "per_device_train_batch_size" in values
        else set_to(rollout__groups_per_step=max(1, given // first(values, "num_generations", default=8)))
    ),
    "num_train_epochs": epochs,
    "num_epochs": epochs,
    "total_epochs": epochs,
    "epochs": epochs,
    "num_episodes": epochs,
    "num_epoch": epochs,
    "exp_name": run_name,
    "run_name": run_name,
    "experiment_name": run_name,
    "name": run_name,
    "output_dir": run_folder,
    "resume_from_checkpoint": lambda given, values: set_to(trainer__resume=bool(given)),
    "scale_rewards": scale_rewards,
    "loss_type": aggregation,
    "importance_sampling_level": lambda given, values: (
        set_to(algorithm__name="gspo") if given == "sequence" else ignored(OFF)
    ),
    "per_device_train_batch_size": trl_batch,
    "adam_beta1": betas,
    "adam_beta2": betas,
    "warmup_ratio": share_of_steps("trainer.warmup_steps"),
    "lr_warmup_ratio": share_of_steps("trainer.warmup_steps"),
    "lr_warmup_fraction": share_of_steps("trainer.warmup_steps"),
    "max_steps": positive("trainer.steps", OFF),
    "bf16": if_on("model.dtype", "bfloat16"),
    "fp16": only((False,), 'there is no float16: set model.dtype = "bfloat16"'),
    "use_vllm": lambda given, values: (
        set_to(worker__engine="vllm") if is_on(given) and values.get("vllm_mode") != "server" else ignored(OFF)
    ),
    "vllm_gpu_memory_utilization": with_engine("vllm", "vllm.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": with_engine("vllm", "vllm.tensor_parallel_size"),
    "vllm_max_model_length": with_engine("vllm", "vllm.max_model_len"),
    "vllm_num_engines": with_engine("vllm", "vllm.engines"),
    "eval_strategy": never_rule,
    "use_peft": lambda given, values: ignored(OFF) if not is_on(given) or "lora_r" in values else set_to(model__lora__rank=16),
    "use_lora": lambda given, values: ignored(OFF) if not is_on(given) or "lora_r" in values else set_to(model__lora__rank=16),
    "dataset_name": as_rule("data.train"),
    "reward_func": reward_file,
    "custom_rm_path": reward_file,
    "model": as_rule("model.path"),
    "n_gpus": gpus,
    "top_p": _PASSES,
    "top_k": only((-1, 0, None), "set only rollout.temperature: this makes the recorded log-probabilities inexact"),
    # ROLL
    "num_gpus_per_node": gpus,
    "use_reward_scaling": scaling_rule,
    "use_reward_norm": with_rule("use_reward_scaling"),
    "reward_shift": if_on("algorithm.reward_scale", False),
    "reward_scale": if_on("algorithm.reward_shift", False),
    "dual_clip_loss": dual_clip_rule,
    "use_topr_loss": if_on("algorithm.name", "topr"),
    "grouping": with_rule("method"),
    "method": method_rule,
    "reward_normalization.grouping": with_rule("reward_normalization.method"),
    "reward_normalization.method": method_rule,
    "use_pg_clip_range": with_rule("pg_clip_low and pg_clip_high"),
    "pg_clip_low": as_rule("algorithm.clip_low"),
    "pg_clip_high": as_rule("algorithm.clip_high"),
    "actor_train.model_args.disable_gradient_checkpointing": unless_on("model.gradient_checkpointing", True),
    "actor_infer.strategy_args.strategy_name": lambda given, values: set_to(worker__engine=engine(given)),
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": with_engine("vllm", "vllm.gpu_memory_utilization"),
    "actor_infer.strategy_args.strategy_config.max_model_len": with_engine("vllm", "vllm.max_model_len"),
    "actor_infer.strategy_args.strategy_config.mem_fraction_static": with_engine("sglang", "sglang.mem_fraction_static"),
    # AgentRL
    "sync_sampling": if_on("rollout.max_staleness", 0),
    "inf_tp_size": with_engine("sglang", "sglang.tp_size"),
    "inf_ep_size": with_engine("sglang", "sglang.ep_size"),
    "inf_mem_ratio": with_engine("sglang", "sglang.mem_fraction_static"),
    "nproc_per_node": lambda given, values: (
        ignored(f"{READ} per_device_train_batch_size") if "num_generations" in values else gpus(given, values)
    ),
    # OpenRLHF and slime
    "eps_clip_low_high": low_high,
    "no_advantage_std_norm": if_on("algorithm.normalise_by_std", False),
    "disable_grpo_std_normalization": if_on("algorithm.normalise_by_std", False),
    "normalize_advantages": if_on("algorithm.whiten_advantages", True),
    "calculate_per_token_loss": if_on("algorithm.aggregation", "token-mean"),
    "param_dtype": lambda given, values: set_to(model__dtype={"bf16": "bfloat16", "fp32": "float32"}.get(given, given)),
    "actor_num_gpus_per_node": fixed_gpus,
    "actor_num_nodes": with_rule("actor_num_gpus_per_node"),
    "save_path": run_name,
    "ckpt_path": run_folder,
    "save": run_folder,
    "async_train": lambda given, values: ignored("rollouts are always asynchronous: rollout.max_staleness bounds the staleness"),
    "overlong_buffer_len": overlong,
    "min_lr": min_lr,
    "rollout_num_gpus": engines,
    "rollout_num_gpus_per_engine": with_engine("sglang", "sglang.tp_size"),
    "max_tokens_per_gpu": as_rule("trainer.micro_batch_tokens"),
    "use_tis": lambda given, values: ignored(f"{READ} tis_clip") if "tis_clip" in values else set_to(algorithm__token_tis_cap=2.0),
    "eval_prompt_data": lambda given, values: set_to(data__eval=given[1::2] if isinstance(given, list) and len(given) > 1 else given),
    "apply_chat_template": lambda given, values: set_to(data__text_prompts="chat" if is_on(given) else "plain"),
    "kl_estimator": lambda given, values: (
        set_to(algorithm__kl_form=given) if is_on(values.get("use_kl_loss")) else set_to(algorithm__reward_kl_form=given)
    ),
    "micro_train_batch_size": with_rule("trainer.micro_batch_tokens"),
    "micro_rollout_batch_size": with_rule("trainer.micro_batch_tokens"),
    "vllm_sync_backend": lambda given, values: ignored("weights travel over the object store: s3.endpoint"),
    "optimizer": lambda given, values: ignored(OFF) if "adam" in str(given).lower() else decide("the optimizer is AdamW"),
    "dataset": lambda given, values: decide("set data.train: a file, or a list of files"),
    "l2": as_rule("trainer.weight_decay"),
    "reward_model.path": lambda given, values: decide(
        f"serve it with `python -m penstock.reward_model` and the folder {given}; set reward.name"
    ),
    "vllm_mode": lambda given, values: (
        set_to(worker__engine="vllm-url", worker__engine_url=first(values, "vllm_server_base_url", default="http://127.0.0.1:8000"))
        if given == "server"
        else ignored("workers start servers of their own, on GPUs that the trainer does not use")
    ),
    "vllm_server_base_url": with_rule("vllm_mode"),
    "logging_dir": lambda given, values: ignored("everything a run writes is in its folder: run.dir"),
    "render_save_dir": lambda given, values: ignored("everything a run writes is in its folder: run.dir"),
    "model_size": lambda given, values: ignored("it is that of the folder at model.path"),
    "num_gpus": gpus,
    "batch_size": lambda given, values: (
        set_to(sft__batch_size=given) if values.get("algorithm") == "sft" else set_to(rollout__groups_per_step=given)
    ),
    "context_length": lambda given, values: (
        ignored("prompts and completions have limits of their own")
        if first(values, "max_prompt_length", "max_response_length", "max_new_tokens")
        else decide(f"set data.max_prompt_tokens and rollout.max_new_tokens, {given} together")
    ),
    "data.max_length": lambda given, values: decide(f"set data.max_prompt_tokens and rollout.max_new_tokens, {given} together"),
    "algorithm.beta": lambda given, values: decide("training on pairs of given answers is `penstock dpo`: set dpo.beta"),
}  # fmt: skip
_OF_SYSTEM: dict[str, dict[str, Rule]] = {
    "openrlhf": {
        "rollout_batch_size": batch_rule("rollout_batch_size", "train_batch_size"),
        "train_batch_size": completions_per_step,
    },
    "slime": {
        "rollout_batch_size": batch_rule("rollout_batch_size", "global_batch_size"),
        "global_batch_size": completions_per_step,
    },
    "roll": {
        "actor_train.training_args.per_device_train_batch_size": with_rule("rollout_batch_size"),
        "per_device_train_batch_size": with_rule("rollout_batch_size"),
    },
    "agentrl": {"algorithm": estimator},
}


def rule_for(system: str, key: str) -> Rule | None:
    """Return the rule of a key in a system's file; None when the tables answer for it."""
    if key.startswith(REWARD_ARGUMENTS):
        return reward_argument(key.removeprefix(REWARD_ARGUMENTS))
    return _OF_SYSTEM.get(system, {}).get(key) or _RULES.get(key)
