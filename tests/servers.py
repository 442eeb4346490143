"""Real servers for tests: nats-server and the S3 server, each in a separate folder.

``start_nats(folder)`` and ``start_s3(folder)`` give a ready server with ``settings``, ``kill()``
(SIGKILL), ``restart()`` (same port, same store) and ``stop()``. Tests use the fixtures of
``conftest.py``: the shared ``nats_server`` and ``s3_server``, or the factories ``own_nats`` and
``own_s3`` if they kill a server.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.protocol.config.connection import NatsSettings

BUCKET = "penstock"
_SECRETS = tempfile.TemporaryDirectory(prefix="penstock-test-secrets-")


def require_package(program: str, package: str) -> None:
    """Skip the test when a program of a Debian package is not installed; the summary prints the command to get it."""
    if shutil.which(program) is None and not Path(program).exists():
        pytest.skip(f"{program} is not installed: apt-get install {package}")


def needs(module: str, *, extra: str) -> pytest.MarkDecorator:
    """Skip the tests of a file when a package is not installed. Does not import it: six processes collect every file, one runs it."""
    reason = f"{module} is not installed: pip install 'penstock[{extra}]'"
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=reason)


def require(program: str) -> None:
    """Skip the test when a server's program is not installed; fail in CI, where it must be."""
    if Path(sys.executable).with_name(program).exists() or shutil.which(program):
        return
    if os.environ.get("CI"):
        pytest.fail(f"{program} is not installed, and this is CI: pip install 'penstock[local]'")
    pytest.skip(f"{program} is not installed: pip install 'penstock[local]'")


def start_nats(folder: Path, *, max_store_gb: float = 1000) -> NatsServer:
    """Start a nats-server with JetStream on a free port of the loopback."""
    require("nats-server")
    server = NatsServer(folder / "nats", log=folder / "nats.log", max_store_gb=max_store_gb)
    server.start()
    return server


class NatsCluster:
    """Three nats-servers on the loopback, which hold each stream three times."""

    def __init__(self, folder: Path) -> None:
        require("nats-server")
        routes = _free_ports(3)
        urls = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in routes)
        password = secrets.token_hex(8)
        self.nodes: dict[str, NatsServer] = {}
        for number, port in enumerate(routes):
            node = NatsServer(folder / f"n{number}", log=folder / f"n{number}.log", password=password)
            node.more_config = (
                f'server_name: n{number}\ncluster {{ name: test, listen: "127.0.0.1:{port}", '
                f"routes: [{urls}], no_advertise: true }}\n"
            )
            self.nodes[f"n{number}"] = node
        self.start(*self.nodes)

    @property
    def settings(self) -> NatsSettings:
        """How to connect: any of the three, three replicas."""
        nodes = list(self.nodes.values())
        url = ",".join(node.settings.url for node in nodes)
        return nodes[0].settings.model_copy(update={"url": url, "replicas": len(nodes)})

    def start(self, *names: str) -> None:
        """Start servers, at the same time, and wait until each has what it stores; a busy machine gets two minutes."""
        for name in names:
            self.nodes[name].launch()
        for name in names:
            wait_for(self.nodes[name]._ready, f"{name} to be ready")

    def stop(self) -> None:
        for node in self.nodes.values():
            node.kill()


def _free_ports(num_ports: int) -> list[int]:
    probes = [socket.socket() for _ in range(num_ports)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def start_s3(folder: Path) -> S3Server:
    require("rclone")
    server = S3Server(folder / "s3", log=folder / "s3.log")
    server.start()
    return server


@functools.cache
def secret_file(secret: str) -> Path:
    """Return a file that contains a secret, as ``nats.password_file`` names one; it is removed when this process exits."""
    file = Path(_SECRETS.name) / secrets.token_hex(8)
    file.touch(mode=0o600)
    file.write_text(secret)
    return file


def wait_for(condition: Callable[[], object], what: str, deadline_s: float = 180.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {deadline_s:.0f} s in vain for {what}")
        time.sleep(0.01)
