"""Read the sections ``[[tracker]]`` and ``[tracking]``, check them before a run starts, and open the trackers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from penstock.console import connections, launch
from penstock.console.evaluation_results import FOLDER as EVALUATIONS
from penstock.console.report import curves
from penstock.console.tracking.interface import TRACKERS
from penstock.protocol import seals
from penstock.protocol.config.connection import NatsSettings, RunSettings, S3Settings, Section
from penstock.protocol.config.run_file import load
from penstock.protocol.config.sources import split_arguments
from penstock.protocol.errors import ConfigError
from penstock.protocol.secret_values import hide
from penstock.protocol.subjects import similar_run_id

MODULE = "penstock.console.tracking"
EXPLAINED_CODE = 2  # exit code of an error that another start does not resolve


def refuse_credentials(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that is a credential: settings are shown, and stored with the run."""
    for name, value in options.items():
        if hide(("options", name), value) != value:
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
        labels = [tracker.label for tracker in self.tracker]
        if len(labels) != len(set(labels)):
            raise ValueError(f"tracker: {', '.join(labels)}: each may be given once")
        return self


def load_settings(run: str | None, arguments: Sequence[str], environ: Mapping[str, str]) -> TrackSettings:
    files, overrides = split_arguments(arguments)
    if run is None:
        return load(TrackSettings, files=files, overrides=overrides, environ=environ).settings
    store = connections.find(arguments, environ, run_id=run).settings.run.folder / connections.STORE
    is_elsewhere = connections.is_configured(connections.find(arguments, environ))
    store_environ = {} if is_elsewhere else connections.store_environment(store)
    loaded = load(
        TrackSettings, files=files, overrides=[*overrides, f"run.id={run}"], environ={**store_environ, **environ}
    )
    if loaded.origins["tracker"] != "default":
        return loaded.settings
    stored = _stored_trackers(loaded.settings) or loaded.settings
    return loaded.settings.model_copy(update={"tracker": stored.tracker, "tracking": stored.tracking})


def check(settings: TrackSettings) -> None:
    for tracker in settings.tracker:
        TRACKERS.find(tracker.type).value.require_installed()


def _stored_trackers(settings: TrackSettings) -> TrackSettings | None:
    """Return the trackers that a run was started with, from its folder; None when there is no such file.

    Raises UntrustedFolder for a file of somebody else: a tracker may be code, and gets what a run generated.
    """
    content = seals.read(settings.run.folder / "trackers" / "settings.json", 1024**2)
    try:
        return None if content is None else TrackSettings.model_validate(json.loads(content))
    except ValueError:
        return None


def store(settings: TrackSettings) -> None:
    """Write the trackers of a run into its folder, for `penstock track RUN` without its run file."""
    path = settings.run.folder / "trackers" / "settings.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = settings.model_dump(mode="json", include={"tracker", "tracking"})
    seals.write(path, json.dumps(kept, indent=1) + "\n", optional=True)


def command(run: str, label: str, arguments: Sequence[str], *flags: str) -> list[str]:
    return launch.module(MODULE, run, label, *flags, *arguments)


def _start(
    settings: TrackSettings, arguments: Sequence[str], training: str, *flags: str
) -> dict[str, subprocess.Popen[bytes]]:
    """Start a process for each tracker, by label; it ends with this one."""
    own = ["--training", training] if training in (*curves.GIVEN_ANSWERS, EVALUATIONS) else []
    flags = ("--parent", str(os.getpid()), *own, *flags)
    labels = [tracker.label for tracker in settings.tracker]
    return {label: subprocess.Popen(command(settings.run.id, label, arguments, *flags)) for label in labels}


@contextmanager
def beside(training: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Write the figures of a training on given answers, sft, dpo or rm, to the trackers of its run file while the block runs.

    A process that crashes is started again. At its end the processes have ``tracking.finish_s`` to write the rest; what is missing then
    is named on stderr. Raises ConfigError before the block for a tracker that is not installed.
    """
    settings = load_settings(None, arguments, environ)
    check(settings)
    if settings.tracker:
        store(settings)
    children = _start(settings, arguments, training)
    ended = threading.Event()
    watch = threading.Thread(target=_restart_crashed, args=(children, ended), daemon=True, name="trackers")
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()
        if not curves.is_training_finished(settings.run.folder, training):  # it will be continued: no end will come
            _end(children, 0.0)
            children = _start(settings, arguments, training, "--once")
        for label in _end(children, settings.tracking.finish_s):
            print(f"{label} has not everything; the rest: penstock track {settings.run.id}", file=sys.stderr)


def _restart_crashed(children: dict[str, subprocess.Popen[bytes]], ended: threading.Event) -> None:
    """Start processes that crash again until ``ended`` is set; each time the next look is twice as late, up to half a minute."""
    pause_s = 0.5
    while not ended.wait(pause_s):
        for label, child in list(children.items()):
            if child.poll() not in (None, os.EX_OK, EXPLAINED_CODE):
                print(f"the tracker {label} ended with exit code {child.returncode}; restarting it", file=sys.stderr)
                children[label] = subprocess.Popen(child.args)
                pause_s = min(2 * pause_s, 30.0)


def write_evaluations(home: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Write the evaluations noted in a run's folder to the trackers of a run file, each once; what is missing is named on stderr."""
    settings = load_settings(None, arguments, environ)
    arguments = [*arguments, f"run.dir={home.parent}"]
    settings = settings.model_copy(update={"run": RunSettings(id=similar_run_id(home.name), dir=home.parent)})
    children = _start(settings, arguments, EVALUATIONS, "--once", f"--folder={home / EVALUATIONS}")
    for label in _end(children, settings.tracking.finish_s):
        print(f"{label} has not everything; the same command writes the rest", file=sys.stderr)


def _end(children: Mapping[str, subprocess.Popen[bytes]], wait_s: float) -> list[str]:
    """Wait for the processes, and stop those that take longer; return the trackers that do not have everything."""
    give_up = time.monotonic() + wait_s
    for child in children.values():
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, give_up - time.monotonic()))
    unfinished = [label for label, child in children.items() if child.returncode != 0]
    for child in children.values():
        child.terminate()
        child.wait()
    return unfinished


def track(run: str, arguments: Sequence[str], environ: Mapping[str, str], *, once: bool) -> int:
    """Write a run to all its trackers, each in a separate process, until it ends; returns the highest exit code."""
    settings = load_settings(run, arguments, environ)
    check(settings)
    if not settings.tracker:
        raise ConfigError(
            'no tracker is set: penstock track RUN tracker=tensorboard, or tracker = ["wandb"] in the run file'
        )
    training = curves.command_of(settings.run.folder) or ""
    children = _start(settings, arguments, training, *(["--once"] if once else []))

    def stop(*_: object) -> None:
        for child in children.values():
            child.terminate()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
    names = ", ".join(children)
    print(f"run {run}: writing to {names}; Ctrl-C stops it, and the same command goes on", file=sys.stderr)
    codes = [child.wait() for child in children.values()]
    return max((code if code >= 0 else 128 - code for code in codes), default=os.EX_OK)
