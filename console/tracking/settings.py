"""The sections ``[[tracker]]`` and ``[tracking]``: to which experiment trackers a run's metrics are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from penstock.protocol.config.connection import NatsSettings, RunSettings, S3Settings, Section

_CREDENTIAL = re.compile(r"(^|_)(api_?key|token|password|passwd|secret)", re.IGNORECASE)


def refuse_credentials(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that is a credential: settings are shown, and stored with the run."""
    for name in options:
        if _CREDENTIAL.search(name):
            raise ValueError(
                f"options.{name} is a credential, and settings are stored with the run: set the library's own "
                "environment variable, such as WANDB_API_KEY, SWANLAB_API_KEY, HF_TOKEN or MLFLOW_TRACKING_TOKEN"
            )


class TrackerSettings(Section):
    """One tracker; what it leaves out is taken from [tracking]."""

    type: str = Field(min_length=1, description="Name of the tracker, or file.py:kind of your own.")
    project: str | None = Field(default=None, description="Project, experiment.")
    name: str | None = Field(default=None, description="Name of the run in the tracker.")
    folder: Path | None = Field(default=None, description="Folder of the files that the tracker writes.")
    options: dict[str, Any] = Field(default={}, description="Further arguments of the library's init function.")

    @field_validator("options")
    @classmethod
    def _no_credentials(cls, value: dict[str, Any]) -> dict[str, Any]:
        refuse_credentials(value)
        return value

    @property
    def label(self) -> str:
        """The name of its process, its log and its state: the type, or the attribute of a kind by import path."""
        return re.sub(r"[^A-Za-z0-9_-]+", "-", self.type.rpartition(":")[2]).strip("-") or "tracker"


def _by_name(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


Trackers = list[Annotated[TrackerSettings, BeforeValidator(_by_name)]]


class TrackingSettings(Section):
    """Where and how the trackers of [[tracker]] are written."""

    project: str = Field(
        default="penstock", min_length=1, description="Project (W&B, trackio, SwanLab), experiment (MLflow)."
    )
    name: str | None = Field(default=None, description='Name of the run in the trackers; "none": the run\'s id.')
    folder: Path | None = Field(
        default=None, description='Folder of the files that trackers write; "none": trackers/ in the run\'s folder.'
    )
    group: str = Field(default="", description="Group of runs (W&B, trackio, SwanLab).")
    entity: str = Field(default="", description="Team or workspace (W&B, SwanLab).")
    tags: list[str] = Field(default=[], description="Tags (W&B, SwanLab, MLflow).")
    samples: int = Field(
        default=32,
        ge=0,
        le=1000,
        description="Trained completions in the table of samples that is written at the end; 0: no table.",
    )
    finish_s: float = Field(
        default=10.0,
        ge=0.0,
        le=600.0,
        description="How long a train command waits at its end for trackers that have not sent everything; `penstock track` sends the rest.",
    )


class TrackSettings(Section):
    """The sections of a run file that the process of a tracker reads."""

    run: RunSettings = RunSettings()
    nats: NatsSettings = NatsSettings()
    s3: S3Settings = S3Settings()
    tracker: Trackers = Field(
        default=[],
        description='Trackers that get the run\'s metrics: ["tensorboard", "wandb"], or a table [[tracker]] for each with '
        "type, project, name, folder and options.",
    )
    tracking: TrackingSettings = TrackingSettings()

    @model_validator(mode="after")
    def _distinct(self) -> TrackSettings:
        labels = [one.label for one in self.tracker]
        if len(labels) != len(set(labels)):
            raise ValueError(f"tracker: {', '.join(labels)}: each may be given once")
        return self
