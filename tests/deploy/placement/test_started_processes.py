"""Every process of a run gets its GPUs: through the code that starts them, as a stand-in of Python wrote them down."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.console.command import server_arguments
from tests.deploy.placement.hosts import cards, model_of, see, stand_in, started
from tests.servers import require_package, wait_for
from tests.small_run import write_small_run

from penstock.console.cli.main import run as penstock
from penstock.console.tools.init_run_file import Answers, init
from penstock.deploy import train
from penstock.deploy.local_run import LocalRun
from penstock.deploy.make_secrets import make_secrets
from penstock.deploy.placement import run_placement
from penstock.deploy.placement.placement import DoesNotFit
from penstock.deploy.placement.run_placement import place_run
from penstock.deploy.placement.show import finding, settings_that_fit
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.metrics import gpu
from penstock.protocol.record.run_folder import PLACEMENT

ROOT = Path(__file__).parents[3]
WITH_ADAPTERS = {("7B", 1), ("7B", 2), *(("32B", num_gpus) for num_gpus in (1, 2, 4, 8))}
SBATCH = str(ROOT / "deploy" / "slurm" / "penstock.sbatch")


def run_file(folder: Path, shape: str, gpus: str) -> Path:
    file = folder / "run.toml"
    answers = Answers(str(model_of(folder, shape)), str(folder / "none.jsonl"), None, "gsm8k", gpus, 3, "demo")
    init(file, answers, schema=False, ask=None, fit=settings_that_fit)
    return file


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", ["0.6B", "7B", "32B"])
def test_a_new_run_fits_and_no_gpu_is_used_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nats_settings: NatsSettings,
    s3_settings: S3Settings,
    run_id: str,
    shape: str,
    num_gpus: int,
) -> None:
    """The file of `penstock init` fits by the plan; workers, servers, ranks and rewards see what the placement says."""
    see(monkeypatch, cards(num_gpus))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    file = run_file(tmp_path, shape, str(num_gpus))
    where = server_arguments(nats_settings, s3_settings)
    arguments = [str(file), f"run.id={run_id}", f"run.dir={tmp_path / 'runs'}", *where]
    assert ("[model.lora]" in file.read_text()) == ((shape, num_gpus) in WITH_ADAPTERS)
    python = str(stand_in(tmp_path))
    with LocalRun(arguments) as run:
        monkeypatch.setattr(sys, "executable", python)
        run.start_services()
        run.start_trainer()
        processes = started(tmp_path, 3)
    assert len(processes) == 3, "one worker for all servers"
    reward, worker, trainer = sorted(processes, key=lambda process: process.role)
    of_servers = [gpus for gpus, _ in worker.servers()]
    used = [name for gpus in of_servers for name in gpus]
    assert sorted(used) == sorted(set(used)) == sorted(worker.visible)
    assert trainer.ranks == len(trainer.visible)
    assert bool(set(used) & set(trainer.visible)) == (num_gpus == 1) == run.placed.placement.is_shared
    assert not set(reward.visible) & {*used, *trainer.visible}
    assert {*used, *trainer.visible, *reward.visible} == {str(number) for number in range(num_gpus)}
    assert {one.environ[gpu.ORDER] for one in (trainer, worker)} == {"PCI_BUS_ID"}
    assert int(worker.environ["OMP_NUM_THREADS"]) == 64 // (len(of_servers) + trainer.ranks)
    fractions = ["--mem-fraction-static" in words for _, words in worker.servers()]
    assert set(fractions) == {num_gpus == 1}, "a part of the memory only where it is shared"
    recorded = json.loads((run.folder / PLACEMENT).read_text())
    assert (len(recorded["trainer"]), recorded["overrides"]) == (trainer.ranks, list(run.placed.overrides))
    assert set(recorded["overrides"]) <= set(trainer.words)


def test_the_plan_and_the_doctor_show_the_same_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text and JSON; a run that does not fit ends the plan with 1, and the doctor with a line that fails."""
    see(monkeypatch, cards(8, used=0))
    file = run_file(tmp_path, "7B", "8")
    line = "GPU 0-3 engines (4 x tp 1), GPU 4-7 trainer (4 ranks, ZeRO 1): a rank needs 76.1 GB of"
    assert re.sub(r"\s+", " ", file.read_text()).count(f"# GPUs: {line}") == 1
    capsys.readouterr()
    assert penstock(["plan", str(file), "--gpus", "8x85.899GB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["placement"]["says"][0].startswith(line)
    assert (document["memory"]["fits"], document["memory"]["limit"]) == (True, int(0.92 * 85_899_000_000))
    assert penstock(["placement", str(file)]) == 0
    assert capsys.readouterr().out.startswith(line)
    (found,) = finding([str(file)], os.environ)
    assert (found.level, found.detail[: len(line)]) == ("ok", line)
    assert not list(finding([], os.environ)), "without a run file"
    assert penstock(["plan", str(file), "--gpus", "1x80GB"]) == 1
    assert penstock(["placement", str(file), "--gpus", "8x80"]) == 2
    assert "--gpus 80: expected a size such as 24GB" in (said := capsys.readouterr().err)
    assert "penstock plan: engines and trainer do not fit on GPU 0 in turns" in said
    see(monkeypatch, cards(2))
    assert [found.level for found in finding([str(file)], os.environ)] == ["fail"]


# `penstock` on a machine with eight GPUs, one of which is in use; what it starts is a stand-in.
PROGRAM = """
import sys
sys.path[:0] = [{root!r}]
from tests.deploy.placement import hosts
from tests.protocol.metrics.nvml import Nvml
from penstock.console.cli.main import run
from penstock.protocol.metrics import gpu
gpu._package = lambda **_: Nvml([*hosts.cards(2), hosts.Card("GPU-busy", used=60), *hosts.cards(7)[2:]])
sys.executable = {stand_in!r}
sys.exit(run(sys.argv[1:]))
"""
NODES = 'shift 2; SLURM_PROCID=1 SLURM_NODEID=1 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST="n[0-1]" exec "$@"'
SERVERS = {"PENSTOCK_NATS__URL": "nats://127.0.0.1:1", "PENSTOCK_S3__ENDPOINT": "http://127.0.0.1:1"}


def machine(folder: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command where `penstock` is `PROGRAM`, and Slurm's `srun` the second node."""
    (folder / "bin").mkdir()
    (folder / "program.py").write_text(PROGRAM.format(root=str(ROOT), stand_in=str(stand_in(folder, sleep_s=0.0))))
    for name, body in (("penstock", f'exec {sys.executable} {folder}/program.py "$@"'), ("srun", NODES)):
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    locks = {"PENSTOCK_PLACEMENT__LOCK_DIR": str(folder / "locks")}
    given = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), **SERVERS, **locks, **environ}
    return subprocess.run(command, cwd=folder, env=given, text=True, capture_output=True, timeout=300, check=False)


def test_a_node_of_a_job_uses_the_gpus_of_its_allocation(tmp_path: Path) -> None:
    """Slurm's script on two nodes: the second one's torchrun starts its half of the ranks, on the GPUs of Slurm."""
    words = [SBATCH, str(run_file(tmp_path, "7B", "8x80GB")), "trainer.num_ranks=8", "trainer.zero_stage=3"]
    job = machine(tmp_path, "bash", *words, SLURM_JOB_NUM_NODES="2", CUDA_VISIBLE_DEVICES="1,3,4,6")
    assert job.returncode == 0, job.stdout + job.stderr
    assert "GPU 0-3 trainer (4 ranks, ZeRO 3): a rank needs 28.7 GB of" in job.stderr
    (trainer,) = started(tmp_path, 1)
    assert (trainer.visible, trainer.ranks) == (["1", "3", "4", "6"], 4)


def test_a_job_whose_allocation_does_not_suffice_ends_with_numbers(tmp_path: Path) -> None:
    """Before a server starts."""
    file = run_file(tmp_path, "7B", "8x80GB")
    job = machine(tmp_path, "bash", SBATCH, str(file), "nats.url=none", "s3.endpoint=none", CUDA_VISIBLE_DEVICES="0,1")
    assert job.returncode == 1
    assert "a rank of the trainer needs 145.7 GB on 1 GPU(s) with ZeRO 1, and" in job.stderr
    assert not list((tmp_path / "started").iterdir())


def test_a_worker_that_is_started_alone_uses_every_free_gpu(tmp_path: Path) -> None:
    file = run_file(tmp_path, "32B", "8x80GB")
    done = machine(tmp_path, "penstock", "rollout", str(file))
    assert done.returncode == 0, done.stderr
    assert "GPU 0-1, 3-6 engines (3 x tp 2)" in done.stderr
    (worker,) = started(tmp_path, 1)
    assert [gpus for gpus, _ in worker.servers()] == [["0", "1"], ["3", "4"], ["5", "6"]]
    assert [words[words.index("--tp-size") + 1] for _, words in worker.servers()] == ["2", "2", "2"]


def test_a_trainer_that_is_started_alone_uses_the_gpus_that_it_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_settings: NatsSettings, s3_settings: S3Settings, run_id: str
) -> None:
    file = write_small_run(tmp_path, run_id)
    see(monkeypatch, cards(8), visible="GPU-6f,GPU-1f,GPU-9f,0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "executable", str(stand_in(tmp_path, sleep_s=0.0)))
    typed = [str(file), *server_arguments(nats_settings, s3_settings)]
    assert train.train_attached(typed, None, as_json=True, again=[]) == 0
    (trainer,) = started(tmp_path, 1)
    assert (trainer.visible, trainer.ranks) == (["6", "1"], 2)
    assert json.loads((tmp_path / "runs" / run_id / PLACEMENT).read_text())["trainer"] == [0, 1]


def test_commands_that_start_at_once_get_no_gpu_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command sees what another one has given out before its processes allocate anything; a SIGKILL gives it back."""
    see(monkeypatch, cards(4))
    arguments = [f"model.path={model_of(tmp_path, '0.6B')}", "worker.engine=sglang"]
    placed = place_run(arguments, os.environ, role="engines", workers=1)
    late = place_run(arguments, os.environ, role="trainer")
    if not (child := os.fork()):
        with placed.claimed():
            (tmp_path / "claimed").touch()
            signal.pause()
    try:
        wait_for((tmp_path / "claimed").exists, "the other command")
        with pytest.raises(DoesNotFit, match="another command has just given it"), late.claimed():
            pass
        given = r"(GPU \d: another command has given it to its processes: left out; ){4}end"
        with pytest.raises(DoesNotFit, match=rf"{given} them, .*\[placement\]"):
            place_run(arguments, os.environ, role="trainer")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with late.claimed():
        pass


def test_shared_gpus_are_claimed_once_each_by_the_command_of_both_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their names, whatever order a command sees them in; commands of one role each claim none."""
    see(monkeypatch, cards(2), visible="GPU-1f,GPU-0f")
    claimed, open_lock = [], run_placement.open_lock
    arguments = [f"model.path={model_of(tmp_path, '0.6B')}", "worker.engine=sglang", "placement.shared=beside"]
    placed = place_run(arguments, os.environ)
    monkeypatch.setattr(run_placement, "open_lock", lambda *words: claimed.append(words[1]) or open_lock(*words))
    with placed.claimed():
        assert claimed == ["GPU-0f", "GPU-1f"]
        with pytest.raises(DoesNotFit, match="another command has given it to its processes"):
            place_run(arguments, os.environ)
        for role in ("engines", "trainer"):
            with place_run(arguments, os.environ, role=role).claimed():  # type: ignore[arg-type]
                pass
    claimed.clear()
    place_run([arguments[0], "worker.device=cpu"], os.environ, role="engines")
    assert claimed == []  # where no GPU is needed


def test_containers_get_what_the_placement_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compose: variables that its file reads, no GPU twice unless there is one. Kubernetes: patches of `gpu`."""
    see(monkeypatch, [])
    small = str(run_file(tmp_path, "0.6B", "8x80GB"))
    compose = (ROOT / "deploy" / "compose.yaml").read_text()
    for gpus, expected in (
        ("8x80GB", {"SGLANG_GPUS": "0,1,2,3,4,5,6", "SGLANG_DP": "7", "TRAINER_GPUS": "7"}),
        ("1x80GB", {"SGLANG_GPUS": "0", "SGLANG_DP": "1", "SGLANG_MEMORY_FRACTION": "0.71", "TRAINER_GPUS": "0"}),
    ):
        capsys.readouterr()
        assert penstock(["placement", small, "--gpus", gpus, "--env", "compose"]) == 0
        variables = dict(line.split("=") for line in capsys.readouterr().out.splitlines())
        assert variables == {"SGLANG_TP": "1", "TRAINER_RANKS": "1", "TRAINER_ZERO_STAGE": "1", **expected}
        assert all(f"${{{name}:-" in compose for name in variables)
    assert penstock(["placement", small, "--gpus", "1x80GB", "--env", "kubernetes"]) == 1
    assert "engine and trainer have a GPU each" in capsys.readouterr().err
    for role, visible in (("trainer", "7"), ("rollout", "0,1,2,3,4,5,6")):
        assert penstock(["placement", small, "--gpus", "8x80GB", "--env", role]) == 0
        assert f"CUDA_VISIBLE_DEVICES={visible}\n" in capsys.readouterr().out
    require_package("kubectl", "kubernetes-client")
    shutil.copytree(ROOT / "deploy" / "kubernetes", tmp_path / "k", ignore=shutil.ignore_patterns("secrets"))
    make_secrets(tmp_path / "k" / "base" / "secrets", ["nats"])
    overlay = tmp_path / "k" / "overlays" / "gpu"
    big = str(run_file(tmp_path / "k", "32B", "8x80GB"))
    capsys.readouterr()
    assert penstock(["placement", big, "--gpus", "8x80GB", "--env", "kubernetes"]) == 0
    (overlay / "placement.yaml").write_text(capsys.readouterr().out)
    with (overlay / "kustomization.yaml").open("a") as out:
        out.write("  - { path: placement.yaml }\n")
    made = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=True)
    objects = {(one["kind"], one["metadata"]["name"]): one.get("spec") for one in yaml.safe_load_all(made.stdout)}
    rollout, trainer = objects["Deployment", "rollout"], objects["Job", "trainer"]["template"]["spec"]["containers"][0]
    (engine,) = rollout["template"]["spec"]["initContainers"]
    assert (rollout["replicas"], engine["resources"]["limits"]["nvidia.com/gpu"]) == (3, "2")
    assert "--tp-size=$(SGLANG_TP)" in engine["args"]
    assert {"name": "SGLANG_TP", "value": "2"} in engine["env"]
    assert trainer["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert {"name": "PENSTOCK_TRAINER__NUM_RANKS", "value": "2"} in trainer["env"]
