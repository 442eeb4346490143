"""Reads the settings of a session from the run's record, and compares them with others; pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.protocol.errors import ConfigError
from penstock.trainer.algorithm.algorithm_settings import RECORDED
from penstock.trainer.algorithm.chosen_parts import BY_KEY
from penstock.trainer.settings import TrainerSettings

_CONNECTIONS = ("nats", "s3")  # addresses of servers may change between a run and its replay
# A step's weights do not depend on these: when the run waits, saves, publishes, signs, stops, or kills itself in tests.
_WITHOUT_EFFECT = frozenset(
    f"trainer.{key}"
    for key in (
        "kill_at", "lease_s", "rank_deadline_s", "resume", "checkpoint_every", "checkpoint_every_s", "keep_checkpoints", "store_checkpoints", "local_checkpoints", "signing_key_file", "keep_versions", "collect_deadline_s",
        "keep_best", "verify_export", "milestone_every", "keep_milestones",
        "max_mismatch", "mismatch_patience", "check_texts", "store_logprobs", "min_entropy", "peak_flops",
    )
)  # fmt: skip
_SECTIONS = ("model", "rollout", "algorithm", "critic", "trainer")  # read by a step
_READ_WITH_PAIRS = ("dpo", "data")  # where a step trains on pairs beside its groups
_ALSO_READ = ("data.from_run", "run.seed")  # the seed decides which groups are in which mini-batch

Flat = dict[str, Any]


def read_settings(document: bytes, *, where: str) -> tuple[TrainerSettings, Flat]:
    """Return the settings of a `config_document`, and the same by dotted key.

    Raises ConfigError if this build cannot read them; ``where`` names them in the text.
    """
    try:
        values = json.loads(document)["settings"]
        lora = values["model"].get("lora", {})
        if lora.get("rank") and "seed" not in lora:  # of a release whose adapters began with 0
            lora = {**lora, "seed": 0}
        read = {**values, "model": {**values["model"], "lora": lora}}
        settings = TrainerSettings.model_validate(
            {k: v for k, v in read.items() if k not in _CONNECTIONS}, context=RECORDED
        )
    except ValidationError as err:
        first = err.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{where}: these settings are not valid in this build: {key or 'settings'}: {first['msg']}; "
            "replay with the version of penstock that made the run"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ConfigError(
            f"{where} does not hold the settings of a run ({type(err).__name__}: {err}); restore the file"
        ) from None
    return settings, flat(values)


def named_code(document: bytes) -> list[str]:
    """Return the user code that settings name by path, which `read_settings` imports and so runs.

    What cannot be read names none; an extension that an installed package registers under a name is not named by path.
    """
    try:
        settings = json.loads(document)["settings"]
        values = [settings["algorithm"].get(key) for key in BY_KEY] + [settings.get("dpo", {}).get("loss")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return [name for name in names if isinstance(name, str) and ":" in name]


def flat(values: Mapping[str, Any], prefix: str = "") -> Flat:
    """Return nested settings by dotted key, without the addresses of servers."""
    found: Flat = {}
    for key, value in values.items():
        if not prefix and key in _CONNECTIONS:
            continue
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(recorded: Flat, other: Flat, *, ignoring: Iterable[str] = ()) -> list[str]:
    return [
        f"{key} = {json.dumps(other.get(key))}, recorded {json.dumps(recorded.get(key))}"
        for key in _differing(recorded, other, ignoring)
    ]


def _differing(one: Flat, other: Flat, ignoring: Iterable[str] = ()) -> list[str]:
    keys = sorted((one.keys() | other.keys()) - set(ignoring))
    return [key for key in keys if _value(one, key) != _value(other, key)]


def _value(settings: Flat, key: str) -> Any:
    """Return a setting; an empty table is none, since one with entries has a key for each."""
    value = settings.get(key)
    return None if value == {} else value


def changed_settings(recorded: Path, config: bytes) -> list[str]:
    try:
        before = flat(json.loads(recorded.read_bytes())["settings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # the run's record has them
    now = flat(json.loads(config)["settings"])
    epochs = now.get("trainer.epochs")
    counted = ["trainer.steps"] if epochs is not None and epochs == before.get("trainer.epochs") else []
    return [
        f"{key} = {json.dumps(now.get(key))}, was {json.dumps(before.get(key))}"
        for key in _differing(before, now, counted)
    ]


def what_steps_read(settings: Flat) -> Flat:
    """Return the settings that a step's weights depend on: sessions that agree in them are replayed as one."""
    sections = _SECTIONS + (_READ_WITH_PAIRS if settings.get("algorithm.dpo_coefficient") else ())
    return {
        key: value
        for key, value in settings.items()
        if (key.split(".")[0] in sections and key not in _WITHOUT_EFFECT) or key in _ALSO_READ
    }
