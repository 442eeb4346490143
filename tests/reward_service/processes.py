"""The reward service as a real process, and real HTTP endpoints that fail in the ways a test needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from fastapi import FastAPI

from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.reward_service.api import app
from penstock.reward_service.endpoints.endpoint import Access
from tests import forked
from tests.servers import wait_for

ROOT = Path(__file__).resolve().parents[2]
_SERVICE = "penstock.reward_service"


class Process:
    """A child process whose output is written to a file that a failing test shows.

    The reward service, and its commands that serve a file, are forked from a process that has imported them.
    """

    def __init__(
        self, command: Sequence[str], log: Path, *, environ: dict[str, str] | None = None, cwd: Path = ROOT
    ) -> None:
        self.log = log
        given = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        with log.open("ab") as file:
            self._popen = forked.Popen(
                [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=cwd, env=given
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def output(self) -> str:
        return self.log.read_text()

    def alive(self) -> bool:
        return self._popen.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self, deadline_s: float = 60.0) -> int:
        return self._popen.wait(deadline_s)

    def kill(self) -> None:
        if self.alive():
            self._popen.kill()
        self._popen.wait(60)


class Served(Process):
    """A command that serves a reward, once it listens."""

    @property
    def url(self) -> str:
        """Where it listens, from the line that it prints."""
        wait_for(lambda: " Next: " in self.output or not self.alive(), "the line that says what to type next")
        assert self.alive(), self.output
        return next(word for word in self.output.split() if word.startswith("http") and "/score" in word).rstrip(".,")


class Service(Process):
    """``python -m penstock.reward_service`` for one run."""

    def __init__(
        self,
        run_id: str,
        nats: NatsSettings,
        s3: S3Settings,
        folder: Path,
        overrides: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        """Start it with its API on a free port; a restart in the same folder keeps the log."""
        self._port_file = folder / "port"
        self._port_file.unlink(missing_ok=True)
        given = [
            f"run.id={run_id}",
            f"nats.url={nats.url}",
            f"nats.user={nats.user}",
            f"s3.endpoint={s3.endpoint}",
            f"s3.bucket={s3.bucket}",
            f"s3.access_key={s3.access_key}",
            *([f"nats.ca_file={nats.ca_file}"] if nats.ca_file else []),
            *([f"s3.ca_file={s3.ca_file}"] if s3.ca_file else []),
            "reward_service.port=0",
            f"reward_service.port_file={self._port_file}",
            "reward_service.retry_delay_s=0.2",
            *overrides,
        ]
        secrets = {"PENSTOCK_NATS__PASSWORD": nats.secret(), "PENSTOCK_S3__SECRET_KEY": s3.secret()}
        super().__init__([_SERVICE, *given], folder / "reward.log", environ={**secrets, **(environ or {})}, cwd=cwd)

    def ready(self) -> Service:
        wait_for(lambda: self._port_file.exists() or not self.alive(), f"the reward service: {self.log}")
        assert self.alive(), self.output
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port_file.read_text().strip()}"

    def register(self, name: str, url: str, *, token: str = "", **more: Any) -> httpx.Response:
        return self.post("/v1/endpoints", {"name": name, "url": url, **more}, token=token)

    def post(self, path: str, body: Any = None, *, token: str = "") -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60)

    def delete(self, name: str, *, token: str = "", **params: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.delete(f"{self.url}/v1/endpoints/{name}", params=params, headers=headers, timeout=60)

    def endpoints(self, token: str = "") -> dict[str, Any]:
        """Return the registered endpoints by name."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        answer = httpx.get(f"{self.url}/v1/endpoints", headers=headers, timeout=60).raise_for_status()
        return {row["endpoint"]["name"]: row["endpoint"] for row in answer.json()}

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=60).raise_for_status().json()


def api_app(access: Access) -> FastAPI:
    """Return the API of a reward service that knows nothing: what it refuses before its routes run."""
    names = ("registry", "reward_registry", "client", "heartbeat", "spans", "certificates")
    context = SimpleNamespace(run_id="r", replica="a", **dict.fromkeys(names))
    return app.build(cast(Any, context), access=access, max_request_bytes=1024, max_requests_bytes=4096)


Answer = tuple[int, dict[str, str], bytes]
Behaviour = Callable[[dict[str, Any]], Answer]
StartService = Callable[..., Service]
Serve = Callable[..., Served]
StartEndpoint = Callable[[Behaviour], "EndpointServer"]


class EndpointServer:
    """A real HTTP server whose answer to every request is what ``behaviour`` returns for its JSON body."""

    def __init__(self, behaviour: Behaviour) -> None:
        """Listen on a free port; requests are answered in threads."""
        self.behaviour = behaviour
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.hosts: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["content-length"]))
                body = json.loads(sent)
                outer.bodies.append(sent)
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                outer.requests.append(body)
                outer.keys.append(self.headers["idempotency-key"])
                outer.hosts.append(self.headers["host"])
                status, headers, answer = outer.behaviour(body)
                try:
                    self.send_response(status)
                    for name, value in {"content-length": str(len(answer)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(answer)
                except OSError:
                    self.close_connection = True  # the client closed the connection

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/score"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def good(score: float = 0.5) -> Behaviour:
    """Answer every completion with ``score``, as the contract requires."""

    def behave(request: dict[str, Any]) -> Answer:
        results = [
            {
                "group_id": g["group_id"],
                "scores": [{"score": score, "parts": {"length": len(c)}} for c in g["completions"]],
            }
            for g in request["groups"]
        ]
        return 200, {"content-type": "application/json"}, json.dumps({"results": results}).encode()

    return behave


def chat_said(text: str | None, *, finish: str = "stop", **message: Any) -> Answer:
    """Return the response of a chat endpoint, of 50 and 7 tokens."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    body = {"object": "chat.completion", "choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 7}}
    return 200, {"content-type": "application/json"}, json.dumps(body).encode()


def blocking(score: float) -> tuple[Behaviour, threading.Event, threading.Event]:
    """An endpoint that signals each request and answers when the test allows it."""
    asked, release = threading.Event(), threading.Event()

    def behave(request: dict[str, Any]) -> Answer:
        asked.set()
        release.wait(60)
        return good(score)(request)

    return behave, asked, release


def raw(body: str | bytes, status: int = 200, **headers: str) -> Behaviour:
    data = body.encode() if isinstance(body, str) else body
    return lambda _: (status, headers, data)
