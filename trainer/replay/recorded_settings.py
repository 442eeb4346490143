"""The settings that a life of a run had, read back from its record, and held against others; pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from penstock.protocol.errors import ConfigError
from penstock.trainer.settings import TrainerSettings

_CONNECTIONS = ("nats", "s3")  # where servers are today is no part of what a run is
# What a step's weights do not depend on: when the run waits, saves, publishes, stops, tests its own crashes.
_NO_MATTER = frozenset(
    f"trainer.{key}"
    for key in (
        "kill_at", "lease_s", "resume", "checkpoint_every", "keep_checkpoints", "keep_versions", "collect_deadline_s",
        "max_mismatch", "mismatch_patience",
    )
)  # fmt: skip
_SECTIONS = ("model", "rollout", "algorithm", "critic", "trainer")  # that a step reads

Flat = dict[str, Any]


def read_settings(document: bytes, *, where: str) -> tuple[TrainerSettings, Flat]:
    """Return the settings of a `config_document`, and the same by dotted key.

    Raises ConfigError when this build cannot read them; ``where`` names them in the text.
    """
    try:
        values = json.loads(document)["settings"]
        settings = TrainerSettings.model_validate({k: v for k, v in values.items() if k not in _CONNECTIONS})
    except ValidationError as err:
        first = err.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{where}: this build does not read it as a run's settings: {key or 'settings'}: {first['msg']}; "
            "replay with the version of penstock that made the run"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(f"{where} is not the settings of a run ({type(err).__name__}: {err})") from None
    return settings, flat(values)


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
    """Return one line for each setting that differs; a key that only one side knows differs, too."""
    keys = sorted((recorded.keys() | other.keys()) - set(ignoring))
    return [
        f"{key} = {json.dumps(other.get(key))}, recorded {json.dumps(recorded.get(key))}"
        for key in keys
        if recorded.get(key) != other.get(key)
    ]


def what_steps_read(settings: Flat) -> Flat:
    """Return the settings that the weights of a step depend on: lives that agree in them can be one."""
    return {
        key: value
        for key, value in settings.items()
        if (key.split(".")[0] in _SECTIONS and key not in _NO_MATTER) or key == "data.from_run"
    }
