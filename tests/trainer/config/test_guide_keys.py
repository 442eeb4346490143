"""Every key of five other projects' guides: accepted if its meaning is the same, otherwise refused with the right key."""

from __future__ import annotations

import re

import pytest

from penstock.protocol.config.foreign_config import ABSENT, ALIASES, REFUSED, RENAMED
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.settings import TrainerSettings

# key = value  ->  the setting it sets; several keys if it needs the others
TAKEN = """
AgentRL
model_name_or_path=m -> model.path=m
loss_calculater=GRPO -> algorithm.name=grpo
loss_calculater=GSPO -> algorithm.name=gspo
loss_calculater=MINIRL -> algorithm.name=minirl
loss_calculater=CISPO -> algorithm.name=cispo
num_generations=16 -> rollout.group_size=16
max_new_tokens=8192 -> rollout.max_new_tokens=8192
max_prompt_tokens=512 -> data.max_prompt_tokens=512
learning_rate=1e-6 -> trainer.lr=1e-06
save_steps=500 -> trainer.checkpoint_every=500
activation_offloading=true model.gradient_checkpointing=true -> model.activation_offload=True
importance_weight_cap_ratio=4.0 -> algorithm.age_band_cap=4.0
drop_zero_advantage=true -> algorithm.drop_zero_advantage=True
skip_non_positive_advantage=true -> algorithm.skip_non_positive_advantage=True
minimal_advantage=0.1 -> algorithm.minimal_advantage=0.1
max_trained_count=2 -> algorithm.max_trained_count=2
HelloAgents
model_name=m -> model.path=m
max_samples=500 -> data.max_samples=500
lora_r=16 -> model.lora.rank=16
gradient_checkpointing=true -> model.gradient_checkpointing=True
learning_rate=5e-5 -> trainer.lr=5e-05
mask_truncated_completions=true -> algorithm.mask_truncated=True
num_iterations=4 -> algorithm.epochs=4
off_policy_mask_threshold=0.5 -> algorithm.opsm_delta=0.5
delta=2.0 -> algorithm.dual_clip=2.0
lr_scheduler_type=constant_with_warmup -> trainer.schedule=constant
verl GRPO guide
rollout_n=5 -> rollout.group_size=5
norm_adv_by_std=false -> algorithm.normalise_by_std=False
train_batch_size=256 -> rollout.groups_per_step=256
max_response_length=1024 -> rollout.max_new_tokens=1024
lr=5e-7 -> trainer.lr=5e-07
actor_rollout_ref.actor.ppo_epochs=2 -> algorithm.epochs=2
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm -> algorithm.aggregation=seq-mean-token-sum-norm
actor_rollout_ref.model.lora_rank=8 -> model.lora.rank=8
ROLL
exp_name=sokoban -> run.id=sokoban
seed=42 -> run.seed=42
max_steps=1024 -> trainer.steps=1024
save_steps=100 -> trainer.checkpoint_every=100
rollout_batch_size=64 -> rollout.groups_per_step=64
ppo_epochs=2 -> algorithm.epochs=2
prompt_length=2048 -> data.max_prompt_tokens=2048
response_length=4096 -> rollout.max_new_tokens=4096
num_return_sequences_in_group=8 -> rollout.group_size=8
max_grad_norm=1.0 -> trainer.max_grad_norm=1.0
reward_clip=5.0 -> algorithm.reward_clip=5.0
reward_norm=group -> algorithm.reward_norm=group
reward_norm=running -> algorithm.reward_norm=running
reward_norm=none -> algorithm.reward_norm=none
whiten_advantages=true -> algorithm.whiten_advantages=True
advantage_clip=2.0 -> algorithm.advantage_clip=2.0
difficulty_loss_weight=true -> algorithm.difficulty_weight=True
length_loss_weight=true -> algorithm.length_weight=True
entropy_loss_coef=0.01 -> algorithm.entropy_coefficient=0.01
sft_loss_coef=0.1 -> algorithm.sft_coefficient=0.1
pg_clip=0.3 -> algorithm.clip_low=0.3
pg_clip=0.3 -> algorithm.clip_high=0.3
loss_agg_mode=token-mean -> algorithm.aggregation=token-mean
loss_agg_mode=seq-mean-token-sum -> algorithm.aggregation=seq-mean-token-sum
loss_agg_mode=seq-mean-token-mean -> algorithm.aggregation=seq-mean-token-mean
lambd=0.9 algorithm.name=ppo -> critic.lam=0.9
gamma=0.99 algorithm.name=ppo -> critic.gamma=0.99
value_clip=0.2 algorithm.name=ppo critic.updates=2 -> critic.value_clip=0.2
critic_warmup=5 algorithm.name=ppo -> critic.head_start_steps=5
whiten_rewards=true algorithm.name=ppo -> algorithm.whiten_rewards=True
kl_penalty=kl algorithm.reward_kl_coefficient=0.1 -> algorithm.reward_kl_form=k1
kl_penalty=abs algorithm.reward_kl_coefficient=0.1 -> algorithm.reward_kl_form=abs
kl_penalty=mse algorithm.reward_kl_coefficient=0.1 -> algorithm.reward_kl_form=k2
kl_penalty=full algorithm.reward_kl_coefficient=0.1 -> algorithm.reward_kl_form=full
target_kl=0.1 algorithm.reward_kl_coefficient=0.1 -> algorithm.kl_target=0.1
kl_horizon=500 algorithm.reward_kl_coefficient=0.1 algorithm.kl_target=0.1 -> algorithm.kl_horizon=500
actor_train.model_args.dtype=bf16 -> model.dtype=bfloat16
actor_train.training_args.learning_rate=1e-6 -> trainer.lr=1e-06
actor_train.training_args.weight_decay=0.1 -> trainer.weight_decay=0.1
actor_train.training_args.warmup_steps=20 -> trainer.warmup_steps=20
actor_train.data_args.prompt=instruction -> data.map.prompt=instruction
actor_train.data_args.messages=chat -> data.map.messages=chat
actor_infer.generating_args.max_new_tokens=128 -> rollout.max_new_tokens=128
actor_infer.generating_args.temperature=0.99 -> rollout.temperature=0.99
platform
data.train_files=t.parquet -> data.train=t.parquet
data.val_files=v.parquet -> data.eval=v.parquet
data.train_batch_size=1024 -> rollout.groups_per_step=1024
data.max_prompt_length=512 -> data.max_prompt_tokens=512
data.max_response_length=1024 -> rollout.max_new_tokens=1024
data.prompt_key=question -> data.map.prompt=question
data.response_key=answer -> data.map.response=answer
actor_rollout_ref.rollout.n=5 -> rollout.group_size=5
actor_rollout_ref.rollout.temperature=0.7 -> rollout.temperature=0.7
actor_rollout_ref.model.path=m -> model.path=m
actor_rollout_ref.model.enable_gradient_checkpointing=true -> model.gradient_checkpointing=True
actor_rollout_ref.actor.optim.lr=1e-6 -> trainer.lr=1e-06
actor_rollout_ref.actor.kl_loss_type=low_var_kl algorithm.kl_coefficient=0.001 -> algorithm.kl_form=k3
actor_rollout_ref.ref.fsdp_config.param_offload=true algorithm.kl_coefficient=0.001 -> algorithm.reference_device=parked
actor_rollout_ref.actor.clip_ratio=0.1 -> algorithm.clip_high=0.1
actor_rollout_ref.actor.clip_ratio_high=0.28 -> algorithm.clip_high=0.28
actor_rollout_ref.actor.clip_ratio_c=3.0 -> algorithm.dual_clip=3.0
algorithm.gamma=0.9 algorithm.name=ppo -> critic.gamma=0.9
algorithm.lam=0.9 algorithm.name=ppo -> critic.lam=0.9
critic.model.path=c algorithm.name=ppo -> critic.path=c
trainer.critic_warmup=0 -> critic.head_start_steps=0
trainer.save_freq=20 -> trainer.checkpoint_every=20
trainer.experiment_name=qwen25 -> run.id=qwen25
model.partial_pretrain=m -> model.path=m
model.lora_rank=32 -> model.lora.rank=32
model.enable_gradient_checkpointing=true -> model.gradient_checkpointing=True
optim.lr=5e-7 -> trainer.lr=5e-07
"""

# key -> a piece of the answer
ANSWERED = """
AgentRL
enable_sampling: rollout workers always sample
sync_sampling: rollout.max_staleness = 0
dynamic_batching: trainer.micro_batch_tokens
target_concurrency: worker.packs_in_flight
max_concurrent_samples_per_process: worker.packs_in_flight
tp_size: trainer.zero_stage
pp_size: trainer.zero_stage
ep_size: trainer.zero_stage
cp_size: trainer.zero_stage
inf_tp_size: sglang.extra_args
inf_ep_size: sglang.extra_args
inf_mem_ratio: sglang.extra_args
epsilon: algorithm.clip_low
epsilon_higher: not the increment
beta1: algorithm.beta_low
beta2: algorithm.beta_high
loss_seq_chunk_size: in chunks
db_connection_string: nats.url
enable_oss: s3.endpoint
oss_connection_string: s3.endpoint
per_device_train_batch_size: trainer.micro_batch_tokens
gradient_accumulation_steps: rollout.groups_per_step
eval_strategy: eval.every
output_dir: run.dir
HelloAgents
action: penstock train
format: data.format
split: data.train
dataset: data.train
batch_size: rollout.groups_per_step
use_lora: model.lora.rank
bitsandbytes: model.lora.rank
epsilon_high: algorithm.clip_high
scale_rewards: algorithm.normalise_by_std
loss_type: algorithm.aggregation
verl GRPO guide
use_kl_loss: algorithm.kl_coefficient
kl_loss_coef: algorithm.kl_coefficient
kl_coef: algorithm.kl_coefficient
reward_func: reward.name
n_gpus: trainer.num_ranks
ROLL
rpc_timeout: trainer.collect_deadline_s
tracker_kwargs: [tracking]
logging_steps: every step
resume_from_checkpoint: trainer.resume
val_batch_size: eval.num_prompts
sequence_length: data.max_prompt_tokens
generate_opt_level: scheduled
is_num_return_sequences_expand: rollout.group_size
max_running_requests: worker.packs_in_flight
is_use_additional_prompts: algorithm.dynamic_sampling
max_additional_running_prompts: algorithm.dynamic_sampling
l2: trainer.weight_decay
init_kl_coef: algorithm.reward_kl_coefficient
use_reward_scaling: algorithm.reward_scaling
use_reward_norm: algorithm.reward_scaling
add_len_reward: algorithm.overlong_buffer
reward_shift: shift only
reward_scale: scale only
add_token_level_kl: algorithm.reward_kl_coefficient
use_topr_loss: algorithm.name
rl_loss_coef: weight 1
dual_clip_loss: algorithm.dual_clip
grouping: algorithm.reward_norm
method: algorithm.asym_clip
env_groups: rollout.groups_per_step
group_size: rollout.group_size
tags: data_source
n_groups: rollout.groups_per_step
max_traj_per_env: algorithm.max_trained_count
format_penalty: think_format
worker_cls: penstock reward serve
infer_batch_size: trainer.micro_batch_tokens
model_update_frequency: rollout.max_staleness
actor_train.strategy_args.strategy_config.tensor_model_parallel_size: its own settings
actor_infer.strategy_args.strategy_config.gpu_memory_utilization: its own settings
platform
algorithm.beta: given answers
algorithm.loss_type: given answers
algorithm.use_kl_in_reward: algorithm.reward_kl_coefficient
actor_rollout_ref.actor.use_kl_loss: algorithm.kl_coefficient
actor_rollout_ref.actor.kl_loss_coef: algorithm.kl_coefficient
actor_rollout_ref.actor.ppo_mini_batch_size: algorithm.minibatches
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: trainer.micro_batch_tokens
actor_rollout_ref.actor.fsdp_config.param_offload: trainer.offload
actor_rollout_ref.model.use_remove_padding: padding
actor_rollout_ref.rollout.name: worker.engine
actor_rollout_ref.rollout.mode: asynchronous
actor_rollout_ref.rollout.disable_log_stats: sglang.extra_args
actor_rollout_ref.rollout.prometheus.enable: penstock watch
actor_rollout_ref.rollout.tensor_model_parallel_size: SGLang
actor_rollout_ref.rollout.gpu_memory_utilization: SGLang
critic.ppo_mini_batch_size: critic.updates
data.max_length: data.max_prompt_tokens
data.filter_overlong_prompts: data.overlong
data.truncation: data.overlong
reward_model.path: reward.name
trainer.n_gpus_per_node: trainer.num_ranks
trainer.nnodes: trainer.num_ranks
trainer.project_name: run.id
trainer.test_freq=5: data.eval
context_length: rollout.max_new_tokens
trainer.save_freq=-1: trainer.checkpoint_every
trainer.experiment_name=GSM8K_exp.1: such as gsm8k-exp-1
beta=0.04: algorithm.kl_coefficient
rollout.n=8: rollout.group_size
model.name=m: model.path
num_gpus: trainer.num_ranks
"""

LARGE_MICRO_BATCH = ["trainer.micro_batch_tokens=100000"]


def _lines(table: str) -> list[str]:
    return [line for line in table.strip().splitlines() if "->" in line or ": " in line]


@pytest.mark.parametrize("line", _lines(TAKEN))
def test_a_key_with_the_same_meaning_is_accepted_with_its_origin(line: str) -> None:
    """The setting has its value, and `penstock config show` names the key that was written."""
    given, _, expected = line.partition(" -> ")
    ours, _, value = expected.partition("=")
    written = given.split()[0].partition("=")[0]
    model = [] if ours == "model.path" else ["model.path=m"]
    loaded = load(TrainerSettings, overrides=[*model, *LARGE_MICRO_BATCH, *given.split()])
    node: object = loaded.settings
    for part in ours.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    assert str(node) == value
    if value != "none":
        assert loaded.origins[ours] == f"override as {written}"


@pytest.mark.parametrize("line", _lines(ANSWERED))
def test_a_key_with_another_meaning_is_refused_with_the_right_one(line: str) -> None:
    """No key is accepted and ignored, and none is refused as an unknown key."""
    key, _, piece = line.partition(": ")
    with pytest.raises(ConfigError) as caught:
        load(TrainerSettings, overrides=["model.path=m", key if "=" in key else f"{key}=1"])
    assert piece in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_verls_never_is_an_evaluation_at_both_ends() -> None:
    """`trainer.test_freq = -1` evaluates at no step in between."""
    given = ["model.path=m", "data.eval=e.jsonl", "trainer.test_freq=-1"]
    assert load(TrainerSettings, overrides=given).settings.eval.every == 0


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("trainer.save_steps=5", "did you mean trainer.checkpoint_every?"),
        ("trainer.learning_rate=1e-4", "did you mean trainer.lr?"),
        ("rollout.num_generations=8", "did you mean rollout.group_size?"),
        ("rollout.colour=red", "known here: rollout.group_size, rollout.groups_per_step"),
        ("rollout.temprature=1.0", "did you mean rollout.temperature?"),
    ],
)
def test_a_foreign_key_in_a_section_is_answered_as_without_one(written: str, hint: str) -> None:
    """What another project writes elsewhere, or without a section, is not taken for a misspelt key that looks alike."""
    with pytest.raises(ConfigError, match=re.escape(hint)):
        load(TrainerSettings, overrides=["model.path=m", written])


def test_a_setting_that_is_given_under_two_names_is_refused() -> None:
    """A key of Penstock and its alias in one place are ambiguous."""
    with pytest.raises(ConfigError, match=r"trainer.lr is given twice, as trainer.lr and as learning_rate"):
        load(TrainerSettings, overrides=["model.path=m", "trainer.lr=1e-3", "learning_rate=1e-4"])


def test_a_value_that_does_not_exist_here_is_refused_under_both_names() -> None:
    """The error names the key of Penstock, its possible values, and the key that was written."""
    with pytest.raises(ConfigError, match=r"override as loss_agg_mode: algorithm.aggregation: expected .*token-mean"):
        load(TrainerSettings, overrides=["model.path=m", "loss_agg_mode=mean"])


def test_every_key_that_an_error_recommends_exists() -> None:
    """Accepted and recommended keys lead to existing settings."""
    sections = {**RolloutSettings.model_fields, **TrainerSettings.model_fields}
    assert not set(ALIASES) & {*RENAMED, *ABSENT, *REFUSED}
    told = [*ABSENT.values(), *RENAMED.values(), *(" ".join(alias.keys) for alias in ALIASES.values())]
    named = re.findall(
        rf"\b({'|'.join(sections)})((?:\.[a-z_]+)+)", " ".join(told).replace("metrics.jsonl", "the file")
    )
    assert len(named) > 150
    for section, rest in named:
        model = sections[section].annotation
        first, *deeper = rest.strip(".").split(".")
        assert first in model.model_fields, f"{section}{rest}"  # type: ignore[union-attr]
        if deeper and first != "map":
            assert deeper[0] in model.model_fields[first].annotation.model_fields  # type: ignore[union-attr]
