"""The zygote: programs are forked from this process, which has common modules imported. It reads no program, test or output.

    service ── socket: limits as JSON, with the pipes' descriptors ──▶ zygote ── fork ──▶ program, confined
            ◀── {"pid"}, then {"status", "cpu_s"} ──

Forking takes a tenth of the time of starting an interpreter, and the child inherits only this module's state: the
program is read from a pipe by the child, after it is confined. One program runs at a time; any message meanwhile, or
the end of the socket, kills it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys

from penstock.sandbox.inside import confine, program, tests

WARM = (
    "array bisect collections copy datetime decimal fractions functools heapq io itertools json math operator random re "
    "statistics string threading time typing"
)  # the modules that programs import most, imported in advance
_MAX_DESCRIPTORS = 16
_MAX_MESSAGE = 4096


def main(descriptor: int, settings: str) -> None:
    """Serve the socket ``descriptor`` until it ends; ``settings`` is the JSON text of the confinement's arguments."""
    for name in WARM.split():
        __import__(name)
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)]
    line = socket.socket(fileno=descriptor)
    try:
        confinement = confine.Confinement(**json.loads(settings))
    except OSError as err:
        line.send(json.dumps({"failed": str(err)}).encode())
        return
    line.send(b'{"ready": true}')
    while True:
        message, pipes, _, _ = socket.recv_fds(line, _MAX_MESSAGE, _MAX_DESCRIPTORS)
        if not message:
            return
        if pipes:  # without pipes it is a kill that arrived after the program had exited
            _serve(line, confinement, message, pipes)


def _serve(line: socket.socket, confinement: confine.Confinement, message: bytes, pipes: list[int]) -> None:
    confirmed, confirm = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(confinement, json.loads(message), [*pipes, confirm])
    os.close(confirm)
    for fd in pipes:
        os.close(fd)
    problem = _read_all(confirmed)
    watch = os.pidfd_open(pid)
    line.send(json.dumps({"pid": pid}).encode())
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    poll.register(line, select.POLLIN)
    while not any(fd == watch for fd, _ in poll.poll()):
        os.kill(pid, signal.SIGKILL)
        poll.unregister(line)
    _, status, usage = os.wait4(pid, 0)
    os.close(watch)
    ended = {"status": status, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024}
    if problem != b"confined":
        ended["failed"] = problem.decode(errors="replace") or "the process exited before it was confined"
    line.send(json.dumps(ended).encode())


def _child(confinement: confine.Confinement, request: dict[str, object], pipes: list[int]) -> None:
    """Confine this process, report that, and run the program; does not return."""
    mode = str(request.pop("mode"))
    confirm = len(pipes) - 1
    code = 1
    try:
        confinement.enter(confine.Limits(**request), pipes)  # type: ignore[arg-type]
        os.write(confirm, b"confined")
    except BaseException as err:
        for fd in (pipes[confirm], confirm):  # its number before and after `enter`
            with contextlib.suppress(OSError):
                os.write(fd, f"{type(err).__name__}: {err}".encode())
        os._exit(1)
    os.close(confirm)
    try:
        code = tests.run() if mode == "tests" else program.run(mode)
    finally:
        os._exit(code)


def _read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as pipe:
        return pipe.read()
