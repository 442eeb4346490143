"""What a system does where its file is silent, and which keys of a file only repeat that.

``trl_defaults.json`` has what TRL 1.16's ``GRPOConfig(...).to_dict()`` holds for arguments that were not set.
``silent_defaults.json`` has the defaults that differ from those here: of verl's `_generated_ppo_trainer.yaml` (January 2026), TRL 1.16's
`GRPOConfig`, OpenRLHF's `train_ppo_ray.py` (2025), ROLL 0.3, slime (August 2026) with Megatron's, AgentRL (February 2026).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.deploy.config_import.rule_forms import READS_IMAGES, is_on

_FOLDER = Path(__file__).parent
_FILES = {"trl": "trl_defaults.json"}
_WHOLE = 60  # so many keys at their defaults are a configuration that was written out; fewer were typed by a person


def at_default(system: str, values: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys at their defaults, or without a value, in a file with all of them; none for a file of chosen keys."""
    known = _defaults(system)
    default_keys = frozenset(
        k for k, value in values.items() if value is None or (k in known and _same(value, known[k]))
    )
    return default_keys if len(default_keys) >= _WHOLE else frozenset()


@cache
def _defaults(system: str) -> Mapping[str, Any]:
    if system not in _FILES:
        return {}
    return json.loads((_FOLDER / _FILES[system]).read_text(encoding="utf-8"))


def _same(value: Any, default: Any) -> bool:
    return value == default and isinstance(value, bool) == isinstance(default, bool)


@dataclass(frozen=True, slots=True)
class SilentDefault:
    """A key that a file does not name: what its system does then, and the settings that do the same here."""

    key: str
    value: Any
    settings: Mapping[str, Any]
    also: Sequence[str] = ()  # other keys of that system that decide the same
    only_with: str = ""  # a switch without which it is no default
    ask: str = ""  # for one that no setting expresses: what the run then does otherwise


@cache
def silent_defaults() -> Mapping[str, Sequence[SilentDefault]]:
    """Return the defaults by system, and by ``SYSTEM.SECTION`` for given answers: those of ``SYSTEM.*`` are of each of its sections."""
    by_system = json.loads((_FOLDER / "silent_defaults.json").read_text(encoding="utf-8"))
    for name in [name for name in by_system if name.endswith(".*")]:
        shared = json.dumps(by_system.pop(name))
        for section in ("sft", "dpo", "rm"):
            table = by_system.setdefault(name.replace("*", section), [])
            table += json.loads(shared.replace("*.", f"{section}."))
    return {system: [SilentDefault(**default) for default in defaults] for system, defaults in by_system.items()}


def differing(
    system: str, named: Mapping[str, Any], written: Mapping[str, Any], effective: Mapping[str, Any]
) -> list[tuple[SilentDefault, Mapping[str, Any]]]:
    """Return the defaults that a file does not name and that hold otherwise in the run file, with the settings that differ.

    ``named`` are the keys of the file, ``written`` the settings of the run file, ``effective`` all settings, by dotted key.
    """
    if system == "agentrl" and "algorithm" in named:  # a job of the training platform, which has other defaults
        return []
    differences, has_critic = [], effective.get("algorithm.advantage") == "gae"
    trains_vision = READS_IMAGES.search(str(written.get("model.path"))) and not written.get("model.lora.rank")
    schedule = effective.get(f"{system.partition('.')[2] or 'trainer'}.schedule")
    for default in silent_defaults().get(system, ()):
        if default.only_with and not is_on(named.get(default.only_with)):
            continue
        if any(key in named for key in (default.key, *default.also)):
            if "trainer.min_lr_ratio" not in default.settings or any(
                key.startswith("lr_scheduler_kwargs") for key in named
            ):
                continue
            end = {
                "trainer.min_lr_ratio": default.settings["trainer.min_lr_ratio"]
            }  # of the schedule that the file names
            default = SilentDefault("end of the schedule", end["trainer.min_lr_ratio"], end)
        others = {
            ours: value
            for ours, value in default.settings.items()
            if effective.get(ours) != value
            and (has_critic or not ours.startswith("critic."))
            and (written.get("data.eval") or not ours.startswith("eval."))
            and (trains_vision or ours != "model.train_vision_tower")
        }
        is_idle = others.keys() == {"trainer.min_lr_ratio"} and schedule == "constant"
        if (others or default.ask) and not is_idle and not any(ours in written for ours in default.settings):
            differences.append((default, others))
    return differences
