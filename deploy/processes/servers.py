"""Run nats-server and an S3 server (``rclone serve s3``) as child processes on the loopback.

A server picks a free port at its first start and keeps it over restarts, so that clients can
reconnect. Both programs come with the extra ``penstock[local]``.

`rclone serve s3` never calls fsync: after a power loss, objects that it had acknowledged are empty. ``chattr +SD`` on its folder
has the kernel write through: a write returns when its data is on disk, a new name or a rename when the folder is. New folders
below inherit it.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.deploy.processes.child import Child, DeployError, wait_until
from penstock.protocol.config.connection import NatsSettings, S3Settings

_GET, _SET = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS
_WRITE_THROUGH = 0x00000008 | 0x00010000  # FS_SYNC_FL, FS_DIRSYNC_FL
log = structlog.get_logger("deploy.servers")
HOST = "127.0.0.1"
USER = "penstock"
READY_DEADLINE_S = 20.0
_STALE_UPLOAD_S = 24 * 3600.0


def make_durable(folder: Path) -> None:
    """Have everything below an existing folder written through.

    Raises:
        OSError: The file system has no such attributes, or the folder is another user's.
    """
    if _is_durable(folder):
        return  # and what was made in it since
    for path, folders, _ in os.walk(folder, topdown=False):
        for name in folders:
            _set(Path(path) / name)
    _set(folder)  # last: it says that all below have it


def _is_durable(folder: Path) -> bool:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return _flags(number) & _WRITE_THROUGH == _WRITE_THROUGH
    finally:
        os.close(number)


def _set(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(number, _SET, struct.pack("l", _flags(number) | _WRITE_THROUGH))
    finally:
        os.close(number)


def _flags(number: int) -> int:
    flags: int = struct.unpack("l", fcntl.ioctl(number, _GET, struct.pack("l", 0)))[0]
    return flags


def find_program(name: str) -> str:
    """Return the path of a program, from the folder of this interpreter or PATH; raises DeployError."""
    installed = Path(sys.executable).with_name(name)
    program = str(installed) if installed.exists() else shutil.which(name)
    if program is None:
        raise DeployError(f"no program {name}; install it with: pip install 'penstock[local]'")
    return program


@dataclass(frozen=True, slots=True)
class Certificate:
    """A server's certificate and private key, and the authority that its clients trust; all PEM files."""

    file: Path
    key_file: Path
    ca_file: Path


class Server:
    name: str

    def __init__(self, store: Path, log: Path, port: int, keep_open: Sequence[int]) -> None:
        """``port`` 0 takes a free one at the first start; ``keep_open`` are file descriptors that the process inherits."""
        self.store = store.absolute()
        self.port = port
        self._log = log
        self._keep_open = tuple(keep_open)
        self._child: Child | None = None
        self._log_offset = 0

    @property
    def child(self) -> Child:
        if self._child is None:
            raise DeployError(f"{self.name} was not started")
        return self._child

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        if self.port:
            self._check_port_is_free()
        self.store.mkdir(parents=True, exist_ok=True)
        self._log_offset = self._log.stat().st_size if self._log.exists() else 0
        self._child = self._new_child()
        self._child.start()

    def wait_ready(self) -> None:
        if not wait_until(lambda: not self.child.alive or self._ready(), READY_DEADLINE_S) or not self.child.alive:
            error = self.child.failure(f"was not ready within {READY_DEADLINE_S:.0f} s")
            self.kill()
            raise error

    def kill(self) -> None:
        self.child.kill()

    def restart(self) -> None:
        self.child.kill()
        self.start()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()

    def _new_child(self) -> Child:
        raise NotImplementedError

    def _ready(self) -> bool:
        raise NotImplementedError

    def relaunch(self) -> Child:
        self.launch()
        return self.child

    def _check_port_is_free(self) -> None:
        if not port_is_free(self.port):
            raise DeployError(
                f"{self.name}: port {self.port} on {HOST} is taken; "
                "stop the process that uses it, or choose another port (0: any free one)"
            )


class NatsServer(Server):
    """nats-server with JetStream; every acknowledged message is synced to disk."""

    name = "nats-server"

    def __init__(
        self,
        store: Path,
        *,
        log: Path,
        password: str = "",
        port: int = 0,
        max_store_gb: float = 50,
        keep_open: Sequence[int] = (),
        certificate: Certificate | None = None,
    ) -> None:
        """``password`` empty: a new one is made. ``max_store_gb`` bounds what all streams may reserve. With a certificate: only TLS."""
        super().__init__(store, log, port, keep_open)
        self._password = password or secrets.token_urlsafe(24)
        self._max_store_gb = max_store_gb
        self._certificate = certificate
        self.more_config = ""  # further lines of its configuration, from the next start on
        self._monitor_port = 0

    @property
    def settings(self) -> NatsSettings:
        scheme, ca_file = ("tls", self._certificate.ca_file) if self._certificate else ("nats", None)
        return NatsSettings(url=f"{scheme}://{HOST}:{self.port}", user=USER, password=self._password, ca_file=ca_file)

    def resize(self, max_store_gb: float) -> None:
        """Set the storage limit from the next start on; what is stored stays, even if it is more."""
        self._max_store_gb = max_store_gb

    def _new_child(self) -> Child:
        for old in self.store.glob("nats-server_*.ports"):
            old.unlink()
        config = self.store / "nats.conf"
        config.touch(mode=0o600)
        config.write_text(
            f"listen: {json.dumps(f'{HOST}:{self.port or -1}')}\n"
            f"http: {json.dumps(f'{HOST}:-1')}\n"
            f"ports_file_dir: {json.dumps(str(self.store))}\n"
            "jetstream {\n"
            f"  store_dir: {json.dumps(str(self.store / 'jetstream-store'))}\n"
            "  sync_interval: always\n"  # the default syncs an acknowledged message up to two minutes later
            f"  max_file_store: {round(self._max_store_gb * 2**30)}\n"  # the default is 75 % of the free disk space
            "  max_memory_store: 64MB\n"
            "}\n"
            f"authorization {{ user: {json.dumps(USER)}, password: {json.dumps(self._password)} }}\n"
            + self._tls_block()
            + self.more_config
        )
        command = [find_program("nats-server"), "-c", str(config)]
        return Child(self.name, command, log=self._log, death_signal=signal.SIGTERM, keep_open=self._keep_open)

    def _tls_block(self) -> str:
        if self._certificate is None:
            return ""
        cert, key = (json.dumps(str(path.absolute())) for path in (self._certificate.file, self._certificate.key_file))
        return f"tls {{ cert_file: {cert}, key_file: {key}, handshake_first: true, timeout: 5 }}\n"

    def _ready(self) -> bool:
        ports = self.store / f"nats-server_{self.child.pid}.ports"
        with contextlib.suppress(OSError, ValueError, KeyError):
            known = json.loads(ports.read_text())
            self.port = int(known["nats"][0].rsplit(":", 1)[1])
            self._monitor_port = int(known["monitoring"][0].rsplit(":", 1)[1])
            return self.healthy()
        return False

    def healthy(self) -> bool:
        """Ask ``/healthz``: it fails when JetStream cannot write, for example because the disk is full."""
        try:
            connection = http.client.HTTPConnection(HOST, self._monitor_port, timeout=2.0)
            connection.request("GET", "/healthz")
            status = connection.getresponse().status
            connection.close()
        except OSError:
            return False
        return status == 200


class S3Server(Server):
    """``rclone serve s3`` over a folder: a bucket is a folder below ``store``.

    With ``is_durable`` an object that it has acknowledged is on disk, where the file system can write through
    (`make_durable`); a large one takes several times as long.
    """

    name = "s3-server"

    def __init__(
        self,
        store: Path,
        *,
        log: Path,
        secret_key: str = "",
        port: int = 0,
        keep_open: Sequence[int] = (),
        certificate: Certificate | None = None,
    ) -> None:
        """``secret_key`` empty: a new one is made. With a certificate: only TLS."""
        super().__init__(store, log, port, keep_open)
        self._secret_key = secret_key or secrets.token_urlsafe(24)
        self._certificate = certificate
        self.is_durable = False  # from the next start on

    @property
    def settings(self) -> S3Settings:
        scheme, ca_file = ("https", self._certificate.ca_file) if self._certificate else ("http", None)
        return S3Settings(
            endpoint=f"{scheme}://{HOST}:{self.port}", access_key=USER, secret_key=self._secret_key, ca_file=ca_file
        )

    def _new_child(self) -> Child:
        remove_stale_uploads(self.store)
        if self.is_durable:
            self._write_through()
        command = [
            find_program("rclone"),
            *("serve", "s3", str(self.store)),
            *("--addr", f"{HOST}:{self.port}"),
            *("--vfs-cache-mode", "off"),
            *("--etag-hash", ""),  # else an MD5 of every object at its first read; readers verify sha256
            "--no-checksum",  # else the same at every read and write: half the server's time for a small object
            "--ignore-checksum",  # else once more between its buffer and the disk
        ]
        if self._certificate is not None:
            command += ["--cert", str(self._certificate.file), "--key", str(self._certificate.key_file)]
        environ = {
            **os.environ,
            "RCLONE_CONFIG": os.devnull,  # ignore the user's configuration
            "RCLONE_AUTH_KEY": f'"{USER},{self._secret_key}"',  # not on the command line, where ps shows it
        }
        return Child(
            self.name, command, log=self._log, environ=environ, death_signal=signal.SIGTERM, keep_open=self._keep_open
        )

    def _write_through(self) -> None:
        try:
            make_durable(self.store)
        except OSError as err:
            log.warning(
                "a power loss may cost acknowledged objects: this file system cannot write through; use ext4, or mount it with -o sync",
                folder=str(self.store),
                reason=err.strerror,
            )

    def _ready(self) -> bool:
        with contextlib.suppress(OSError):
            with self._log.open("rb") as file:
                file.seek(self._log_offset)
                match = re.search(rb"Starting s3 server on \[https?://[^:]+:(\d+)/", file.read())
            if match:
                self.port = int(match[1])
                with socket.create_connection((HOST, self.port), timeout=2.0):
                    return True
        return False


def port_is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def remove_stale_uploads(store: Path) -> int:
    removed = 0
    for path in store.rglob(".rclone_temp_*"):
        with contextlib.suppress(OSError):
            if path.is_file() and time.time() - path.stat().st_mtime > _STALE_UPLOAD_S:
                path.unlink()
                removed += 1
    return removed
