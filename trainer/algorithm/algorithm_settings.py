"""The algorithm section of the run file: a preset, every part by name, and the options of every part; imports no torch.

The keys are those of `_GeneralSettings` and the options of all built-in parts, so that a new file in `losses/`,
`estimators/`, `filters/`, `group_filters/` or `corrections/` adds its options here by itself. Options of user code are in a separate
table, [algorithm.options], since a run file is checked key by key before its loss is known.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, create_model, field_validator, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.errors import ConfigError
from penstock.trainer.algorithm.aggregation import Aggregation
from penstock.trainer.algorithm.chosen_parts import (
    BY_KEY,
    DEFAULT,
    ESTIMATORS,
    PRESETS,
    ChosenParts,
    canonical,
    explain,
    option_fields,
    options_of_user_code,
    refuse_idle,
)
from penstock.trainer.algorithm.parts import Options, Part
from penstock.trainer.algorithm.settings_checks import check_passes, check_teacher, refuse_parts_that_disagree

Anchor = Literal["behaviour", "proximal", "interpolated"]
DistillForm = Literal["reverse", "forward"]
RewardKlForm = Literal["k1", "abs", "k2", "k3", "full"]
KlForm = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+", "full"]
OptionsT = TypeVar("OptionsT", bound=Options)

# Context for settings of a run's record: they name every key, also those that were at the defaults of an older version.
RECORDED = {"recorded": True}


class _GeneralSettings(Section):
    """The keys of [algorithm] that belong to no part."""

    name: str = Field(
        default=DEFAULT,
        validate_default=True,
        description="Preset that sets the parts below; each part can still be set by itself.",
    )

    # the advantage of a trajectory
    advantage: str = Field(
        default="grpo",
        description="Estimator of advantages from rewards, by name or as module:attribute or file.py:attribute.",
    )
    overlong_buffer: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Last share of rollout.max_new_tokens in which a longer answer loses reward, linearly; 0: off.",
    )
    overlong_factor: float = Field(
        default=1.0, gt=0.0, description="Reward lost by an answer of rollout.max_new_tokens."
    )
    efficiency_spread: float = Field(
        default=0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Among a group's successes, reward of the episode with the fewest turns above that of the one with the most, by rank; 0: off.",
    )
    efficiency_failure_spread: float = Field(
        default=0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Among a group's failures, reward of the episode with the most turns above that of the one with the fewest; 0: off.",
    )
    efficiency_success: float = Field(
        default=0.5, allow_inf_nan=False, description="Reward from which on an episode is a success for these two."
    )
    reward_clip: float | None = Field(
        default=None, gt=0.0, description="Rewards are limited to plus or minus this; none: no limit."
    )
    reward_scaling: Literal["none", "std", "mean_std"] = Field(
        default="none",
        description="Divide rewards by the standard deviation of all rewards of the run so far; mean_std: subtract their mean first.",
    )
    reward_norm: Literal["none", "group", "batch", "source", "running"] = Field(
        default="none",
        description="Normalise rewards, before the estimator, over the prompt's group, the batch, the batch's rows of "
        "one data_source, or all rewards of the run so far.",
    )
    reward_shift: bool = Field(default=True, description="reward_norm subtracts the mean.")
    reward_scale: bool = Field(default=True, description="reward_norm divides by the standard deviation.")
    asym_clip: bool = Field(default=False, description="Normalised rewards are limited to [-1, 3].")
    whiten_advantages: bool = Field(
        default=False, description="Whiten advantages over all tokens of the batch, after the estimator."
    )
    advantage_clip: float | None = Field(
        default=None, gt=0.0, description="Advantages are limited to plus or minus this; none: no limit."
    )
    difficulty_weight: bool = Field(
        default=False, description="Weigh samples by 0.5 + 1.5 x (1 - mean reward of the group)."
    )
    length_weight: bool = Field(default=False, description="Weigh samples from 1.5 (shortest) to 0.5 (longest).")

    # what is left out
    filters: tuple[str, ...] = Field(
        default=(),
        description="Further trajectory filters: built-in ones that no key turns on, or your own as module:attribute.",
    )
    group_filters: tuple[str, ...] = Field(
        default=(),
        description="Filters that drop whole groups when they arrive, each under its reason: your own as module:attribute.",
    )

    empty_batch: Literal["skip", "ignore_filters"] = Field(
        default="skip",
        description="A batch of which trajectory filters leave nothing, or an optimizer step whose tokens corrections all reject: skip: "
        "it counts, and changes neither weights nor optimizer; ignore_filters: it trains, on the whole batch or by momentum and weight "
        "decay alone, as runs recorded without this key did.",
    )

    max_trained_count: int = Field(
        default=1,
        ge=1,
        description="How often a group may be trained on: one that was trained fills a batch that would otherwise wait.",
    )
    retrained_interval: int = Field(default=1, ge=1, description="Steps between two uses of a group.")
    epochs: int = Field(default=1, ge=1, le=1000, description="Passes over each batch.")
    minibatches: int = Field(
        default=1,
        ge=1,
        description="Optimizer steps of a pass: the groups of a batch are split into so many parts; a group is never split.",
    )
    stop_kl: float | None = Field(
        default=None,
        gt=0.0,
        description="No further pass over a batch once the policy's KL to the one before the batch, per token, was above this "
        "in a pass; none: all of algorithm.epochs.",
    )

    # the loss
    loss: str = Field(
        default="ppo_clip",
        description="Policy loss, by name (docs/algorithms.md has each formula) or as module:attribute or file.py:attribute.",
    )
    aggregation: Aggregation = Field(
        default="token-mean", description="How tokens and sequences are weighed in the loss."
    )
    entropy_coefficient: float = Field(default=0.0, ge=0.0, description="Bonus on the policy's entropy.")
    sft_coefficient: float = Field(
        default=0.0, ge=0.0, description="Weight of cross-entropy on the tokens of rewarded trajectories."
    )

    dpo_coefficient: float = Field(
        default=0.0,
        ge=0.0,
        description="Weight of a preference loss beside the policy's, on rows of data.train with chosen and rejected: dpo.batch_size "
        "pairs in each step, with dpo.loss and its options. 0: such rows are refused.",
    )

    # stale and mismatched samples
    corrections: tuple[str, ...] = Field(
        default=(),
        description="Further corrections: built-in ones that no key turns on, or your own as module:attribute.",
    )
    ratio_anchor: Literal["auto", Anchor] = Field(
        default="auto",
        description="Denominator of ratios: the sampler, the trainer's own log-probabilities before the batch, or, interpolated, "
        "a policy between sampler and current one by the token's age; auto: the sampler where a batch is one optimizer step, else the "
        "trainer's own.",
    )
    negative_weight: float = Field(default=1.0, ge=0.0, description="Factor on negative advantages.")
    stale_negative_weight: float = Field(
        default=1.0, ge=0.0, description="Further factor on them for tokens that an older version sampled."
    )
    ess_level: Literal["off", "token", "root", "sequence"] = Field(
        default="off",
        description="Scale each step's learning rate by the effective share of the batch: the effective "
        "sample size of the weights at this level; off: the schedule alone.",
    )
    ess_power: float = Field(default=4.0, gt=0.0, description="Power of the effective share of the batch.")
    ess_floor: float = Field(default=0.1, ge=0.0, le=1.0, description="Smallest factor on the learning rate.")

    # the reference policy
    kl_coefficient: float = Field(
        default=0.0, ge=0.0, description="Weight of the KL to the reference in the loss; 0: no reference is loaded."
    )
    kl_form: KlForm = Field(
        default="k3",
        description="Estimator of that KL; a plus: with the gradient of k2; full: exact, over the vocabulary.",
    )
    reward_kl_coefficient: float = Field(
        default=0.0,
        ge=0.0,
        description="Weight of the KL to the reference inside the reward, summed over the trajectory's tokens; 0: off.",
    )
    reward_kl_form: RewardKlForm = Field(
        default="k1", description="Estimator of the KL inside the reward; full: exact, of the policy before the step."
    )
    kl_target: float | None = Field(
        default=None,
        gt=0.0,
        description="KL per token that the coefficient, in loss or reward, is adapted to during the run; none: fixed coefficient.",
    )
    kl_horizon: int = Field(
        default=10_000,
        ge=1,
        description="Trajectories over which a deviation of the KL from its target changes the coefficient.",
    )
    kl_unbiased: bool = Field(
        default=False, description="Weigh the KL by the ratio, which makes its estimate unbiased on stale samples."
    )
    reference_path: Path | None = Field(
        default=None, description="Model folder of the reference; none: model.path as the run started."
    )
    reference_device: Literal["same", "parked", "remote"] = Field(
        default="same",
        description="Where the reference is kept: on the policy's device; parked in host memory, from where each layer is copied "
        "to that device while it computes; remote: it is the model of [teacher], and none is loaded.",
    )

    # the teacher
    distill_coefficient: float = Field(
        default=0.0, ge=0.0, description="Weight of the KL to the model of [teacher]; 0: off."
    )
    distill_form: DistillForm = Field(
        default="reverse",
        description="reverse: KL(policy to teacher) as an advantage of each sampled token; forward: KL(teacher to policy) over the "
        "teacher.top_k likeliest tokens and one event for all others, in the loss.",
    )
    distill_clip: float | None = Field(
        default=None,
        gt=0.0,
        description="Bound of a token's difference of log-probabilities in that advantage; none: no bound.",
    )

    options: dict[str, Any] = Field(
        default={}, description="Options of your own loss, estimator, filters and corrections, by their names."
    )


if TYPE_CHECKING:

    class _AllSettings(_GeneralSettings):
        dynamic_sampling: bool = False  # the option of a part that checks here read

else:
    _AllSettings = create_model(
        "_AllSettings",
        __base__=_GeneralSettings,
        **{name: (info.annotation, copy.copy(info)) for name, info in option_fields().items()},
    )


class AlgorithmSettings(_AllSettings):
    """From rewards to gradients."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, table: Any, info: ValidationInfo) -> Any:
        """Fill in the preset and the options of user code, and refuse settings that would do nothing."""
        if not isinstance(table, dict):
            return table
        name = canonical(str(table.get("name", DEFAULT)))
        merged = {**PRESETS[name], **table, "name": name}
        unset = {**{field: info.default for field, info in cls.model_fields.items()}, **PRESETS[name]}
        values = {**unset, **merged}
        try:
            parts = ChosenParts.of(values)
        except (ConfigError, TypeError):  # the validator of the key reports it
            return merged
        changed = frozenset(key for key, value in table.items() if key in unset and value != unset[key])
        if info.context != RECORDED:
            refuse_idle(changed, values, parts)
        if isinstance(values["options"], dict):
            merged["options"] = options_of_user_code(parts, values["options"], cls.model_fields)
        return merged

    @field_validator("name")
    @classmethod
    def _canonical(cls, value: str) -> str:
        return canonical(value)

    @field_validator("reference_device", mode="before")
    @classmethod
    def _in_host_memory(cls, value: object, info: ValidationInfo) -> object:
        """Read a record's "cpu", where the reference was also computed on the CPU: the same numbers where a CPU trained."""
        return "parked" if value == "cpu" and info.context == RECORDED else value

    @field_validator("loss", "advantage", "filters", "group_filters", "corrections")
    @classmethod
    def _is_registered(cls, value: str | tuple[str, ...], info: ValidationInfo) -> str | tuple[str, ...]:
        for name in (value,) if isinstance(value, str) else value:
            try:
                part = BY_KEY[str(info.field_name)].find(name)
            except ConfigError as err:
                raise ValueError(str(err)) from None
            switch = getattr(part.value, "switch", "")
            if switch and not part.digest:
                raise ValueError(f"{name} is turned on by algorithm.{switch}; set that instead of naming it here")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmSettings:
        for part in self.parts:
            try:
                self.options_of(part.value)
            except ValidationError as err:
                raise ValueError(explain(err, "algorithm")) from None
        refuse_parts_that_disagree(self)
        if self.retrained_interval > 1 and self.max_trained_count == 1:
            raise ValueError(
                f"algorithm.retrained_interval = {self.retrained_interval} does nothing while "
                "algorithm.max_trained_count = 1; set that too"
            )
        check_passes(self)
        if self.kl_unbiased and self.kl_form == "full":
            raise ValueError(
                "algorithm.kl_unbiased weighs an estimate by its token's ratio, and algorithm.kl_form = full sums over all "
                "tokens: leave one of them out"
            )
        check_teacher(self)
        if self.kl_target is not None and self.kl_coefficient and self.reward_kl_coefficient:
            raise ValueError(
                "algorithm.kl_target steers one coefficient, and both algorithm.kl_coefficient and "
                "algorithm.reward_kl_coefficient are set; set one of them to 0"
            )
        return self

    @property
    def parts(self) -> ChosenParts:
        return ChosenParts.of(self.__dict__)

    @property
    def extension_digests(self) -> dict[str, str]:
        return self.parts.digests

    def options_of(self, part: Part[OptionsT]) -> OptionsT:
        keys = type(self).model_fields
        return part.options.model_validate(
            {
                name: getattr(self, name) if name in keys else self.options[name]
                for name in part.option_names
                if name in keys or name in self.options
            }
        )

    @property
    def needs_baseline(self) -> bool:
        """Whether every group carries a greedy completion that is not trained on."""
        return ESTIMATORS.find(self.advantage).value.needs_baseline

    @property
    def needs_groups(self) -> str:
        """The setting with which a group of one completion teaches nothing; empty for none."""
        if self.dynamic_sampling:  # equal rewards, and one reward equals itself
            return "algorithm.dynamic_sampling = true"
        if self.reward_norm == "group" and self.reward_shift:
            return "algorithm.reward_norm = group"
        estimator = ESTIMATORS.find(self.advantage).value
        alone = estimator.group_relative and not estimator.beyond_groups(self.options_of(estimator))
        return f"algorithm.advantage = {self.advantage}" if alone else ""

    @property
    def has_critic(self) -> bool:
        return ESTIMATORS.find(self.advantage).value.has_critic

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0.0 or self.reward_kl_coefficient > 0.0

    @property
    def needs_teacher(self) -> bool:
        return self.distill_coefficient > 0.0 or (self.needs_reference and self.reference_device == "remote")

    @property
    def anchor(self) -> Anchor:
        """What ratios are taken against."""
        if self.ratio_anchor != "auto":
            return self.ratio_anchor
        return "proximal" if self.many_updates else "behaviour"

    @property
    def many_updates(self) -> bool:
        return self.epochs * self.minibatches > 1

    def origin_of(self, field: str) -> str:
        return f"preset {self.name}" if field in PRESETS[self.name] else "default"
