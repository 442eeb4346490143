"""`python`: a program that the policy writes, run once in the sandbox of `penstock.sandbox`; nothing is kept between two calls."""

from __future__ import annotations

import functools
import itertools
import threading
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from penstock.agents.environments.episode_environment import PlayOptions
from penstock.agents.environments.tools.tool import Tool, ToolArguments, ToolEpisode, ToolError, ToolUnavailable
from penstock.protocol.errors import ConfigError
from penstock.sandbox import canary
from penstock.sandbox.slots import Slots
from penstock.sandbox.zygote_command import Launch, SandboxError
from penstock.sandbox.zygote_process import Limits, Reason, Run, Zygote, failure, run_program

_MAX_CODE = 65_536  # characters
_OUTPUT_BYTES = 1024**2
_SHOWN_LINES = 8  # of a traceback
_NEXT_SLOT = itertools.count()  # of all pools of this process: each has a different user id
# Prints the value of the last statement if it is an expression, as an interactive Python does.
_WRAPPED = """
import ast as _ast
_code = {code!r}
_tree = _ast.parse(_code, "<call>")
_last = _tree.body.pop() if _tree.body and isinstance(_tree.body[-1], _ast.Expr) else None
_names = {{"__name__": "__main__"}}
exec(compile(_tree, "<call>", "exec"), _names)
if _last is not None:
    _value = eval(compile(_ast.Expression(_last.value), "<call>", "eval"), _names)
    if _value is not None:
        print(repr(_value))
"""
_SAYS = {
    Reason.CPU_TIME: "stopped: it used up its CPU time", Reason.WALL_TIME: "stopped: it took too long",
    Reason.MEMORY: "stopped: it used up its memory", Reason.OUTPUT: "stopped: it wrote too much",
    Reason.FORBIDDEN: "stopped: it tried an operation that the sandbox forbids",
    Reason.CRASHED: "stopped: the interpreter crashed",
}  # fmt: skip


class PythonOptions(PlayOptions):
    """Options of ``python``."""

    cpu_s: float = Field(
        2.0, gt=0, le=600, description="Seconds of CPU time of one program; its wall time may be six times as long."
    )
    memory_mb: int = Field(512, ge=64, le=65_536, description="Address space of one program, in MiB.")
    slots: int = Field(2, ge=1, le=8, description="Programs that run at once in a worker.")
    sandbox: Literal["auto", "bubblewrap", "landlock"] = Field("auto", description="The kind of sandbox.")


class PythonArguments(ToolArguments):
    code: str = Field(
        max_length=_MAX_CODE,
        description="A whole Python program. What it prints is returned, and the value of its last expression.",
    )


@dataclass(slots=True)
class _Slot:
    zygote: Zygote
    stopped: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        self.stopped.set()
        self.zygote.interrupt()

    def resume(self) -> None:
        self.stopped.clear()

    def kill(self) -> None:
        self.zygote.kill()


class PythonTool(Tool):
    name = "python"
    description = (
        "Run a Python program and return what it prints. It has the standard library, no files and no network; nothing is kept "
        "between two calls."
    )
    arguments = PythonArguments
    options = PythonOptions

    def __init__(self) -> None:
        super().__init__()
        self._slots: Slots[_Slot] | None = None
        self._limits = Limits()

    def prepare(self) -> None:
        chosen: PythonOptions = self.chosen
        probed = canary.probe(chosen.sandbox)
        if probed.kind is None:
            raise ConfigError(f"the tool python needs a sandbox, and none works on this machine ({probed.reasons})")
        self.max_running = chosen.slots
        self._limits = Limits(cpu_s=chosen.cpu_s, memory_bytes=chosen.memory_mb * 1024**2, output_bytes=_OUTPUT_BYTES)
        launch = Launch(probed.kind)
        self._slots = Slots([_Slot(Zygote(launch, next(_NEXT_SLOT) % 15)) for _ in range(chosen.slots)])

    async def call(self, arguments: PythonArguments, episode: ToolEpisode) -> str:
        assert self._slots is not None
        program = _WRAPPED.format(code=arguments.code)
        try:
            run, reason = await self._slots.run(functools.partial(_run, program=program, limits=self._limits))
        except SandboxError as err:
            raise ToolUnavailable(str(err)) from None
        if reason is not None:
            raise ToolError(_failed(run, reason))
        return run.output.decode(errors="replace").rstrip("\n") or "(it printed nothing)"

    async def close(self) -> None:
        if self._slots is not None:
            await self._slots.close()


def _run(slot: _Slot, program: str, limits: Limits) -> tuple[Run, Reason | None]:
    if slot.stopped.is_set():
        raise SandboxError("a program was stopped before it began")
    run = run_program(slot.zygote, program, limits)
    return run, failure(run, limits)


def _failed(run: Run, reason: Reason) -> str:
    printed = run.output.decode(errors="replace").rstrip("\n")
    if reason in _SAYS:
        return f"{_SAYS[reason]}\n{printed}".rstrip("\n")
    lines = run.errors[-8000:].decode(errors="replace").strip().splitlines()
    # Lines before the first frame of the program belong to `_WRAPPED`.
    begin = next((place for place, line in enumerate(lines) if '"<call>"' in line), len(lines) - 1)
    shown = [*([printed] if printed else []), *lines[max(begin, len(lines) - _SHOWN_LINES, 0) :]]
    return "\n".join(shown) or f"it ended with exit code {run.exit_code}"


PYTHON_TOOL = PythonTool()
