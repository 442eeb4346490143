"""The settings of the trainer, one class per section of the run file; imports no torch.

Lengths are in tokens, times in seconds, sizes of a batch in groups (one group: the
``rollout.group_size`` completions of one prompt).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from penstock.protocol.config.connection import NatsSettings, RunSettings, S3Settings, Section
from penstock.protocol.config.environment_settings import MIXTURE, EnvironmentSettings
from penstock.protocol.config.retention import RetentionSettings
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.config.teacher_settings import TeacherSettings
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import MAX_COMPLETIONS, SINGLE_TURN, Identifier, RewardName, StopStrings
from penstock.protocol.metrics.settings import MetricsSettings
from penstock.trainer.algorithm.algorithm_settings import RECORDED, AlgorithmSettings
from penstock.trainer.algorithm.corrections.m2po import m2po
from penstock.trainer.critic_settings import CriticSettings
from penstock.trainer.dpo_settings import DpoSettings
from penstock.trainer.eval_settings import ENVIRONMENT, EvalSettings
from penstock.trainer.fine_tuning_settings import (
    Beta,
    Files,
    RmSettings,
    Schedule,
    SftSettings,
    listed,
)
from penstock.trainer.lora_settings import LoraSettings
from penstock.trainer.parallel_layout import ParallelLayout

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import SigningKey, TrustedKeys

Format = Literal["auto", "verl", "trl", "messages", "flat", "question_answer", "sharegpt", "alpaca", "openrlhf"]

COLUMNS = (
    "prompt",
    "messages",
    "response",
    "ground_truth",
    "data_source",
    "extra_info",
    "reward_model",
    "question",
    "answer",
    "completion",
    "system",
    "conversations",
    "instruction",
    "input",
    "output",
    "label",
    "tools",
    "chosen",
    "rejected",
    "margin",
)
BFLOAT16_UNSHARDED = (
    "model.dtype = bfloat16 needs trainer.zero_stage >= 1: stage 0 keeps no correct float32 master weights in DeepSpeed 0.19 "
    "(measured: it drifts from a correct run); set trainer.zero_stage = 1"
)
_TEMPLATE_NAMES = {"messages", "tools", "documents", "add_generation_prompt"}  # given by Penstock


class ModelSettings(Section):
    """The policy and its numeric format."""

    path: Path = Field(
        description="Hugging Face model folder: config.json, safetensors, tokenizer, chat template; or a GGUF file, which is "
        "converted to such a folder beside it; or the id OWNER/NAME of one on the Hugging Face hub, OWNER/NAME@REVISION.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of forward and backward; float32 agrees with the embedded engine, bfloat16 suits GPUs.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Recompute activations in the backward pass: less memory, about a third more compute.",
    )
    activation_offload: bool = Field(
        default=False,
        description="Keep what gradient checkpointing holds of each layer in host memory until the backward pass; saves nothing "
        "where the CPU trains.",
    )
    lora: LoraSettings = Field(default_factory=LoraSettings, description="Low-rank adapters.")

    @model_validator(mode="after")
    def _offloads_what_is_kept(self) -> ModelSettings:
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError(
                "model.activation_offload moves what gradient checkpointing keeps, and model.gradient_checkpointing is false; "
                "set it to true"
            )
        return self


class DataSettings(Section):
    """Prompts to train and evaluate on, and how rows are read as prompts."""

    train: Files = Field(
        default=[],
        description="JSONL, JSON, CSV, Parquet or Arrow file with the training prompts, a folder of them, an id on the Hugging "
        "Face hub (OWNER/NAME, OWNER/NAME:main/train-*), or a list of these.",
    )
    eval: Files = Field(default=[], description="Held-out prompts, same forms; none: no evaluation.")
    from_run: Identifier | None = Field(
        default=None,
        description="Train on this output of `penstock rescore` instead of generating: no engine, no rewards, no evaluation; "
        "data.train and data.eval are not read.",
    )
    format: Format = Field(default="auto", description="Form of the rows; auto recognises it by the columns.")
    map: dict[str, str] = Field(
        default={}, description='Columns with other names, as expected = "actual": data.map.prompt = "instruction".'
    )
    system_prompt: str = Field(default="", description="Prepended to every prompt that has no system message.")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="Longest prompt, template included, in tokens.")
    overlong: Literal["drop", "error"] = Field(
        default="drop",
        description="Prompts above max_prompt_tokens, or too long for the model's context: drop and count them, or refuse the "
        "file.",
    )
    max_samples: int | None = Field(
        default=None,
        ge=1,
        description="Only the first training rows, for a quick try; none: all. Of data.eval: eval.num_prompts.",
    )
    text_prompts: Literal["chat", "plain"] = Field(
        default="chat",
        description="A prompt that is a text: chat makes it a user message in the model's chat template (as verl does); plain "
        "trains on the text itself (as TRL, ROLL and OpenRLHF do), also with a base model that has no template.",
    )
    template_arguments: dict[str, bool | int | float | str] = Field(
        default={}, description="Arguments of the chat template: data.template_arguments.enable_thinking = false."
    )
    use_tools: bool = Field(
        default=False, description="Give a row's column tools to the chat template; false: only the reward sees it."
    )
    answer_is_ground_truth: bool = Field(
        default=False,
        description="The answer in a row without a ground truth (last assistant message, completion, response, output) is its "
        "ground truth; false: only SFT uses it.",
    )
    self_play_reward: RewardName | None = Field(
        default=None,
        description="Reward of rows with self_play = true, which compares the completions of a group with one another, such as a "
        "judge with mode = pairwise; none: such rows are refused.",
    )
    roles: dict[str, str] = Field(
        default={}, description='Other roles of messages, as found = "meant": data.roles.bot = "assistant".'
    )
    ignore: list[str] = Field(
        default=[], description="Columns to leave out, as named in the file; no reward sees them."
    )
    shuffle: bool = Field(default=True, description="Another order in every epoch, made from run.seed alone.")

    @field_validator("map")
    @classmethod
    def _known_columns(cls, value: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(value) - set(COLUMNS))
        if unknown:
            raise ValueError(f"data.map.{unknown[0]} maps a column that is not read; use one of {', '.join(COLUMNS)}")
        return value

    @field_validator("template_arguments")
    @classmethod
    def _free_names(cls, value: dict[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
        if taken := sorted(_TEMPLATE_NAMES & value.keys()):
            raise ValueError(f"data.template_arguments.{taken[0]} is set by Penstock for every chat; leave it out")
        return value

    @model_validator(mode="after")
    def _one_reading(self) -> DataSettings:
        if both := sorted(set(self.ignore) & set(self.map.values())):
            raise ValueError(f"data.ignore leaves out {both[0]}, which data.map reads; remove it from one of them")
        if self.text_prompts == "plain" and self.system_prompt:
            raise ValueError('data.system_prompt has no place with data.text_prompts = "plain"; remove one of them')
        return self

    @property
    def least_age(self) -> int:
        """The least age of a token in versions: 1 if another run sampled it, whatever its version number."""
        return 0 if self.from_run is None else 1

    @property
    def train_files(self) -> tuple[Path, ...]:
        """The training files; raises ConfigError when there is none."""
        if not listed(self.train):
            raise ConfigError("data.train names no file; set it to the JSONL, JSON, CSV or Parquet file to train on")
        return listed(self.train)

    @property
    def eval_files(self) -> tuple[Path, ...]:
        """The held-out files; none: no evaluation."""
        return listed(self.eval)


class RolloutSettings(Section):
    """What the workers generate, and how stale it may be."""

    group_size: int = Field(default=8, ge=1, le=4096, description="Completions of one prompt; advantages compare them.")
    groups_per_step: int = Field(default=32, ge=1, description="Groups that make one optimizer step.")
    groups_per_message: int = Field(
        default=0,
        ge=0,
        description="Groups that share a message; 0 chooses by size: many tiny ones, or a single large one.",
    )
    redundant_completions: int = Field(
        default=0,
        ge=0,
        description="Completions of a prompt that are started besides group_size, so that no group waits for its longest ones: once "
        "group_size have ended, the engine aborts the rest. The first to end are the shorter ones: what is trained is biased to "
        "short completions. Not in evaluations, and only in single_turn.",
    )
    redundant_wait: float = Field(
        default=0.0,
        ge=0.0,
        le=1000.0,
        description="How much longer the rest may take, as a share of the time in which the first group_size ended: what ends by then "
        "is part of the group too, which then has group_size to group_size + redundant_completions. 0: the rest is aborted at once.",
    )
    max_staleness: int = Field(
        default=2,
        ge=0,
        description="Most versions that a sample may be behind when it is trained; 0: generation waits for every step.",
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Longest completion, in tokens.")
    temperature: float = Field(
        default=1.0,
        gt=0.0,
        le=100.0,
        description="Sampling temperature; the trainer divides its logits by it too, so that log-probabilities agree.",
    )
    stop: StopStrings = Field(
        default=(),
        description='Strings that end a completion, such as ["</answer>"], in training and evaluation; the string remains part '
        "of the completion, in its tokens and in its text. At most 16, of 200 characters.",
    )
    environment: str = Field(
        default=SINGLE_TURN,
        pattern=ENVIRONMENT,
        max_length=200,
        description="Environment that generates the trajectories, by name; one of your own must be in worker.environments. "
        "mixture: all of environment.define that have a weight, in these proportions.",
    )
    max_attempts: int = Field(
        default=2, ge=1, description="How often a group is generated at most when it is too stale to be trained."
    )

    @model_validator(mode="after")
    def _redundancy_is_possible(self) -> RolloutSettings:
        started = self.group_size + self.redundant_completions
        if started > MAX_COMPLETIONS:
            raise ValueError(
                f"rollout.group_size + rollout.redundant_completions = {started}, at most {MAX_COMPLETIONS} completions of a prompt "
                "are started; lower one of them"
            )
        if self.redundant_wait and not self.redundant_completions:
            raise ValueError(
                f"rollout.redundant_wait = {self.redundant_wait:g} does nothing without rollout.redundant_completions; set it, or "
                "leave out rollout.redundant_wait"
            )
        if self.redundant_completions and self.environment != SINGLE_TURN:
            raise ValueError(
                f"rollout.redundant_completions = {self.redundant_completions} is possible in {SINGLE_TURN} only, not in the episodes "
                f"of rollout.environment = {self.environment!r}; leave it out"
            )
        return self

    @property
    def started_completions(self) -> int:
        """Completions of a prompt that are started."""
        return self.group_size + self.redundant_completions

    @property
    def largest_group(self) -> int:
        """Most completions of a group that is trained."""
        return self.started_completions if self.redundant_wait else self.group_size

    @property
    def max_outstanding(self) -> int:
        """Most groups that may be issued and neither trained nor dropped (arXiv 2505.24298)."""
        return (self.max_staleness + 1) * self.groups_per_step


class OptimizerSettings(Section):
    """Optimizer, ranks, checkpoints, deadlines."""

    steps: int = Field(
        default=100,
        ge=1,
        description="Steps of the whole run, resumed ones included: each trains one batch and makes one version. Warm-up and "
        "schedule count them too, whatever number of optimizer steps a batch has.",
    )
    epochs: float | None = Field(
        default=None,
        gt=0.0,
        description="Passes over the rows of data.train instead of steps: the steps are counted at the start, as epochs x rows "
        "that are not left out / rollout.groups_per_step, rounded up.",
    )
    lr: float = Field(default=1e-6, gt=0.0, description="Peak learning rate of AdamW.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's decay of both moments.")
    weight_decay: float = Field(default=0.0, ge=0.0, description="AdamW's decoupled weight decay.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up from 0 to lr.")
    schedule: Schedule = Field(default="constant", description="Learning rate after the warm-up.")
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0, description="End of linear and cosine, as a share of lr.")
    max_grad_norm: float = Field(default=1.0, gt=0.0, description="Gradients are clipped to this norm.")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="ZeRO: 0 nothing sharded, 1 optimizer, 2 also gradients, 3 also parameters."
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        default="none",
        description="Held in host memory: optimizer, the master weights and states of AdamW, which steps there (ZeRO 1 to 3); "
        "parameters, also the parameters, a layer at a time on the device (ZeRO 3). Saves nothing where the CPU trains. NVMe is not "
        "offered: DeepSpeed compiles its access to it at the start, which was never run here.",
    )
    gradient_dtype: Literal["float32", "as-trained"] = Field(
        default="float32",
        description="In which gradients are summed over micro-batches and ranks with model.dtype = bfloat16; as-trained needs "
        "half the memory and drops small terms.",
    )
    num_ranks: int = Field(default=1, ge=1, description="Processes that train together, under torchrun when above 1.")
    sequence_parallel: int = Field(
        default=1,
        ge=1,
        description="Ranks that compute a micro-batch together, each a part of its tokens and, in attention, of its heads (Ulysses): "
        "for rows whose activations do not fit on one. Divides trainer.num_ranks and the model's attention heads.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Ranks that have a part of every linear layer each (AutoTP of DeepSpeed): for models of llama, qwen2 and qwen3 that "
        "ZeRO 3 alone does not fit or gathers too often. Divides trainer.num_ranks, attention heads and key heads; not with adapters.",
    )
    router_replay: bool = Field(
        default=False,
        description="For a mixture of experts: compute every token with the experts that the engine's routers chose for it, which packs "
        "then store (Rollout Routing Replay, arXiv:2510.11370). Router weights still learn, by the gates of those experts. For models "
        "of qwen3_moe on the embedded engine and SGLang, in single_turn.",
    )
    micro_batch_tokens: int = Field(
        default=16_384,
        ge=1,
        description="Most tokens of one forward and backward pass on a rank, or on those of trainer.sequence_parallel together; a "
        "prompt that completions share counts once.",
    )
    checkpoint_every: int = Field(
        default=50, ge=1, description="Steps between checkpoints; the last step makes one too."
    )
    checkpoint_every_s: float = Field(
        default=60.0,
        ge=0.0,
        description="Longest time between checkpoints besides, in s, so that a crash costs no more than this; longer where "
        "training would stand still for more than a twentieth of it, or one be written for more than half. 0: only every "
        "checkpoint_every steps.",
    )
    signing_key_file: Path | None = Field(
        default=None,
        description="Ed25519 private key in PEM form, such as the signing.key of penstock certs, which signs the manifest of every "
        "version: workers with worker.trusted_keys_file load no others.",
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints that stay on disk.")
    store_checkpoints: bool = Field(
        default=False,
        description="Copy each checkpoint to the object store before its groups are acknowledged, so that a trainer on another "
        "machine resumes the run without this folder. The store keeps as many as keep_checkpoints.",
    )
    resume: bool = Field(default=True, description="Resume from the newest checkpoint of this run id, if there is one.")
    resume_older_step: int | None = Field(
        default=None,
        ge=0,
        description="Resume from the checkpoint of this step although the run committed a newer one that is not in the "
        "folder any more, or although its state.json was altered; none: refused, because the steps since would be lost.",
    )
    lease_s: float = Field(
        default=6.0, ge=1.0, le=60.0, description="A lease that was not renewed for this long has expired, in s."
    )
    rank_deadline_s: float = Field(
        default=60.0,
        ge=1.0,
        description="Longest time for which one of several ranks may not answer while the run trains, in s: one that is "
        "suspended or blocked. Then the other ranks end, and the launcher starts all of them again.",
    )
    verify_export: bool = Field(
        default=True,
        description="Load the exported model on rank 0 and compare its log-probabilities with the trainer's, before it replaces an "
        "earlier one. Needs host memory for one more copy of the model.",
    )
    kill_at: str = Field(
        default="",
        description="For crash tests: the trainer sends itself SIGKILL at this point (trainer/crash_points.py), NAME:2 the "
        "2nd time, NAME@1 on rank 1.",
    )
    collect_deadline_s: float = Field(
        default=600.0,
        gt=0.0,
        description="Longest wait for a full batch before an error with queue depths and services alive, in s.",
    )
    oldest_patience: float = Field(
        default=3.0,
        ge=0.0,
        le=1000.0,
        description="Longest wait of a full batch for groups under way that would be too old for the next one, in durations "
        "of the last step; halved after each wait without result. Later groups are dropped and sampled again. 0: no wait.",
    )
    max_mismatch: float | None = Field(
        default=0.1,
        gt=0.0,
        description="Largest mean difference, in nats, between the engine's log-probabilities and the trainer's, of tokens "
        "that the version in training sampled; beyond it the run stops with an error. None: only reported.",
    )
    mismatch_patience: int = Field(
        default=3,
        ge=1,
        description="Consecutive comparisons beyond max_mismatch before the run stops; at the first comparison it stops at once.",
    )
    check_texts: Annotated[int, Field(ge=0)] | Literal["all"] = Field(
        default="all",
        description="Completions of each group whose text (which was scored) is compared with their decoded tokens (which are "
        "trained on); only of the environment single_turn. A number: as many, chosen at random. 0: none.",
    )
    min_entropy: float | None = Field(
        default=None,
        gt=0.0,
        description="Smallest entropy of the sampled tokens, in nats per token; below it in three steps in a row the run stops with "
        "an error, as a collapse. None: only reported.",
    )
    skip_step_above_grad_norm: float | None = Field(
        default=None,
        gt=1.0,
        description="Leave out an optimizer step whose gradient norm is above this multiple of the median of the last 64 steps' "
        "norms; its trajectories are counted as outlier_step, and a replay leaves it out too. None: every step is made. Not finite "
        "norms stop the run in any case.",
    )
    skip_step_after: int = Field(
        default=20,
        ge=1,
        le=64,
        description="Optimizer steps whose norms must be known before one is left out (trainer.skip_step_above_grad_norm).",
    )
    peak_flops: float | None = Field(
        default=None,
        gt=0.0,
        description="Peak of the device of one rank, in floating-point operations per second, for the metric mfu. None: that of a "
        "table of GPUs for model.dtype = bfloat16; no mfu for other devices and for float32.",
    )
    store_logprobs: Annotated[int, Field(ge=0)] | Literal["all"] = Field(
        default="all",
        description="Trained groups of each step of which the object store keeps the log-probability of every trained token under "
        "the policy before the step, for the ratios on the live page. A number: the first ones of the batch. Five bytes a token, "
        "at most 3 million tokens of a step, kept as long as its packs. 0: none.",
    )
    publish_dtype: Literal["as-trained", "float32", "bfloat16"] = Field(
        default="as-trained",
        description="Number format of published weights; bfloat16 halves their size and suits engines on GPUs.",
    )
    keep_versions: int = Field(
        default=8,
        ge=2,
        description="Newest published versions that can be read from the object store; see keep_best and keep_milestones.",
    )
    keep_best: int = Field(
        default=1,
        ge=0,
        le=16,
        description="Versions with the best evaluations that are kept beyond keep_versions: by eval.best_by, else by the share of "
        "correct completions, or by the mean reward where nothing says when one is correct. 0: none.",
    )
    milestone_every: int = Field(
        default=10,
        ge=1,
        description="Versions between two milestones, which are kept beyond keep_versions; doubled when there would be more "
        "than keep_milestones, so that they are spread over the whole run.",
    )
    keep_milestones: int = Field(default=3, ge=0, le=64, description="Most milestones that are kept. 0: none.")
    anchor_every: int = Field(
        default=64, ge=1, le=128, description="Most versions between two full snapshots, stored beside the patches."
    )
    anchor_ratio: float = Field(
        default=2.0,
        gt=0.0,
        description="A full snapshot is written when the patches since the last one have this multiple of its size.",
    )
    weights_grace_s: float = Field(
        default=1800.0,
        ge=0.0,
        description="How long weights are kept after the last version that needs them expired, for readers under way, in s.",
    )

    @property
    def layout(self) -> ParallelLayout:
        """How the ranks are divided."""
        return ParallelLayout(self.sequence_parallel, self.tensor_parallel)

    def signing_key(self) -> SigningKey | None:
        """Return the key that signs manifests, None when none is set; raises ConfigError when it cannot be read."""
        if self.signing_key_file is None:
            return None
        from penstock.protocol.weights.signature import SigningKey  # noqa: PLC0415  its library is needed only here

        return SigningKey.from_file(self.signing_key_file, "trainer.signing_key_file")

    def trusted_keys(self) -> TrustedKeys | None:
        """Return what every rank requires of the manifests that it reads: its own key's signature; None without a key."""
        key = self.signing_key()
        return None if key is None else key.trusted

    @model_validator(mode="after")
    def _divides_the_ranks(self) -> OptimizerSettings:
        if self.num_ranks % self.layout.ranks_of_rows:
            raise ValueError(
                f"trainer.num_ranks = {self.num_ranks} is not a multiple of {self.layout}; it counts all processes: set it to a multiple"
            )
        return self

    @model_validator(mode="after")
    def _offloads_what_is_sharded(self) -> OptimizerSettings:
        needed = {"none": 0, "optimizer": 1, "parameters": 3}[self.offload]
        if self.zero_stage < needed:
            raise ValueError(
                f"trainer.offload = {self.offload} needs trainer.zero_stage >= {needed}, got {self.zero_stage}; DeepSpeed offloads "
                f"only what its stage shards: set trainer.zero_stage = {needed}"
            )
        return self


class TrainerSettings(Section):
    """All sections of the run file that the trainer reads."""

    run: RunSettings = Field(default_factory=RunSettings)
    nats: NatsSettings = Field(default_factory=NatsSettings)
    s3: S3Settings = Field(default_factory=S3Settings)
    model: ModelSettings
    data: DataSettings = Field(default_factory=DataSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    teacher: TeacherSettings = Field(default_factory=TeacherSettings)
    environment: EnvironmentSettings = Field(default_factory=EnvironmentSettings)
    critic: CriticSettings = Field(default_factory=CriticSettings)
    trainer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    eval: EvalSettings = Field(default_factory=EvalSettings)
    sft: SftSettings = Field(default_factory=SftSettings)
    dpo: DpoSettings = Field(default_factory=DpoSettings)
    rm: RmSettings = Field(default_factory=RmSettings)
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)

    @model_validator(mode="after")
    def _consistent(self) -> TrainerSettings:
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if longest > self.trainer.micro_batch_tokens:
            raise ValueError(
                f"a trajectory may have {longest} tokens (data.max_prompt_tokens {self.data.max_prompt_tokens} + "
                f"rollout.max_new_tokens {self.rollout.max_new_tokens}), more than trainer.micro_batch_tokens = "
                f"{self.trainer.micro_batch_tokens}; raise it to at least {longest}"
            )
        if self.algorithm.minibatches > self.rollout.groups_per_step:
            raise ValueError(
                f"algorithm.minibatches = {self.algorithm.minibatches} is more than rollout.groups_per_step = "
                f"{self.rollout.groups_per_step}, and a group is never split; lower it, or raise rollout.groups_per_step"
            )
        if self.rollout.groups_per_message > self.rollout.groups_per_step:
            raise ValueError(
                f"rollout.groups_per_message = {self.rollout.groups_per_message} is more than rollout.groups_per_step"
                f" = {self.rollout.groups_per_step}; a message never spans steps: lower it, or set it to 0 (automatic)"
            )
        rows = self.rollout.groups_per_step * self.rollout.group_size
        if rows < self.trainer.num_ranks // self.trainer.layout.ranks_of_rows:
            raise ValueError(
                f"a step has {rows} trajectories (rollout.groups_per_step x rollout.group_size), fewer than "
                f"trainer.num_ranks = {self.trainer.num_ranks} can share; lower trainer.num_ranks, so that every rank has one"
            )
        interval = self.algorithm.retrained_interval
        if self.algorithm.max_trained_count > 1 and self.rollout.max_staleness < interval:
            raise ValueError(
                f"algorithm.max_trained_count = {self.algorithm.max_trained_count}: a group is {interval} version(s) older at "
                f"its next use, which rollout.max_staleness = {self.rollout.max_staleness} never allows; raise it, or set "
                "algorithm.max_trained_count = 1"
            )
        if self.trainer.keep_versions < self.rollout.max_staleness + 2:
            raise ValueError(
                f"trainer.keep_versions = {self.trainer.keep_versions} would delete weights that workers may still "
                f"fetch with rollout.max_staleness = {self.rollout.max_staleness}; "
                f"raise it to at least {self.rollout.max_staleness + 2}"
            )
        self._check_dtype()
        self._check_mixture()
        self._check_evaluation()
        self._check_critic()
        self._check_lora()
        self._check_teacher()
        self._check_pairs()
        self._check_router_replay()
        self._check_warmup()
        if self.trainer.epochs is None and (problem := self.problem_of_length()):
            raise ValueError(problem)
        if self.trainer.epochs is not None and self.data.from_run is not None:
            raise ValueError(
                f"trainer.epochs = {self.trainer.epochs:g} counts rows of data.train, and data.from_run trains on stored groups; "
                "set trainer.steps"
            )
        return self

    def _check_mixture(self) -> None:
        used = MIXTURE in (self.rollout.environment, *(self.eval.of(name).environment for name in self.evaluated))
        weights, by_source = self.environment.weights, self.environment.by_source
        if used and not weights:
            raise ValueError(
                f'rollout.environment or eval.environment = "{MIXTURE}" mixes the environments that have a weight, and none has; set '
                "environment.define.NAME.weight"
            )
        if (weights or by_source) and not used:
            name = next(iter(weights)) if weights else next(iter(by_source.values()))
            key = "weight" if weights else "data_sources"
            raise ValueError(
                f'environment.define.{name}.{key} does nothing without rollout.environment = "{MIXTURE}"; set it, or leave it out'
            )

    def problem_of_length(self) -> str:
        """Return what does not fit into ``trainer.steps`` steps; empty when all does."""
        section = self.trainer
        if section.warmup_steps > section.steps:
            return (
                f"trainer.warmup_steps = {section.warmup_steps} is more than trainer.steps = {section.steps}; lower it, so that the "
                "peak is reached"
            )
        if self.critic.head_start_steps >= section.steps:
            return (
                f"critic.head_start_steps = {self.critic.head_start_steps} leaves none of trainer.steps = {section.steps} for the "
                "policy; lower it"
            )
        return ""

    @model_validator(mode="after")
    def _stored_groups_are_not_sampled(self, info: ValidationInfo) -> TrainerSettings:
        """Refuse redundant completions where nothing is sampled; a run's record is read as it is."""
        if self.rollout.redundant_completions and self.data.from_run is not None and info.context != RECORDED:
            raise ValueError(
                "rollout.redundant_completions does nothing with data.from_run: stored groups are trained as they are; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self, info: ValidationInfo) -> TrainerSettings:
        """Refuse groups of one where advantages compare the completions of a group; a run's record is read as it is."""
        needed = self.algorithm.needs_groups
        if self.rollout.group_size == 1 and needed and self.data.from_run is None and info.context != RECORDED:
            raise ValueError(
                f"rollout.group_size = 1 with {needed}, which compares the completions of a prompt: every advantage would be "
                "0 and nothing would be learned; raise rollout.group_size, or set algorithm.name to reinforce_pp, "
                "reinforce_pp_baseline, remax or ppo"
            )
        return self

    def _check_dtype(self) -> None:
        if self.model.dtype == "bfloat16" and self.trainer.zero_stage == 0:
            raise ValueError(BFLOAT16_UNSHARDED)
        if self.model.dtype == "float32" and self.trainer.gradient_dtype == "as-trained":
            raise ValueError(
                "trainer.gradient_dtype = as-trained does nothing with model.dtype = float32; set model.dtype = bfloat16, or leave it out"
            )

    def _check_warmup(self) -> None:
        for name, section in (("sft", self.sft), ("dpo", self.dpo), ("rm", self.rm)):
            if section.epochs is None and section.warmup_steps > section.steps:
                raise ValueError(
                    f"{name}.warmup_steps is more than {name}.steps; lower it, so that the peak is reached"
                )

    def _check_evaluation(self) -> None:
        """Raise ValueError for evaluations that have no prompts or no engine, or compare what is not measured."""
        if self.eval.every and not self.evaluated:
            raise ValueError(
                f"eval.every = {self.eval.every} but data.eval names no file; set data.eval, or eval.every = 0"
            )
        if (self.eval.every or self.eval.source) and self.data.from_run:
            asked = f"eval.every = {self.eval.every}" if self.eval.every else "eval.source"
            raise ValueError(
                f"{asked} with data.from_run = {self.data.from_run}: no engine generates completions to "
                "evaluate; set eval.every = 0, and evaluate the resulting model"
            )
        best = self.eval.best(has_data_eval=bool(self.data.eval_files))
        if self.eval.early_stop and (best is None or not self.eval.of(best.source).every):
            raise ValueError(
                f"eval.early_stop = {self.eval.early_stop} compares evaluations during the run; set data.eval and eval.every too"
            )

    @property
    def evaluated(self) -> list[str]:
        """The names of the sources that are evaluated during the run; data.eval first."""
        return self.eval.names(has_data_eval=bool(self.data.eval_files))

    def _check_critic(self) -> None:
        if self.algorithm.has_critic and self.trainer.tensor_parallel > 1:
            raise ValueError(
                f"trainer.tensor_parallel = {self.trainer.tensor_parallel} with algorithm.advantage = {self.algorithm.advantage}: a critic "
                "whose weights ranks share was never compared with one process; set trainer.tensor_parallel = 1, or an algorithm "
                "without a critic"
            )
        if not self.algorithm.has_critic:
            standard = CriticSettings()
            idle = sorted(
                key for key in CriticSettings.model_fields if getattr(self.critic, key) != getattr(standard, key)
            )
            if idle:
                raise ValueError(
                    f"critic.{idle[0]} does nothing with algorithm.advantage = {self.algorithm.advantage}, which needs "
                    'no critic; set algorithm.name = "ppo", or algorithm.advantage = "gae"'
                )

    @property
    def teacher_top_k(self) -> int | None:
        """Likeliest tokens that workers ask the teacher for; None without a teacher."""
        return self.teacher.top_k if self.algorithm.needs_teacher else None

    def _check_teacher(self) -> None:
        chosen, stored = self.algorithm, self.data.from_run is not None
        if self.teacher.urls and not chosen.needs_teacher:
            raise ValueError(
                "teacher.url does nothing without algorithm.distill_coefficient or a KL with algorithm.reference_device = remote; "
                'set algorithm.name = "on_policy_distillation", or leave [teacher] out'
            )
        if not chosen.needs_teacher:
            return
        if not self.teacher.urls and not stored:
            key = "distill_coefficient" if chosen.distill_coefficient else "reference_device = remote"
            raise ValueError(f"algorithm.{key} needs a teacher; set teacher.url to a server that answers for it")
        if self.rollout.temperature != 1.0:
            raise ValueError(
                f"rollout.temperature = {self.rollout.temperature:g} with a teacher, whose log-probabilities are those at "
                "temperature 1; set rollout.temperature = 1"
            )
        wants_top = chosen.distill_coefficient > 0.0 and chosen.distill_form == "forward"
        if wants_top and not self.teacher.top_k and not stored:
            raise ValueError(
                "algorithm.distill_form = forward compares the teacher's likeliest tokens; set teacher.top_k, such as 16"
            )
        if self.teacher.top_k and not wants_top:
            raise ValueError(
                f"teacher.top_k = {self.teacher.top_k} does nothing with algorithm.distill_form = {chosen.distill_form}, which "
                "compares the sampled tokens alone; leave it out"
            )

    def _check_router_replay(self) -> None:
        if not self.trainer.router_replay:
            return
        if self.rollout.environment != SINGLE_TURN:
            raise ValueError(
                f"trainer.router_replay = true with rollout.environment = {self.rollout.environment!r}: which experts computed the tokens "
                f"of an episode is not stored; set it to false, or use {SINGLE_TURN}"
            )
        if self.algorithm.dpo_coefficient:
            raise ValueError(
                "trainer.router_replay = true with algorithm.dpo_coefficient: no engine chose experts for the pairs of data.train; leave "
                "one out"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether a run has a reference policy: for a KL, or for pairs that are trained on beside the groups."""
        mixed = self.algorithm.dpo_coefficient > 0.0 and self.dpo.needs_reference
        return self.algorithm.needs_reference or mixed

    @property
    def extension_digests(self) -> dict[str, str]:
        """Digest of the source of every part that is user code, by kind and name; a run records it."""
        mixed = self.dpo.extension_digests if self.algorithm.dpo_coefficient else {}
        return {**self.algorithm.extension_digests, **mixed}

    def _check_pairs(self) -> None:
        """Raise ValueError for pairs beside groups where that is not exact, or where a setting of theirs does nothing."""
        chosen, named = self.algorithm, "algorithm.dpo_coefficient"
        if not chosen.dpo_coefficient:
            return
        if self.data.from_run is not None:
            raise ValueError(
                f"{named} trains on pairs of data.train, which is not read with data.from_run; leave one out"
            )
        if self.rollout.temperature != 1.0:
            raise ValueError(
                f"{named} with rollout.temperature = {self.rollout.temperature:g}: the trainer divides all its logits by it, and a "
                "preference loss compares log-probabilities at temperature 1; set rollout.temperature = 1"
            )
        if chosen.many_updates:
            key, value = ("epochs", chosen.epochs) if chosen.epochs > 1 else ("minibatches", chosen.minibatches)
            raise ValueError(
                f"{named} with algorithm.{key} = {value}: a step's pairs belong to one optimizer step, and a batch would have several; "
                f"set algorithm.{key} = 1"
            )
        if chosen.has_critic:
            raise ValueError(
                f"{named} with algorithm.advantage = {chosen.advantage}: while the critic learns alone no step is made on pairs, and "
                "it gives no values to them; choose an algorithm without a critic"
            )
        if chosen.options_of(m2po).m2po_budget is not None:
            raise ValueError(
                f"{named} with algorithm.m2po_budget: its limit is found over all micro-batches of a step against the policy that "
                "sampled them, and pairs were sampled by none; leave one out"
            )
        if chosen.distill_coefficient and chosen.distill_form == "forward":
            raise ValueError(
                f"{named} with algorithm.distill_form = forward, which reads a teacher's likeliest tokens of every micro-batch, and "
                'pairs have none; set algorithm.distill_form = "reverse"'
            )
        self._check_reference_of_pairs()

    def _check_reference_of_pairs(self) -> None:
        chosen, named = self.algorithm, "algorithm.dpo_coefficient"
        if self.dpo.reference_path is not None:
            raise ValueError(
                f"dpo.reference_path with {named}: a run has one reference; set algorithm.reference_path instead"
            )
        if self.dpo.reference == "precomputed":
            raise ValueError(
                f"dpo.reference = precomputed with {named}: a resumed run could not compute it again; leave it out, the reference is "
                "held beside the policy"
            )
        if chosen.reference_device == "remote" and self.dpo.needs_reference:
            raise ValueError(
                f"algorithm.reference_device = remote with {named}: the model of [teacher] is asked about groups that workers "
                'generate, and not about pairs; set algorithm.reference_device = "same" or "parked"'
            )
        if not self.needs_reference and (chosen.reference_path is not None or chosen.reference_device != "same"):
            raise ValueError(
                f"algorithm.reference_path and algorithm.reference_device do nothing: there is no KL, and dpo.loss = {self.dpo.loss} "
                "has no reference; leave them out"
            )

    @property
    def first_seed(self) -> int:
        """The seed of the first values of what is made new, and of dropout."""
        return self.run.seed if self.model.lora.seed is None else self.model.lora.seed

    @property
    def publishes_adapters(self) -> bool:
        """Whether versions are published as adapters on a base model, not as whole models."""
        return self.model.lora.rank > 0 and self.model.lora.publish == "adapter"

    def _check_lora(self) -> None:
        if self.model.lora.rank and self.trainer.tensor_parallel > 1:
            raise ValueError(
                f"trainer.tensor_parallel = {self.trainer.tensor_parallel} with model.lora.rank = {self.model.lora.rank}: DeepSpeed 0.19 "
                "does not divide layers that have adapters; set trainer.tensor_parallel = 1, and trainer.zero_stage = 3 where the model "
                "does not fit"
            )
        chosen = self.algorithm
        is_frozen_copy = chosen.reference_path is not None or not self.needs_reference
        if self.model.lora.rank and not is_frozen_copy and chosen.reference_device == "parked":
            raise ValueError(
                'algorithm.reference_device = "parked" does nothing with model.lora: the reference is the policy with '
                "its adapters switched off, and takes no memory; set algorithm.reference_path, or leave it out"
            )
