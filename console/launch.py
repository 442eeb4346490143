"""Build the command line of the process that a verb starts: a service's module, in this interpreter, on one node or several.

The console replaces its process by the service's, so signals, exit code and terminal belong to the
service, and its arguments arrive unchanged. On several nodes every node starts the same command, with flags or with what a
scheduler exports; node 0 has rank 0, which talks to NATS and S3, and torchrun on it is the rendezvous.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.console.nodes import NodeOptions, Nodes, find
from penstock.protocol.config.sources import Given, from_environment, from_files, from_overrides, split_arguments
from penstock.protocol.errors import ConfigError

_TORCHRUN_STOP_S = "900"  # as PyTorch's variable has it; long enough for a checkpoint of a large model
_PROGRAMS: Mapping[str, tuple[str, ...]] = {  # of the commands that train and are not the trainer's own
    "replay": ("penstock.forensics.replay",),
    **{name: ("penstock.fine_tuning", name) for name in ("sft", "dpo", "rm")},
}
REWARD_URL = "http://127.0.0.1:8700"  # where `penstock reward service` listens
REWARD_PORT_FILE = "reward.port"  # in the folder of a local run: where its reward service listens, once it does


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

    The ``--`` keeps torchrun from reading the trainer's flags as its own.
    Raises ConfigError when the run file, num_ranks or the options of several nodes cannot be read.
    """
    return trainer(num_ranks(arguments, environ), command, *arguments, nodes=find(options or NodeOptions(), environ))


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
    """Return what a service's setting was given last, with its origin; None where its default holds. Raises ConfigError."""
    files, overrides = split_arguments(arguments)
    problems: list[str] = []
    found = [*from_files(files, problems), *from_environment(environ), *from_overrides(overrides, problems)]
    if problems:
        raise ConfigError("\n".join(problems))
    return next((one for one in reversed(found) if tuple(part.replace("-", "_") for part in one.path) == path), None)


def give_ranks_time() -> None:
    """Let a torchrun below this process give its ranks time for a checkpoint: by itself it kills them 30 s after it was asked to stop."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCHRUN_STOP_S)


def replace_process(command: Sequence[str]) -> None:
    give_ranks_time()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))  # noqa: S606 - no shell is the point
