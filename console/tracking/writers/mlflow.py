"""MLflow: a tracking server (``MLFLOW_TRACKING_URI`` or options.tracking_uri), else a SQLite file in the folder.

The run is found again by a tag, and what it holds is asked: every row is there exactly once. MLflow's plain files
(``file:``) write the figures of a row one by one: there a kill may leave figures of one row twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from penstock.console.tracking.interface import EVENT, Destination, Row, TrackerKind, TrackerWriter, library
from penstock.protocol.errors import ConfigError

_KEY_TAG = "penstock.key"
_MOST = 900  # figures of one request
_VALUE_CHARS = 500
_UNNAMEABLE = re.compile(r"[^\w\-. /]")


class MlflowWriter(TrackerWriter):
    def __init__(self, destination: Destination) -> None:
        """Find the run or make it, in the experiment named as the project."""
        options = dict(destination.options or {})
        uri = options.pop("tracking_uri", None) or os.environ.get("MLFLOW_TRACKING_URI")
        if options:
            raise ConfigError(f"tracker mlflow: unknown option {min(options)}; it takes tracking_uri")
        if uri is None:
            destination.folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{destination.folder.absolute() / 'mlflow.db'}"
        self._mlflow = library("mlflow")
        self._entities = library("mlflow.entities")
        self._client = self._mlflow.MlflowClient(tracking_uri=str(uri))
        experiment = self._experiment(destination)
        runs = self._client.search_runs([experiment], f"tags.`{_KEY_TAG}` = '{destination.key}'")
        tags = {_KEY_TAG: destination.key, **dict.fromkeys(destination.tags, "")}
        run = runs[0] if runs else self._client.create_run(experiment, tags=tags, run_name=destination.name)
        self._id = run.info.run_id
        self._last_event = int(run.data.metrics.get(EVENT, 0))
        if not run.data.params:
            params = [
                self._entities.Param(_nameable(name), str(value)[:_VALUE_CHARS])
                for name, value in (destination.config or {}).items()
            ]
            for start in range(0, len(params), 100):
                self._client.log_batch(self._id, params=params[start : start + 100])

    def _experiment(self, destination: Destination) -> str:
        known = self._client.get_experiment_by_name(destination.project)
        if known is not None:
            return known.experiment_id
        is_local = str(self._client.tracking_uri).startswith("sqlite:")
        artifacts = (destination.folder / "artifacts").absolute().as_uri() if is_local else None
        return self._client.create_experiment(destination.project, artifact_location=artifacts)

    @property
    def last_event(self) -> int | None:
        return self._last_event

    def write(self, row: Row) -> None:
        at = int(row.at * 1000)
        figures = [self._metric(name, value, at, row.step) for name, value in row.values.items() if name != EVENT]
        figures.append(self._metric(EVENT, row.event, at, row.event))
        for start in range(0, len(figures), _MOST):
            self._client.log_batch(self._id, metrics=figures[start : start + _MOST], synchronous=True)

    def flush(self) -> None:
        """Do nothing: a row is stored when its request returns."""

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
        """Store a table as MLflow stores its tables."""
        self._client.log_dict(self._id, {"columns": list(columns), "data": [list(row) for row in rows]}, f"{name}.json")

    def file(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def close(self, *, finished: bool) -> None:
        """Mark the run as finished; one that will be continued stays running."""
        if finished:
            self._client.set_terminated(self._id)

    def _metric(self, name: str, value: float, at: int, step: int) -> object:
        return self._entities.Metric(_nameable(name), float(value), at, step)


def _nameable(name: str) -> str:
    return _UNNAMEABLE.sub("_", name)


KIND = TrackerKind("mlflow", "mlflow", "penstock[mlflow]", MlflowWriter)
