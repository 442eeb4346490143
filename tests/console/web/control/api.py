"""What the tests of the Runs API share: an app with a token of each role, a run's settings, and launchers that start nothing."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.testclient import TestClient

from penstock.console.web import serve
from penstock.console.web.access import Access, Role
from penstock.console.web.app import create_app
from penstock.console.web.context import WebContext
from penstock.console.web.jobs import actions, job_file
from penstock.console.web.launchers.launcher import Found, Launcher, Start
from penstock.console.web.launchers.local import LocalOptions
from penstock.console.web.launchers.run_process import LAUNCH, LOCK
from penstock.console.web.problems import Problem
from penstock.deploy import config_show
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import atomic_write

BASE = "http://127.0.0.1:8800"


class Api:
    """An app on a folder of runs, with a token of each role. A second one on the same folder is a console that restarted."""

    def __init__(self, folder: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.access = Access(folder / "tokens")
        names = {role: f"{role.text}-{time.monotonic_ns()}" for role in Role}
        self.tokens = {role: self.access.add(name, role) for role, name in names.items()}
        self.context = WebContext(folder, self.access, arguments, dict(os.environ if environ is None else environ))
        self.app: FastAPI = create_app(self.context)
        self._port = 0
        self._end: Callable[[], object] = lambda: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @contextmanager
    def served(self) -> Iterator[Api]:
        """Serve it on a port of this machine."""
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def start(self) -> None:
        """Start a server; after a `stop` it has the same port."""
        self.context = replace(self.context, closing=asyncio.Event())
        bound = socket.create_server(("127.0.0.1", self._port))
        self._port = bound.getsockname()[1]
        ready, server = threading.Event(), serve.server_for(self.context, ())

        async def run() -> None:
            loop = asyncio.get_running_loop()
            self._end = lambda: loop.call_soon_threadsafe(serve.stop, self.context, server)
            ready.set()
            await server.serve(sockets=[bound])

        self._thread = threading.Thread(target=lambda: asyncio.run(run()))
        self._thread.start()
        ready.wait(60.0)

    def stop(self) -> None:
        """Stop the server as a signal would."""
        self._end()
        self._thread.join(60.0)
        assert not self._thread.is_alive()

    def client(self, role: Role | None = Role.ADMIN, **headers: str) -> TestClient:
        """A client with the token of a role, or none; its app's queue does not advance by itself."""
        token = {} if role is None else {"authorization": f"Bearer {self.tokens[role]}"}
        return TestClient(
            self.app, base_url=BASE, headers={**token, **headers}, follow_redirects=False, raise_server_exceptions=False
        )


class FakeLauncher(Launcher):
    """A launcher of this machine that starts nothing: runs are running until a test ends them."""

    name = "local"
    uses_this_machine = True
    options = LocalOptions

    def __init__(self) -> None:
        self.started: list[Start] = []
        self.running: dict[str, int] = {}  # the handle that holds the lock of a run's process
        self.stopped: list[tuple[str, bool]] = []
        self.fails = False

    def start(self, start: Start) -> str:
        if self.fails:
            raise Problem(503, "sbatch failed", got="no partition", fix="set one")
        self.started.append(start)
        handle = os.open(start.folder / LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(handle, fcntl.LOCK_EX)
        self.running[start.run] = handle
        launch = job_file.Launch(start=start.number, pid=1, started_at=1.0)
        atomic_write(start.folder / LAUNCH, launch.model_dump_json())
        return f"fake-{start.number}"

    def find(self, folder: Path, options: BaseModel, handle: str) -> Found:
        return Found("running") if folder.name in self.running else Found("absent")

    def stop(self, folder: Path, options: BaseModel, handle: str, *, force: bool) -> None:
        self.stopped.append((folder.name, force))

    def close(self) -> None:
        """End all runs without a record."""
        for handle in self.running.values():
            os.close(handle)
        self.running.clear()

    def end(self, folder: Path, code: int) -> None:
        os.close(self.running.pop(folder.name))
        launch = job_file.read_launch(folder)
        assert launch is not None
        ended = launch.model_copy(update={"ended_at": 2.0, "exit_code": code})
        atomic_write(folder / LAUNCH, ended.model_dump_json())


def check_in_process(
    arguments: Sequence[str], environ: Mapping[str, str], directory: Path, hide: Path, *, command: str
) -> dict[str, Any]:
    """The check of settings without a process of its own: the same code, without the second that a process takes."""
    files, overrides = config_show.split_arguments(arguments)
    try:
        services, unread = config_show.load_for(command, files, overrides, environ)
        document = config_show.as_document(services) | {"unread": unread}
        return actions.hidden(json.loads(json.dumps(document)), hide)
    except ConfigError as err:
        lines = [line.replace(f"{hide}/", "") for line in str(err).splitlines()]
        raise Problem(422, lines[0], errors=lines) from None


def settings(**more: Any) -> dict[str, Any]:
    return {"model": {"path": "model"}, "data": {"train": "train.jsonl"}, **more}
