"""Start a run or a training through a Runs API (`penstock console`), and follow it; of a console on this machine its folder is read too."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.client import data_files
from penstock.client.events import Event, recorded
from penstock.client.local_backend import LocalBackend
from penstock.client.processes import GOING_ON, RunFailed, State
from penstock.client.remote.runs_api import ApiRefused, RemoteEvents, RunsApi
from penstock.client.rewards import RegisteredReward, ServedFunction, reward_name, reward_of
from penstock.client.run_settings import DATA, MODEL, REWARD, Values, nested
from penstock.console.report import curves
from penstock.deploy.processes.child import wait_until
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.process_end import error_text

_POLL_S = 0.5
_PORT_S = 0.2
_STOP_S = 120.0
_QUIET_S = 1.5  # after the end of a run: what was published before has arrived
_WINDOW = 2000  # steps whose figures the API returns one by one


class RemoteBackend:
    def __init__(self, api: RunsApi, run_id: str, *, reward: ServedFunction | RegisteredReward | None = None) -> None:
        """``reward`` is registered at the run's reward service when that listens."""
        self.run_id = run_id
        self._api = api
        self._reward = reward
        self._closed = threading.Event()
        self._local = self._find_folder() if api.is_here else None
        if reward is not None and self._local is not None:
            threading.Thread(target=self._keep_registered, name="reward-register", daemon=True).start()

    @property
    def folder(self) -> Path | None:
        """The run's folder, if the console is on this machine."""
        return None if self._local is None else self._local.folder

    @property
    def state(self) -> State:
        return self._call("GET", "")["state"]

    def wait(self, timeout_s: float | None) -> bool:
        return wait_until(lambda: self.state not in GOING_ON, timeout_s, _POLL_S)

    def failure(self) -> RunFailed:
        response = self._call("GET", "")
        return RunFailed(
            f"run {self.run_id} failed: {response.get('detail')}; its log ends with\n{response.get('log', '')}"
        )

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield steps and evaluations: of the folder, or those that the API has."""
        if self._local is not None:
            yield from self._local.rows()
            return
        yield from self._steps()
        for split in self._call("GET", "/summary").get("evaluations", []):
            for point in split["points"]:
                figures = {name: value for name, value in point.items() if name != "reward"}
                yield {"kind": "eval", "split": split["split"], "reward_mean": point.get("reward"), **figures}

    def _steps(self) -> Iterator[Mapping[str, Any]]:
        first = 0
        while True:
            response = self._call("GET", "/metrics", **{"from": first, "to": first + _WINDOW - 1, "points": _WINDOW})
            for place, step in enumerate(response["steps"]):
                values = {name: series["mean"][place] for name, series in response["figures"].items()}
                yield {"kind": "step", **values, "at": response["at"][place], "step": step}
            first += _WINDOW
            if not response["steps"] and not self._call("GET", "/metrics", **{"from": first, "points": 2})["steps"]:
                return

    def events(self) -> Iterator[Event | None]:
        """Yield the events as they are published until the run is over; of one that is over, its steps and evaluations."""
        if self.state not in GOING_ON:
            yield from recorded(self.rows())
            return
        over_since: float | None = None
        with RemoteEvents(self._api, self.run_id) as arriving:
            while over_since is None or time.monotonic() - over_since < _QUIET_S:
                message = arriving.next(_POLL_S)
                if message is not None and "kind" in message:
                    over_since = over_since and time.monotonic()
                    yield Event(
                        str(message["kind"]), str(message["source"]), float(message["at"]), dict(message["data"])
                    )
                    continue
                if message is not None and "state" in message:
                    is_over = message["state"] not in GOING_ON and self.state not in GOING_ON
                    over_since = (over_since or time.monotonic()) if is_over else None
                yield None

    def pause(self) -> None:
        self._call("POST", "/pause")

    def resume(self) -> None:
        self._call("POST", "/resume")

    def stop(self) -> None:
        if self.state in GOING_ON or self.state == "created":
            self._call("POST", "/stop")
            if not self.wait(_STOP_S):
                raise PenstockError(f"run {self.run_id} did not stop within {_STOP_S:.0f} s; it is {self.state}")

    def versions(self) -> list[dict[str, Any]]:
        return self._here("weights").versions()

    def export(self, version: int | None, to: Path) -> None:
        self._here("export").export(version, to)

    def close(self) -> None:
        """Stop serving the reward; the run goes on."""
        self._closed.set()
        if self._reward is not None:
            self._reward.close()

    def _call(self, method: str, path: str, **query: Any) -> Any:
        return self._api.call(method, f"/v1/runs/{self.run_id}{path}", **query)

    def _here(self, what: str) -> LocalBackend:
        if self._local is None:
            raise PenstockError(
                f"{what} of run {self.run_id}: its weights are on another machine; use `penstock weights` there"
            )
        return self._local

    def _find_folder(self) -> LocalBackend | None:
        settings = self._call("GET", "/config").get("settings", {})
        folder = Path(str(settings.get("run", {}).get("dir", ""))) / self.run_id
        return LocalBackend(self.run_id, folder, workers=1) if folder.is_absolute() and folder.is_dir() else None

    def _keep_registered(self) -> None:
        """Register the reward whenever the run's reward service listens at another port: a run may be queued for hours."""
        assert self._reward is not None
        assert self._local is not None
        known = None
        while not self._closed.wait(_PORT_S):
            port = self._local.reward_port()
            if port is None or port == known:
                continue
            known = port
            try:
                self._reward.register(f"http://127.0.0.1:{port}")
            except PenstockError as err:
                sys.stderr.write(error_text(f"penstock: run {self.run_id}: {err}\n"))
                known = None


class RemoteTraining(RemoteBackend):
    """One training that a console runs; it goes on without this process."""

    def __init__(self, api: RunsApi, run_id: str, verb: str) -> None:
        """Read where it writes its model; raises ApiRefused when there is no such run."""
        super().__init__(api, run_id)
        self._verb = verb
        settings = self._call("GET", "/config")["settings"]
        output = settings.get(verb, {}).get("output")
        self.output = Path(output) if output else Path(str(settings["run"]["dir"])) / run_id / verb

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield steps and validations: of the folder, or the figures that the API has."""
        if self.folder is not None:
            yield from curves.rows(curves.training_folder(self.folder, self._verb))
            return
        for row in super().rows():
            yield row
            eval_values = {name: value for name, value in row.items() if name.startswith("eval_") and value is not None}
            if eval_values:
                yield {"kind": "eval", "step": row.get("step"), **eval_values}


_CONFLICT = 409
_FILES = ".client"  # rows of calls, in the folder of runs: the folder of a run is made by the API


def train(api: RunsApi, values: Values, runs: Path, *, workers: int | None) -> RemoteBackend:
    """Create a run and start it; raises ApiRefused or another PenstockError, and starts nothing then."""
    reward_value = values.get(REWARD)
    if not api.is_here:
        _refuse_what_is_here(api, values)
    reward: ServedFunction | RegisteredReward | None = None
    name = reward_value
    if callable(reward_value):
        name = reward_name(reward_value)
        reward = ServedFunction(reward_of(reward_value), name)
    try:
        more = {} if workers is None else {"workers": workers}
        run_id = _create(api, {**_with_files(values, runs), REWARD: name}, "run", **more)
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
    file_values: dict[tuple[str, ...], Any] = dict(values)
    for key in DATA & values.keys():
        file_values[key] = data_files.stored(values[key], runs / _FILES, key[1])
    model = values.get(MODEL)
    if isinstance(model, str) and Path(model).exists():
        file_values[MODEL] = str(Path(model).absolute())
    return file_values
