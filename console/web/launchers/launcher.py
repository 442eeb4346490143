"""What a launcher is: it starts the process of a run somewhere, finds it again, and asks it to stop."""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from penstock.console import launch
from penstock.console.web.problems import Problem
from penstock.protocol.errors import ConfigError
from penstock.protocol.extensions import Registry

_COMMAND_S = 30.0
_MAX_ANSWER = 500


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run: its folder, its number, and the command to execute."""

    folder: Path
    number: int
    command: tuple[str, ...]
    environ: Mapping[str, str]
    options: BaseModel
    num_gpus: int = 0
    directory: Path | None = None

    @property
    def run(self) -> str:
        return self.folder.name

    @property
    def name(self) -> str:
        return f"penstock-{self.run}"

    @property
    def process(self) -> list[str]:
        """The command of `run_process`, which executes the run's."""
        module = "penstock.console.web.launchers.run_process"
        return launch.module(module, str(self.folder), str(self.number), *self.command)


@dataclass(frozen=True, slots=True)
class Found:
    """What a launcher knows of a run's newest process: ``waiting`` for the scheduler, ``running``, or ``absent``."""

    state: Literal["waiting", "running", "absent"]
    detail: str = ""

    @property
    def is_alive(self) -> bool:
        """True while the run has a process or will get one from its scheduler."""
        return self.state != "absent"


class Launcher(ABC):
    """One way to start runs; those that share this machine wait for one another in its queue."""

    name: str  # in requests
    uses_this_machine: bool
    options: type[BaseModel]  # what ``launcher_options`` may hold

    @abstractmethod
    def start(self, start: Start) -> str:
        """Start a process, detached from this one; return the scheduler's id. Raises Problem."""

    @abstractmethod
    def find(self, folder: Path, options: BaseModel, handle: str) -> Found:
        """Look up the run's process; raises Problem when the scheduler does not answer."""

    @abstractmethod
    def stop(self, folder: Path, options: BaseModel, handle: str, *, force: bool) -> None:
        """Ask the process to write a checkpoint and end, or with ``force`` end it; return at once. Raises Problem."""


LAUNCHERS: Final[Registry[Launcher]] = Registry(
    "launcher", Launcher, package="penstock.console.web.launchers", group="penstock.launchers"
)


def named(name: str) -> str:
    """Return the name of a launcher in a request, checked: a file's name would run it. Raises ValueError."""
    if name not in LAUNCHERS.names():
        raise ValueError(f"unknown launcher {name!r}; use one of {', '.join(LAUNCHERS.names())}")
    return name


def launcher_of(name: str) -> Launcher | None:
    """Return the launcher that a stored job names; None if none of that name works here. A file that it names is not run."""
    try:
        return LAUNCHERS.find(named(name)).value if name not in LAUNCHERS.built_in else LAUNCHERS.built_in[name]
    except (ValueError, ConfigError):
        return None


def installed(name: str) -> Launcher:
    """Return the launcher that a stored job names; raises Problem if none of that name works here."""
    if (launcher := launcher_of(name)) is None:
        raise Problem(
            409,
            f"the run was started by the launcher {name[:80]!r}, which is not installed here",
            expected=", ".join(LAUNCHERS.names()),
            fix="stop it where it was started, or install the package of this launcher",
        )
    return launcher


def ask(
    command: Sequence[str], *, stdin: str = "", environ: Mapping[str, str] | None = None, absent: Sequence[str] = ()
) -> str | None:
    """Run a scheduler's command and return its output; None if it failed with one of the texts ``absent``. Raises Problem."""
    try:
        answer = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_S,
            check=False,
            env={**os.environ, **(environ or {})},
        )
    except FileNotFoundError:
        raise Problem(
            503, f"{command[0]} is not installed here", fix=f"start the console on a machine with {command[0]}"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as err:
        raise Problem(503, f"{command[0]} did not answer: {err}"[:_MAX_ANSWER], fix="try again") from None
    if answer.returncode == 0:
        return answer.stdout
    if any(text in answer.stderr for text in absent):
        return None
    raise Problem(
        503,
        f"{command[0]} failed with exit code {answer.returncode}",
        expected="exit code 0",
        got=answer.stderr.strip()[-_MAX_ANSWER:],
        fix="correct the launcher's options, or the scheduler",
    )


def scheduler_options(job_options: dict[str, Any], options: type[BaseModel]) -> BaseModel:
    """Return stored options; unknown ones of another build are ignored."""
    return options.model_validate({key: value for key, value in job_options.items() if key in options.model_fields})
