"""The addresses of a run's NATS and S3: from arguments, the environment, or the run's local store.

A run that this machine started together with its NATS and S3 stores their addresses in
``<run folder>/store/environment``, as the PENSTOCK_ variables that every service reads. That file, and a run file in the run's
folder, are used only as this user sealed them (`protocol/seals.py`): the folder may be somebody else's.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from penstock.protocol import seals, streams
from penstock.protocol.config.connection import NatsSettings, RunSettings, S3Settings
from penstock.protocol.config.run_file import Loaded, load
from penstock.protocol.config.sources import ENVIRONMENT_PREFIX, split_arguments
from penstock.protocol.errors import ConfigError
from penstock.protocol.subjects import check_run_id

if TYPE_CHECKING:
    from penstock.protocol.transport.bus import Bus
    from penstock.protocol.weights.signature import TrustedKeys

STORE = "store"
RUN_FILE = "run.toml"  # in the folder of a run that the API or the Python client created
COPIED_INPUTS = "copied-inputs"  # folder in a store: names of the rescored inputs that are copies of another run's
# What is about servers, and the keys that the run's trainer signs its weights with. Nothing else of the file is read.
_TRUSTED_KEYS = f"{ENVIRONMENT_PREFIX}WORKER__TRUSTED_KEYS_FILE"
_CONNECTION_PREFIXES = (*(f"{ENVIRONMENT_PREFIX}{section}__" for section in ("NATS", "S3")), f"{_TRUSTED_KEYS}=")
_ANSWER_S = 1.0  # the default addresses are on this machine


class ConsoleSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunSettings = RunSettings()
    nats: NatsSettings = NatsSettings()
    s3: S3Settings = S3Settings()


def find(arguments: Sequence[str], environ: Mapping[str, str], *, run_id: str | None = None) -> Loaded[ConsoleSettings]:
    files, overrides = split_arguments(arguments)
    if run_id is not None:
        overrides = [*overrides, f"run.id={run_id}"]
    loaded = load(ConsoleSettings, files=files, overrides=overrides, environ=environ)
    if run_id is None or is_configured(loaded):
        return loaded
    store = loaded.settings.run.dir / run_id / STORE
    return load(ConsoleSettings, files=files, overrides=overrides, environ={**store_environment(store), **environ})


@dataclass(frozen=True)
class NamedRun:
    """A run as a verb or a request names it: its id, with the run files, settings and environment that say where it is."""

    id: str
    arguments: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __str__(self) -> str:
        return self.id

    @property
    def given(self) -> Loaded[ConsoleSettings]:
        """The configured settings, without those of the run's local store."""
        return find(self.arguments, self.environ)

    @property
    def settings(self) -> ConsoleSettings:
        """The settings that reach its servers: as configured, else of its local store. Raises ConfigError."""
        return find(self.arguments, self.environ, run_id=check_run_id(self.id)).settings

    @property
    def folder(self) -> Path:
        return self.given.settings.run.dir / check_run_id(self.id)


def run_file_of(folder: Path) -> list[str]:
    """Return the run file in a run's folder as an argument, if there is one. Raises UntrustedFolder unless this user sealed it."""
    return [] if seals.read(folder / RUN_FILE) is None else [str(folder / RUN_FILE)]


def trusted_keys(keys_file: Path | None, environ: Mapping[str, str], store: Path) -> TrustedKeys | None:
    """Return the keys that must have signed a run's weights: those of ``keys_file``, of the environment, or of its local store.

    None when no file is named. Raises ConfigError for a file without keys.
    """
    named = environ.get(_TRUSTED_KEYS) or store_environment(store).get(_TRUSTED_KEYS)
    file = keys_file or (Path(named) if named else None)
    if file is None:
        return None
    from penstock.protocol.weights.signature import TrustedKeys  # noqa: PLC0415  its library is needed only here

    return TrustedKeys.from_file(file, "--trusted-keys" if keys_file else _TRUSTED_KEYS)


def is_configured(loaded: Loaded[ConsoleSettings]) -> bool:
    """Return True if the address of NATS was configured; the default address does not count."""
    return loaded.origins["nats.url"] != "default"


def require_servers(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise ConfigError at once when no server was configured and none is at the default addresses.

    A server that was configured may still be starting: the service waits for it.
    """
    loaded = find(arguments, environ)
    nats, s3 = loaded.settings.nats.url, loaded.settings.s3.endpoint
    for what, key, address in (("NATS", "nats.url", nats), ("S3", "s3.endpoint", s3)):
        if loaded.origins[key] == "default" and not answers(address):
            raise ConfigError(
                f"no {what} server at {address}, and {key} is not set; start both servers with `penstock up` and load their "
                "settings here (. data/environment), set nats.url and s3.endpoint, or let `penstock train run.toml --local` "
                "start everything on this machine"
            )


def stored_state(bus: Bus, run: str, key: str) -> bytes | None:
    """Return what a key of the run's state bucket on NATS holds; None for a key that is not there."""
    entry = bus.key_value(streams.state_bucket(run).bucket).wait().get(key).wait()
    return None if entry is None else entry.value


def answers(address: str) -> bool:
    url = urlsplit(address)
    try:
        with socket.create_connection((url.hostname or "", url.port or 0), timeout=_ANSWER_S):
            return True
    except (OSError, ValueError):
        return False


def may_answer(addresses: str) -> bool:
    """Return False if nothing listens at any of the comma-separated addresses; one without a port is not tried."""
    return any(urlsplit(address).port is None or answers(address) for address in addresses.split(","))


def store_environment(store: Path) -> dict[str, str]:
    """Return the variables that local servers wrote to their data folder; empty when there are none.

    Raises ConfigError for a file that is not theirs, UntrustedFolder for one that this user's servers did not write.
    """
    try:
        words = shlex.split((seals.read(store / "environment") or b"").decode())
    except ValueError:  # not UTF-8, or a quote without its end
        raise ConfigError(
            f"{store / 'environment'} cannot be read: start the servers again (penstock up --data {store}), which writes it"
        ) from None
    assignments = [word for word in words if word.startswith(_CONNECTION_PREFIXES)]
    variables = dict(word.split("=", 1) for word in assignments if "=" in word)
    for name, value in variables.items():
        if name.endswith("_FILE") and not Path(value).resolve().is_relative_to(store.resolve()):
            raise ConfigError(
                f"{store / 'environment'}: {name} names {value}, a file outside of {store}, whose content would be sent to a "
                f"server; start the servers again (penstock up --data {store}), which writes it"
            )
    return variables
