"""Attacks that test whether a sandbox works on this machine.

A file, a listener and this process's environment are outside the sandbox; a program in it tries to reach them, to
start processes, to signal its parent, to write, and to use more memory and threads than allowed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.sandbox.zygote_command import Kind, Launch, SandboxError
from penstock.sandbox.zygote_process import Limits, Reason, Zygote, failure, run_program

_LIMITS = Limits(cpu_s=1.0, memory_bytes=256 * 1024**2, output_bytes=64 * 1024, tasks=8)
_SLOT = 15  # not used by a pool

_REACH = """
import os, resource, socket, threading
def attempt(what, act):
    try:
        act()
    except (OSError, RuntimeError):
        return
    print('ESCAPED:', what)
attempt('read a file outside', lambda: open({file!r}).read())
attempt('read /etc/passwd', lambda: open('/etc/passwd').read())
attempt('list /proc', lambda: os.listdir('/proc'))
for folder in ({folder!r}, '/', '/tmp', '/dev/shm', '/var/tmp', '/run'):
    attempt('write into ' + folder, lambda: open(folder + '/penstock-canary', 'w'))
attempt('connect to a listener', lambda: socket.create_connection(('127.0.0.1', {port}), 1))
attempt('open a unix socket', lambda: socket.socket(socket.AF_UNIX))
attempt('fork', os.fork)
attempt('exec', lambda: os.execv('/bin/true', ['true']))
attempt('signal its parent', lambda: os.kill(os.getppid(), 0))
attempt('signal everybody', lambda: os.kill(-1, 0))
held = threading.Event()
def bomb():
    for _ in range(100):
        threading.Thread(target=held.wait, daemon=True).start()
attempt('start 100 threads', bomb)
held.set()
def limited():
    if resource.getrlimit(resource.RLIMIT_CPU)[0] > 1:
        return
    raise OSError
attempt('use CPU time without a limit', limited)
print('through')
"""
_EXCESSES = {
    "x = bytearray(1 << 30)": Reason.MEMORY,
    "while True: print('x' * 4096)": Reason.OUTPUT,
    "import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)": Reason.FORBIDDEN,
}


@dataclass(frozen=True, slots=True)
class Probed:
    kind: Kind | None
    refused: dict[Kind, str]

    @property
    def reasons(self) -> str:
        return "; ".join(f"{kind}: {why}" for kind, why in self.refused.items())

    def __str__(self) -> str:
        if self.kind is None:
            return f"code rewards are refused: no sandbox works on this machine ({self.reasons or 'switched off'})"
        return f"programs run in {self.kind}" + (f" ({self.reasons})" if self.reasons else "")


def probe(wanted: str) -> Probed:
    """Return the first sandbox that withstands the attacks; ``wanted`` is ``auto``, ``off`` or a kind. Takes under 1 s."""
    refused: dict[Kind, str] = {}
    for kind in Kind:
        if wanted in ("auto", kind):
            problem = attack(kind)
            if not problem:
                return Probed(kind, refused)
            refused[kind] = problem
    return Probed(None, refused)


def attack(kind: Kind) -> str:
    """Return why a kind of sandbox fails on this machine, "" if it works."""
    zygote = Zygote(Launch(kind), _SLOT)
    try:
        with _outside() as reach:
            run = run_program(zygote, reach, _LIMITS)
        said = run.output.decode(errors="replace")
        if "ESCAPED" in said or "through" not in said:
            return (said + run.errors.decode(errors="replace")).strip().replace("\n", "; ")[-500:]
        for program, reason in _EXCESSES.items():
            outcome = failure(run_program(zygote, program, _LIMITS), _LIMITS)
            if outcome is not reason:
                return f"{program!r} ended with {outcome}, expected {reason}"
    except (SandboxError, OSError) as err:
        return str(err)
    finally:
        zygote.kill()
    return ""


@contextlib.contextmanager
def _outside() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="penstock-canary-") as folder, socket.socket() as listener:
        os.chmod(folder, 0o777)  # noqa: PTH101, S103 the sandbox must protect it, not its mode
        file = Path(folder, "secret")
        file.write_text("reached")
        file.chmod(0o666)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield _REACH.format(file=str(file), folder=folder, port=listener.getsockname()[1])
