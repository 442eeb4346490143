"""An MCP server of the real package `mcp`, whose tools do what a test asks for. As a program it talks over standard input and output."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes")
notes: list[str] = []  # of this process: one episode


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a note; return all of them and the seed."""
    notes.append(text)
    return f"{notes} {os.environ.get('PENSTOCK_SEED', '')}"


@server.tool()
def header(name: str, ctx: Context[Any, Any]) -> str:
    """Return a header of the request."""
    return str((ctx.headers or {}).get(name, ""))


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("there is no such page")


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "over"


@server.tool()
def long(count: int) -> str:
    """Return a long text."""
    return "x" * count + "end"


@server.tool()
def start_process() -> int:
    """Start a process that ignores the end of its parent."""
    return subprocess.Popen(["sleep", "600"]).pid


@server.tool()
def crash_once(marker: str) -> str:
    """Exit, unless an earlier attempt has."""
    if not pathlib.Path(marker).exists():
        pathlib.Path(marker).write_text("crashed")
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(9)
    return "alive"


@server.tool()
def stop_answering() -> str:
    """Hang, with all of the process."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "woken"


@server.tool()
def judge(answer: str, ground_truth: str) -> dict[str, float]:
    """Return the reward of an answer."""
    return {"reward": 1.0 if answer == ground_truth else 0.25}


if __name__ == "__main__":
    server.run("stdio")
