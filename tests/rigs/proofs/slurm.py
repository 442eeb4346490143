"""A real Slurm of one node, and a run that is preempted once and resumes. `make proof NAME=slurm` (Debian's slurmctld, slurmd, slurm-client, munge; root).

    python -m tests.rigs.proofs.slurm [FOLDER]

munged, slurmctld and slurmd run on the loopback with a configuration of their own. The job is submitted into a partition
of low priority; a job of a higher one takes its node. Prints a line for each step of the proof; exit code 1 when one does not
hold.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.rigs.proofs.proof import Proof, folder_of
from tests.small_run import write_small_run

from penstock.deploy.processes.child import Child
from penstock.deploy.processes.servers import free_port

_SCRIPT = Path(__file__).parents[3] / "deploy" / "slurm" / "penstock.sbatch"
_PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
_STEPS, _BEFORE = 40, 8
_DEADLINE_S = 240.0
_CONFIG = """
ClusterName=proof
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmdPort={slurmd}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
RebootProgram=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 MaxTime=60 OverSubscribe=NO
PartitionName=high Nodes={host} PriorityTier=2 PreemptMode=OFF MaxTime=60 OverSubscribe=NO
"""


class Queued(Proof):
    """The steps of the proof; the run's id is ``queued``."""

    def type(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=False, cwd=self.base, timeout=60
        )
        return done.stdout.strip() if done.returncode == 0 else f"{done.stdout}{done.stderr}".strip()

    def job(self, number: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.type("scontrol", "show", "job", number)))


def main() -> int:
    """Return 1 when a step of the proof does not hold."""
    for program, package in _PROGRAMS.items():
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            print(f"no program {program}: apt-get install {package}", file=sys.stderr)
            return 2
    base = folder_of("slurm")
    environ = {**os.environ, "SLURM_CONF": str(base / "slurm.conf"), "PENSTOCK": str(base / "penstock")}
    proof = Queued(base, environ, deadline_s=_DEADLINE_S)
    _prepare(base)
    children = _cluster(proof)
    try:
        _prove(proof)
    finally:
        for child in reversed(children):
            child.stop()
    return proof.end()


def _prepare(base: Path) -> None:
    for folder in (base / "state", base / "spool"):
        folder.mkdir(parents=True, exist_ok=True)
    write_small_run(base, "queued", num_train=1000, trainer={"steps": _STEPS, "checkpoint_every_s": 600})
    (base / "munge.key").write_bytes(os.urandom(1024))
    (base / "munge.key").chmod(0o600)
    (base / "penstock").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m penstock "$@"\n')
    (base / "penstock").chmod(0o755)
    host = socket.gethostname().split(".")[0]
    ports = {"ctld": free_port(), "slurmd": free_port()}
    (base / "slurm.conf").write_text(_CONFIG.format(host=host, base=base, cpus=os.cpu_count(), **ports))


def _cluster(proof: Queued) -> list[Child]:
    base, started = proof.base, []
    names = [
        f"--{name}={base}/munge.{end}" for name, end in (("socket", "socket"), ("key-file", "key"), ("pid-file", "pid"))
    ]
    more = [f"--log-file={base}/munge.log", f"--seed-file={base}/munge.seed"]
    path = f"{os.environ['PATH']}:/usr/sbin"
    for name, *flags in (
        ("munged", "--foreground", "--force", *names, *more),
        ("slurmctld", "-D", "-c", "-f", str(base / "slurm.conf")),
        ("slurmd", "-D", "-f", str(base / "slurm.conf")),
    ):
        program = shutil.which(name, path=path)
        assert program is not None
        child = Child(name, [program, *flags], log=base / f"{name}.log", environ=proof.environ)
        child.start()
        started.append(child)
        time.sleep(2.0)
    proof.wait("the node is idle", lambda: "idle" in proof.type("sinfo", "--noheader", "--format=%T"), 60)
    return started


def _prove(proof: Queued) -> None:
    started = time.monotonic()
    number = proof.type(
        "sbatch", "--parsable", "--partition=low", "--exclusive", "--output=job.out", str(_SCRIPT), "run.toml"
    )
    proof.check(f"job {number} is submitted", number.isdigit())
    proof.wait(f"{_BEFORE} steps are trained", lambda: len(proof.steps("queued")) >= _BEFORE)
    before = len(proof.steps("queued"))
    other = proof.type(
        "sbatch", "--parsable", "--partition=high", "--exclusive", "--output=other.out", "--wrap=sleep 3"
    )
    proof.wait(f"job {other} of higher priority has run", lambda: proof.job(other).get("JobState") == "COMPLETED")
    proof.wait("the preempted job runs again", lambda: proof.job(number).get("JobState") == "RUNNING")
    proof.check(f"it was restarted once: {proof.job(number).get('Restarts')}", proof.job(number).get("Restarts") == "1")
    proof.wait(
        f"job {number} ends", lambda: proof.job(number).get("JobState") not in ("RUNNING", "PENDING", "COMPLETING")
    )
    job = proof.job(number)
    proof.check(f"it is {job.get('JobState')} with exit code {job.get('ExitCode')}", job.get("JobState") == "COMPLETED")
    steps = proof.steps("queued")
    proof.check(
        f"steps 1 to {_STEPS}, each once ({before} or more before the preemption): {len(steps)} rows",
        steps == list(range(1, _STEPS + 1)),
    )
    log = (proof.base / "job.out").read_text()
    proof.check("the checkpoint of the stop was written and read: its log says both", "put back into the queue" in log)
    audit = proof.type(str(proof.base / "penstock"), "audit", "queued")
    print("    " + audit.replace("\n", "\n    "))
    print(f"{time.monotonic() - started:.0f} s from the submission to the end")


if __name__ == "__main__":
    sys.exit(main())
