"""No verb, nor any process it starts, imports from the working directory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from cyclopts import App

from penstock.console.cli.main import app
from tests import forked
from tests.packaging.conftest import HostileFolder

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
DEADLINE_S = 240.0
SERVES_S = 12.0  # a verb that serves until it is stopped has imported everything by then

# What a verb is given so that it gets as far as it can without servers; none: nothing.
ARGUMENTS = {
    "chat": ("run", "--prompt", "hello"),
    "config show": ("run.toml",),
    "data check": ("rows.jsonl",),
    "dead-letters list": ("run",),
    "dead-letters resend": ("run", "1"),
    "dead-letters show": ("run", "1"),
    "plan": ("run.toml", "rollout.groups_per_step=1", "rollout.group_size=2", "rollout.max_new_tokens=8"),
    "recipe": ("smollm2", "--gguf", "absent.gguf"),
    "reward drain": ("name",),
    "reward errors": ("run",),
    "reward remove": ("name",),
    "reward resume": ("name",),
    "reward serve": ("my_reward.py",),
    "reward serve-grader": ("grader.json",),
    "reward serve-judge": ("judge.toml",),
    "reward serve-model": ("no-model",),
    "reward service": ("run.toml",),
    "reward test": ("gsm8k",),
    "rollout": ("run.toml",),
    "runs rm": ("run", "--yes"),
    "runs show": ("run",),
    "sft": ("run.toml",),
    "dpo": ("run.toml",),
    "rm": ("run.toml",),
    "train": ("run.toml",),
    "watch": ("run", "--plain"),
    "runs backup": ("run", "--to", "folder"),
    "runs restore": ("folder",),
    "weights": ("run",),
    "weights export": ("run", "--version", "1", "--to", "folder"),
    **dict.fromkeys(("replay", "rescore", "lineage", "audit", "profile"), ("run",)),
    "quickstart": ("--help",),  # tests/system/test_quickstart.py runs all of it in such a folder
}
# Verbs with the modules and processes of another one, which alone runs in the suite; `make test-more NAME=verbs` runs all.
LIKE_ANOTHER = {
    "dead-letters show": ("dead-letters list", "dead-letters resend"),
    "reward resume": ("reward drain", "reward remove"),
    "reward test": ("reward list",),
    "runs restore": ("runs backup",),
    "runs show": ("runs list", "runs rm"),
    "sft": ("dpo", "recipe", "rm"),
    "weights": ("weights export",),
}
NO_SERVERS = {"PENSTOCK_NATS__URL": "nats://127.0.0.1:1", "PENSTOCK_S3__ENDPOINT": "http://127.0.0.1:1"}
SERVING = ("up", "reward serve", "console")


def _verbs(app: App, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name in app:
        if name.startswith("-"):
            continue
        if app[name].default_command is not None:
            yield " ".join((*path, name))
        yield from _verbs(app[name], (*path, name))


VERBS = sorted(_verbs(app))
if "PENSTOCK_TEST_VERBS" not in os.environ:
    VERBS = [verb for verb in VERBS if not any(verb in others for others in LIKE_ANOTHER.values())]


def run(popen: type[forked.Popen], folder: HostileFolder, log: Path, verb: str) -> tuple[int, str]:
    """Run a verb in the folder; a process that is still running at the deadline is stopped (exit code 124)."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PENSTOCK_"))}
    command = [sys.executable, "-P", "-m", "penstock", *verb.split(), *ARGUMENTS.get(verb, ())]
    with log.open("wb") as output:
        process = popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ | NO_SERVERS, cwd=folder.path, start_new_session=True
        )  # fmt: skip
    try:
        return process.wait(SERVES_S if verb in SERVING else DEADLINE_S), log.read_text()
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30.0)
        return 124, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and output of every verb, run in one hostile folder, several at a time: most wait for servers.

    Each is forked from a process that has imported what every verb does at its start, and imports the rest there.
    """
    base = tmp_path_factory.mktemp("verbs")
    folder = HostileFolder(base / "here", base / "imported")
    (folder.path / "run.toml").write_text('[run]\nid = "run"\n')
    (folder.path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (folder.path / "my_reward.py").write_text("def compute_score(*given, **named):\n    return 1.0\n")
    server = forked.Server.start(["penstock.console.cli.main"])
    popen = type("Popen", (forked.Popen,), {"server": server})
    with contextlib.closing(server), ThreadPoolExecutor(16) as pool:
        logs = [base / f"{verb.replace(' ', '-')}.log" for verb in VERBS]
        found = dict(zip(VERBS, pool.map(partial(run, popen, folder), logs, VERBS), strict=True))
    return found | {"": (0, folder.imported())}


def test_the_command_starts_in_a_hostile_folder(hostile_folder: HostileFolder):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PENSTOCK_"))}
    answer = subprocess.run(
        [PENSTOCK, "version"], cwd=hostile_folder.path, env=environ, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("penstock ")
    assert hostile_folder.imported() == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_verb_imports_from_the_working_directory(outcomes: dict[str, tuple[int, str]]):
    """Every verb runs in a folder of modules named like Penstock's and all installed ones, and imports none of them."""
    assert outcomes[""] == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_runs_in_a_hostile_folder(verb: str, outcomes: dict[str, tuple[int, str]]):
    """A verb serves until it is stopped, or ends with its own exit code and message and no traceback."""
    code, output = outcomes[verb]
    assert "imported from the working directory" not in output
    assert "Traceback" not in output, output
    assert code in ((0, 1, 2, 124) if verb in SERVING else (0, 1, 2)), output


def test_a_python_without_a_safe_path_would_import_from_it(hostile_folder: HostileFolder):
    subprocess.run(
        [sys.executable, "-m", "penstock", "version"], cwd=hostile_folder.path, capture_output=True, check=False
    )
    assert "-m penstock version" in hostile_folder.imported()
