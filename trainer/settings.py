"""The settings of the trainer, one class per section of the run file, and what they need of each other; imports no torch.

Lengths are in tokens, times in seconds, sizes of a batch in groups (one group: the
``rollout.group_size`` completions of one prompt).
"""

from __future__ import annotations

from pydantic import Field, ValidationInfo, model_validator

from penstock.protocol.config.connection import NatsSettings, RunSettings, S3Settings, Section
from penstock.protocol.config.environment_settings import MIXTURE, EnvironmentSettings
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.config.shared_sections import (
    MetricsSettings,
    PlacementSettings,
    RetentionSettings,
    TeacherSettings,
)
from penstock.trainer.algorithm.algorithm_settings import RECORDED, AlgorithmSettings
from penstock.trainer.data_settings import (
    COLUMNS,
    DataSettings,
    EvalSettings,
    FineTuningSettings,
    RmSettings,
    SftSettings,
    listed,
)
from penstock.trainer.dpo_settings import DpoSettings, check_pairs
from penstock.trainer.optimizer_settings import CriticSettings, ModelSettings, OptimizerSettings
from penstock.trainer.rollout_settings import RolloutSettings

__all__ = [
    "BFLOAT16_UNSHARDED", "COLUMNS", "DataSettings", "EvalSettings", "GivenAnswersSettings", "ModelSettings",
    "OptimizerSettings", "RolloutSettings", "TrainerSettings",
]  # fmt: skip

BFLOAT16_UNSHARDED = (
    "model.dtype = bfloat16 needs trainer.zero_stage >= 1: stage 0 keeps no correct float32 master weights in DeepSpeed 0.19 "
    "(measured: it drifts from a correct run); set trainer.zero_stage = 1"
)


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
    placement: PlacementSettings = Field(default_factory=PlacementSettings)

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
        self._check_algorithm()
        self._check_lora()
        self._check_teacher()
        check_pairs(self.algorithm, self.dpo, self.rollout, self.data, needs_reference=self.needs_reference)
        self._check_router_replay()
        self._check_warmup()
        if self.placement.takes_turns and self.trainer.published_words == "device":
            raise ValueError(
                'trainer.published_words = "device" keeps a copy of the weights on the GPU that placement.shared = "turns" gives to an '
                'engine; set it to "host"'
            )
        if self.trainer.epochs is None and (problem := self.problem_of_length()):
            raise ValueError(problem)
        if self.trainer.epochs is not None and self.data.from_run is not None:
            raise ValueError(
                f"trainer.epochs = {self.trainer.epochs:g} counts rows of data.train, "
                "and data.from_run trains on stored groups; set trainer.steps"
            )
        return self

    def data_of(self, section: str) -> DataSettings:
        """Return how the rows of sft, dpo, rm, or of a source of evaluation are read: by the names of columns that are meant for them."""
        if section in ("sft", "dpo", "rm"):
            rows: FineTuningSettings = getattr(self, section)
            has_rows = bool(rows.files or rows.eval_files) and bool(listed(self.data.train))
            return self.data.with_map(rows.map, f"{section}.map") if rows.map or has_rows else self.data
        source = self.eval.source.get(section)
        if source is not None and source.map:
            return self.data.with_map(source.map, f"eval.source.{section}.map")
        return self.data.with_map(self.eval.map, "eval.map") if self.eval.map else self.data

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

        if self.model.dtype == "float32" and self.model.head_dtype == "float32":
            raise ValueError(
                "model.head_dtype = float32 does nothing with model.dtype = float32; set model.dtype = bfloat16, or leave it out"
            )

    def _check_warmup(self) -> None:
        for name, section in (("sft", self.sft), ("dpo", self.dpo), ("rm", self.rm)):
            if section.epochs is None and section.warmup_steps > section.steps:
                raise ValueError(
                    f"{name}.warmup_steps is more than {name}.steps; lower it, so that the peak is reached"
                )

    def _check_evaluation(self) -> None:
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
        return self.eval.names(has_data_eval=bool(self.data.eval_files))

    def _check_algorithm(self) -> None:
        if self.algorithm.anchor == "interpolated" and not self.rollout.max_staleness and self.data.least_age == 0:
            raise ValueError(
                "algorithm.ratio_anchor = interpolated with rollout.max_staleness = 0: for a token of the newest version it is the "
                'current policy, so no ratio would differ from 1; raise it, or set algorithm.ratio_anchor = "auto"'
            )
        shared = [key for key in ("tensor_parallel", "sequence_parallel") if getattr(self.trainer, key) > 1]
        shared += ["zero_stage"] if self.trainer.zero_stage == 3 else []
        if shared and self.algorithm.parts.estimator.value.by_gradient:
            raise ValueError(
                f"trainer.{shared[0]} = {getattr(self.trainer, shared[0])} with algorithm.advantage = {self.algorithm.advantage}: it needs "
                "the gradient of each trajectory of weights that are whole on every rank; leave it out, or choose another advantage"
            )

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
        if self.trainer.router_replay and self.algorithm.dpo_coefficient:
            raise ValueError(
                "trainer.router_replay = true with algorithm.dpo_coefficient: no engine chose experts for the pairs of data.train; leave "
                "one out"
            )

    @property
    def needs_reference(self) -> bool:
        mixed = self.algorithm.dpo_coefficient > 0.0 and self.dpo.needs_reference
        return self.algorithm.needs_reference or mixed

    @property
    def extension_digests(self) -> dict[str, str]:
        mixed = self.dpo.extension_digests if self.algorithm.dpo_coefficient else {}
        return {**self.algorithm.extension_digests, **mixed}

    @property
    def first_seed(self) -> int:
        return self.run.seed if self.model.lora.seed is None else self.model.lora.seed

    @property
    def publishes_adapters(self) -> bool:
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


class GivenAnswersSettings(TrainerSettings):
    """The same sections for a training on given answers: nothing is asked of settings that only sampled groups need."""

    @model_validator(mode="after")
    def _consistent(self) -> GivenAnswersSettings:
        self._check_dtype()
        self._check_lora()
        self._check_warmup()
        return self
