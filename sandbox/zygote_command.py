"""The command that starts a zygote (`inside/zygote.py`) in each kind of sandbox, and the paths it may read."""

from __future__ import annotations

import enum
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.protocol.errors import PenstockError

_ROOT = Path(__file__).absolute().parents[2]  # the folder that holds `penstock`
_INSIDE = Path("penstock/sandbox/inside")
_ROOT_INSIDE_BUBBLE = "/penstock"
_START = (
    "import sys; sys.path.append(sys.argv[1]); from penstock.sandbox.inside.zygote import main; "
    "main(int(sys.argv[2]), sys.argv[3])"
)
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_FIRST_UID, _NUM_UIDS = 60578, 600  # unassigned in systemd's table of user ids
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "1",  # without it each thread uses 64 MiB of address space
}


class SandboxError(PenstockError):
    """A sandbox did not start, exited or did not answer, and the program is not proven to be the cause."""


class Kind(enum.StrEnum):
    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"


@dataclass(frozen=True, slots=True)
class Launch:
    kind: Kind

    def command(self, descriptor: int, slot: int) -> list[str]:
        """Return the command of a zygote that serves the inherited socket ``descriptor``.

        Raises SandboxError if a required program is not installed. When started by root, each slot has a separate
        user id, so that the kernel's count of its threads is exact.
        """
        uid = None
        if os.geteuid() == 0:
            uid = _FIRST_UID + (os.getpid() * 16 + slot) % _NUM_UIDS
        bubble = self.kind is Kind.BUBBLEWRAP
        settings = json.dumps({"readable": readable(), "uid": uid, "landlocked": not bubble})
        python = [interpreter(), "-S", "-s", "-P", "-B", "-c", _START]
        if bubble:
            return [*_bubble(as_root=uid is not None), *python, _ROOT_INSIDE_BUBBLE, str(descriptor), settings]
        return [*python, str(_ROOT), str(descriptor), settings]


def readable() -> list[str]:
    """Return the paths that a program may read: the standard library, shared libraries, time zones, four devices."""
    paths = [f"{sys.base_prefix}/lib", *_LIBRARIES, *_DEVICES]
    return [path for path in dict.fromkeys(paths) if Path(path).exists()]


def interpreter() -> str:
    """Return the path of the Python outside of any virtual environment."""
    base: str = getattr(sys, "_base_executable", "") or sys.executable
    return str(Path(base).resolve())


def _bubble(*, as_root: bool) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bubblewrap is not installed; run apt install bubblewrap")
    if as_root:  # no user namespace: the zygote needs capabilities to switch users and to kill processes of that user
        options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        options += ["--cap-add", "CAP_KILL"]
    else:
        options = ["--unshare-all", "--cap-drop", "ALL"]
    arguments = [program, *options, "--die-with-parent", "--new-session", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    bound = [*readable(), interpreter(), str(Path(_ROOT_INSIDE_BUBBLE) / _INSIDE)]
    parents = dict.fromkeys(parent for path in bound for parent in reversed(Path(path).parents[:-1]))
    for parent in parents:  # bubblewrap creates them unreadable for the user of programs
        if not parent.is_symlink():
            arguments += ["--perms", "0755", "--dir", str(parent)]
    for path in bound[:-1]:
        if path.startswith("/dev/"):
            arguments += ["--dev-bind", path, path]
        elif Path(path).is_symlink():
            arguments += ["--symlink", str(Path(path).readlink()), path]
        else:
            arguments += ["--ro-bind", path, path]
    return [*arguments, "--ro-bind", str(_ROOT / _INSIDE), bound[-1], "--remount-ro", "/", "--chdir", "/", "--"]
