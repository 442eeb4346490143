"""A server with the protocol of NeMo-Gym, written after its public source: a counter for each session, on a thread.

The response that `/verify` gets is checked by the models of the package `openai`, as NeMo-Gym's are
(`NeMoGymResponse`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from openai.types.responses import Response as OpenAiResponse
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
from openai.types.responses.response_input_item import FunctionCallOutput
from pydantic import BaseModel, ConfigDict
from tests.servers import wait_for

_KEY = secrets.token_bytes(16)


class Params(BaseModel):
    """As `NeMoGymResponseCreateParamsNonStreaming`, of which it has some."""

    model_config = ConfigDict(extra="forbid")

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] = []
    parallel_tool_calls: bool = True
    temperature: float | None = None


class GymResponse(OpenAiResponse):
    output: list[  # pyright: ignore[reportIncompatibleVariableOverride]
        ResponseOutputMessage | ResponseFunctionToolCall | FunctionCallOutput | ResponseReasoningItem
    ]


class Seed(BaseModel):
    """The row at the start."""

    initial_count: int


class Increment(BaseModel):
    """Arguments of a tool."""

    count: int


class Verify(BaseModel):
    """The row at the end, and the episode."""

    model_config = ConfigDict(extra="allow")

    responses_create_params: Params
    response: GymResponse
    expected_count: int


def _signed(session: str) -> str:
    return f"{session}.{hmac.new(_KEY, session.encode(), hashlib.sha256).hexdigest()}"


def _session_of(cookie: str) -> str | None:
    session = cookie.partition(".")[0]
    return session if cookie and cookie == _signed(session) else None


class GymServer:
    """Serves until it is stopped; ``instead`` has what is answered in place of a path, once it is set."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.instead: dict[str, Callable[[], Response | Awaitable[Response]]] = {}
        config = uvicorn.Config(self._app(), port=0, log_level="critical", ws="none", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started, "the resources server's start")
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(60.0)

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def session(request: Request, go_on: Any) -> Response:
            self.headers.append(dict(request.headers))
            instead = self.instead.get(request.url.path)
            if instead is not None:
                made = instead()
                return await made if isinstance(made, Awaitable) else made
            known = _session_of(request.cookies.get("CounterServer", ""))
            request.state.session = known or secrets.token_hex(8)
            response = await go_on(request)
            response.set_cookie("CounterServer", _signed(request.state.session))
            return response

        @app.post("/seed_session")
        async def seed_session(request: Request, body: Seed) -> dict[str, Any]:
            self.counters[request.state.session] = body.initial_count
            return {}

        @app.post("/increment_counter")
        async def increment_counter(request: Request, body: Increment) -> dict[str, Any]:
            if body.count < 0:
                raise HTTPException(404, "no such count")
            self.counters[request.state.session] += body.count
            return {"success": True, "done": self.counters[request.state.session] >= 100}

        @app.post("/get_counter_value")
        async def get_counter_value(request: Request) -> dict[str, Any]:
            return {"count": self.counters[request.state.session]}

        @app.post("/wait")
        async def wait() -> str:
            await asyncio.sleep(600)
            return ""

        @app.post("/verify")
        async def verify(request: Request, body: Verify) -> dict[str, Any]:
            sent = await request.json()
            self.verified.append(sent)
            calls = [one for one in body.response.output if isinstance(one, ResponseFunctionToolCall)]
            outputs = [one for one in body.response.output if one.type == "function_call_output"]
            is_right = self.counters[request.state.session] == body.expected_count
            used = any(call.name == "increment_counter" for call in calls) and len(calls) == len(outputs)
            components = {"count": float(is_right), "used": float(used)}
            return {**sent, "reward": float(is_right and used), "reward_components": components}

        return app
