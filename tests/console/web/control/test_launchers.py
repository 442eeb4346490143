"""Launchers: a real process that outlives the API; Slurm and Kubernetes through executables that stand in for theirs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers import wait_for

from penstock.console.web.jobs import job_file
from penstock.console.web.jobs.job_file import Job, run_state
from penstock.console.web.launchers.kubernetes import Kubernetes, KubernetesOptions, manifest
from penstock.console.web.launchers.launcher import Start
from penstock.console.web.launchers.local import Local, LocalOptions, send
from penstock.console.web.launchers.run_process import ALREADY_RUNNING, LOCK, started_ticks
from penstock.console.web.launchers.slurm import Slurm, SlurmOptions
from penstock.console.web.problems import Problem
from penstock.protocol.record.run_folder import is_locked

WAITS = "import signal,sys,time; signal.signal(signal.SIGINT, lambda *_: sys.exit(7)); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "runs" / "one"
    made.mkdir(parents=True)
    return made


def start_of(folder: Path, *command: str, options: object = None, num_gpus: int = 0, number: int = 1) -> Start:
    return Start(folder, number, command, dict(os.environ), options or LocalOptions(), num_gpus)  # type: ignore[arg-type]


def test_a_local_run_outlives_the_process_that_started_it(folder: Path):
    """It is found by its lock, a second one ends at once, SIGINT reaches its command, and its exit code is recorded."""
    start = start_of(folder, sys.executable, "-c", WAITS)
    code = (
        "import sys, json, os; from pathlib import Path; from penstock.console.web.launchers.local import Local, LocalOptions;"
        "from penstock.console.web.launchers.launcher import Start;"
        "c = json.loads(sys.argv[2]); Local().start(Start(Path(sys.argv[1]), 1, tuple(c), dict(os.environ), LocalOptions()));"
        "os.kill(os.getpid(), 9)"
    )
    api = subprocess.run([sys.executable, "-c", code, str(folder), json.dumps(start.command)], timeout=300, check=False)
    assert api.returncode == -signal.SIGKILL
    launcher, options = Local(), LocalOptions()
    assert launcher.find(folder, options, "").state == "running"
    log = folder / "logs" / "launch.log"
    wait_for(lambda: "up" in log.read_text(), "the command to run")
    second = subprocess.run(start.process, timeout=300, check=False)
    assert second.returncode == ALREADY_RUNNING
    launcher.stop(folder, options, "", force=False)
    wait_for(lambda: not is_locked(folder / LOCK), "the run to end")
    ended = job_file.read_launch(folder)
    assert ended is not None
    assert (ended.start, ended.exit_code) == (1, 7)
    assert ended.ended_at is not None


def test_a_killed_run_is_seen_as_ended_and_its_command_is_not_left(folder: Path):
    """With force its command is killed and the end recorded; without the process that records it the lock is free too."""
    Local().start(start_of(folder, sys.executable, "-c", WAITS))
    wait_for(lambda: (launch := job_file.read_launch(folder)) is not None and launch.child > 0, "the command")
    Local().stop(folder, LocalOptions(), "", force=True)
    wait_for(lambda: not is_locked(folder / LOCK), "the run to end")
    launch = job_file.read_launch(folder)
    assert launch is not None
    assert launch.exit_code == -signal.SIGKILL
    job = Job(run="one", created_at=0.0, intent="run", starts=1, handle_start=1)
    assert run_state(folder, job).state == "failed"


def test_a_run_goes_on_without_the_process_that_records_its_end(folder: Path):
    """Its command holds the lock too, is still found, and is the one that is asked to stop."""
    Local().start(start_of(folder, sys.executable, "-c", WAITS))
    wait_for(lambda: "up" in (folder / "logs" / "launch.log").read_text(), "the command to run")
    launch = job_file.read_launch(folder)
    assert launch is not None
    assert send(launch.pid, launch.pid_started, signal.SIGKILL)
    wait_for(lambda: started_ticks(launch.pid) != launch.pid_started, "the recording process to end")
    assert Local().find(folder, LocalOptions(), "").state == "running"
    Local().stop(folder, LocalOptions(), "", force=False)
    wait_for(lambda: not is_locked(folder / LOCK), "the command to end")


def test_a_signal_is_sent_to_no_other_process_of_the_same_pid():
    assert not send(os.getpid(), started_ticks(os.getpid()) + 1, signal.SIGCONT)
    assert send(os.getpid(), started_ticks(os.getpid()), signal.SIGCONT)
    assert not send(0, 0, signal.SIGCONT)


def test_a_command_that_cannot_start_is_a_failure_with_its_log(folder: Path):
    Local().start(start_of(folder, "/nonexistent/program"))
    wait_for(lambda: not is_locked(folder / LOCK), "the process to end")
    assert "FileNotFoundError" in (folder / "logs" / "launch.log").read_text()
    assert run_state(folder, Job(run="one", created_at=0.0, intent="run", starts=1, handle_start=1)).state == "failed"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with stand-ins for the commands of schedulers: they log their words and answer with a file."""
    commands = tmp_path / "bin"
    commands.mkdir()
    script = f"""#!/bin/sh
name=$(basename "$0")
echo "$name $*" >> {tmp_path}/calls
case "$name $*" in sbatch*|*apply*) cat > {tmp_path}/stdin ;; esac
key="$name"; case "$*" in *--name=*) key="$name-name" ;; esac; case "$*" in *" get "*) key="$name-get" ;; esac
if [ -f {tmp_path}/$key.err ]; then cat {tmp_path}/$key.err >&2; exit 1; fi
cat {tmp_path}/$key.out 2>/dev/null; exit 0
"""
    for name in ("sbatch", "squeue", "scancel", "kubectl"):
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return tmp_path


def said(calls: Path) -> list[str]:
    return (calls / "calls").read_text().splitlines()


def test_slurm_submits_finds_and_stops_a_batch_job(calls: Path, folder: Path):
    """The script runs the recording process; a running job gets SIGINT, a pending one is cancelled."""
    (calls / "sbatch.out").write_text("4711;cluster\n")
    slurm, options = Slurm(), SlurmOptions(partition="gpu", time="1-00:00:00", gpus=None)
    handle = slurm.start(start_of(folder, "train", "a b", options=options, num_gpus=8))
    assert handle == "4711"
    queued, submitted = said(calls)
    assert queued.startswith("squeue --noheader --name=penstock-one")
    flags = {
        "--parsable",
        "--job-name=penstock-one",
        "--comment=penstock:one:1",
        "--partition=gpu",
        "--gpus=8",
        "--no-requeue",
    }
    assert flags <= set(submitted.split())
    script = (calls / "stdin").read_text()
    assert script.startswith("#!/bin/sh\nexec ")
    assert script.endswith(f"run_process {folder} 1 train 'a b'\n")
    states = {"PENDING|Priority": "waiting", "RUNNING|None": "running", "COMPLETED|None": "absent", "": "absent"}
    for state, expected in states.items():
        (calls / "squeue.out").write_text(state)
        assert slurm.find(folder, options, handle).state == expected
    for state in ("RUNNING|None", "PENDING|Priority"):
        (calls / "squeue.out").write_text(state)
        slurm.stop(folder, options, handle, force=False)
    assert [call for call in said(calls) if "scancel" in call] == ["scancel --signal=INT --batch 4711", "scancel 4711"]


def test_a_job_that_a_killed_api_submitted_is_not_submitted_twice(calls: Path, folder: Path):
    """It is found in the queue by its comment: the run, and the number of the start."""
    (calls / "squeue-name.out").write_text("4710|RUNNING|penstock:one:0\n4711|PENDING|penstock:one:1\n")
    assert Slurm().start(start_of(folder, "train", options=SlurmOptions())) == "4711"
    assert not any(call.startswith("sbatch") for call in said(calls))


def test_a_job_that_slurm_has_forgotten_has_ended(calls: Path, folder: Path):
    """Squeue calls its id invalid; another failure is a problem with its text."""
    (calls / "squeue.err").write_text("slurm_load_jobs error: Invalid job id specified\n")
    assert Slurm().find(folder, SlurmOptions(), "4711").state == "absent"
    (calls / "squeue.err").write_text("Unable to contact slurm controller\n")
    with pytest.raises(Problem) as problem:
        Slurm().find(folder, SlurmOptions(), "4711")
    assert problem.value.body.got == "Unable to contact slurm controller"


def test_kubernetes_applies_finds_and_deletes_a_job(calls: Path, folder: Path):
    """The Job never restarts a pod by itself, mounts the runs, and its pod has time for a checkpoint."""
    options = KubernetesOptions(image="penstock:1", claim="runs", namespace="rl", environment_secret="keys")
    kubernetes = Kubernetes()
    start = start_of(folder, "train", options=options, num_gpus=2)
    assert kubernetes.start(start) == "penstock-one-1"
    applied = json.loads((calls / "stdin").read_text())
    assert applied == manifest(start, options)
    spec = applied["spec"]["template"]["spec"]
    assert (applied["spec"]["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
    assert spec["terminationGracePeriodSeconds"] >= 60
    (container,) = spec["containers"]
    assert container["command"][:4] == ["python", "-P", "-m", "penstock.console.web.launchers.run_process"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": str(folder.parent)}]
    for status, expected in (
        ({"active": 1, "ready": 1}, "running"),
        ({}, "waiting"),
        ({"succeeded": 1}, "absent"),
        ({"failed": 1}, "absent"),
    ):
        (calls / "kubectl-get.out").write_text(json.dumps({"status": status}))
        assert kubernetes.find(folder, options, "penstock-one-1").state == expected
    (calls / "kubectl-get.err").write_text('Error from server (NotFound): jobs.batch "penstock-one-1" not found')
    assert kubernetes.find(folder, options, "penstock-one-1").state == "absent"
    kubernetes.stop(folder, options, "penstock-one-1", force=False)
    assert said(calls)[-1] == "kubectl --namespace=rl delete job penstock-one-1 --wait=false --cascade=foreground"


def test_a_scheduler_that_is_not_installed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Problem) as problem:
        Slurm().start(start_of(folder, "train", options=SlurmOptions()))
    assert (problem.value.status, problem.value.body.detail) == (503, "squeue is not installed here")


@pytest.mark.parametrize("value", ["a b", "x;rm -rf /", "$(id)", "--wrap=x", "a\nb", ""])
def test_an_option_of_a_scheduler_is_one_word(value: str):
    with pytest.raises(ValueError, match="partition"):
        SlurmOptions(partition=value)
