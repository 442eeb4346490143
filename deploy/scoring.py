"""``python -m penstock.deploy.scoring [--serve FILE]... [--recorded FILE] [SETTINGS]... -- COMMAND``: a reward service for one command.

NATS, an S3 server, the reward service and an endpoint for each served file run on this machine, over a temporary folder,
until the command exits; it gets ``--url`` of the service. The run's servers and queues are not touched: a reward
service of the run would also score what is left in them. SETTINGS are run files and section.key=value; ``--recorded`` is a
run's ``config.json``, whose rewards are defined for the service too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.console import launch
from penstock.console.tools.rewards import RewardService, RewardServiceError
from penstock.deploy.bootstrap import bootstrap, without_servers
from penstock.deploy.early_checks import check_reward_files
from penstock.deploy.local import LocalStack
from penstock.deploy.processes.child import Child, wait_until
from penstock.deploy.processes.supervise import Supervisor, stop_all
from penstock.deploy.stored import run_command
from penstock.protocol import logs, seals
from penstock.protocol.command_line import RunArguments, program
from penstock.protocol.config.run_file import refuse_masks, split_arguments, toml_text
from penstock.protocol.errors import ConfigError
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

_READY_S = 60.0
_RUN = "scoring"
_SERVE = {".py": "serve", ".json": "serve-grader", ".toml": "serve-judge"}


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    split = argv.index("--")

    def run(*settings: RunArguments, serve: tuple[Path, ...] = (), recorded: Path | None = None) -> int:
        with service(serve, settings, recorded=recorded) as url:
            return run_command([*argv[split + 1 :], "--url", url], os.environ)

    logs.configure("scoring", level="error")
    return program("penstock", run)(argv[:split])


@contextlib.contextmanager
def service(files: Sequence[Path], settings: Sequence[str], *, recorded: Path | None = None) -> Iterator[str]:
    """Yield the URL of a reward service that offers the built-in rewards, those of the settings and the served files.

    Raises ConfigError for a file that cannot be served, DeployError for a process that does not start.
    """
    if unknown := [str(file) for file in files if file.suffix not in _SERVE]:
        raise ConfigError(f"--serve {', '.join(unknown)}: unknown file type; expected one of {', '.join(_SERVE)}")
    check_reward_files([file for file in files if file.suffix == ".py"])
    supervisor, children = Supervisor(), list[Child]()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-scoring-", ignore_cleanup_errors=True) as scratch,
        contextlib.ExitStack() as running,
    ):
        folder = Path(scratch)
        stack = LocalStack(folder / "store")
        running.callback(stack.stop)
        running.callback(lambda: stop_all(children))
        running.callback(supervisor.close)
        stack.start(supervisor)
        with Bus.connect(stack.nats, name="scoring") as bus:
            bootstrap(bus, Blobs(stack.s3), _RUN)

        def start(name: str, *arguments: str) -> None:
            command = launch.module("penstock.reward_service", *arguments)
            environ = {**os.environ, **stack.environment()}
            children.append(Child(name, command, log=folder / f"{name}.log", environ=environ))
            children[-1].start()
            supervisor.watch(children[-1])

        port_file = folder / launch.REWARD_PORT_FILE
        ports = ("reward_service.port=0", f"reward_service.port_file={port_file}")
        start("reward", *_settings_of(settings, recorded, folder), f"run.id={_RUN}", *ports)
        _wait(port_file.exists, supervisor, children[-1], "listen")
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        for file in files:
            start(f"endpoint-{file.stem}", _SERVE[file.suffix], str(file), "--register", url)
        _wait(lambda: _num_endpoints(url) >= len(files), supervisor, children[-1], "register")
        yield url


def _wait(is_ready: Callable[[], bool], supervisor: Supervisor, last: Child, what: str) -> None:
    wait_until(lambda: is_ready() or supervisor.wait_exit(0.0) is not None, _READY_S)
    if (exited := supervisor.wait_exit(0.0)) is not None:
        raise exited.failure("could not start")
    if not is_ready():
        raise last.failure(f"did not {what} within {_READY_S:.0f} s")


def _num_endpoints(url: str) -> int:
    try:
        rewards = RewardService(url).call("GET", "/v1/rewards")["rewards"]
    except RewardServiceError:
        return 0
    return sum(reward["kind"] == "endpoint" for reward in rewards)


def _settings_of(settings: Sequence[str], recorded: Path | None, folder: Path) -> list[str]:
    first = []
    if recorded is not None and (rewards := _recorded_rewards(recorded, split_arguments(settings)[0])):
        path = folder / "recorded.toml"
        path.write_text(f"reward = {toml_text(rewards)}\n", encoding="utf-8")
        first.append(str(path))
    return [*first, *without_servers(settings)]


def _recorded_rewards(path: Path, files: Sequence[Path] = ()) -> dict[str, Any]:
    content = seals.read(path)
    if content is None:
        return {}
    try:
        document = json.loads(content)
        rewards = dict(document["settings"].get("reward") or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ConfigError(f"{path}: its recorded rewards cannot be read ({type(err).__name__}: {err})") from None
    refuse_masks({**document, "settings": {"reward": rewards}}, ("reward",), str(path), files=files)
    return rewards


if __name__ == "__main__":
    sys.exit(main())
