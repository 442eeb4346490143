"""The algorithm section of the run file: a name that sets the parts, and every part; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.protocol.config.connection import Section
from penstock.trainer.algorithm.aggregation import Aggregation
from penstock.trainer.algorithm.presets import ADVANTAGE_OPTIONS, LOSS_OPTIONS, PRESETS, canonical

Advantage = Literal[
    "grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "opo", "pass_at_k", "gpg", "remax", "gae",
]  # fmt: skip
Loss = Literal[
    "ppo_clip", "gspo", "gspo_token", "ce_gppo", "sapo", "cispo", "minirl", "topr", "topr_token", "reinforce",
    "double_sided", "dppo_tv", "dppo_kl", "gmpo",
]  # fmt: skip
Statistic = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip
RewardKlForm = Literal["k1", "abs", "k2", "k3", "full"]
KlForm = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+", "full"]


class AlgorithmSettings(Section):
    """From rewards to gradients."""

    name: str = Field(
        default="grpo",
        validate_default=True,
        description="Preset that sets the parts below; each part can still be set by itself.",
    )

    # what a trajectory is credited with
    advantage: Advantage = Field(default="grpo", description="Estimator of advantages from rewards.")
    normalise_by_std: bool = Field(default=True, description="Divide advantages by the group's standard deviation.")
    overlong_buffer: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Last share of rollout.max_new_tokens in which a longer answer loses reward, linearly; 0: off.",
    )
    overlong_factor: float = Field(
        default=1.0, gt=0.0, description="Reward lost by an answer of rollout.max_new_tokens."
    )
    reward_clip: float | None = Field(
        default=None, gt=0.0, description="Rewards are limited to plus or minus this; none: not."
    )
    reward_scaling: Literal["none", "std", "mean_std"] = Field(
        default="none",
        description="Divide rewards by the standard deviation of all rewards of the run so far; mean_std: mean off first.",
    )
    reward_norm: Literal["none", "group", "batch", "source", "running"] = Field(
        default="none",
        description="Normalise rewards, before the estimator, over the prompt's group, the batch, the batch's rows of "
        "one data_source, or all rewards of the run so far.",
    )
    reward_shift: bool = Field(default=True, description="reward_norm takes the mean off.")
    reward_scale: bool = Field(default=True, description="reward_norm divides by the standard deviation.")
    asym_clip: bool = Field(default=False, description="Normalised rewards are limited to [-1, 3].")
    whiten_rewards: bool = Field(
        default=False, description="Whiten the rewards of all tokens of the batch before a critic credits them."
    )
    whiten_advantages: bool = Field(
        default=False, description="Whiten advantages over all tokens of the batch, after the estimator."
    )
    advantage_clip: float | None = Field(
        default=None, gt=0.0, description="Advantages are limited to plus or minus this; none: not."
    )
    difficulty_weight: bool = Field(
        default=False, description="Weigh samples by 0.5 + 1.5 x (1 - mean reward of the group)."
    )
    length_weight: bool = Field(default=False, description="Weigh samples from 1.5 (shortest) to 0.5 (longest).")

    # what is left out
    dynamic_sampling: bool = Field(
        default=False, description="Groups whose rewards are all equal are replaced by other prompts before the step."
    )
    drop_zero_advantage: bool = Field(default=False, description="Trajectories with advantage 0 do not count at all.")
    skip_non_positive_advantage: bool = Field(default=False, description="Only successes are trained on.")
    minimal_advantage: float | None = Field(default=None, description="Only above this advantage; none: all.")
    mask_truncated: bool = Field(default=False, description="Answers cut at rollout.max_new_tokens are left out.")

    max_trained_count: int = Field(
        default=1,
        ge=1,
        description="How often a group may be trained on: a trained one fills a batch that would otherwise wait.",
    )
    retrained_interval: int = Field(default=1, ge=1, description="Steps between two uses of a group.")

    # the loss
    loss: Loss = Field(default="ppo_clip", description="Policy loss (docs/algorithms.md has each formula).")
    clip_low: float = Field(default=0.2, gt=0.0, le=1.0, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0.0, description="The ratio is clipped above at 1 + clip_high.")
    dual_clip: float | None = Field(
        default=1.2,
        gt=1.0,
        description="Bound of the ratio for negative advantages; what keeps stale data safe; none: off.",
    )
    token_tis_cap: float | None = Field(
        default=None, ge=1.0, description="Token-level truncation of the importance weight in the gradient; none: off."
    )
    weight_cap: float = Field(
        default=4.0, gt=0.0, description="Bound of the detached ratio in cispo, minirl, dppo; of failures in topr."
    )
    beta_low: float = Field(default=0.75, ge=0.0, description="ce_gppo: share of gradient left below the clip.")
    beta_high: float = Field(default=1.0, ge=0.0, description="ce_gppo: share of gradient left above the clip.")
    tau_positive: float = Field(default=1.0, gt=0.0, description="sapo: steepness of the gate where A > 0.")
    tau_negative: float = Field(default=1.05, gt=0.0, description="sapo: steepness of the gate elsewhere.")
    aggregation: Aggregation = Field(
        default="token-mean", description="How tokens and sequences are weighed in the loss."
    )
    entropy_coefficient: float = Field(default=0.0, ge=0.0, description="Bonus on the policy's entropy.")
    sft_coefficient: float = Field(
        default=0.0, ge=0.0, description="Weight of cross-entropy on the tokens of rewarded trajectories."
    )

    # stale and mismatched samples
    ratio_anchor: Literal["auto", "behaviour", "proximal"] = Field(
        default="auto",
        description="What ratios are taken against: the sampler, or the trainer's own log-probabilities before the "
        "step; auto: the sampler, since a step is one update.",
    )
    negative_weight: float = Field(default=1.0, ge=0.0, description="Factor on negative advantages.")
    stale_negative_weight: float = Field(
        default=0.5, ge=0.0, description="Further factor on them for tokens that an older version sampled."
    )
    importance: Literal["none", "token", "sequence", "geometric", "root"] = Field(
        default="none", description="Importance weights of the trainer over the sampler, on top of the loss."
    )
    importance_bound: Literal["truncate", "clip", "mask"] = Field(
        default="truncate", description="Outside the band: min (TIS), both ends, or weight 0 (IcePop, masked IS)."
    )
    importance_high: float = Field(default=2.0, gt=0.0, description="Upper end of the weights' band.")
    importance_low: float = Field(default=0.0, ge=0.0, description="Lower end of the weights' band.")
    rejection: Statistic | None = Field(
        default=None, description="Divergence from the sampler by which tokens or sequences are left out; none: off."
    )
    rejection_high: float = Field(default=2.0, gt=0.0, description="Largest divergence kept; for k1 a ratio.")
    rejection_low: float | None = Field(default=None, gt=0.0, description="For k1, the lower ratio; none: 1 / high.")
    veto: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="A sequence with a token whose ratio is below this is left out."
    )
    opsm_delta: float | None = Field(
        default=None, ge=0.0, description="Failed sequences that became less likely by more than this per token go."
    )
    m2po_budget: float | None = Field(
        default=None,
        gt=0.0,
        description="Tokens that moved furthest are left out until the mean of their squared log-ratios is below this; "
        "one more forward pass; none: off.",
    )
    m2po_form: Literal["mask", "clip"] = Field(
        default="mask",
        description="How m2po_budget is met: the paper leaves tokens out, the released code clips ratios at what the "
        "batch sets, at least clip_low and clip_high wide.",
    )
    age_band_cap: float | None = Field(
        default=None, gt=0.0, description="Tokens more than so many clip widths outside are left out; none: off."
    )
    age_band_decay: float = Field(default=0.0, ge=0.0, description="How fast that band narrows, per version of age.")
    ess_level: Literal["off", "token", "root", "sequence"] = Field(
        default="token",
        description="Scale each step's learning rate by the share of the batch that still counts, by the effective "
        "sample size of the weights at this level; off: not.",
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
        default="k1",
        description="Estimator of the KL inside the reward; full: exact, of the policy before the step.",
    )
    kl_target: float | None = Field(
        default=None,
        gt=0.0,
        description="KL per token that the coefficient, in loss or reward, is steered to as the run goes; none: fixed.",
    )
    kl_horizon: int = Field(
        default=10_000, ge=1, description="Trajectories over which a KL off its target moves the coefficient."
    )
    kl_unbiased: bool = Field(default=False, description="Weigh the KL by the ratio, which is right for stale samples.")
    reference_path: Path | None = Field(
        default=None, description="Model folder of the reference; none: model.path as the run started."
    )
    reference_device: Literal["same", "cpu"] = Field(
        default="same", description="Where the reference lives: beside the policy, or in host memory."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        """Fill in what the preset says and nobody else did, and refuse parts that would do nothing."""
        if not isinstance(given, dict):
            return given
        name = canonical(str(given.get("name", "grpo")))
        merged = {**PRESETS[name], **given, "name": name}
        defaults = {field: info.default for field, info in cls.model_fields.items()}
        _refuse_idle({field: value for field, value in given.items() if field in defaults}, {**defaults, **merged})
        return merged

    @field_validator("name")
    @classmethod
    def _canonical(cls, value: str) -> str:
        return canonical(value)

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmSettings:
        if self.importance_low > self.importance_high:
            raise ValueError(
                f"algorithm.importance_low = {self.importance_low} is above algorithm.importance_high = "
                f"{self.importance_high}; no weight would be kept"
            )
        if self.has_critic:
            self._refuse_trajectory_filters()
        if self.m2po_form == "clip" and self.loss != "ppo_clip":
            raise ValueError(
                f"algorithm.m2po_form = clip sets the clip of ppo_clip, and algorithm.loss = {self.loss} has another; "
                'set algorithm.loss = "ppo_clip", or algorithm.m2po_form = "mask"'
            )
        is_ratio_loss = self.loss not in ("reinforce",)
        if self.importance != "none" and is_ratio_loss and not self.uses_proximal:
            raise ValueError(
                f"algorithm.importance = {self.importance} would weigh the ratio of {self.loss} twice: against the "
                'sampler the loss holds the weight already; set algorithm.ratio_anchor = "proximal", or '
                'algorithm.loss = "reinforce"'
            )
        if self.retrained_interval > 1 and self.max_trained_count == 1:
            raise ValueError(
                f"algorithm.retrained_interval = {self.retrained_interval} does nothing while "
                "algorithm.max_trained_count = 1; set that too"
            )
        if self.kl_unbiased and self.kl_form == "full":
            raise ValueError(
                "algorithm.kl_unbiased weighs an estimate by its token's ratio, and algorithm.kl_form = full sums over all "
                "tokens: leave one of them out"
            )
        if self.kl_target is not None and self.kl_coefficient and self.reward_kl_coefficient:
            raise ValueError(
                "algorithm.kl_target steers one coefficient, and both algorithm.kl_coefficient and "
                "algorithm.reward_kl_coefficient are set; set one of them to 0"
            )
        return self

    def _refuse_trajectory_filters(self) -> None:
        for name in ("drop_zero_advantage", "skip_non_positive_advantage", "minimal_advantage"):
            if getattr(self, name) not in (None, False):
                raise ValueError(
                    f"algorithm.{name} looks at the advantage of a whole trajectory, and with algorithm.advantage = gae "
                    "every token has its own; leave it off, or choose another algorithm.advantage"
                )

    @property
    def needs_baseline(self) -> bool:
        """Whether every group carries a greedy completion that is not trained on."""
        return self.advantage == "remax"

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic, by token."""
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is loaded."""
        return self.kl_coefficient > 0.0 or self.reward_kl_coefficient > 0.0

    @property
    def uses_proximal(self) -> bool:
        """Whether log-probabilities are recomputed before the step."""
        return self.ratio_anchor == "proximal"

    def origin_of(self, field: str) -> str:
        """Say who chose a value that nobody gave: the preset, or the default."""
        return f"preset {self.name}" if field in PRESETS[self.name] else "default"


# What a part does nothing without: any one of these must be on.
_SWITCHES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("importance",): ("importance_bound", "importance_high", "importance_low"),
    ("rejection",): ("rejection_high", "rejection_low"),
    ("age_band_cap",): ("age_band_decay",),
    ("overlong_buffer",): ("overlong_factor",),
    ("reward_norm",): ("reward_shift", "reward_scale", "asym_clip"),
    ("m2po_budget",): ("m2po_form",),
    ("ess_level",): ("ess_power", "ess_floor"),
    ("kl_coefficient",): ("kl_form", "kl_unbiased"),
    ("reward_kl_coefficient",): ("reward_kl_form",),
    ("kl_coefficient", "reward_kl_coefficient"): ("kl_target", "reference_path", "reference_device"),
    ("kl_target",): ("kl_horizon",),
}
_OFF = (None, 0.0, "none", "off")


def _refuse_idle(given: dict[str, Any], values: dict[str, Any]) -> None:
    """Refuse what was set by hand and would be ignored; a value that changes nothing may stand."""
    changed = {name for name, value in given.items() if value != AlgorithmSettings.model_fields[name].default}
    for options, kind in ((LOSS_OPTIONS, "loss"), (ADVANTAGE_OPTIONS, "advantage")):
        read = options.get(values[kind], ())
        idle = sorted(changed & {name for names in options.values() for name in names} - set(read))
        if idle and values[kind] in options:
            raise ValueError(
                f"algorithm.{idle[0]} does nothing with algorithm.{kind} = {values[kind]}, "
                f"which reads {', '.join(read) or 'none of these'}"
            )
    for switches, parts in _SWITCHES.items():
        idle = sorted(changed.intersection(parts))
        if idle and all(values[switch] in _OFF for switch in switches):
            needed = " and ".join(f"algorithm.{switch}" for switch in switches)
            raise ValueError(f"algorithm.{idle[0]} does nothing while {needed} is off; set that too")
