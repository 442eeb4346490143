"""An engine process that has no weights yet: it imports what it needs, and gets its arguments when there are any.

A worker starts it at once, so that the seconds of its imports pass while the trainer starts, or while the weights are
fetched. It ends when the worker does: its stdin is then closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path


class PreparedProcess:
    """A process started with the words of a program and one flag; it reads the words after these from stdin, as a JSON line."""

    def __init__(self, process: asyncio.subprocess.Process, words: Sequence[str], log_start: int) -> None:
        """Use `PreparedProcess.start` instead."""
        self._process = process
        self._program = list(words[:-1])
        self.log_start = log_start  # bytes of the log before it wrote to it

    @classmethod
    async def start(cls, words: Sequence[str], *, log: Path, environ: Mapping[str, str] | None) -> PreparedProcess:
        """Start it; its output goes to the end of the log."""
        with log.open("ab") as output:
            log_start = output.tell()
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )
        return cls(process, words, log_start)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def become(self, command: Sequence[str]) -> asyncio.subprocess.Process | None:
        """Let it go on as this command; None when it has exited, or the command is of another program."""
        if list(command[: len(self._program)]) != self._program:
            await self.stop()
            return None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command[len(self._program) :]).encode() + b"\n")
            await self._process.stdin.drain()
            self._process.stdin.close()
        except ConnectionError:
            await self.stop()
            return None
        return None if self._process.returncode is not None else self._process

    async def stop(self) -> None:
        """Kill it; it has no work."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
