"""Build the command line of the process that a verb starts: a service's module, in this interpreter, on one node or several.

The console replaces its process by the service's, so signals, exit code and terminal belong to the service, and its
arguments arrive unchanged. The nodes that train one model together all start the same command, with options of the verb or
with what a scheduler exports; node 0 has rank 0, which talks to NATS and S3, and torchrun on it is the rendezvous.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from penstock.protocol.command_line import Help, Least
from penstock.protocol.config.sources import Given, from_environment, from_files, from_overrides, split_arguments
from penstock.protocol.errors import ConfigError

_TORCHRUN_STOP_S = "900"  # as PyTorch's variable has it; long enough for a checkpoint of a large model
_PROGRAMS: Mapping[str, tuple[str, ...]] = {  # of the commands that train and do not belong to the trainer
    "replay": ("penstock.forensics.replay",),
    **{name: ("penstock.fine_tuning", name) for name in ("sft", "dpo", "rm")},
}
REWARD_URL = "http://127.0.0.1:8700"  # where `penstock reward service` listens
REWARD_PORT_FILE = "reward.port"  # in the folder of a local run: where its reward service listens, once it does
RENDEZVOUS_PORT = 29500  # torchrun's default
JOIN_S = 600  # how long a node waits for the others
_USAGE = "on every node: penstock train run.toml --nodes 2 --node-rank N --rdzv HOST_OF_NODE_0:29500"


def module(name: str, *arguments: str) -> list[str]:
    """Return the command line of a module; -P keeps the working directory out of its import path."""
    return [sys.executable, "-P", "-m", name, *arguments]


def page_command(runs_dir: Path) -> str:
    """Return what to type in another terminal to see the runs of a folder on the live page."""
    given = "" if runs_dir.absolute() == Path("runs").absolute() else f" run.dir={shlex.quote(str(runs_dir))}"
    return f"penstock console{given}"


def trainer_command(
    arguments: Sequence[str], environ: Mapping[str, str], command: str = "train", options: NodeOptions | None = None
) -> list[str]:
    """Return the command line of a command of the trainer: one process, or several ranks under torchrun, on one node or several.

    The ``--`` keeps torchrun from parsing the trainer's flags itself.
    Raises ConfigError when the run file, num_ranks or the options of several nodes cannot be read.
    """
    return trainer(
        num_ranks(arguments, environ), command, *arguments, nodes=find_nodes(options or NodeOptions(), environ)
    )


def trainer(ranks: int, command: str, *arguments: str, nodes: Nodes | None = None) -> list[str]:
    """Return the command line of a command that trains on ``ranks`` ranks, of which this node starts its share."""
    program = module(*_PROGRAMS.get(command, ("penstock.trainer", command)), *arguments)
    if ranks == 1 and nodes is None:
        return program
    started = ["--standalone", f"--nproc-per-node={ranks}"] if nodes is None else nodes.torchrun(ranks)
    return module("torch.distributed.run", *started, "--no-python", "--", *program)


def num_ranks(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    last = given(arguments, environ, "trainer", "num_ranks")
    if last is None:
        return 1
    if not isinstance(last.value, int) or isinstance(last.value, bool) or last.value < 1:
        raise ConfigError(
            f"{last.origin}: trainer.num_ranks: expected a whole number of at least 1, got {last.value!r}"
        )
    return last.value


def given(arguments: Sequence[str], environ: Mapping[str, str], *path: str) -> Given | None:
    """Return what a service's setting was set to last, with its origin; None where its default holds. Raises ConfigError."""
    files, overrides = split_arguments(arguments)
    problems: list[str] = []
    assignments = [*from_files(files, problems), *from_environment(environ), *from_overrides(overrides, problems)]
    if problems:
        raise ConfigError("\n".join(problems))
    return next(
        (
            assignment
            for assignment in reversed(assignments)
            if tuple(part.replace("-", "_") for part in assignment.path) == path
        ),
        None,
    )


def threads_of_process(num_processes: int) -> str:
    """Return OMP_NUM_THREADS for each of the processes that share this machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # Linux has it
    return str(max(1, cores // num_processes))


def give_ranks_threads(command: Sequence[str]) -> None:
    """Let the ranks of this node share its cores, unless OMP_NUM_THREADS is set: torchrun by itself gives each one thread."""
    for word in command:
        if word.startswith("--nproc-per-node="):
            os.environ.setdefault("OMP_NUM_THREADS", threads_of_process(int(word.partition("=")[2])))


def give_ranks_time() -> None:
    """Let a torchrun below this process give its ranks time for a checkpoint: by itself it kills them 30 s after it was asked to stop."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCHRUN_STOP_S)


def replace_process(command: Sequence[str]) -> None:
    give_ranks_time()
    give_ranks_threads(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))  # noqa: S606 - no shell is the point


@dataclass(frozen=True, slots=True)
class Nodes:
    """This node's place among ``count`` nodes that meet at ``rdzv``, HOST:PORT of node 0."""

    count: int
    rank: int
    rdzv: str

    @property
    def is_first(self) -> bool:
        """Whether this node has rank 0, and with it the panel, the report and the streams of the run."""
        return self.rank == 0

    def torchrun(self, num_ranks: int) -> list[str]:
        """Return torchrun's options for this node's share of the ranks; raises ConfigError if there is none."""
        if num_ranks % self.count or num_ranks < self.count:
            raise ConfigError(
                f"trainer.num_ranks = {num_ranks} cannot be divided among {self.count} nodes: it is the number of processes on "
                f"all nodes together; set it to a multiple of {self.count}, such as {self.count} × the GPUs of a node"
            )
        place = (f"--nnodes={self.count}", f"--node-rank={self.rank}", f"--nproc-per-node={num_ranks // self.count}")
        meeting = ("--rdzv-backend=static", f"--rdzv-endpoint={self.rdzv}", f"--rdzv-conf=timeout={JOIN_S}")
        return [*place, *meeting]


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    nodes: Annotated[int | None, Help("Train on so many nodes; the same command starts on each."), Least(1)] = None
    node_rank: Annotated[int | None, Help("This node's number, from 0."), Least(0)] = None
    rdzv: Annotated[str, Help("Where the nodes meet, HOST:PORT: an address of node 0, which the others reach.")] = ""


def find_nodes(options: NodeOptions, environ: Mapping[str, str]) -> Nodes | None:
    """Return the nodes, None for this machine alone.

    Options count before what a scheduler exports: a step of Slurm with several nodes, Kubeflow's trainer (``PET_*``), a
    LeaderWorkerSet (``LWS_*``). Raises ConfigError for options that are not complete or not possible.
    """
    if options == NodeOptions():
        return _from_slurm(environ) or _from_kubeflow(environ) or _from_leader_worker_set(environ)
    if options.nodes in (None, 1):
        if options.node_rank is not None or options.rdzv or options.nodes is None:
            raise ConfigError(f"--node-rank and --rdzv are for several nodes; give their number: {_USAGE}")
        return None
    assert options.nodes is not None
    missing = [
        flag for flag, value in (("--node-rank", options.node_rank), ("--rdzv", options.rdzv or None)) if value is None
    ]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing with --nodes {options.nodes}; {_USAGE}")
    assert options.node_rank is not None
    return _checked(Nodes(options.nodes, options.node_rank, _address(options.rdzv)), "--node-rank")


def _from_slurm(environ: Mapping[str, str]) -> Nodes | None:
    """In a step that ``srun`` started on several nodes; a batch script itself is not one."""
    if (count := int(environ.get("SLURM_STEP_NUM_NODES", "1"))) < 2:
        return None
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", count))
    if tasks != count:
        raise ConfigError(
            f"srun started {tasks} tasks on {count} nodes; one per node starts all ranks of its node: "
            "srun --ntasks-per-node=1 penstock train run.toml"
        )
    first = _first_host(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    return Nodes(count, int(environ["SLURM_NODEID"]), f"{first}:{environ.get('MASTER_PORT', RENDEZVOUS_PORT)}")


def _from_kubeflow(environ: Mapping[str, str]) -> Nodes | None:
    if not environ.get("PET_NNODES", "1").isdigit() or (count := int(environ.get("PET_NNODES", "1"))) < 2:
        return None
    if missing := [name for name in ("PET_NODE_RANK", "PET_MASTER_ADDR") if name not in environ]:
        raise ConfigError(
            f"PET_NNODES = {count} is exported, and {' and '.join(missing)} not; or give options: {_USAGE}"
        )
    port = environ.get("PET_MASTER_PORT", RENDEZVOUS_PORT)
    return _checked(
        Nodes(count, int(environ["PET_NODE_RANK"]), f"{environ['PET_MASTER_ADDR']}:{port}"), "PET_NODE_RANK"
    )


def _from_leader_worker_set(environ: Mapping[str, str]) -> Nodes | None:
    if (count := int(environ.get("LWS_GROUP_SIZE", "1"))) < 2:
        return None
    return Nodes(count, int(environ["LWS_WORKER_INDEX"]), f"{environ['LWS_LEADER_ADDRESS']}:{RENDEZVOUS_PORT}")


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: ``gpu[03-05,9],cpu1`` starts with ``gpu03``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST = {nodes!r} has no first host; give options: {_USAGE}")
    return match[1] + (match[2] or "")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host:
        host, port = text, str(RENDEZVOUS_PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--rdzv: expected HOST:PORT of node 0, got {text!r}; {_USAGE}")
    return f"{host}:{port}"


def _checked(nodes: Nodes, name: str) -> Nodes:
    if not 0 <= nodes.rank < nodes.count:
        raise ConfigError(f"{name}: {nodes.rank} of {nodes.count} nodes; ranks of nodes go from 0 to {nodes.count - 1}")
    return nodes
