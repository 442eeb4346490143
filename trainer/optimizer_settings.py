"""The sections [trainer], [model] and [critic] of the run file; imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section
from penstock.trainer.attention_choice import Attention
from penstock.trainer.data_settings import Beta, Schedule
from penstock.trainer.lora_settings import LoraSettings
from penstock.trainer.parallel_dims import ParallelLayout
from penstock.trainer.zero_settings import ZeroSettings

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import SigningKey, TrustedKeys

_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA, AMD, and WSL
_HIDES_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class CriticSettings(Section):
    """PPO's critic: its initial weights, its optimizer, and how its values become advantages."""

    path: Path | None = Field(
        default=None,
        description="Model folder whose weights the critic starts from, without the head; none: model.path.",
    )
    lr: float = Field(
        default=1e-5, gt=0.0, description="Peak learning rate of the critic's AdamW, with trainer.schedule."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up from 0 to critic.lr.")
    max_grad_norm: float = Field(default=1.0, gt=0.0, description="The critic's gradients are clipped to this norm.")
    head_start_steps: int = Field(
        default=0, ge=0, description="First steps of the run, in which only the critic is updated."
    )
    updates: int = Field(default=1, ge=1, description="Optimizer steps of the critic on each batch.")
    loss: Literal["mse", "huber"] = Field(default="mse", description="Value loss: half the squared error, or Huber's.")
    loss_coefficient: float = Field(
        default=1.0, gt=0.0, description="Factor on the value loss; it has an effect only through critic.max_grad_norm."
    )
    value_clip: float | None = Field(
        default=None,
        gt=0.0,
        description="Largest change of a value by the updates on one batch; none: unlimited; needs critic.updates > 1.",
    )
    gamma: float = Field(default=1.0, ge=0.0, le=1.0, description="Discount of later rewards, per token.")
    lam: float = Field(
        default=0.95,
        ge=0.0,
        le=1.0,
        description="GAE's lambda: 1 uses the rewards alone (no bias, high variance), 0 the critic's next value.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> CriticSettings:
        if self.value_clip is not None and self.updates == 1:
            raise ValueError(
                f"critic.value_clip = {self.value_clip} does nothing with critic.updates = 1: it limits the change of a value "
                "since the batch arrived, which is 0 at the first update; raise critic.updates, or remove critic.value_clip"
            )
        return self


def default_dtype() -> Literal["float32", "bfloat16"]:
    """Return bfloat16 where this process sees a GPU, else float32; looks for device files, and loads no driver."""
    if any(os.environ.get(name, "all").strip() in ("", "-1") for name in _HIDES_GPUS):
        return "float32"
    return "bfloat16" if any(Path(file).exists() for file in _GPU_FILES) else "float32"


class ModelSettings(Section):
    """The policy and its numeric format."""

    path: Path = Field(
        description="Hugging Face model folder: config.json, safetensors, tokenizer, chat template; or a GGUF file, which is "
        "converted to such a folder beside it; or the id OWNER/NAME of one on the Hugging Face hub, OWNER/NAME@REVISION."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default_factory=default_dtype,
        description="Of forward and backward. Without it bfloat16 where the trainer sees a GPU, and float32, with which the embedded "
        "engine agrees, where it does not. In float32 a GPU has neither tensor cores nor flash attention.",
    )
    head_dtype: Literal["as-trained", "float32"] = Field(
        default="as-trained",
        description="Of the logits with dtype = bfloat16: as-trained, rounded to it; float32, not rounded, as with SGLang's "
        "--enable-fp32-lm-head (sglang.fp32_lm_head), so that both compute the same.",
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
    train_vision_tower: bool = Field(
        default=False,
        description="Train the part of a model that reads images too; otherwise it stays as it is, and its images are computed "
        "without gradients.",
    )

    @model_validator(mode="after")
    def _offloads_what_is_kept(self) -> ModelSettings:
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError(
                "model.activation_offload moves what gradient checkpointing keeps, and model.gradient_checkpointing is false; "
                "set it to true"
            )
        return self


class OptimizerSettings(ZeroSettings):
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
    attention: Attention = Field(
        default="auto",
        description="What computes the attention of packed rows. auto: the first of the others that works for the model's heads on this "
        "device and agrees with the definition, except dense. flash-3, flash-4: FlashAttention where it is installed; flash: torch's kernels for CUDA, in "
        "bfloat16; cpu-flash: torch's kernel for the CPU; sdpa: torch's scaled_dot_product_attention, one node of the prompts' tree at a "
        "time; flex: torch's flex_attention, compiled for the GPU; dense: the definition, whose memory grows with the square of "
        "trainer.micro_batch_tokens.",
    )
    router_replay: bool = Field(
        default=False,
        description="For a mixture of experts: compute every token with the experts that the engine's routers chose for it, which packs "
        "then store (Rollout Routing Replay, arXiv:2510.11370). Router weights still learn, by the gates of those experts. For models "
        "of qwen3_moe on the embedded engine and SGLang, episodes of several turns included.",
    )
    micro_batch_tokens: int = Field(
        default=16_384,
        ge=1,
        description="Most tokens of one forward and backward pass on a rank, or on those of trainer.sequence_parallel together; a "
        "prompt that completions share counts once.",
    )
    max_logits: int | None = Field(
        default=None,
        ge=1,
        description="Most logits, tokens times vocabulary, that the output head computes at once. None: 32 Mi on a CPU; on a GPU so many "
        "that they take a quarter of its free memory, 32 Mi to 512 Mi.",
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
    local_checkpoints: bool = Field(
        default=True,
        description="Keep the files of checkpoints in the run's folder too. False, with store_checkpoints: once the object store has "
        "all files of a checkpoint, each read back, and NATS names it, only its state.json stays on disk, so that at most the "
        "checkpoint that is being written or resumed takes space there.",
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
        "earlier one. Needs host memory for one more copy of the model, in float32.",
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
    published_words: Literal["host", "device"] = Field(
        default="host",
        description="Where the weights that were published last are compared from, if a GPU trains. host: from pinned host memory, which "
        "passes to the GPU for each version while training goes on; device: from a copy in its memory, so that only what changed passes "
        "between the two (memory: `penstock plan`). A CPU compares in host memory.",
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
        return ParallelLayout(self.sequence_parallel, self.tensor_parallel)

    def signing_key(self) -> SigningKey | None:
        if self.signing_key_file is None:
            return None
        from penstock.protocol.weights.signature import SigningKey  # noqa: PLC0415  its library is needed only here

        return SigningKey.from_file(self.signing_key_file, "trainer.signing_key_file")

    def trusted_keys(self) -> TrustedKeys | None:
        """Return what every rank requires of the manifests that it reads: its key's signature; None without a key."""
        key = self.signing_key()
        return None if key is None else key.trusted

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerSettings:
        if not self.local_checkpoints and not self.store_checkpoints:
            raise ValueError(
                "trainer.local_checkpoints = false needs trainer.store_checkpoints = true: without it no checkpoint would be kept "
                "anywhere; set that, or leave trainer.local_checkpoints out"
            )
        if self.num_ranks % self.layout.ranks_of_rows:
            raise ValueError(
                f"trainer.num_ranks = {self.num_ranks} is not a multiple of {self.layout}; it counts all processes: set it to a multiple"
            )
        if self.num_ranks % self.hpz_partition_size:
            raise ValueError(
                f"trainer.hpz_partition_size = {self.hpz_partition_size} does not divide trainer.num_ranks = {self.num_ranks}; set it to "
                "the ranks of one node"
            )
        if self.hpz_partition_size > 1 and (self.tensor_parallel > 1 or self.offload == "parameters"):
            raise ValueError(
                f"trainer.hpz_partition_size = {self.hpz_partition_size} keeps a copy of the parameters on the devices of ranks that have all "
                "of them in parts; set trainer.tensor_parallel = 1, and trainer.offload to none or optimizer"
            )
        return self
