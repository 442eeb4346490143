"""Several nodes: flags, what schedulers export, and torchrun's options on each."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from penstock.console import launch
from penstock.console.cli.main import app
from penstock.console.launch import NodeOptions, Nodes, find_nodes
from penstock.protocol.errors import ConfigError

TWO = NodeOptions(nodes=2, node_rank=1, rdzv="node0:29501")
NO = NodeOptions()
SLURM = {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NODEID": "2"}
SLURM["SLURM_STEP_NODELIST"] = "gpu[03-05],cpu1"
KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0", "PET_MASTER_PORT": "29400"}
LEADER_WORKER_SET = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "set-0.ns"}


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        (TWO, {}, Nodes(2, 1, "node0:29501")),
        (NodeOptions(nodes=2, node_rank=0, rdzv="10.0.0.1"), SLURM, Nodes(2, 0, "10.0.0.1:29500")),
        (NO, SLURM, Nodes(3, 2, "gpu03:29500")),
        (NO, {**SLURM, "SLURM_STEP_NODELIST": "a,b,c", "MASTER_PORT": "1234"}, Nodes(3, 2, "a:1234")),
        (NO, KUBEFLOW, Nodes(2, 1, "job-node-0:29400")),
        (NO, LEADER_WORKER_SET, Nodes(4, 3, "set-0.ns:29500")),
        (NO, {"SLURM_NNODES": "3", "SLURM_NODEID": "0"}, None),  # a batch script that starts no step
        (NO, {"PET_NNODES": "1:4"}, None),  # an elastic range is torchrun's own
        (NodeOptions(nodes=1), SLURM, None),
    ],
)
def test_the_place_of_a_node(options: NodeOptions, environ: dict[str, str], expected: Nodes | None) -> None:
    """Options count before the scheduler."""
    assert find_nodes(options, environ) == expected


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        (NodeOptions(nodes=2), {}, r"--node-rank and --rdzv missing with --nodes 2; on every node: penstock train"),
        (NodeOptions(node_rank=1), {}, "for several nodes; give their number"),
        (replace(TWO, node_rank=2), {}, "--node-rank: 2 of 2 nodes; ranks of nodes go from 0 to 1"),
        (replace(TWO, rdzv="node0:port"), {}, "--rdzv: expected HOST:PORT of node 0, got 'node0:port'"),
        (NO, {**SLURM, "SLURM_STEP_NUM_TASKS": "24"}, "24 tasks on 3 nodes; one per node starts all ranks"),
        (NodeOptions(nodes=0, node_rank=0, rdzv="node0:1"), {}, "--node-rank: 0 of 0 nodes"),
        (replace(TWO, node_rank=-1), {}, "--node-rank: -1 of 2 nodes"),
        (NO, {"PET_NNODES": "2", "PET_NODE_RANK": "-1", "PET_MASTER_ADDR": "a"}, "PET_NODE_RANK: -1 of 2 nodes"),
        (NO, {"PET_NNODES": "2"}, "PET_NODE_RANK and PET_MASTER_ADDR not"),
    ],
)
def test_what_cannot_be_a_place_is_refused(options: NodeOptions, environ: dict[str, str], message: str) -> None:
    """The message has what to type on every node."""
    with pytest.raises(ConfigError, match=message):
        find_nodes(options, environ)


def test_each_node_starts_its_share_of_the_ranks() -> None:
    """trainer.num_ranks counts all nodes; node 0 has rank 0 because the places are fixed."""
    command = launch.trainer_command(["trainer.num_ranks=8"], {}, options=TWO)
    torchrun = ["-P", "-m", "torch.distributed.run", "--nnodes=2", "--node-rank=1", "--nproc-per-node=4"]
    meeting = ["--rdzv-backend=static", "--rdzv-endpoint=node0:29501", "--rdzv-conf=timeout=600", "--no-python", "--"]
    rank = [sys.executable, "-P", "-m", "penstock.trainer", "train", "trainer.num_ranks=8"]
    assert command == [sys.executable, *torchrun, *meeting, *rank]
    for ranks in ("1", "3"):
        with pytest.raises(ConfigError, match=rf"num_ranks = {ranks} cannot be divided among 2 nodes"):
            launch.trainer_command([f"trainer.num_ranks={ranks}"], {}, options=TWO)


def test_local_is_one_machine() -> None:
    """A stack on every node would be several runs of one name."""
    with pytest.raises(ConfigError, match="--local starts every service on this machine, and this is node 1 of 2"):
        app(
            ["train", "run.toml", "--local", "--nodes", "2", "--node-rank", "1", "--rdzv", "node0"], exit_on_error=False
        )


@pytest.mark.parametrize(
    ("option", "environ", "expected"),
    [
        ("--nproc-per-node=4", {}, "3"),
        ("--nproc-per-node=64", {}, "1"),
        ("--nproc-per-node=4", {"OMP_NUM_THREADS": "7"}, "7"),
        ("-u", {}, ""),
    ],
)
def test_the_ranks_of_a_node_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, option: str, environ: dict[str, str], expected: str
) -> None:
    """Torchrun by itself gives each one thread; one rank without torchrun has all cores by torch's default."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(os, "environ", dict(environ))
    monkeypatch.setattr(os, "execv", lambda *_: None)
    launch.replace_process(["torchrun", option])
    assert os.environ.get("OMP_NUM_THREADS", "") == expected


@pytest.mark.parametrize(("given", "expected"), [({}, "900"), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}, "60")])
def test_torchrun_gives_its_ranks_time_for_a_checkpoint(given: dict[str, str], expected: str) -> None:
    """By itself it kills them 30 s after it was asked to stop; a time of one's own counts."""
    environ = {name: value for name, value in os.environ.items() if name != "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    say = "import os; print(os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'])"
    code = f"import sys; from penstock.console import launch; launch.replace_process([sys.executable, '-c', {say!r}])"
    started = subprocess.run(
        [sys.executable, "-c", code], env=environ | given, capture_output=True, text=True, check=True, timeout=60
    )
    assert started.stdout == f"{expected}\n"
