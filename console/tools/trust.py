"""`penstock runs trust`: show what the files in a run's folder name, and seal them after a yes (`protocol/seals.py`)."""

from __future__ import annotations

import json
import os
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.console.connections import RUN_FILE, STORE, NamedRun
from penstock.console.terminal import one_line
from penstock.console.tools.removal import agreed
from penstock.console.tools.runs import existing_folder
from penstock.protocol import seals
from penstock.protocol.config.sources import ENVIRONMENT_PREFIX, KeyPath, leaves
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import links_below, read_regular
from penstock.protocol.secret_values import MASK

_SECRETS = frozenset({"nats.password", "s3.secret_key", "s3.session_token", "reward_service.token"})
_SECRET_VARIABLES = {
    *(ENVIRONMENT_PREFIX + key.replace(".", "__").upper() for key in _SECRETS),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
}
_MOST_BYTES = 1024**2
_USES = {  # file of a run's folder: what it is used for
    "job.json": "the console of this user starts, resumes and stops it so",
    RUN_FILE: "it is started with these settings, which may name code",
    "config.json": "`penstock eval` and `rescore` use its data, environment and reward settings, which may name code",
    f"{STORE}/environment": "commands and the console connect to these servers",
    "trackers/settings.json": "`penstock track` sends the run's metrics and texts there",
}


def trust(run: NamedRun, *, yes: bool, defaults: Mapping[str, Any] | None = None) -> int:
    """Seal the files of a run's folder after confirmation; return 1 when it was not confirmed. Raises ConfigError.

    What its ``config.json`` sets as these ``defaults`` of this build do is not shown; all is shown without them.
    """
    usual = dict(leaves(dict(defaults or {})))
    folder = existing_folder(run)
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link; move the folder itself there")
    unsealed = {name: _read(folder / name) for name in _USES if not _needs_no_trust(folder / name)}
    for name, content in unsealed.items():
        print(f"{name}: {_USES[name]}")
        for key, value in _shown(folder / name, content, usual):
            print(f"  {one_line(key)} = {one_line(value)}")
    for link in links_below(folder) if unsealed else ():
        print(f"{one_line(link.relative_to(folder))}: what is written there is written to {one_line(link.resolve())}")
    if not unsealed:
        print(f"run {run}: this user wrote, or trusts, every file that is used")
    elif not agreed(f"use all of it as if this user had written it in {folder}?", yes=yes):
        return 1
    else:
        try:
            for name, content in unsealed.items():
                seals.seal(folder / name, content)
        except OSError as err:
            raise ConfigError(
                f"the seals cannot be written in {folder} ({err}); run it as the user of that folder, or share that user's key and "
                f"seals: export {seals.KEY_FILE}=FILE, a file of both, mode 640"
            ) from None
        print(f"run {run} is trusted until one of these files is changed or moved by somebody else")
    return 0


def _needs_no_trust(path: Path) -> bool:
    return not os.path.lexists(path) or seals.is_sealed(path)


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as err:
        raise ConfigError(f"{path} cannot be read ({err}); remove it, or change its permissions") from None


def _shown(path: Path, content: bytes, usual: Mapping[KeyPath, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a file sets; of the settings of a session those that are not ``usual``. Raises ConfigError.

    Every value may name code, whatever its key is, so that only the fields of secrets are masked; the file's own origins of its
    values are not believed.
    """
    try:
        if path.name == "environment":
            words = [word.partition("=") for word in shlex.split(content.decode()) if "=" in word]
            yield from ((name, MASK if name in _SECRET_VARIABLES else value) for name, _, value in words)
            return
        document = tomllib.loads(content.decode()) if path.name == RUN_FILE else json.loads(content)
        is_session = path.name == "config.json"
        for key, value in leaves(document["settings"] if is_session else document):
            if not (is_session and key in usual and usual[key] == value):
                yield ".".join(key), MASK if ".".join(key) in _SECRETS and isinstance(value, str) and value else value
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ConfigError(f"{path} cannot be read ({type(err).__name__}: {err}); remove it") from None
