"""The batch script of Slurm, run by bash with stand-ins for `penstock` and `scontrol`; `make proof NAME=slurm` has the real ones."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from tests.servers import wait_for

SCRIPT = Path(__file__).parents[3] / "deploy" / "slurm" / "penstock.sbatch"
FINISHES = "exit ${CODE:-0}"
WAITS = 'trap "echo asked > asked; exit ${CODE:-130}" TERM; echo up > up; while :; do sleep 0.05; done'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory whose `bin` has the stand-ins; Slurm's writes its arguments down."""
    (tmp_path / "bin").mkdir()
    stand_in(tmp_path, "scontrol", 'echo "$*" > requeued; exit 1')
    return tmp_path


def stand_in(folder: Path, name: str, body: str) -> None:
    file = folder / "bin" / name
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)


def start(folder: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    given = {"PATH": path, "SLURM_JOB_ID": "7", "HOME": os.environ.get("HOME", "/"), **environ}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.Popen(command, cwd=folder, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("code", ["0", "3"])
def test_the_job_ends_as_the_run_does(folder: Path, code: str) -> None:
    """Arguments arrive as they are, with --local; a run that ends by itself is not queued again, whatever its exit code."""
    stand_in(folder, "penstock", f'printf "%s|" "$@" > arguments; {FINISHES}')
    job = start(folder, "run.toml", "--workers", "2", "data.system_prompt=two words", CODE=code)
    job.communicate(timeout=300)
    assert job.returncode == int(code)
    assert (folder / "arguments").read_text() == "train|--local|run.toml|--workers|2|data.system_prompt=two words|"
    assert not (folder / "requeued").exists()


@pytest.mark.parametrize(("code", "is_requeued"), [("130", True), ("0", False)])
def test_a_signal_reaches_the_run_and_the_job_is_queued_again(folder: Path, code: str, is_requeued: bool) -> None:
    """SIGTERM to the script is passed on; a run that is not finished then goes back into the queue, one that is does not."""
    stand_in(folder, "penstock", WAITS)
    job = start(folder, "run.toml", CODE=code)
    wait_for((folder / "up").exists, "the run")
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=300)
    assert (folder / "asked").exists()
    assert job.returncode == int(code)
    assert (folder / "requeued").exists() == is_requeued
    if is_requeued:
        assert (folder / "requeued").read_text() == "requeue 7\n"
        assert "put back into the queue" in output


# As Slurm's: a task on each node, and SIGTERM kills all of them.
SRUN = """
printf "%s|" "$1" "$2" > flags; shift 2
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
trap 'kill -KILL $first $second; exit 137' TERM
wait $first; code=$?
kill $second
exit $code
"""
TRAINS = """
printf "%s|" "$@" > arguments-$SLURM_PROCID
trap 'echo asked >> asked-$SLURM_PROCID; sleep ${FOR:-0}; exit ${CODE:-130}' TERM
echo up > up-$SLURM_PROCID; while :; do sleep 0.05; done
"""
SERVERS = {"PENSTOCK_NATS__URL": "tls://n:4222", "PENSTOCK_S3__ENDPOINT": "https://s:9000"}


@pytest.mark.parametrize(("code", "is_requeued"), [("130", True), ("0", False)])
def test_on_several_nodes_srun_starts_the_trainer_on_each(folder: Path, code: str, is_requeued: bool) -> None:
    """One task a node, with the arguments as they are and no servers; a signal reaches the first one, once, and not srun."""
    stand_in(folder, "penstock", TRAINS)
    stand_in(folder, "srun", SRUN)
    given = {"CODE": code, "FOR": "0.5", "SLURM_JOB_NUM_NODES": "2", "TMPDIR": str(folder), **SERVERS}
    job = start(folder, "run.toml", "trainer.num_ranks=16", **given)
    wait_for(lambda: all((folder / f"up-{node}").exists() for node in (0, 1)), "both nodes")
    job.send_signal(signal.SIGTERM)
    wait_for((folder / "asked-0").exists, "the signal")
    job.send_signal(signal.SIGUSR1)  # also of Slurm: a job that is preempted near its time limit
    job.communicate(timeout=300)
    assert job.returncode == int(code)
    assert (folder / "flags").read_text() == "--ntasks-per-node=1|--kill-on-bad-exit=1|"
    assert [(folder / f"arguments-{n}").read_text() for n in (0, 1)] == ["train|run.toml|trainer.num_ranks=16|"] * 2
    assert (folder / "asked-0").read_text() == "asked\n"
    assert (folder / "requeued").exists() == is_requeued
    assert not list(folder.glob("tmp.*"))


def test_a_signal_before_srun_has_started_the_trainer_reaches_it_afterwards(folder: Path) -> None:
    stand_in(folder, "penstock", TRAINS)
    stand_in(folder, "srun", f"echo up > srun-up; until [ -e go ]; do sleep 0.05; done\n{SRUN}")
    job = start(folder, "run.toml", SLURM_JOB_NUM_NODES="2", TMPDIR=str(folder), **SERVERS)
    wait_for((folder / "srun-up").exists, "srun")
    job.send_signal(signal.SIGTERM)
    (folder / "go").touch()
    job.communicate(timeout=300)
    assert job.returncode in {130, 143}, "143: it was started, and had not set its handler yet"
    assert (folder / "requeued").read_text() == "requeue 7\n"


def test_several_nodes_without_servers_that_all_reach_are_refused(folder: Path) -> None:
    stand_in(folder, "penstock", FINISHES)
    job = start(folder, "run.toml", SLURM_JOB_NUM_NODES="2", PENSTOCK_NATS__URL="tls://n:4222")
    assert "export PENSTOCK_NATS__URL and PENSTOCK_S3__ENDPOINT" in job.communicate(timeout=300)[0]
    assert job.returncode == 2


def test_what_is_missing_is_named(folder: Path) -> None:
    """Without a run file, or without the program, nothing is started."""
    nothing = start(folder)
    assert "usage: sbatch" in nothing.communicate(timeout=300)[0]
    missing = start(folder, "run.toml", PENSTOCK="/nowhere/penstock")
    assert "no program /nowhere/penstock" in missing.communicate(timeout=300)[0]
    assert nothing.returncode == missing.returncode == 2


def test_the_options_are_those_that_the_guide_explains() -> None:
    """The job may be requeued, keeps one output file, and the signal goes to the script alone."""
    options = re.findall(r"^#SBATCH (\S+)$", SCRIPT.read_text(), re.MULTILINE)
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@180", "--nodes=1", "--ntasks-per-node=1"} <= set(
        options
    )
