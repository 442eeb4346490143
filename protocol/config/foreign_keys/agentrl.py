"""Flags of AgentRL, and fields of the training platform's jobs."""

from __future__ import annotations

from penstock.protocol.config.foreign_keys.answers import METRICS, Alias, taken

TAKEN: dict[str, Alias] = {
    "eval_data_path": taken("data.eval"),
    "activation_offloading": taken("model.activation_offload"),
    "train_data_path": taken("data.train"),
    "drop_zero_advantage": taken("algorithm.drop_zero_advantage"),
    "importance_weight_cap_ratio": taken("algorithm.age_band_cap"),
    "loss_calculater": taken("algorithm.name"),
    "loss_calculator": taken("algorithm.name"),
    "max_prompt_tokens": taken("data.max_prompt_tokens"),
    "max_trained_count": taken("algorithm.max_trained_count"),
    "minimal_advantage": taken("algorithm.minimal_advantage"),
    "model_path": taken("model.path"),
    "out_of_date_decay": taken("algorithm.age_band_decay"),
    "retrained_interval": taken("algorithm.retrained_interval"),
    "skip_non_positive_advantage": taken("algorithm.skip_non_positive_advantage"),
}

RENAMED: dict[str, str] = {
    "algorithm": "algorithm.name",
    "agent_config_path": "environment.define.NAME.options (`tools` for tools; for a judge a reward endpoint, docs/rewards.md)",
    "beta1": "algorithm.beta_low",
    "beta2": "algorithm.beta_high",
    "db_name": "run.id (streams, objects and folders carry it)",
    "epsilon_higher": "algorithm.clip_high (the whole upper width, not the increment over epsilon)",
    "efficient_rewarding": "algorithm.efficiency_spread and algorithm.efficiency_failure_spread (0.2 each)",
    "eval_tasks": "data.eval",
    "max_turns": "environment.define.NAME.max_turns, see docs/tools.md",
    "min_turns": "algorithm.success_turns (leaves early successes out), or options.min_turns of [environment.define.NAME] (asks for a call)",
    "model_size": "model.path",
    "name": "run.id",
    "repetition_early_stop_times": "environment.define.NAME.options (`repeat_limit`, docs/tools.md)",
    "tool_call_parser": "environment.define.NAME.answer_format (qwen and qwen25 are hermes, llama3 is llama; mistral, deepseek, kimi_k2, plain, or your own)",
    "reward_fn": "`penstock reward serve FILE` and its name in reward.name",
}

ABSENT: dict[str, str] = {
    "training_args": "use the section [trainer]",
    "description": "a run has a name and no description: run.id",
    "cp_size": "not offered: trainer.zero_stage shards the model over trainer.num_ranks",
    "db_connection_string": "there is no database: services communicate through nats.url and s3.endpoint",
    "dynamic_batching": "micro-batches are cut by trainer.micro_batch_tokens",
    "enable_oss": "large objects always go to the object store: s3.endpoint",
    "enable_sampling": "rollout workers always sample: start them with `python -m penstock.rollout_service`",
    "ep_size": "not offered: trainer.zero_stage shards the model over trainer.num_ranks",
    "inf_context_length": "sglang.context_length, or vllm.max_model_len",
    "inf_ep_size": "SGLang's is sglang.ep_size; others: sglang.extra_args",
    "inf_max_running": "worker.max_running, sglang.max_running_requests or vllm.max_num_seqs",
    "inf_mem_ratio": "SGLang's is sglang.mem_fraction_static, vLLM's vllm.gpu_memory_utilization; others: sglang.extra_args",
    "inf_port": "a worker finds free ports for its servers",
    "inf_tp_size": "SGLang's is sglang.tp_size, vLLM's vllm.tensor_parallel_size; others: sglang.extra_args",
    "job_uuid": "run.id names a run everywhere",
    "loss_seq_chunk_size": "logits are always computed in chunks; their size is set in trainer/learner/logprobs.py",
    "max_concurrent_samples_per_process": "the load of an engine is set by worker.packs_in_flight",
    "oss_connection_string": "large objects always go to the object store: s3.endpoint",
    "platform_enabled": METRICS,
    "platform_url": METRICS,
    "pp_size": "not offered: trainer.zero_stage shards the model over trainer.num_ranks",
    "sampling_timeout": "worker.request_deadline_s",
    "strict_in_bound": "set algorithm.age_band_cap = 1.0: a band of one clip width",
    "sync_sampling": "set rollout.max_staleness = 0: sampling then waits for every step",
    "target_concurrency": "the load of an engine is set by worker.packs_in_flight and worker.max_running",
    "task_type": "a row names its reward by data_source, and its environment is rollout.environment",
    "tp_size": "not offered: trainer.zero_stage shards the model over trainer.num_ranks",
    "weight_sync_interval": "every step is published; rollout.max_staleness bounds how old samples may be",
}

PREFIXES: dict[str, str] = {}
