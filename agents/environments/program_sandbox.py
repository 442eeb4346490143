"""Confine a program with bubblewrap: it reads what it needs to run, writes its own folder, and reaches nothing but the proxy.

It has namespaces of its own for processes, network and users. The only network is a loopback interface on which
`inside_sandbox.py` listens and passes every connection on to the proxy's Unix socket. All of its processes end with the sandbox: none
can leave it, whatever it starts. Memory and CPU time are not limited: use a command that does (`systemd-run`, a container) for that.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.agents.environments import inside_sandbox
from penstock.protocol.errors import ConfigError

PROXY_PORT = 8080  # inside; nothing else listens there
_SOCKET = "/run/penstock-proxy"  # inside
_NOBODY = "65534"
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/ssl",
    "/etc/localtime",
    "/etc/alternatives",
)


def program() -> str:
    """Return the path of bubblewrap; raises ConfigError when it is not installed."""
    found = shutil.which("bwrap")
    if found is None:
        raise ConfigError(
            "options.sandbox needs bubblewrap: apt install bubblewrap, or leave it out and name a command that confines the program"
        )
    return found


def confined(
    command: Sequence[str],
    *,
    start_in: Path,
    readable: Sequence[str],
    writable: Path,
    socket: Path,
) -> list[str]:
    """Return the command that runs ``command`` confined.

    ``start_in`` and ``readable`` can be read besides the system and this Python, ``writable`` is the episode's folder, ``socket`` the
    proxy's. The sandbox sees the variables that the command is started with: in its arguments every user could read them.
    """
    arguments = [program(), "--unshare-all", "--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL"]
    arguments += ["--die-with-parent", "--new-session", "--hostname", "sandbox"]
    arguments += ["--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev"]  # noqa: S108  inside
    for path in dict.fromkeys(_readable(start_in, readable)):
        arguments += (
            ["--symlink", str(Path(path).readlink()), path] if Path(path).is_symlink() else ["--ro-bind", path, path]
        )
    arguments += ["--bind", str(writable), str(writable), "--ro-bind", str(socket), _SOCKET]
    arguments += ["--ro-bind", inside_sandbox.__file__, "/run/inside_sandbox.py", "--remount-ro", "/"]
    arguments += ["--chdir", str(start_in.absolute()), "--"]
    return [*arguments, sys.executable, "-I", "-S", "/run/inside_sandbox.py", _SOCKET, str(PROXY_PORT), *command]


def _readable(start_in: Path, readable: Sequence[str]) -> Iterator[str]:
    yield from (path for path in _SYSTEM if Path(path).exists())
    for path in (sys.base_prefix, sys.prefix, str(start_in.absolute()), *readable):
        if Path(path).is_symlink():  # the link alone would lead nowhere inside
            yield str(Path(path).resolve())
        if Path(path).exists():
            yield path
