"""Refusal of settings that would do nothing, such as an option of a loss that is not chosen; pure, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.protocol.extensions import Registry
from penstock.trainer.algorithm.chosen_parts import ChosenParts
from penstock.trainer.algorithm.registries import CORRECTIONS, ESTIMATORS, FILTERS, GROUP_FILTERS, LOSSES

# What a setting that belongs to no part does nothing without: any one of these must be on.
_SWITCHES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("overlong_buffer",): ("overlong_factor",),
    ("efficiency_spread", "efficiency_failure_spread"): ("efficiency_success",),
    ("reward_norm",): ("reward_shift", "reward_scale", "asym_clip"),
    ("ess_level",): ("ess_power", "ess_floor"),
    ("kl_coefficient",): ("kl_form", "kl_unbiased"),
    ("reward_kl_coefficient",): ("reward_kl_form",),
    ("kl_coefficient", "reward_kl_coefficient"): ("kl_target",),
    ("kl_coefficient", "reward_kl_coefficient", "dpo_coefficient"): ("reference_path", "reference_device"),
    ("kl_target",): ("kl_horizon",),
    ("distill_coefficient",): ("distill_form", "distill_clip"),
}
_OFF = (None, 0.0, "none", "off")


def refuse_idle(changed: frozenset[str], values: Mapping[str, Any], parts: ChosenParts) -> None:
    """Raise ValueError for a setting that no chosen part reads.

    Args:
        changed: Keys that were set by hand to something else than their default.
        values: Every key of [algorithm].
        parts: The chosen parts.
    """
    read = parts.option_names
    by_choice: set[str] = set()
    for key, registry, chosen in (("loss", LOSSES, parts.loss), ("advantage", ESTIMATORS, parts.estimator)):
        known = {name for part in registry.built_in.values() for name in part.option_names}
        by_choice |= known
        idle = sorted((changed & known) - read)
        if idle:
            raise ValueError(
                f"algorithm.{idle[0]} does nothing with algorithm.{key} = {values[key]}, "
                f"which reads {', '.join(chosen.value.option_names) or 'none of these'}"
            )
    for registry, key in ((FILTERS, "filters"), (GROUP_FILTERS, "group_filters"), (CORRECTIONS, "corrections")):
        _refuse_parts_off(registry, key, changed - by_choice - read)
    for switches, settings in _SWITCHES.items():
        idle = sorted(changed & set(settings))
        if idle and all(values[switch] in _OFF for switch in switches):
            needed = " and ".join(f"algorithm.{switch}" for switch in switches)
            raise ValueError(f"algorithm.{idle[0]} does nothing while {needed} is off; set that too")


def _refuse_parts_off(registry: Registry[Any], key: str, unread: frozenset[str]) -> None:
    """Refuse options of parts that are switched on, or named, by nothing."""
    for part in registry.built_in.values():
        idle = sorted(unread & (set(part.option_names) - {part.switch}))
        if idle and part.switch:
            raise ValueError(f"algorithm.{idle[0]} does nothing while algorithm.{part.switch} is off; set that too")
        if idle:
            raise ValueError(
                f"algorithm.{idle[0]} does nothing while algorithm.{key} does not name {part.name}; add it there"
            )
