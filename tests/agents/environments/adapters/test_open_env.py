"""Environments of real OpenEnv servers: one session for each episode, capacity, failures, tools. ``make test-more NAME=environments`` installs them."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.agents.environments.played import call, check_exact, play, results, said, task_of
from tests.servers import wait_for

from penstock.agents.environments.adapters import open_env
from penstock.agents.environments.adapters.open_env import OPENENV, OpenEnvOptions
from penstock.agents.environments.over_http import servers
from penstock.rollout_service.errors import TaskRefused

PYTHON = os.environ.get("PENSTOCK_TEST_OPENENV_PYTHON", "")
needs_openenv = pytest.mark.skipif(
    not PYTHON, reason="make test-more NAME=environments sets PENSTOCK_TEST_OPENENV_PYTHON"
)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Start servers by kind; each is started once."""
    folder = tmp_path_factory.mktemp("servers")
    running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}

    def start(kind: str) -> str:
        if kind not in running or running[kind][0].poll() is not None:
            port = folder / f"{kind}.port"
            port.unlink(missing_ok=True)
            server = subprocess.Popen([PYTHON, str(Path(__file__).with_name("openenv_server.py")), kind, str(port)])
            running[kind] = server, ""
            wait_for(port.exists, f"the port of the OpenEnv server {kind}")
            running[kind] = server, f"http://127.0.0.1:{port.read_text()}"
        return running[kind][1]

    yield start
    for server, _ in running.values():
        server.kill()
        server.wait(60.0)


def echo(url: str, **more: Any) -> dict[str, Any]:
    return {"url": url, "observation": "prompt", "rules": "Listen.", **more}


@needs_openenv
def test_an_episode_is_a_session_of_its_own(model: Path, serve: Callable[[str], str]) -> None:
    """Episodes of a group begin alike and are played side by side; rewards are those of the steps."""
    task = task_of(size=3, extra_info='{"level": 2}')
    found, _ = play(model, OPENENV, ["a"] * 6, task, options=echo(serve("echo"), row_reset=["level"]), max_turns=2)
    firsts = {said(one)[0] for one in found}
    assert len(firsts) == 1
    word = firsts.pop()[1].removeprefix("Listen.\nlevel 2: say ")
    assert [(one.status, one.reward) for one in found] == [("truncated", -1.0)] * 3
    (episode,), engine = play(model, OPENENV, ["no", word], options=echo(serve("echo")))
    check_exact(episode, engine, model, ["no", word])
    assert said(episode)[2] == ("user", "not no")
    assert (episode.status, [turn.reward for turn in episode.rows[0].turns]) == ("done", [-0.5, 1.0])


@needs_openenv
def test_a_full_server_is_waited_for(model: Path, serve: Callable[[str], str]) -> None:
    found, _ = play(model, OPENENV, ["a"] * 3, task_of(size=3), options=echo(serve("one")), max_turns=1)
    assert [one.status for one in found] == ["truncated"] * 3


@needs_openenv
def test_an_action_that_is_none_is_the_policys_fault(model: Path, serve: Callable[[str], str]) -> None:
    options = echo(serve("echo"), action_field="", format_penalty=-2.0)
    script = ['{"message": "a"}', '{"massage": "a"}', "a"]
    (episode,), _ = play(model, OPENENV, script, options=options, max_turns=3)
    assert [turn.reward for turn in episode.rows[0].turns] == [-0.5, -2.0, -2.0]


@needs_openenv
def test_a_server_that_fails_is_no_reward(model: Path, serve: Callable[[str], str]) -> None:
    """An environment that raises, and a server that exits in mid-episode: the groups are refused with the reason."""
    for word, reason in (("fail", "EXECUTION_ERROR: the world is gone"), ("crash", "the session")):
        refused, _ = play(model, OPENENV, [word], options=echo(serve("echo")), attempts=1)
        assert isinstance(refused, TaskRefused)
        assert reason in str(refused)


@needs_openenv
def test_tools_are_called(tool_model: Path, serve: Callable[[str], str]) -> None:
    script = [call("add", a=1, b=2), call("add", a=1), "3"]
    options = {"url": serve("tools"), "tools": True, "instructions": "row"}
    (episode,), engine = play(tool_model, OPENENV, script, task_of("Add.", reward="exact_match"), options=options)
    check_exact(episode, engine, tool_model, script)
    right, wrong = results(episode)
    assert (right, wrong[:7]) == ("3", "error: ")
    assert "Add two numbers." in engine.tokenizer.decode(engine.prompts[0])
    assert dict(episode.reward_parts) == {"tool_calls": 2.0, "tool_errors": 1.0}


def test_a_server_that_is_none_is_named(model: Path) -> None:
    for url, problem in (
        ("http://127.0.0.1:9", "no session within 0.2 s (options.place_deadline_s): http://127.0.0.1:9/ws: "),
        ("http://169.254.169.254", "metadata and multicast addresses are never called"),
    ):
        refused, _ = play(model, OPENENV, [], options={"url": url, "place_deadline_s": 0.2}, attempts=1)
        assert problem in str(refused)


async def test_a_server_that_fails_at_the_start_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """One never opens a session, one ends it at its reset: the episode goes to the third, whose session ends without its word."""
    monkeypatch.setattr(open_env, "_OPEN_S", 2.0)
    monkeypatch.setattr(open_env, "_CLOSE_S", 0.3)
    monkeypatch.setattr(servers, "_FIRST_REST_S", 30.0)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def ends(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.close()
        return socket

    async def plays(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_json({"type": "observation", "data": {"observation": {"prompt": "go"}, "done": False}})
        await closed.wait()  # it does not read that the session is over
        return socket

    closed = asyncio.Event()
    deaf = await asyncio.start_server(silent, "127.0.0.1", 0)
    urls = [f"http://127.0.0.1:{deaf.sockets[0].getsockname()[1]}"]
    runners = []
    for handler in (ends, plays):
        app = web.Application()
        app.router.add_get("/ws", handler)
        runners.append(web.AppRunner(app, shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runners[-1].addresses[0][1]}")
    sessions = open_env.Sessions(OpenEnvOptions(url=urls), ())
    try:
        with pytest.raises(open_env.OpenEnvFailed, match=f"{urls[1]}: the session ended"):
            await sessions.open({})
        opened, first = await sessions.open({})
        assert first["observation"] == {"prompt": "go"}
        await opened.close()
    finally:
        closed.set()
        await sessions.close()
        for runner in runners:
            await runner.cleanup()
        deaf.close()
