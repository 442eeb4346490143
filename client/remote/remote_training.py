"""A training on given answers behind a Runs API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.client.errors import RunFailed
from penstock.client.processes import State
from penstock.client.remote.remote_backend import RemoteBackend
from penstock.client.remote.runs_api import RunsApi
from penstock.console.report import curves, fine_tuned


class RemoteTraining:
    """One training that a console runs; it goes on without this process."""

    def __init__(self, api: RunsApi, run_id: str, verb: str) -> None:
        """Read where it writes its model; raises ApiRefused when there is no such run."""
        self._backend = RemoteBackend(api, run_id)
        self._verb = verb
        settings = api.call("GET", f"/v1/runs/{run_id}/config")["settings"]
        given = settings.get(verb, {}).get("output")
        self.run_id = run_id
        self.output = Path(given) if given else Path(str(settings["run"]["dir"])) / run_id / verb

    @property
    def folder(self) -> Path | None:
        """The run's folder, if the console is on this machine."""
        return self._backend.folder

    @property
    def state(self) -> State:
        return self._backend.state

    def wait(self, timeout_s: float | None) -> bool:
        return self._backend.wait(timeout_s)

    def failure(self) -> RunFailed:
        return self._backend.failure()

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield steps and validations: of the folder, or the figures that the API has."""
        if self.folder is not None:
            yield from curves.rows(fine_tuned.training_folder(self.folder, self._verb))
            return
        for row in self._backend.rows():
            yield row
            found = {name: value for name, value in row.items() if name.startswith("eval_") and value is not None}
            if found:
                yield {"kind": "eval", "step": row.get("step"), **found}

    def stop(self) -> None:
        self._backend.stop()

    def close(self) -> None:
        self._backend.close()
