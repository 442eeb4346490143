"""Servers of the real package `openenv`: a game with a word, and an environment with tools; a program: ``openenv_server.py KIND PORT_FILE``."""

from __future__ import annotations

import os
import pathlib
import random
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    prompt: str = ""


class Echo(Environment):
    """Wants a word back that follows from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.word, self.count = "", 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, level: int = 0, **kwargs: Any) -> Heard:
        self.word, self.count = str(random.Random(seed).randrange(10**6)), 0
        return Heard(prompt=f"level {level}: say {self.word}")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        self.count += 1
        if action.message == "crash":
            os._exit(9)
        if action.message == "fail":
            raise OSError("the world is gone")
        is_right = action.message == self.word
        return Heard(prompt=f"not {action.message}", reward=1.0 if is_right else -0.5, done=is_right)

    @property
    def state(self) -> State:
        return State(step_count=self.count)


def tools() -> Any:
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    class Adder(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server = FastMCP("adder")

            @server.tool
            def add(a: int, b: int) -> int:
                """Add two numbers."""
                return a + b

            super().__init__(server)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
            return Observation(metadata={"seed": seed})

        def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            raise ValueError(f"{action} is no call of a tool")

        @property
        def state(self) -> State:
            return State()

    return create_fastapi_app(Adder, CallToolAction, CallToolObservation, max_concurrent_envs=8)


def main() -> None:
    kind, port_file = sys.argv[1:]
    sessions = {"echo": 8, "one": 1}
    app = tools() if kind == "tools" else create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=sessions[kind])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    partial = pathlib.Path(f"{port_file}.partial")
    partial.write_text(str(listener.getsockname()[1]))
    partial.rename(port_file)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
