"""A run on this machine with a Prometheus beside it, and the addresses to look at. `make observe`.

    python -P -m penstock.deploy.monitoring.observe RUN.toml [--port PORT] [--workers N] [--serve FILE.py] [section.key=value]

Prometheus reads the addresses of all services from their heartbeats, so workers may come and go; its data are in the folder
of the run, and it stops with the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from penstock.console import connections, launch
from penstock.deploy.bootstrap import ConnectionSettings
from penstock.deploy.monitoring.dashboards import FOLDER
from penstock.deploy.processes.child import Child, DeployError
from penstock.deploy.processes.servers import HOST, Server, free_port
from penstock.protocol.command_line import Help, RunArguments, program
from penstock.protocol.config.run_file import load, split_arguments

METRICS_ON = ("metrics.trainer_port=0", "metrics.rollout_port=0")
_SCRAPE_S = 2
_POLL_S = 0.5


class Prometheus(Server):
    """A real Prometheus on the loopback that scrapes the targets of one file, with our alerts."""

    name = "prometheus"

    def __init__(
        self, folder: Path, *, port: int = 0, scrape_s: int = _SCRAPE_S, rules: Path = FOLDER / "rules.yml"
    ) -> None:
        """Its data, log, configuration and `targets.json` are in ``folder``; port 0 takes a free one."""
        super().__init__(folder, folder / "prometheus.log", port or free_port(), ())
        self._rules = rules
        self.targets = self.store / "targets.json"
        self._scrape_s = scrape_s

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def _new_child(self) -> Child:
        config = self.store / "prometheus.yml"
        job = {"job_name": "penstock", "file_sd_configs": [{"files": [str(self.targets)], "refresh_interval": "2s"}]}
        seconds = f"{self._scrape_s}s"
        timing = {"scrape_interval": seconds, "scrape_timeout": seconds, "evaluation_interval": seconds}
        rules = [str(self._rules)]
        config.write_text(json.dumps({"global": timing, "rule_files": rules, "scrape_configs": [job]}))  # JSON is YAML
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={self.store / 'data'}",
            f"--web.listen-address={HOST}:{self.port}",
        ]
        return Child(self.name, command, log=self._log)

    def _ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=2.0) as answer:  # noqa: S310  our server
            return answer.status == 200
        return False


def target_writer(run_file: Sequence[str], folder: Path, targets: Path) -> Child | None:
    environ = connections.store_environment(folder / connections.STORE)
    if not environ:
        return None
    command = launch.module("penstock.deploy.monitoring.targets", *run_file, "--write", str(targets), "--every", "2")
    return Child("targets", command, log=targets.with_name("targets.log"), environ={**os.environ, **environ})


def observe(
    *arguments: RunArguments,
    port: Annotated[int, Help("Port of Prometheus; 0: any free one.")] = 0,
    workers: Annotated[int, Help("Number of rollout workers.")] = 2,
    serve: Annotated[tuple[str, ...], Help("FILE.py, as of `penstock train --local`.")] = (),
) -> int:
    flags = [f"--workers={workers}", *(f"--serve={file}" for file in serve)]
    files, overrides = split_arguments(arguments)
    run = load(ConnectionSettings, files=files, overrides=overrides, environ=os.environ).settings.run
    return _run([*flags, *arguments], run.folder.absolute(), run.id, port)


main = program("observe", observe)


def _run(rest: Sequence[str], folder: Path, run_id: str, port: int) -> int:
    prometheus = Prometheus(folder / "prometheus", port=port)
    writer: Child | None = None
    stored = folder / "store" / "environment"
    stored.unlink(missing_ok=True)  # of an earlier session, on other ports
    try:
        prometheus.start()
        print(f"Prometheus: {prometheus.url}/graph, alerts: {prometheus.url}/alerts", file=sys.stderr)
        print(f"targets:    {prometheus.url}/targets, from {prometheus.targets}", file=sys.stderr)
        print(f"dashboards: import {FOLDER / 'grafana' / 'dashboards'}/*.json into a Grafana", file=sys.stderr)
        process = subprocess.Popen(launch.module("penstock", "train", "--local", *rest, *METRICS_ON))
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while True:
            try:
                if process.poll() is not None:
                    return process.returncode
                if writer is None or not writer.alive:
                    writer = target_writer([f"run.id={run_id}"], folder, prometheus.targets)
                    if writer is not None:
                        writer.start()
                time.sleep(_POLL_S)
            except KeyboardInterrupt:  # the terminal signals the run too, which writes a checkpoint
                continue
    except DeployError as err:
        raise DeployError(f"{err}. Prometheus is Debian's package: apt-get install prometheus") from None
    finally:
        if writer is not None:
            writer.stop()
        prometheus.stop()


if __name__ == "__main__":
    sys.exit(main())
