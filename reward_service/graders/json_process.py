"""A child process that reads JSON texts from stdin and writes JSON texts to stdout, one a line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

_START_S = 120.0  # importing sympy or a user's libraries on a busy machine
_LINE_BYTES = 64 * 1024**2  # longest line that is read


class JsonProcess:
    """One child process. Its first line says that it is ready.

    Every wait ends: `start` has a deadline, and the caller of `read` sets one.
    """

    def __init__(self, command: Sequence[str], *, environ: Mapping[str, str], own_group: bool = False) -> None:
        """Describe it; nothing is started yet. With ``own_group`` `kill` ends its own children too."""
        self._command = command
        self._environ = environ
        self._own_group = own_group
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> dict[str, Any]:
        """Start the process and return its first line; raises TimeoutError, or EOFError when it ends instead."""
        async with asyncio.timeout(_START_S):
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=dict(self._environ),
                limit=_LINE_BYTES,
                start_new_session=self._own_group,
            )
            return await self.read()

    async def write(self, message: Mapping[str, Any]) -> None:
        """Send one line; raises ConnectionError when the process has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def read(self) -> dict[str, Any]:
        """Return the next line; raises EOFError at the end of stdout, ValueError for anything but a JSON object."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise EOFError
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError(f"expected a JSON object, got {str(found)[:80]!r}")  # noqa: TRY004 as json.loads
        return found

    async def kill(self, *, after_s: float = 0.0) -> int | None:
        """End the process, ``after_s`` seconds after its stdin was closed; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.stdin is not None:
            process.stdin.close()
        if after_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), after_s)
        if process.returncode is None:  # of one that has exited, the process id may belong to another by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL) if self._own_group else process.kill()
        return await process.wait()


def describe_exit(code: int | None) -> str:
    """Return how a process ended, for a message."""
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
