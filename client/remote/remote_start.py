"""Start a run or a training through a Runs API from the arguments of a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.client import data_files
from penstock.client.remote.remote_backend import RemoteBackend, RemoteTraining
from penstock.client.remote.runs_api import ApiRefused, RunsApi
from penstock.client.rewards import RegisteredReward, ServedFunction, reward_name, reward_of
from penstock.client.run_settings import DATA, MODEL, REWARD, Values, nested
from penstock.protocol.errors import ConfigError

_CONFLICT = 409
_FILES = ".client"  # rows of calls, in the folder of runs: the folder of a run is made by the API


def train(api: RunsApi, values: Values, runs: Path, *, workers: int) -> RemoteBackend:
    """Create a run and start it; raises ApiRefused or another PenstockError, and starts nothing then."""
    given = values.get(REWARD)
    if not api.is_here:
        _refuse_what_is_here(api, values)
    reward: ServedFunction | RegisteredReward | None = None
    name = given
    if callable(given):
        name = reward_name(given)
        reward = ServedFunction(reward_of(given), name)
    try:
        run_id = _create(api, {**_with_files(values, runs), REWARD: name}, "run", workers=workers)
        return RemoteBackend(api, run_id, reward=reward)
    except BaseException:
        if reward is not None:
            reward.close()
        raise


def fine_tune(api: RunsApi, verb: str, values: Values, runs: Path) -> RemoteTraining:
    """Create a training and start it; raises ApiRefused or another PenstockError, and starts nothing then."""
    if not api.is_here:
        _refuse_what_is_here(api, values)
    return RemoteTraining(api, _create(api, _with_files(values, runs), verb, command=verb), verb)


def _create(api: RunsApi, values: Values, stem: str, **more: Any) -> str:
    """Create and start a run under its name, or the first free one of stem, stem-2, …; return the name."""
    wanted = values.pop(("run", "id"), None)
    number = 1
    while True:
        name = str(wanted) if wanted is not None else stem if number == 1 else f"{stem}-{number}"
        body = {"run": name, "settings": nested(values), "start": True, **more}
        try:
            return str(api.call("POST", "/v1/runs", body)["run"])
        except ApiRefused as err:
            if wanted is not None or err.status != _CONFLICT or f"run {name} exists" not in str(err):
                raise
            number += 1


def _refuse_what_is_here(api: RunsApi, values: Values) -> None:
    """Raise ConfigError for what a console on another machine cannot reach."""
    if callable(values.get(REWARD)):
        raise ConfigError(
            f"the run's reward service, at {api.host}, cannot call a function of this process; serve a file there "
            "(penstock reward serve) and give its name as reward"
        )
    for key in DATA & values.keys():
        if not data_files.is_named(values[key]):
            raise ConfigError(f"{'.'.join(key)}: rows are not sent to {api.host}; give the path of a file there")


def _with_files(values: Values, runs: Path) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = dict(values)
    for key in DATA & values.keys():
        found[key] = data_files.stored(values[key], runs / _FILES, key[1])
    model = values.get(MODEL)
    if isinstance(model, str) and Path(model).exists():
        found[MODEL] = str(Path(model).absolute())
    return found
