"""One container as processes in namespaces: its own mounts, network, host name, users' rights and process ids. Needs root.

The root is an overlay of this machine's, so that what a container writes stays in memory of its own; with `read_only` nothing
is written. Files and volumes are bind mounts. Names of services are in /etc/hosts, since there is no DNS server.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rigs.compose.interpret import USER, Image, Service

_PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_REPOSITORY = Path(__file__).parents[3]
# As docker's --init: process 1 passes signals on and takes the exit code of the only child.
_INIT = '"$@" & child=$!; trap "kill -TERM $child" TERM; trap "kill -INT $child" INT; while :; do wait $child; code=$?; kill -0 $child 2>/dev/null || exit $code; done'


def interface(number: int) -> str:
    """Return the name of the network interface in the namespace of that number."""
    return f"psc{number}"


class Network:
    """A bridge to which every container is connected, in a subnet of its own."""

    def __init__(self, subnet: str) -> None:
        """``subnet`` is three numbers, such as 10.213.7; the host has its first address."""
        self.subnet, self.bridge = subnet, f"psb{os.getpid()}"
        self._namespaces: list[str] = []

    def __enter__(self) -> Network:
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self.subnet}.1/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", self.bridge], check=False, capture_output=True)

    def add(self, number: int) -> str:
        """Return the name of a new namespace with the subnet's address of that number."""
        name, near, far = f"psn{os.getpid()}x{number}", f"psh{os.getpid()}x{number}"[-15:], interface(number)
        _run("ip", "netns", "add", name)
        self._namespaces.append(name)
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _run("ip", "link", "set", near, "master", self.bridge, "up")
        _run("ip", "-n", name, "address", "add", f"{self.subnet}.{number}/24", "dev", far)
        _run("ip", "-n", name, "link", "set", far, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        return name


class Container:
    def __init__(
        self, service: Service, image: Image, *, number: int, namespace: str, volumes: Path, files: Path, work: Path
    ) -> None:
        self.service, self.image, self.number = service, image, number
        self.name = f"{service.name}-{number}"
        self.hostname = secrets.token_hex(6)  # as docker's
        self.restarts = 0
        self.codes: list[int] = []
        self.is_stopping = False
        self.log = work / "log"
        self._namespace, self._volumes, self._files, self._work = namespace, volumes, files, work
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        home = "/root" if self.image.user == "0" else "/home/penstock"
        given = {"PATH": _PATH, "HOME": home, "HOSTNAME": self.hostname, **self.image.environment}
        given |= self.service.environment
        if self.image.entrypoint[:1] == (sys.executable,):
            given["PYTHONPATH"] = str(_REPOSITORY)  # of the stand-in
        return given

    @property
    def command(self) -> tuple[str, ...]:
        given = self.service.command
        return (*self.image.entrypoint, *(self.image.command if given is None else given))

    @property
    def code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def start(self, hosts: Mapping[str, Sequence[str]]) -> None:
        self._work.mkdir(parents=True, exist_ok=True)
        script = self._work / "start.sh"
        script.write_text(self._script(hosts))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child",
                 "/bin/bash", str(script)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self) -> None:
        """SIGTERM to process 1, SIGKILL after the service's grace."""
        self.is_stopping = True
        if self._process is None or self._process.poll() is not None:
            return
        self.kill(signal.SIGTERM)
        try:
            self._process.wait(self.service.stop_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if (pid := self._pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def run(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Run a command inside, as its user; returns the exit code and the output. 124 when it took too long."""
        pid = self._pid()
        if pid is None:
            return 125, "not running"
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid")
        enter = ["nsenter", f"--target={pid}", *spaces, f"--root=/proc/{pid}/root", "--wd=/"]
        try:
            done = subprocess.run(
                [*enter, *self._as_user(), *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124, f"no answer within {timeout_s:g} s"
        return done.returncode, done.stdout + done.stderr

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:]) if self.log.exists() else ""

    def _pid(self) -> int | None:
        if self._process is None or self._process.poll() is not None:
            return None
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            if children:
                return int(children[0])
            time.sleep(0.02)
        return None

    def _as_user(self) -> list[str]:
        """Return a command line that drops all rights that the container has not, and this machine's variables."""
        none = ("--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs")
        rights = ["setpriv", f"--reuid={USER}", f"--regid={USER}", *none] if self.image.user == USER else []
        return [*rights, "env", "-i", *(f"{key}={value}" for key, value in self.environment.items())]

    def _script(self, hosts: Mapping[str, Sequence[str]]) -> str:
        root, layer = self._work / "root", self._work / "layer"
        lines = [
            "set -eu",
            "mount --make-rprivate /",
            f"mkdir -p {root} {layer}",
            f"mount -t tmpfs tmpfs {layer} && mkdir {layer}/upper {layer}/work",
            f"mount -t overlay overlay -o lowerdir=/,upperdir={layer}/upper,workdir={layer}/work {root}",
            f"chmod 755 {root}/root",  # the interpreter may be below it; images have it elsewhere
            f"echo 'penstock:x:{USER}:{USER}::/home/penstock:/bin/sh' >> {root}/etc/passwd",
            f"mkdir -p {root}/home/penstock && chown {USER}:{USER} {root}/home/penstock",
            f"hostname {self.hostname} && echo {self.hostname} > {root}/etc/hostname",
            f"echo '127.0.0.1 localhost {self.hostname}' > {root}/etc/hosts",
            *(f"echo '{address} {name}' >> {root}/etc/hosts" for name, found in hosts.items() for address in found),
            f"rm -f {root}/etc/resolv.conf && touch {root}/etc/resolv.conf",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            *(f"mount -t tmpfs -o mode=1777 tmpfs {root}{path}" for path in ("/dev/shm", "/tmp", "/run")),
        ]
        for number, mount in enumerate(self.service.mounts):
            target = f"{root}{mount.target}"
            if mount.is_volume:
                source = self._volumes / (mount.source or f"{self.name}.{number}")
                if not source.exists():
                    source.mkdir(parents=True)
                    if mount.target in self.image.own_folders:
                        os.chown(source, int(USER), int(USER))
            else:
                source = (self._files / mount.source).resolve()
                if not source.exists():
                    raise FileNotFoundError(f"{self.name}: {source}, mounted at {mount.target}, does not exist")
            lines.append(
                f"mkdir -p {target}" if source.is_dir() else f"mkdir -p {Path(target).parent} && touch {target}"
            )
            lines.append(f"mount --bind {shlex.quote(str(source))} {target}")
            if mount.read_only:
                lines.append(f"mount -o remount,ro,bind {target}")
        if self.service.read_only:
            lines += [f"umount {root}/tmp"] if "/tmp" not in self.service.tmpfs else []
            lines.append(f"mount -o remount,ro {root}")
        inside = shlex.join([*self._as_user(), *self.command])
        lines.append(f"exec chroot {root} /bin/bash -c {shlex.quote(_INIT)} init {inside}")
        return "\n".join(lines) + "\n"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")
