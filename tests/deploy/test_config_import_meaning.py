"""`penstock config import`: whole configurations, each held against a table of what its system does with them.

The configurations are the essence of public examples. The tables were worked out by hand from the code of each system, with its defaults:
each property is what the run file does, or a decision (`ASKED`: the key of the report that has it).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.console.cli.main import run
from penstock.deploy.config_show import as_document, load_all
from penstock.protocol.config.sources import leaves


class ASKED(str):
    """The key whose decision a property is part of."""


ROLL_RLVR = """
exp_name: qwen-rlvr
max_steps: 500
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 4096
adv_estimator: reinforce
gamma: 1.0
reward_clip: 10
advantage_clip: 2.0
dual_clip_loss: true
max_len_mask: true
difficulty_mask: true
whiten_advantages: true
pretrain: Qwen/Qwen2.5-7B
reward_pretrain: Qwen/Qwen2.5-7B
actor_train:
  model_args: {dtype: bf16, disable_gradient_checkpointing: false}
  training_args: {learning_rate: 1.0e-6, weight_decay: 0, per_device_train_batch_size: 1, gradient_accumulation_steps: 32, warmup_steps: 20}
  data_args: {file_name: [/d/math.jsonl, /d/code.jsonl], domain_interleave_probs: {math_rule: 0.6, code_sandbox: 0.4}}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1}}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", top_p: 0.99, temperature: 0.99, num_return_sequences: "${num_return_sequences_in_group}"}
  strategy_args: {strategy_name: vllm}
rewards:
  math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker, tag_included: [deepmath, aime], world_size: 8}
  code_sandbox: {worker_cls: roll.pipeline.rlvr.rewards.code_sandbox_reward_worker.CodeSandboxRewardWorker, tag_included: KodCode}
"""
ROLL_AGENTIC = """
exp_name: frozen
max_steps: 100
rollout_batch_size: 1024
sequence_length: 4096
prompt_length: 1024
adv_estimator: grpo
gamma: 0.95
init_kl_coef: 0.0
use_kl_loss: true
kl_loss_coef: 0.001
pretrain: Qwen/Qwen2.5-0.5B-Instruct
reward_normalization: {grouping: traj_group_id, method: mean_std}
actor_train:
  strategy_args: {strategy_name: deepspeed_train, strategy_config: "${deepspeed_zero3_cpuoffload}"}
  model_args: {dtype: bf16}
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 2, gradient_accumulation_steps: 64, lr_scheduler_type: cosine}
  device_mapping: list(range(0,4))
actor_infer:
  device_mapping: [4, 5, 6]
  generating_args: {max_new_tokens: 128, top_p: 1.0, top_k: -1, temperature: 0.99, num_return_sequences: 1}
  strategy_args: {strategy_name: vllm}
max_tokens_per_step: 64
train_env_manager: {format_penalty: -0.15, num_env_groups: 128, group_size: 8, tags: [FrozenLake, Pairs], num_groups_partition: [96, 32]}
val_env_manager: {num_env_groups: 64, group_size: 1, tags: [SimpleSokoban]}
custom_envs: {FrozenLake: "${custom_env.FrozenLake}", SimpleSokoban: "${custom_env.SimpleSokoban}", Pairs: "${mine.Pairs}"}
mine:
  Pairs: {env_type: sokoban, max_steps: 20, use_thread_lock: true, env_manager_cls: a.b.TrajEnvManager, agent_system_template: Push.,
    env_config: {dim_room: [8, 8], num_boxes: 2, format_penalty: -0.2, grid_lookup: {0: W}}}
"""
TRL_GRPO = json.dumps({
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "dataset_name": "/d/train.parquet", "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4, "num_processes": 4, "num_generations": 16, "max_completion_length": 1024, "max_steps": 300,
    "learning_rate": 2e-6, "steps_per_generation": 8, "loss_type": "dr_grpo", "scale_rewards": "none", "top_p": 0.9,
    "reward_funcs": ["my/rewards.py:correct", "think_format_reward"], "reward_weights": [1.0, 0.2], "epsilon_high": 0.28, "epsilon": 0.2,
})  # fmt: skip
SLIME = """
ROLLOUT_ARGS=(--prompt-data /d/dapo.jsonl --input-key prompt --label-key label --apply-chat-template --rollout-shuffle --num-rollout 3000
  --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-temperature 0.8 --global-batch-size 128)
GRPO_ARGS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl --eps-clip 0.2 --eps-clip-high 0.28)
python3 train.py --hf-checkpoint /m/Qwen3-4B ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]} --rm-type deepscaler --rollout-top-p 0.95 --lr 1e-6 \\
  --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --actor-num-gpus-per-node 4
"""
OPENRLHF = """
python3 -m openrlhf.cli.train_ppo_ray --pretrain /m --prompt_data /d/p.jsonl --input_key question --label_key answer --rollout_batch_size 128 \\
  --n_samples_per_prompt 8 --generate_max_len 1024 --prompt_max_len 512 --advantage_estimator group_norm --init_kl_coef 1e-3 \\
  --use_kl_loss --kl_estimator k3 --actor_learning_rate 5e-7 --remote_rm_url http://h:5000/score --reward_pretrain /rm --gamma 0.99 --use_wandb secretkey
"""
AGENTRL = """
torchrun --nproc_per_node 8 src/main.py --model_name_or_path /m --loss_calculater GRPO --beta1 0.5 --beta2 0.8 --epsilon 0.2 \\
  --optim_args 'beta1=0.9,beta2=0.98' --num_generations 8 --max_new_tokens 512 --per_device_train_batch_size 1 \\
  --gradient_accumulation_steps 8 --tp_size 4 --cp_size 2 --learning_rate 1e-6 --strict_in_bound true --train_file /d/tasks.jsonl
"""
OPENRLHF_2026 = """
python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path /m --data.prompt_dataset /d/p.jsonl --data.label_key answer --rollout.batch_size 128 \\
  --rollout.n_samples_per_prompt 8 --train.batch_size 256 --data.max_len 4096 --algo.advantage.estimator group_norm --algo.kl.init_coef 1e-3 \\
  --algo.kl.use_loss --algo.kl.estimator k3 --actor.adam.lr 5e-7 --actor.eps_clip_low_high 0.2 0.27 --reward.remote_url /r/reward.py \\
  --logger.tensorboard_dir $(hostname)/runs --train.dynamic_batch_enable --train.max_tokens_per_gpu 32768 --reward.stop_properly_penalty_coef 0.0 \\
  --algo.dynamic_filtering_enable --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop --vllm.num_engines 4 --ds.zero_stage 3
"""
ROLL_SFT = """
exp_name: sft
pretrain: Qwen/Qwen2.5-7B
sequence_length: 2048
prompt_key: instruction
query_key: input
response_key: answer
sft_train:
  model_args: {dtype: bf16}
  training_args: {num_train_epochs: 2, per_device_train_batch_size: 2, gradient_accumulation_steps: 16, learning_rate: 5.0e-6}
  data_args: {file_name: /d/code.json, template: qwen2_5}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-4B
stage: dpo
finetuning_type: lora
lora_target: all
pref_beta: 0.2
pref_loss: ipo
dataset: mine
template: qwen3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
deepspeed: examples/deepspeed/ds_z3_config.json
bf16: true
"""

TRL_SFT = """
accelerate launch --num_processes 8 examples/scripts/sft_gpt_oss.py --model_name_or_path /m --dataset_name /d/x --packing --max_length 4096 \\
  --per_device_train_batch_size 2 --num_train_epochs 1 --warmup_steps 0.03 --lr_scheduler_type cosine_with_min_lr --dtype bfloat16 \\
  --lr_scheduler_kwargs '{"min_lr_rate": 0.2}' --eval_strategy steps --eval_steps 50
"""
TRL_ALONE = """
accelerate launch examples/scripts/rloo.py --model_name_or_path /m --dataset_name /d/x --normalize_advantages --num_ppo_epochs 4 --stop_token eos \\
  --per_device_train_batch_size 8 --reward_funcs a.py:f --gradient_accumulation_steps 2 --weight_decay 0.1
"""
AGENTRL_SFT = """
torchrun --nproc_per_node=4 src/main.py --model_name_or_path /m --enable_sampling false --loss_calculater CrossEntropy --train_file /d/x.jsonl \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --learning_rate 2e-5 --num_train_epochs 2 --lr_scheduler_type cosine --max_grad_norm 0.5
"""
SLIME_REPO = """
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
WORK=$(pwd)
CUDA_VISIBLE_DEVICES=7 python3 -m sglang.launch_server --model-path /teacher --tp 1 --mem-fraction-static 0.6 &
source "/elsewhere/scripts/models/qwen3-4B.sh"
ARGS=(--prompt-data ${WORK}/d.jsonl --label-key label --num-rollout 30 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64)
python3 train.py --hf-checkpoint /m/Qwen3-4B --ref-load /x/Other_torch_dist --use-kl-loss --kl-loss-coef 0.01 --use-tis --tis-clip 3 --tis-clip-low 0.5 \\
  --recompute-granularity full --save ${PWD}/out ${MODEL_ARGS[@]} ${ARGS[@]} --rollout-max-response-len 64 --custom-rm-path ${SCRIPT_DIR}/rm.py
"""

# name → how the file ends, its text, what its system does: setting → value, or the key that has the decision
TABLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "roll_rlvr": ("yaml", ROLL_RLVR, {
        "algorithm.name": "grpo", "algorithm.advantage": "reinforce", "algorithm.loss": "ppo_clip", "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.2, "algorithm.dual_clip": 1.4, "algorithm.aggregation": "seq-mean-token-mean",
        "rollout.groups_per_step": 64, "algorithm.minibatches": 4, "rollout.group_size": 8, "data.max_prompt_tokens": 2048,
        "rollout.max_new_tokens": 4096, "rollout.temperature": 0.99, "algorithm.reward_clip": 10.0, "algorithm.advantage_clip": 2.0,
        "algorithm.whiten_advantages": True, "algorithm.mask_truncated": True, "reward.by_source.deepmath": "math",
        "reward.by_source.aime": "math", "data.map.data_source": "tag", "trainer.steps": 500, "trainer.schedule": "linear",
        "trainer.min_lr_ratio": 0.0, "trainer.betas": [0.9, 0.999], "trainer.warmup_steps": 20, "model.dtype": "bfloat16",
        "algorithm.group_mean_range": [0.0, 1.0], "difficulty": ASKED("difficulty_mask"), "code": ASKED("rewards.code_sandbox.worker_cls"),
        "data.weights.deepmath,aime": 38, "data.weights.KodCode": 26, "top_p": ASKED("actor_infer.generating_args.top_p"),
    }),
    "roll_agentic": ("yaml", ROLL_AGENTIC, {
        "algorithm.name": "grpo", "algorithm.reward_norm": "group", "algorithm.aggregation": "seq-mean-token-mean",
        "rollout.groups_per_step": 128, "rollout.group_size": 8, "algorithm.minibatches": 2, "rollout.max_new_tokens": 128,
        "data.max_prompt_tokens": 1024, "algorithm.kl_coefficient": 0.001, "algorithm.dual_clip": "none", "trainer.schedule": "cosine", "trainer.min_lr_ratio": 0.0,
        "trainer.betas": [0.9, 0.999], "run.seed": 42, "model.dtype": "bfloat16", "trainer.steps": 100, "rollout.temperature": 0.99,
        "trainer.zero_stage": 3, "trainer.offload": "optimizer", "placement.trainer": 4, "placement.engines": 3, "gamma": ASKED("critic.gamma"), "rollout.environment": "mixture", "reward.name": "environment",
        "environment.define.FrozenLake.type": "frozen_lake", "environment.define.FrozenLake.weight": 96,
        "environment.define.FrozenLake.options.is_slippery": False, "environment.define.FrozenLake.options.hole_chance": 0.2,
        "environment.define.FrozenLake.options.format_penalty": -0.01, "environment.define.FrozenLake.max_turns": 10,
        "environment.define.FrozenLake.options.action_pattern": "<answer>(.*?)</answer>", "environment.define.FrozenLake.max_answer_tokens": 64,
        "environment.define.Pairs.type": "sokoban", "environment.define.Pairs.weight": 32, "environment.define.Pairs.options.size": 8,
        "environment.define.Pairs.options.boxes": 2, "environment.define.Pairs.options.format_penalty": -0.2,
        "environment.define.Pairs.max_turns": 20, "environment.define.Pairs.system_prompt": "Push.",
        "eval.environment": "SimpleSokoban", "environment.define.SimpleSokoban.options.size": 6,
        "drawn otherwise": ASKED("custom_envs.Pairs.env_config.grid_lookup.0"), "words": ASKED("custom_envs.FrozenLake.agent_template"),
        "data": ASKED("data.train"),
    }),
    "trl_grpo": ("json", TRL_GRPO, {
        "algorithm.name": "grpo", "algorithm.aggregation": "seq-mean-token-sum-norm", "algorithm.normalise_by_std": False,
        "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28, "algorithm.dual_clip": "none", "algorithm.kl_coefficient": 0.0,
        "rollout.groups_per_step": 16, "algorithm.minibatches": 2, "rollout.group_size": 16, "rollout.max_new_tokens": 1024,
        "rollout.temperature": 1.0, "trainer.lr": 2e-6, "trainer.schedule": "linear", "trainer.min_lr_ratio": 0.0,
        "trainer.betas": [0.9, 0.999], "trainer.weight_decay": 0.0, "trainer.steps": 300, "model.dtype": "bfloat16",
        "reward.define.trl.parts.part0.reward": "my/rewards.py:correct", "reward.define.trl.parts.part1.reward": "think_format",
        "reward.define.trl.parts.part1.weight": 0.2, "rollout.max_staleness": 0, "top_p": ASKED("top_p"),
    }),
    "slime": ("sh", SLIME, {
        "algorithm.name": "grpo", "algorithm.aggregation": "seq-mean-token-mean", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28,
        "algorithm.dual_clip": "none", "algorithm.kl_coefficient": 0.001, "algorithm.kl_form": "k3", "rollout.groups_per_step": 32,
        "algorithm.minibatches": 2, "rollout.group_size": 8, "rollout.max_new_tokens": 8192, "rollout.temperature": 0.8,
        "trainer.lr": 1e-6, "trainer.schedule": "constant", "trainer.weight_decay": 0.1, "trainer.betas": [0.9, 0.98],
        "trainer.max_grad_norm": 1.0, "model.dtype": "bfloat16", "data.text_prompts": "chat", "data.shuffle": True,
        "data.map.ground_truth": "label", "reward": ASKED("rm_type"), "top_p": ASKED("rollout_top_p"),
    }),
    "openrlhf": ("sh", OPENRLHF, {
        "algorithm.name": "grpo", "algorithm.kl_coefficient": 0.001, "algorithm.kl_form": "k3", "algorithm.reward_kl_coefficient": 0.0,
        "rollout.groups_per_step": 128, "algorithm.minibatches": 8, "rollout.group_size": 8, "rollout.max_new_tokens": 1024,
        "data.max_prompt_tokens": 512, "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2, "algorithm.dual_clip": "none",
        "algorithm.reward_clip": 10.0, "trainer.lr": 5e-7, "trainer.schedule": "cosine", "trainer.min_lr_ratio": 0.1,
        "trainer.betas": [0.9, 0.95], "trainer.epochs": 1, "model.dtype": "bfloat16", "rollout.max_staleness": 0,
        "gamma": ASKED("critic.gamma"), "reward": ASKED("remote_rm_url"), "reward model": ASKED("reward_pretrain"), "warmup": ASKED("lr_warmup_ratio"),
    }),
    "agentrl": ("sh", AGENTRL, {
        "algorithm.name": "ce_gppo", "algorithm.advantage": "rloo", "run.seed": 42, "age": ASKED("sync_sampling"), "algorithm.beta_low": 0.5, "algorithm.beta_high": 0.8, "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.3, "rollout.groups_per_step": 1, "rollout.group_size": 8, "rollout.max_new_tokens": 512,
        "trainer.betas": [0.9, 0.98], "trainer.schedule": "linear", "trainer.min_lr_ratio": 0.0, "trainer.epochs": 3.0,
        "model.dtype": "bfloat16", "model.gradient_checkpointing": True, "algorithm.drop_zero_advantage": True, "data.train": "/d/tasks.jsonl",
        "algorithm.age_band_cap": 1.0, "algorithm.age_band_decay": 0.0, "data.overlong": "error", "algorithm.min_reward_spread": 0.1,
        "balance": ASKED("balance_sample"), "reward": ASKED("reward.name"),
    }),
    "openrlhf_2026": ("sh", OPENRLHF_2026, {
        "model.path": "/m", "data.train": "/d/p.jsonl", "data.map.ground_truth": "answer", "algorithm.name": "grpo", "rollout.groups_per_step": 128,
        "rollout.group_size": 8, "algorithm.minibatches": 4, "algorithm.kl_coefficient": 1e-3, "algorithm.kl_form": "k3", "trainer.lr": 5e-7,
        "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.27, "reward.name": "/r/reward.py:reward_func", "algorithm.group_mean_range": [0.0, 1.0],
        "algorithm.importance": "token", "algorithm.importance_bound": "mask", "algorithm.importance_low": 0.5, "algorithm.importance_high": 5.0,
        "algorithm.ratio_anchor": "proximal", "vllm.engines": 4, "trainer.zero_stage": 3,
        "trainer.micro_batch_tokens": 32768, "tracker": [{"type": "tensorboard"}], "cut off": ASKED("reward.stop_properly_penalty_coef"), "lengths": ASKED("data.max_len"), "warmup": ASKED("lr_warmup_ratio"),
    }),
    "roll_sft": ("yaml", ROLL_SFT, {
        "model.path": "Qwen/Qwen2.5-7B", "data.train": "/d/code.json", "data.map.instruction": "instruction", "data.map.input": "input",
        "data.map.output": "answer", "sft.batch_size": 64, "sft.epochs": 2, "sft.lr": 5e-6, "sft.schedule": "linear", "trainer.min_lr_ratio": 0.0,
        "sft.betas": [0.9, 0.999], "trainer.weight_decay": 0.0, "trainer.max_grad_norm": 1.0, "model.dtype": "bfloat16", "run.seed": 42,
    }),
    "llamafactory": ("yaml", LLAMA_FACTORY, {
        "model.path": "Qwen/Qwen3-4B", "model.lora.rank": 8, "model.lora.alpha": 16.0, "dpo.beta": 0.2, "dpo.loss": "ipo", "dpo.batch_size": 8,
        "dpo.lr": 5e-6, "dpo.epochs": 3.0, "dpo.schedule": "cosine", "trainer.min_lr_ratio": 0.0, "dpo.betas": [0.9, 0.999], "trainer.zero_stage": 3, "model.dtype": "bfloat16",
        "run.seed": 42, "trainer.weight_decay": 0.0, "data": ASKED("dataset"), "lengths": ASKED("cutoff_len"), "warmup": ASKED("warmup_ratio"),
    }),
    "trl_sft": ("sh", TRL_SFT, {
        "sft.batch_size": 16, "sft.epochs": 1.0, "sft.lr": 2e-5, "sft.schedule": "cosine", "trainer.min_lr_ratio": 0.2, "sft.betas": [0.9, 0.999],
        "model.dtype": "bfloat16", "model.gradient_checkpointing": True, "run.seed": 42, "trainer.weight_decay": 0.0, "trainer.max_grad_norm": 1.0,
        "packed": ASKED("packing"), "whole": ASKED("assistant_only_loss"), "lengths": ASKED("max_length"), "warmup": ASKED("warmup_steps"), "held out": ASKED("sft.eval_data"),
    }),
    "trl_other_trainer": ("sh", TRL_ALONE, {
        "model.path": "/m", "data.train": "/d/x", "reward.name": "a.py:f", "trainer.weight_decay": 0.1, "trainer.betas": [0.9, 0.999], "run.seed": 42,
        "rollout.max_staleness": 0, "trainer.schedule": "linear", "trainer.min_lr_ratio": 0.0, "trainer.epochs": 3.0, "model.dtype": "bfloat16",
        "model.gradient_checkpointing": True, "trainer": ASKED("GRPOTrainer"), "batch": ASKED("per_device_train_batch_size"), "processes": ASKED("num_processes"),
    }),
    "agentrl_sft": ("sh", AGENTRL_SFT, {
        "model.path": "/m", "data.train": "/d/x.jsonl", "sft.batch_size": 64, "sft.lr": 2e-5, "sft.epochs": 2.0, "sft.schedule": "cosine",
        "trainer.min_lr_ratio": 0.0, "sft.betas": [0.9, 0.999], "trainer.max_grad_norm": 0.5, "trainer.weight_decay": 0.0, "model.dtype": "bfloat16",
        "model.gradient_checkpointing": True, "run.seed": 42, "data.overlong": "error", "sft.eval_every": 0,
    }),
    "platform_sft": ("yaml", "data: {train_files: /d/a.parquet, val_files: /d/b.parquet, prompt_key: question, response_key: answer, max_length: 4096}", {
        "data.train": "/d/a.parquet", "sft.eval_data": "/d/b.parquet", "data.map.prompt": "question", "data.map.response": "answer", "sft.epochs": 4,
        "data.overlong": "error", "sft.lr": 1e-5, "sft.batch_size": 256, "sft.schedule": "cosine", "trainer.min_lr_ratio": 0.0, "sft.betas": [0.9, 0.95],
        "model.dtype": "bfloat16", "model.gradient_checkpointing": True, "run.seed": 1, "model": ASKED("model.path"), "warmup": ASKED("optim.lr_warmup_steps_ratio"),
    }),
    "platform_dpo": ("yaml", "{model: {path: /m}, data: {train_files: /d/a.parquet}, algorithm: {beta: 0.2, loss_type: hinge}, optim: {lr: 5.0e-7}}", {
        "model.path": "/m", "data.train": "/d/a.parquet", "dpo.beta": 0.2, "dpo.loss": "hinge", "dpo.lr": 5e-7, "dpo.reference_path": "none",
        "dpo.label_smoothing": 0.0, "dpo.divergence": "reverse_kl", "dpo.weighting": "none", "dpo.eval_every": 0, "model.lora.rank": 0,
        "dpo.length_alpha": "none", "dpo.loss_weights": [], "dpo.early_stop": 0, "dpo.checkpoint_every": 0,
    }),
    "slime_repo": ("sh", SLIME_REPO, {
        "model.path": "/m/Qwen3-4B", "data.train": "d.jsonl", "run.dir": "out", "model.gradient_checkpointing": True, "algorithm.minibatches": 4,
        "algorithm.importance": "token", "algorithm.importance_bound": "clip", "algorithm.importance_low": 0.5, "algorithm.importance_high": 3.0,
        "algorithm.ratio_anchor": "proximal", "algorithm.kl_coefficient": 0.01, "algorithm.kl_form": "k1", "algorithm.reference_path": "none",
        "rollout.groups_per_step": 32, "rollout.group_size": 8, "reference": ASKED("ref_load"), "reward": ASKED("custom_rm_path"),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_a_run_file_does_what_its_source_does_or_asks(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every property of the table is equal in the run file or a decision of the report, and nothing is done with exit code 0."""
    suffix, text, table = TABLE[name]
    assert len(table) >= 15
    file, to = tmp_path / f"a.{suffix}", tmp_path / "run.toml"
    file.write_text(text)
    code = run(["config", "import", str(file), "--to", str(to), "--json"])
    report = json.loads(capsys.readouterr().out)
    asked = {line["key"] for line in report["keys"] if line["kind"] in ("decide", "unknown")}
    effective = {".".join(path): value for path, value in leaves(as_document(load_all([to], [], {}))["settings"])}
    done = {key: ASKED(value) if isinstance(value, ASKED) else effective.get(key) for key, value in table.items()}
    expected = {key: value if value != "none" else None for key, value in table.items()}
    assert {key: None if value == "none" else value for key, value in done.items()} == expected
    assert {value for value in table.values() if isinstance(value, ASKED)} <= asked
    assert code == (1 if asked else 0)


REFUSED = {
    "rollout.group_size": "{pretrain: /m, rollout_batch_size: 64, num_return_sequences_in_group: 1, adv_estimator: grpo}",
    "critic.gamma": "{pretrain: /m, rollout_batch_size: 64, num_return_sequences_in_group: 8, adv_estimator: grpo, gamma: 0.99, lambd: 0.95}",
    "algorithm.kl_target": "{pretrain: /m, rollout_batch_size: 8, num_return_sequences_in_group: 8, adv_estimator: grpo, "
    "add_token_level_kl: true, init_kl_coef: 0.1, target_kl: 0.1, use_kl_loss: true, kl_loss_coef: 0.01}",
}


@pytest.mark.parametrize("subject", REFUSED)
def test_what_decides_a_run_is_never_left_out(subject: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused combination is a decision on the option that is refused; algorithm and group stay as the source has them."""
    file = tmp_path / "a.yaml"
    file.write_text(REFUSED[subject])
    assert run(["config", "import", str(file), "--to", str(tmp_path / "run.toml"), "--json", "--from", "roll"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert subject in {line["key"] for line in report["keys"] if line["kind"] == "decide"}
    assert report["settings"]["algorithm.name"] == "grpo"
    assert report["settings"]["rollout.group_size"] == (1 if subject == "rollout.group_size" else 8)


def test_the_files_of_a_hydra_configuration_are_read_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ``defaults`` name beside a file is under it, in their packages; a file elsewhere is not read, and its name stays a decision."""
    (tmp_path / "secret.yaml").write_text("seed: 7\n")
    examples, shared = tmp_path / "roll" / "examples", tmp_path / "roll" / "config"
    for folder in (examples, shared):
        folder.mkdir(parents=True)
    (shared / "envs.yaml").write_text(
        "steps: 12\nlimit: 99\nrunner: null\nunused: 1\ngame: {GuessTheNumber: {env_type: 'game:GuessTheNumber-v0', max_steps: '${steps}', "
        "agent_runner_cls: '${runner}', env_config: {max_number: 20}}, Other: {env_type: webshop}}\n"
    )
    (shared / "zero.yaml").write_text("zero_optimization: {stage: 3}\n")
    file, to = examples / "a.yaml", tmp_path / "run.toml"
    file.write_text(
        "defaults: [../config/envs@_here_, ../config/zero@deepspeed_zero3, ../../secret@_here_, _self_]\nexp_name: x\nsteps: 9\n"
        "rollout_batch_size: 8\nadv_estimator: step_reinforce\nreward_normalization: {grouping: batch, method: mean_std}\n"
        "train_env_manager: {group_size: 1, tags: [GuessTheNumber], generating_args: {max_new_tokens: 64, top_p: 1.0}}\n"
        "custom_envs: {GuessTheNumber: '${game.GuessTheNumber}'}\n"
        "actor_train: {strategy_args: {strategy_name: deepspeed_train, strategy_config: '${deepspeed_zero3}'}}\n"
    )
    assert run(["config", "import", str(file), "--to", str(to), "--json", "--from", "roll"]) == 1
    report = json.loads(capsys.readouterr().out)
    done, asked = (
        report["settings"],
        {line["key"]: line["value"] for line in report["keys"] if line["kind"] in ("decide", "unknown")},
    )
    game = "environment.define.GuessTheNumber"
    assert {key: done[key] for key in done if key.startswith(game)} == {
        f"{game}.type": "gem", f"{game}.options.id": "game:GuessTheNumber-v0", f"{game}.options.make.max_number": 20, f"{game}.max_turns": 9,
    }  # fmt: skip
    assert (done["rollout.group_size"], done["algorithm.turn_baseline"], done["trainer.zero_stage"]) == (1, "batch", 3)
    assert (done["run.seed"], done["rollout.max_new_tokens"]) == (42, 64)
    assert asked["defaults"] == ["../../secret@_here_"]
    assert not [key for key in asked if key.startswith(("game.", "deepspeed_zero3", "unused", "limit", "steps"))]
