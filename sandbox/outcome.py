"""How a program ended, and whose failure that is."""

from __future__ import annotations

import enum
import json
import signal

from penstock.sandbox.zygote_command import SandboxError
from penstock.sandbox.zygote_process import Killed, Limits, Run, Watch, Zygote, was_out_of_cpu


def run_program(zygote: Zygote, program: str, limits: Limits, *, stdin: str = "") -> Run:
    """Return how a program ended and what it wrote; `outcome.failure` says whose failure it is. Raises SandboxError."""
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
    """Return how a program failed, None if it succeeded; raises SandboxError if the sandbox failed."""
    if run.killed is Killed.OUTPUT:
        return Reason.OUTPUT
    # the kernel's kill comes a second of CPU time later, on a busy machine after the wall limit
    if run.killed is Killed.WALL_TIME:
        return Reason.CPU_TIME if run.cpu_s >= limits.cpu_s else Reason.WALL_TIME
    if was_out_of_cpu(run, limits):
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
