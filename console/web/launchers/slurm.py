"""A batch job of Slurm: `sbatch`, `squeue`, `scancel`. The folder of runs must be shared with the nodes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from penstock.console.web.launchers.launcher import Found, Launcher, Start, ask

_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,:=+@/-]{0,127}$")]
_NO_JOB = ("Invalid job id",)
_OVER = ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")


class SlurmOptions(BaseModel):
    """Options of sbatch."""

    model_config = ConfigDict(extra="forbid")

    partition: _Word | None = None
    account: _Word | None = None
    qos: _Word | None = None
    time: _Word | None = Field(None, description="Longest time, as 1-12:00:00.")
    cpus_per_task: int | None = Field(None, ge=1, le=4096)
    mem: _Word | None = Field(None, description="Memory, as 64G.")
    gpus: int | None = Field(None, ge=0, le=1024, description="Default: num_gpus of the job.")
    constraint: _Word | None = None


class Slurm(Launcher):
    name = "slurm"
    uses_this_machine = False
    options = SlurmOptions

    def start(self, start: Start) -> str:
        """Submit a job and return its id; one that an earlier, killed API submitted for this start is taken instead."""
        comment = f"penstock:{start.run}:{start.number}"
        for line in (_queue(start.name) or "").splitlines():
            job, _, rest = line.partition("|")
            if rest.partition("|")[2].strip() == comment:
                return job.strip()
        options = start.options
        assert isinstance(options, SlurmOptions)
        (start.folder / "logs").mkdir(parents=True, exist_ok=True)
        gpus = options.gpus if options.gpus is not None else start.num_gpus
        flags = {
            "partition": options.partition,
            "account": options.account,
            "qos": options.qos,
            "time": options.time,
            "cpus-per-task": options.cpus_per_task,
            "mem": options.mem,
            "gpus": gpus or None,
            "constraint": options.constraint,
        }
        command = [
            "sbatch",
            "--parsable",
            f"--job-name={start.name}",
            f"--comment={comment}",
            f"--output={start.folder / 'logs' / 'slurm-%j.out'}",
            "--no-requeue",
            *([f"--chdir={start.directory}"] if start.directory else []),
            *(f"--{name}={value}" for name, value in flags.items() if value is not None),
        ]
        script = f"#!/bin/sh\nexec {shlex.join(start.process)}\n"
        answer = ask(command, stdin=script, environ=start.environ) or ""
        return answer.strip().partition(";")[0]  # with several clusters: ID;CLUSTER

    def find(self, folder: Path, options: BaseModel, handle: str) -> Found:
        """Ask squeue; a job that it does not list has ended."""
        if not handle:
            return Found("absent")
        answer = ask(["squeue", "--noheader", f"--jobs={handle}", "--format=%T|%r"], absent=_NO_JOB) or ""
        state, _, reason = answer.strip().partition("|")
        if state in {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED"}:
            return Found("waiting", reason.strip())
        return Found("absent", state.lower()) if state in _OVER else Found("running", state.lower())

    def stop(self, folder: Path, options: BaseModel, handle: str, *, force: bool) -> None:
        """Cancel a pending job; a running one gets SIGINT, and writes a checkpoint."""
        job = self.find(folder, options, handle)
        if not job.is_alive:
            return
        gently = job.state == "running" and not force
        ask(["scancel", *(["--signal=INT", "--batch"] if gently else []), handle], absent=_NO_JOB)


SLURM = Slurm()


def _queue(name: str) -> str | None:
    return ask(["squeue", "--noheader", f"--name={name}", "--format=%i|%T|%k"])
