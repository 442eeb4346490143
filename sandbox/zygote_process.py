"""The service's side of a zygote and of the programs it forks: start, pipes, limits, kill, and whose failure an end is.

Everything here blocks, with deadlines; it runs on the threads of `Slots`.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.sandbox.zygote_command import ENVIRONMENT, Launch, SandboxError

_START_S = 60.0  # starting an interpreter on a busy machine
_EXIT_S = 20.0  # from SIGKILL to the zygote's report that the program ended
_CHUNK = 65536
_MESSAGE = 4096


class Killed(enum.StrEnum):
    WALL_TIME = "wall_time"
    OUTPUT = "output"
    DONE = "done"  # the test process has exited


@dataclass(frozen=True, slots=True)
class Limits:
    cpu_s: float = 5.0
    memory_bytes: int = 1024**3
    output_bytes: int = 4 * 1024**2
    tasks: int = 32
    wall_factor: float = 6.0  # wall seconds allowed per CPU second, because the machine may be busy
    wall_min_s: float = 2.0

    @property
    def wall_s(self) -> float:
        return max(self.wall_min_s, self.wall_factor * self.cpu_s)


@dataclass(slots=True)
class Run:
    """The result of one program. ``answer`` is the text it wrote to descriptor 4."""

    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    answer: bytearray = field(default_factory=bytearray)
    status: int | None = None
    cpu_s: float = 0.0
    peak_bytes: int = 0
    killed: Killed | None = None

    @property
    def signal(self) -> int:
        return os.WTERMSIG(self.status) if self.status is not None and os.WIFSIGNALED(self.status) else 0

    @property
    def exit_code(self) -> int:
        return os.WEXITSTATUS(self.status) if self.status is not None else -1


class Zygote:
    def __init__(self, launch: Launch, slot: int) -> None:
        self._launch = launch
        self.slot = slot
        self._process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def spawn(self, mode: str, limits: Limits, pipes: Sequence[int]) -> None:
        if self.pid is None:
            self._start()
        assert self.channel is not None
        request = {"mode": mode, "cpu_s": limits.cpu_s, "memory_bytes": limits.memory_bytes, "tasks": limits.tasks}
        try:
            socket.send_fds(self.channel, [json.dumps(request).encode()], pipes)
            self._report("forking a program")
        except OSError as err:
            raise self._broken(f"does not accept a program ({err})") from None

    def end_program(self) -> None:
        with contextlib.suppress(OSError):
            assert self.channel is not None
            self.channel.send(b"kill")

    def ended(self) -> dict[str, Any]:
        return self._report("running a program")

    def interrupt(self) -> None:
        """Kill the zygote from another thread; a thread that waits for it gets SandboxError."""
        if (process := self._process) is not None:
            process.kill()

    def kill(self) -> None:
        process, self._process = self._process, None
        line, self.channel = self.channel, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        if line is not None:
            line.close()

    def _start(self) -> None:
        self.kill()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.settimeout(_START_S)
            self.channel = ours
            try:
                self._process = subprocess.Popen(
                    self._launch.command(theirs.fileno(), self.slot),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=ENVIRONMENT,
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as err:
                self.kill()
                raise SandboxError(f"the {self._launch.kind} sandbox does not start: {err}") from None
        self._report("starting")
        ours.settimeout(_EXIT_S)

    def _report(self, doing: str) -> dict[str, Any]:
        try:
            assert self.channel is not None
            text = self.channel.recv(_MESSAGE)
        except OSError as err:
            raise self._broken(f"did not answer while {doing} ({err})") from None
        if not text:
            raise self._broken(f"exited while {doing}")
        message: dict[str, Any] = json.loads(text)
        if "failed" in message:
            raise self._broken(f"failed while {doing}: {message['failed']}")
        return message

    def _broken(self, what: str) -> SandboxError:
        text, process = b"", self._process
        if process is not None and process.stderr is not None:
            process.kill()
            process.wait()
            os.set_blocking(process.stderr.fileno(), False)
            text = process.stderr.read(2000) or b""
        self.kill()
        said = f": {text.decode(errors='replace').strip()[-500:]}" if text.strip() else ""
        return SandboxError(f"the {self._launch.kind} sandbox {what}{said}")


class Watch:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._open: set[int] = set()
        self._running: dict[Zygote, Run] = {}
        self._killed_at: dict[Zygote, float] = {}  # since when
        self._ended_at = time.monotonic()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for fd in self._open:
            os.close(fd)
        for zygote in self._running:  # after an error its state is unknown
            zygote.kill()

    def start(
        self, zygote: Zygote, mode: str, *, job: bytes, stdin: bytes = b"", extra: Sequence[int] = (), answers: int = -1
    ) -> Run:
        """Start a program. ``extra`` become descriptors 5, 6; ``answers`` descriptor 4 instead of ``Run.answer``.

        This call owns these descriptors: it closes them once the program has them.
        """
        run = Run()
        theirs: list[int] = []
        try:
            theirs.append(_file(stdin))
            theirs += [self._drain(run, 1), self._drain(run, 2)]
            theirs.append(self._feed(job))
            theirs.append(self._drain(run, 4) if answers < 0 else answers)
            theirs += extra
            zygote.spawn(mode, self._limits, theirs)
        finally:
            for fd in theirs:
                os.close(fd)
        self._running[zygote] = run
        assert zygote.channel is not None
        self._selector.register(zygote.channel, selectors.EVENT_READ, zygote)
        return run

    def wait(self, *, until: Run | None = None) -> None:
        """Wait until all have exited; kill those that exceed their limits, and all others once ``until`` has exited.

        Raises SandboxError when a zygote exits or does not report.
        """
        deadline = time.monotonic() + self._limits.wall_s
        while self._running or self._open:
            now = time.monotonic()
            if now >= deadline:
                self._kill_all(Killed.WALL_TIME)
                deadline = now + _EXIT_S
            self._check_killed(now)
            for key, _ in self._selector.select(min(1.0, max(0.0, deadline - now))):
                if isinstance(key.data, Zygote):
                    self._end(key.data)
                elif key.fd in self._open:
                    key.data(key.fd)
            if until is not None and until.status is not None:
                self._kill_all(Killed.DONE)
                until = None

    def _check_killed(self, now: float) -> None:
        for zygote, since in self._killed_at.items():
            if now - since > _EXIT_S:
                raise SandboxError(
                    f"a program did not exit within {_EXIT_S:.0f} s after it was killed (slot {zygote.slot})"
                )
        if self._open and not self._running and now - self._ended_at > _EXIT_S:
            raise SandboxError(f"a pipe stayed open for {_EXIT_S:.0f} s after its program had exited")

    def _end(self, zygote: Zygote) -> None:
        self._selector.unregister(zygote.channel)  # type: ignore[arg-type]
        message = zygote.ended()
        run = self._running.pop(zygote)
        self._killed_at.pop(zygote, None)
        self._ended_at = time.monotonic()
        run.status, run.cpu_s, run.peak_bytes = message["status"], message["cpu_s"], message["peak_bytes"]

    def _kill_all(self, why: Killed) -> None:
        for zygote, run in self._running.items():
            self._kill(zygote, run, why)

    def _kill(self, zygote: Zygote, run: Run, why: Killed) -> None:
        if run.killed is None:
            run.killed = why
            self._killed_at[zygote] = time.monotonic()
            zygote.end_program()

    def _feed(self, data: bytes) -> int:
        theirs, ours = os.pipe()
        view = memoryview(data)

        def write(fd: int) -> None:
            nonlocal view
            try:
                view = view[os.write(fd, view[:_CHUNK]) :]
            except BrokenPipeError:
                view = view[:0]
            if not view:
                self._close(fd)

        self._register(ours, selectors.EVENT_WRITE, write)
        return theirs

    def _drain(self, run: Run, place: int) -> int:
        ours, theirs = os.pipe()
        buffer = {1: run.output, 2: run.errors, 4: run.answer}[place]

        def read(fd: int) -> None:
            data = os.read(fd, _CHUNK)
            remaining = self._limits.output_bytes - len(buffer)
            buffer.extend(data[: max(0, remaining)])
            if len(data) > remaining:
                for zygote in [zygote for zygote, running in self._running.items() if running is run]:
                    self._kill(zygote, run, Killed.OUTPUT)
            if not data:
                self._close(fd)

        self._register(ours, selectors.EVENT_READ, read)
        return theirs

    def _register(self, fd: int, event: int, act: Any) -> None:
        os.set_blocking(fd, False)
        self._open.add(fd)
        self._selector.register(fd, event, act)

    def _close(self, fd: int) -> None:
        self._selector.unregister(fd)
        self._open.discard(fd)
        os.close(fd)


def _file(data: bytes) -> int:
    """Return a descriptor of an unchangeable file in memory: programs ask for the size of their input, and map it."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    return fd


def run_program(zygote: Zygote, program: str, limits: Limits, *, stdin: str = "") -> Run:
    """Return how a program ended and what it wrote; `failure` says whose failure it is. Raises SandboxError."""
    with Watch(limits) as watch:
        job = json.dumps({"program": program}).encode()
        run = watch.start(zygote, "stdin", job=job, stdin=stdin.encode("utf-8", errors="surrogatepass"))
        watch.wait()
    return run


class Reason(enum.StrEnum):
    NO_PROGRAM = "no_program"  # the completion contains none
    WRONG = "wrong"
    RAISED = "raised"  # an uncaught error, or an exit code other than 0
    CPU_TIME = "cpu_time"
    WALL_TIME = "wall_time"
    MEMORY = "memory"
    OUTPUT = "output"  # too much output
    FORBIDDEN = "forbidden"  # a system call that ordinary programs do not make
    CRASHED = "crashed"


OUT_OF_TIME = (Reason.CPU_TIME, Reason.WALL_TIME)


def failure(run: Run, limits: Limits) -> Reason | None:
    if run.killed is Killed.OUTPUT:
        return Reason.OUTPUT
    # the kernel's kill comes a second of CPU time later, on a busy machine after the wall limit
    if run.killed is Killed.WALL_TIME:
        return Reason.CPU_TIME if run.cpu_s >= limits.cpu_s else Reason.WALL_TIME
    if run.signal == signal.SIGXCPU or (run.signal == signal.SIGKILL and run.cpu_s >= limits.cpu_s):
        return Reason.CPU_TIME
    if run.signal == signal.SIGKILL:  # a program cannot send SIGKILL, not even to itself
        raise SandboxError("a program was killed by another process; check whether this machine ran out of memory")
    if run.signal:
        return Reason.FORBIDDEN if run.signal == signal.SIGSYS else Reason.CRASHED
    if run.exit_code:
        return Reason.MEMORY if _last_line(run).startswith("MemoryError") else Reason.RAISED
    return None


def describe(run: Run) -> str:
    if run.signal:
        return f"ended by {signal.Signals(run.signal).name}"
    return _last_line(run) if run.exit_code else "its output is not the expected one"


def _last_line(run: Run) -> str:
    lines = run.errors[-2000:].decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
