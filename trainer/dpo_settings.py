"""The section [dpo] of the run file: preference losses by name with their options, and the reference; imports no torch.

The options of all built-in losses are keys of the section, so that a new file in `algorithm/preferences/` adds its options.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError, create_model, field_validator, model_validator

from penstock.protocol.errors import ConfigError
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.chosen_parts import explain, option_fields
from penstock.trainer.algorithm.corrections.m2po import m2po
from penstock.trainer.algorithm.preferences.interface import PREFERENCE_LOSSES, Divergence, PreferenceLoss, WeighedLoss
from penstock.trainer.data_settings import DataSettings, FineTuningSettings
from penstock.trainer.rollout_settings import RolloutSettings


class _GeneralSettings(FineTuningSettings):
    """The keys of [dpo] that belong to no loss."""

    lr: float = Field(default=1e-6, gt=0.0, description="Peak learning rate of AdamW.")
    loss: str | list[str] = Field(
        default="sigmoid",
        description="Preference loss by name (docs/fine_tuning.md has each formula), as module:attribute or file.py:attribute, "
        "or a list of them, which are added up.",
    )
    loss_weights: list[float] = Field(default=[], description="Factor on each loss of the list; none: 1 each.")
    divergence: Divergence = Field(
        default="reverse_kl",
        description="Divergence from the reference that the margin's rewards follow from (f-DPO, arXiv 2309.16240).",
    )
    alpha: float = Field(default=0.5, description="Exponent of the alpha divergence.")
    length_alpha: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Factor on log-probabilities of tokens beyond the length of the shorter answer (LD-DPO, arXiv 2409.06411); "
        "none: 1.",
    )
    weighting: Literal["none", "wpo"] = Field(
        default="none",
        description="wpo: weigh each pair by how likely the policy samples its answers (arXiv 2406.11827); costs one more pass "
        "without gradients.",
    )
    reference: Literal["auto", "live", "precomputed"] = Field(
        default="auto",
        description="live: a frozen copy computes the reference's log-probabilities in each step, with LoRA the model without "
        "adapters; precomputed: they are computed once, before the first step, and no copy is held. auto: live with LoRA and "
        "for kto, else precomputed.",
    )
    reference_path: Path | None = Field(
        default=None, description="Model folder of the reference; none: model.path as the training began."
    )
    options: dict[str, Any] = Field(default={}, description="Options of your own losses, by their names.")


if TYPE_CHECKING:
    _AllSettings = _GeneralSettings
else:
    _AllSettings = create_model(
        "_AllSettings",
        __base__=_GeneralSettings,
        **{name: (info.annotation, copy.copy(info)) for name, info in option_fields([PREFERENCE_LOSSES]).items()},
    )


class DpoSettings(_AllSettings):
    """Training on preferences, `penstock dpo`."""

    def is_live(self, *, has_adapters: bool) -> bool:
        """Return True if the reference computes in each step; ``has_adapters`` that can be switched off for it."""
        needs_copy = has_adapters or any(weighed.loss.needs_kl for weighed in self.losses)
        return self.reference == "live" or (self.reference == "auto" and needs_copy)

    @property
    def losses(self) -> tuple[WeighedLoss, ...]:
        names = _names(self.loss)
        weights = self.loss_weights or [1.0] * len(names)
        chosen = [PREFERENCE_LOSSES.find(name).value for name in names]
        return tuple(
            WeighedLoss(loss, self._options(loss), weight) for loss, weight in zip(chosen, weights, strict=True)
        )

    @property
    def extension_digests(self) -> dict[str, str]:
        parts = [PREFERENCE_LOSSES.find(name) for name in _names(self.loss)]
        return {f"extension {PREFERENCE_LOSSES.kind} {part.name}": part.digest for part in parts if part.digest}

    @property
    def needs_reference(self) -> bool:
        return any(weighed.loss.needs_reference for weighed in self.losses)

    @property
    def takes_one_answer(self) -> bool:
        is_plain = self.length_alpha is None and self.weighting == "none"
        return is_plain and all(weighed.loss.takes_one_answer for weighed in self.losses)

    @property
    def reward_scale(self) -> float:
        return next((float(weighed.options["beta"]) for weighed in self.losses if "beta" in weighed.options), 1.0)

    def _options(self, loss: PreferenceLoss[Any]) -> dict[str, Any]:
        section_values = {name: getattr(self, name) for name in loss.option_names if name in type(self).model_fields}
        user_options = {
            name: value
            for name, value in self.options.items()
            if name in loss.option_names and name not in section_values
        }
        return {**loss.options(**user_options).model_dump(), **section_values}

    @field_validator("loss")
    @classmethod
    def _is_registered(cls, value: str | list[str]) -> str | list[str]:
        if not _names(value):
            raise ValueError('expected at least one loss, such as "sigmoid"')
        for name in _names(value):
            try:
                PREFERENCE_LOSSES.find(name)
            except ConfigError as err:
                raise ValueError(str(err)) from None
        return value

    @model_validator(mode="after")
    def _consistent(self) -> DpoSettings:
        losses = [PREFERENCE_LOSSES.find(name).value for name in _names(self.loss)]
        if self.loss_weights and len(self.loss_weights) != len(losses):
            raise ValueError(
                f"dpo.loss_weights has {len(self.loss_weights)} factors for {len(losses)} losses; give one each"
            )
        read = {name for loss in losses for name in loss.option_names}
        problem = self._idle(losses, read) or self._impossible(losses)
        if problem:
            raise ValueError(problem)
        try:
            for loss in losses:
                self._options(loss)
        except ValidationError as err:
            raise ValueError(explain(err, "dpo.options")) from None
        return self

    def _idle(self, losses: list[PreferenceLoss[Any]], read: set[str]) -> str:
        named = ", ".join(loss.name for loss in losses)
        for name, info in option_fields([PREFERENCE_LOSSES]).items():
            if name not in read and getattr(self, name) != info.default:
                return f"dpo.{name} does nothing with dpo.loss = {named}; remove it"
        if unknown := sorted(self.options.keys() - read):
            return f"dpo.options.{unknown[0]} is an option of no chosen loss ({named}); remove it"
        other = [loss.name for loss in losses if not loss.uses_divergence and loss.needs_reference]
        if self.divergence != "reverse_kl" and (other or not any(loss.uses_divergence for loss in losses)):
            return f"dpo.divergence has no meaning for dpo.loss = {other[0] if other else named}; remove it"
        if self.alpha != 0.5 and self.divergence != "alpha_divergence":
            return 'dpo.alpha does nothing without dpo.divergence = "alpha_divergence"; remove it'
        if not any(loss.needs_reference for loss in losses) and (self.reference_path or self.reference != "auto"):
            return f"dpo.loss = {named} has no reference; remove dpo.reference and dpo.reference_path"
        return ""

    def _impossible(self, losses: list[PreferenceLoss[Any]]) -> str:
        names = {loss.name for loss in losses}
        if "exo_pair" in names and getattr(self, "label_smoothing") == 0.0:  # noqa: B009 - a field that is made above
            return "dpo.loss = exo_pair needs dpo.label_smoothing above 0, such as 1e-3 (the paper's)"
        if self.weighting != "none" and (coupled := [loss.name for loss in losses if loss.couples_pairs]):
            return f"dpo.weighting has no meaning for dpo.loss = {coupled[0]}, which sorts the answers of a batch; remove it"
        if any(loss.needs_kl for loss in losses) and self.reference == "precomputed":
            return "dpo.loss = kto compares answers to other prompts of a batch, which cannot be precomputed; remove dpo.reference"
        if any(loss.needs_kl for loss in losses) and self.batch_size < 2:
            return "dpo.loss = kto needs another prompt in each batch; raise dpo.batch_size"
        return ""


def _names(loss: str | list[str]) -> list[str]:
    return [loss] if isinstance(loss, str) else loss


def check_pairs(
    chosen: AlgorithmSettings, dpo: DpoSettings, rollout: RolloutSettings, data: DataSettings, *, needs_reference: bool
) -> None:
    """Raise ValueError for pairs beside groups where that is not exact, or where a setting of theirs does nothing.

    ``needs_reference``: the run has a reference policy, for pairs or for a KL.
    """
    named = "algorithm.dpo_coefficient"
    if not chosen.dpo_coefficient:
        return
    if data.from_run is not None:
        raise ValueError(f"{named} trains on pairs of data.train, which is not read with data.from_run; leave one out")
    if dpo.map and not dpo.files:
        raise ValueError(f"{named} reads pairs among data.train by data.map, not by dpo.map; set data.map, or dpo.data")
    if rollout.temperature != 1.0:
        raise ValueError(
            f"{named} with rollout.temperature = {rollout.temperature:g}: the trainer divides all its logits by it, and a "
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
    _check_reference(chosen, dpo, needs_reference=needs_reference)


def _check_reference(chosen: AlgorithmSettings, dpo: DpoSettings, *, needs_reference: bool) -> None:
    named = "algorithm.dpo_coefficient"
    if dpo.reference_path is not None:
        raise ValueError(
            f"dpo.reference_path with {named}: a run has one reference; set algorithm.reference_path instead"
        )
    if dpo.reference == "precomputed":
        raise ValueError(
            f"dpo.reference = precomputed with {named}: a resumed run could not compute it again; leave it out, the reference is "
            "held beside the policy"
        )
    if chosen.reference_device == "remote" and dpo.needs_reference:
        raise ValueError(
            f"algorithm.reference_device = remote with {named}: the model of [teacher] is asked about groups that workers "
            'generate, and not about pairs; set algorithm.reference_device = "same" or "parked"'
        )
    if not needs_reference and (chosen.reference_path is not None or chosen.reference_device != "same"):
        raise ValueError(
            f"algorithm.reference_path and algorithm.reference_device do nothing: there is no KL, and dpo.loss = {dpo.loss} "
            "has no reference; leave them out"
        )
