"""What becomes of a key of another system: taken as a setting, answered with the one to use, or with why there is none.

For users who migrate a configuration. The tables are in `foreign_keys`, one module for each system; a key that several
systems have is answered as the first of `SYSTEMS` has it. `penstock config import` reads the table of the file's own system
first. Keys that are similar but not equal are refused with advice: nothing is guessed.
"""

from __future__ import annotations

from types import ModuleType

from penstock.protocol.config.foreign_keys import agentrl, openrlhf, roll, shared, slime, trl, verl
from penstock.protocol.config.foreign_keys.answers import Alias

SYSTEMS: dict[str, ModuleType] = {
    "shared": shared,
    "verl": verl,
    "roll": roll,
    "trl": trl,
    "agentrl": agentrl,
    "openrlhf": openrlhf,
    "slime": slime,
}


def _joined(order: list[ModuleType]) -> tuple[dict[str, Alias], dict[str, str], dict[str, str]]:
    aliases: dict[str, Alias] = {}
    renamed: dict[str, str] = {}
    absent: dict[str, str] = {}
    for system in order:
        known = {*aliases, *renamed, *absent}
        aliases |= {key: one for key, one in system.TAKEN.items() if key not in known}
        renamed |= {key: one for key, one in system.RENAMED.items() if key not in known}
        absent |= {key: one for key, one in system.ABSENT.items() if key not in known}
    return aliases, renamed, absent


ALIASES, RENAMED, ABSENT = _joined(list(SYSTEMS.values()))
_PREFIXES: dict[str, str] = {key: why for system in SYSTEMS.values() for key, why in system.PREFIXES.items()}

_INEXACT = (
    "tokens would come from another distribution than the one whose log-probabilities the engine reports and the "
    "trainer computes, which makes the importance ratio wrong; remove it (rollout.temperature is applied on both sides)"
)

# Settings of other systems that would make the training data wrong here.
REFUSED: dict[str, str] = {
    f"rollout.{name}": _INEXACT
    for name in (
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "logit_bias",
        "sampling_params",
    )
}


# Values of accepted keys that have no counterpart here.
_ABSENT_VALUES: dict[tuple[str, object], str] = {
    ("trainer.save_freq", -1): "a run is resumed from its checkpoints, so they are always made; set "
    "trainer.checkpoint_every to trainer.steps for one at the end",
}


def value_advice(dotted: str, value: object) -> str | None:
    """Return what to write instead of another project's value of a key; None for any other value."""
    return _ABSENT_VALUES.get((dotted, value)) if isinstance(value, (str, int)) else None


def advice(dotted: str) -> str | None:
    """Return what to use instead of another project's key; None for an unknown key."""
    if dotted in RENAMED:
        return f"use {RENAMED[dotted]}"
    return ABSENT.get(dotted) or prefix_advice(dotted, _PREFIXES)


def ending_in(last: str) -> str | None:
    """Return the key of another project that ends with a name, for a name that was written without its sections."""
    dotted = f".{last}"
    return next((key for table in (ALIASES, RENAMED, ABSENT) for key in table if key.endswith(dotted)), None)


def prefix_advice(dotted: str, prefixes: dict[str, str]) -> str | None:
    """Return the answer for all keys that begin as this one does, by the longest such beginning."""
    fitting = [prefix for prefix in prefixes if dotted.startswith(prefix) or dotted + "." == prefix]
    return prefixes[max(fitting, key=len)] if fitting else None
