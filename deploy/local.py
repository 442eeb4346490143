"""NATS and S3 on this machine, over one data folder: ``penstock up``.

Both servers run as child processes on the loopback, with credentials made at the first start and
stored in the data folder (readable for its owner only). They stop when this process exits, SIGKILL
included; a server that crashes is restarted on its port. The data folder is locked: two servers
would destroy the store, and nats-server does not check for another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.processes.child import DeployError, wait_until
from penstock.deploy.processes.servers import Certificate, NatsServer, S3Server, Server, port_is_free
from penstock.deploy.processes.supervise import Supervisor
from penstock.protocol import logs, seals
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.errors import PenstockError
from penstock.protocol.process_end import error_text
from penstock.protocol.transport import tls
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

_HTTP = "http"  # the certificate of all HTTP servers of this machine
_LOCK_DEADLINE_S = 5.0  # the servers of a process that was killed need a moment to exit


class LocalStack:
    """nats-server and an S3 server over one locked data folder. Use it as a context manager."""

    def __init__(
        self,
        data: Path,
        *,
        nats_port: int = 0,
        s3_port: int = 0,
        max_store_gb: int = 50,
        log_folder: Path | None = None,
        tls: bool = False,
        is_durable: bool = False,
    ) -> None:
        """``tls``: the servers take encrypted connections only, with certificates made in ``data`` at the first start.

        ``is_durable``: objects are on disk before they are acknowledged, as messages always are.
        ``data`` is created when it does not exist. Port 0: the last one used if it is free, else any free one.
        """
        self.data = data.absolute()
        self._log_folder = log_folder or self.data / "logs"
        self._ports = {NatsServer.name: nats_port, S3Server.name: s3_port}
        self._max_store_gb = max_store_gb
        self._tls = tls
        self._is_durable = is_durable
        self._lock_fd: int | None = None
        self._supervisor: Supervisor | None = None
        self._own_supervisor = False
        self._nats: NatsServer | None = None
        self._s3: S3Server | None = None

    def __enter__(self) -> LocalStack:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, supervisor: Supervisor | None = None) -> None:
        """Start both servers, wait until they answer and create the bucket.

        ``supervisor`` restarts a server that crashes (None: the stack's supervisor). Raises DeployError
        when the folder is in use, a port is taken or a server does not start; no process is left then.
        """
        self._own_supervisor = supervisor is None
        self._supervisor = supervisor or Supervisor()
        try:
            self._lock()
            self._launch()
        except BaseException:
            self.stop()
            raise

    def _launch(self) -> None:
        assert self._lock_fd is not None
        assert self._supervisor is not None
        shared = (self._lock_fd,)  # the folder stays locked until the last server has exited
        self._nats = NatsServer(
            self.data / "nats",
            log=self._log_folder / "nats-server.log",
            password=self._stored_secret("nats.password"),
            port=self._port(NatsServer.name),
            max_store_gb=self._max_store_gb,
            keep_open=shared,
            certificate=self._certificate("nats"),
        )
        self._s3 = S3Server(
            self.data / "objects",
            log=self._log_folder / "s3-server.log",
            secret_key=self._stored_secret("s3.secret_key"),
            port=self._port(S3Server.name),
            keep_open=shared,
            certificate=self._certificate("s3"),
        )
        self._s3.is_durable = self._is_durable
        servers: tuple[Server, ...] = (self._nats, self._s3)
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_ready()
        for server in servers:
            self._supervisor.watch(server.child, server.relaunch)
        Blobs(self.s3).ensure_bucket()
        self._port_file.write_text(json.dumps({server.name: server.port for server in servers}))
        variables = {**self.environment(), **self._http_environment()}
        lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        seals.write(self.data / "environment", lines, optional=True)

    def stop(self) -> None:
        if self._supervisor is not None and self._own_supervisor:
            self._supervisor.close()
        for server in (self._nats, self._s3):
            if server is not None:
                server.stop()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    @property
    def nats(self) -> NatsSettings:
        assert self._nats is not None, "not started"
        return self._nats.settings.model_copy(update={"password": "", "password_file": self.data / "nats.password"})

    @property
    def s3(self) -> S3Settings:
        assert self._s3 is not None, "not started"
        return self._s3.settings.model_copy(update={"secret_key": "", "secret_key_file": self.data / "s3.secret_key"})

    @property
    def pids(self) -> tuple[int, int]:
        assert self._nats is not None, "not started"
        assert self._s3 is not None, "not started"
        return self._nats.child.pid, self._s3.child.pid

    def environment(self) -> dict[str, str]:
        """Return the PENSTOCK_ variables that make every service use these servers; they name the files of secrets.

        With TLS the trainer signs its weights, and workers load no others.
        """
        environment = connection_environment(self.nats, self.s3)
        if self._tls:
            from penstock.deploy import certificates  # noqa: PLC0415  its library is of the extra `local`

            private, public = certificates.signing_key(self._certificates)
            environment |= {
                "PENSTOCK_TRAINER__SIGNING_KEY_FILE": str(private),
                "PENSTOCK_WORKER__TRUSTED_KEYS_FILE": str(public),
            }
        return environment

    def _http_environment(self) -> dict[str, str]:
        if not self._tls:
            return {}
        from penstock.deploy import certificates  # noqa: PLC0415  its library is of the extra `local`

        if not (self._certificates / f"{_HTTP}.pem").exists():
            names = [(_HTTP, name) for name in [socket.gethostname()] if certificates.is_host(name)]
            certificates.write_certificates(self._certificates, services=(_HTTP,), names=names)
        certificate = certificates.kept(self._certificates, _HTTP)
        files = {tls.CERTIFICATE: certificate.file, tls.KEY: certificate.key_file, tls.AUTHORITY: certificate.ca_file}
        return {name: str(file) for name, file in files.items()}

    @property
    def _port_file(self) -> Path:
        return self.data / "ports.json"

    def _port(self, name: str) -> int:
        if self._ports[name]:
            return self._ports[name]
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            last = int(json.loads(self._port_file.read_text())[name])
            if port_is_free(last):
                return last
        return 0

    def _certificate(self, service: str) -> Certificate | None:
        if not self._tls:
            return None
        from penstock.deploy import certificates  # noqa: PLC0415  its library is of the extra `local`

        return certificates.kept(self._certificates, service)

    @property
    def _certificates(self) -> Path:
        return self.data / "certificates"

    def _stored_secret(self, name: str) -> str:
        path = self.data / name
        if not path.exists():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123 - mode
                file.write(secrets.token_urlsafe(24))
        return path.read_text().strip()

    def _lock(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        path = self.data / "lock"
        self._lock_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

        def take() -> bool:
            assert self._lock_fd is not None
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        holder = path.read_text().strip()
        if not take() and (_is_alive(holder) or not wait_until(take, _LOCK_DEADLINE_S)):
            raise DeployError(
                f"the data folder {self.data} is in use by process {holder or '(unknown)'}; "
                "stop that process, or choose another folder with --data"
            )
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)


def connection_environment(nats: NatsSettings, s3: S3Settings) -> dict[str, str]:
    """Return the PENSTOCK_ variables of the NATS and S3 settings that are set."""
    return {
        f"PENSTOCK_{section}__{key.upper()}": str(value)
        for section, settings in (("NATS", nats), ("S3", s3))
        for key, value in settings.model_dump(exclude_none=True).items()
        if value != ""
    }


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # another user's
    return True


def stop_on_signals() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set; call it in the main thread."""
    requested = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: requested.set())
    return requested


def serve(stack: LocalStack, run: str | None) -> int:
    logs.configure("local")
    stop_requested = stop_on_signals()
    try:
        with stack:
            if run:
                with Bus.connect(stack.nats, name="bootstrap") as bus:
                    bootstrap(bus, Blobs(stack.s3), run)
            print((stack.data / "environment").read_text(), end="", flush=True)
            print(f"# NATS and S3 are running; in every other terminal: . {stack.data}/environment", file=sys.stderr)
            print("# then: penstock bootstrap run.toml, and the services and the trainer of that run", file=sys.stderr)
            print("# Ctrl-C stops them; their data stays in the folder", file=sys.stderr)
            stop_requested.wait()
    except PenstockError as err:
        print(error_text(f"penstock up: {err}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("up")
