"""``python -m penstock.deploy.scoring [--serve FILE]... [--recorded FILE] [SETTINGS]... -- COMMAND``: a reward service for one command.

NATS, an S3 server, the reward service and an endpoint for each served file run on this machine, over a temporary folder,
until the command exits; it gets ``--url`` of the service. The run's own servers and queues are not touched: a reward
service of the run would also score what is left in them. SETTINGS are run files and section.key=value; ``--recorded`` is a
run's ``config.json``, whose rewards are defined for the service too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.console import launch
from penstock.console.tools.rewards import RewardService, RewardServiceError
from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.early_checks import check_reward_files
from penstock.deploy.local import LocalStack
from penstock.deploy.processes.child import Child, wait_until
from penstock.deploy.stored import run_command
from penstock.protocol import logs
from penstock.protocol.command_line import RunArguments, program
from penstock.protocol.config.run_file import split_arguments, toml_text
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import read_regular
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

_READY_S = 60.0
_RUN = "scoring"
_SERVE = {".py": "serve", ".json": "serve-grader", ".toml": "serve-judge"}
_ELSEWHERE = ("nats.", "s3.", "run.")  # settings of the run's own servers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code, 1 when the service does not start."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--")

    def run(*settings: RunArguments, serve: tuple[Path, ...] = (), recorded: Path | None = None) -> int:
        with service(serve, settings, recorded=recorded) as url:
            return run_command([*given[split + 1 :], "--url", url], os.environ)

    logs.configure("scoring", level="error")
    return program("penstock", run)(given[:split])


@contextlib.contextmanager
def service(files: Sequence[Path], settings: Sequence[str], *, recorded: Path | None = None) -> Iterator[str]:
    """Yield the URL of a reward service that offers the built-in rewards, those of the settings and the served files.

    Raises ConfigError for a file that cannot be served, DeployError for a process that does not start.
    """
    if unknown := [str(file) for file in files if file.suffix not in _SERVE]:
        raise ConfigError(f"--serve {', '.join(unknown)}: a file is served by its ending: {', '.join(_SERVE)}")
    check_reward_files([file for file in files if file.suffix == ".py"])
    with contextlib.ExitStack() as running:
        folder = Path(tempfile.mkdtemp(prefix="penstock-scoring-"))
        running.callback(shutil.rmtree, folder, ignore_errors=True)
        stack = running.enter_context(LocalStack(folder / "store"))
        with Bus.connect(stack.nats, name="scoring") as bus:
            bootstrap(bus, Blobs(stack.s3), _RUN)
        environ = {**os.environ, **stack.environment()}
        port_file = folder / launch.REWARD_PORT_FILE
        command = [*_settings_of(settings, recorded, folder), f"run.id={_RUN}", "reward_service.port=0"]
        command.append(f"reward_service.port_file={port_file}")
        children = [_start("reward", launch.module("penstock.reward_service", *command), folder, environ, running)]
        _wait(port_file.exists, children, "listen")
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        for file in files:
            served = launch.module("penstock.reward_service", _SERVE[file.suffix], str(file), "--register", url)
            children.append(_start(f"endpoint-{file.stem}", served, folder, environ, running))
        _wait(lambda: _num_endpoints(url) >= len(files), children, "register")
        yield url


def _start(
    name: str, command: Sequence[str], folder: Path, environ: Mapping[str, str], running: contextlib.ExitStack
) -> Child:
    child = Child(name, command, log=folder / f"{name}.log", environ=environ)
    child.start()
    running.callback(child.stop)
    return child


def _wait(is_ready: Any, children: Sequence[Child], what: str) -> None:
    """Wait until the last child is ready; raises DeployError with the log of the one that exited."""
    wait_until(lambda: is_ready() or not all(child.alive for child in children), _READY_S)
    for child in children:
        if not child.alive:
            raise child.failure("could not start")
    if not is_ready():
        raise children[-1].failure(f"did not {what} within {_READY_S:.0f} s")


def _num_endpoints(url: str) -> int:
    try:
        rewards = RewardService(url).call("GET", "/v1/rewards")["rewards"]
    except RewardServiceError:
        return 0
    return sum(reward["kind"] == "endpoint" for reward in rewards)


def _settings_of(settings: Sequence[str], recorded: Path | None, folder: Path) -> list[str]:
    """Return the arguments of the service: recorded rewards first, then the given settings without those of servers."""
    files, overrides = split_arguments(settings)
    words = iter(overrides)
    joined = [f"{word}={next(words, '')}" if word.startswith("--") and "=" not in word else word for word in words]
    kept = [one for one in joined if not one.lstrip("-").startswith(_ELSEWHERE)]
    first = []
    if recorded is not None and (rewards := _recorded_rewards(recorded)):
        path = folder / "recorded.toml"
        path.write_text(f"reward = {toml_text(rewards)}\n", encoding="utf-8")
        first.append(str(path))
    return [*first, *(str(file.absolute()) for file in files), *kept]


def _recorded_rewards(path: Path) -> dict[str, Any]:
    """Return the section [reward] of recorded settings; raises ConfigError when it cannot be read."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(read_regular(path))["settings"].get("reward") or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ConfigError(f"{path}: its recorded rewards cannot be read ({type(err).__name__}: {err})") from None


if __name__ == "__main__":
    sys.exit(main())
