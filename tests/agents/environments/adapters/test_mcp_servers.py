"""Tools of real MCP servers: results and errors are text for the policy, a failed server gives no reward."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.adapters.served_tools import ServedTools
from tests.agents.environments.played import call, check_exact, engine_of, play, results, task_of
from tests.agents.environments.test_program import read_pid, wait_until_ended
from tests.json_server import JsonServer
from tests.servers import needs

from penstock.agents.environments import program_process
from penstock.agents.environments.adapters import mcp_connection
from penstock.agents.environments.adapters.mcp_environment import MCP
from penstock.deploy import certificates
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError
from penstock.protocol.transport import tls
from penstock.rollout_service.environments.environment import load_environments
from penstock.rollout_service.errors import TaskRefused

pytestmark = needs("mcp", extra="dev")

SERVER = Path(__file__).parent / "tool_server.py"


def tools(model: Path, script: Sequence[str], task: Any = None, **options: Any) -> Any:
    """Play an episode with a server that is a process; return it, or why there is none, and the engine."""
    settings = {
        "reply_deadline_s": 200.0,
        **{name: options.pop(name) for name in ("attempts", "engine") if name in options},
    }
    given = {"servers": {"notes": {"command": [sys.executable, str(SERVER)]}}, "reward_tool": "judge", **options}
    found, engine = play(model, MCP, script, task or task_of(ground_truth='"3"'), options=given, **settings)
    return found if isinstance(found, TaskRefused) else found[0], engine


def test_calls_of_tools_are_played_token_for_token(tool_model: Path) -> None:
    """Two calls of one answer, then one without a call; the reward is that of a tool that the policy does not see."""
    script = [call("add", a=1, b=2) + "\n" + call("note", text="one"), call("note", text="two"), "3"]
    episode, engine = tools(tool_model, script)
    check_exact(episode, engine, tool_model, script)
    assert results(episode) == ["3", f"['one'] {episode.seed}", f"['one', 'two'] {episode.seed}"]
    assert (episode.status, [turn.reward for turn in episode.rows[0].turns]) == ("done", [0, 0, 1.0])
    assert dict(episode.reward_parts) == {"tool_calls": 3.0, "tool_errors": 0.0}
    prompt = engine.tokenizer.decode(engine.prompts[0])
    assert '"name": "add"' in prompt
    assert "judge" not in prompt


@pytest.fixture(scope="module")
def http() -> Iterator[ServedTools]:
    running = ServedTools()
    yield running
    running.stop()


def test_what_goes_wrong_in_a_call_is_text_for_the_policy(tool_model: Path, http: ServedTools) -> None:
    """A failing tool, an unknown one, wrong arguments, no answer in time, a long result, too many calls."""
    script = [
        call("fail"),
        call("judge", answer="3", ground_truth="3"),
        call("add", a="one", b=2),
        call("wait", seconds=600),
        call("long", count=1000) + "\n" + call("add", a=1, b=1) + "\n" + call("add", a=2, b=2),
        "4",
    ]
    given = {"call_deadline_s": 8.0, "max_output_chars": 200, "output_cut": "middle", "max_parallel_calls": 2}
    episode, _ = tools(tool_model, script, servers={"notes": {"url": http.url}}, **given)
    failed, unknown, wrong, late, long, done, many = results(episode)
    assert failed.lower().startswith("error")
    assert "there is no such page" in failed
    assert unknown.startswith("error: there is no tool 'judge'; there are add, ")
    assert "error" in wrong.lower()
    assert late == "error: no answer within 8 seconds"
    assert long == "x" * 100 + "\n[803 characters left out]\n" + "x" * 97 + "end"
    assert (done, many) == ("2", "error: only the first 2 calls of an answer are made")
    assert (episode.attempt, episode.reward, dict(episode.reward_parts)) == (
        0,
        0.25,
        {"tool_calls": 7.0, "tool_errors": 5.0},
    )


@pytest.mark.slow
def test_a_server_that_crashes_is_no_reward(tool_model: Path, tmp_path: Path) -> None:
    """The episode restarts with the same seed; after all attempts the group is refused with the server's last words."""
    crash = call("crash_once", marker=str(tmp_path / "marker"))
    episode, _ = tools(tool_model, [crash, crash, "3"])
    assert (episode.attempt, results(episode), episode.reward) == (1, ["alive"], 1.0)
    (tmp_path / "marker").unlink()
    refused, _ = tools(tool_model, [crash], attempts=1)
    assert isinstance(refused, TaskRefused)
    assert "MCP server notes does not answer a call of crash_once" in str(refused)
    assert "the end of its standard error:\nout of memory" in str(refused)


def test_a_server_that_hangs_has_failed(tool_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers neither the call nor a list of its tools. What it had started ends with the episode."""
    monkeypatch.setattr(mcp_connection, "LISTS_WITHIN_S", 0.3)
    refused, engine = tools(
        tool_model, [call("start_process"), call("stop_answering")], attempts=1, call_deadline_s=8.0
    )
    assert "did not answer a call of stop_answering, and does not list its tools either" in str(refused)
    text = engine.tokenizer.decode(engine.prompts[1])
    wait_until_ended(int(text.split("<tool_response>\n")[1].split("\n")[0]))


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        ({"command": ["/no/server"]}, "does not start a session"),
        (
            {"command": [sys.executable, "-c", "print('hello'); print('x' * 70000)"]},
            "longer than options.max_message_bytes",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "does not start a session"),
        ({"url": "http://169.254.169.254/mcp"}, "metadata and multicast addresses are never called"),
        ({"url": "http://localhost:9/mcp"}, "which is in none of options.allowed_targets"),
    ],
)
def test_a_server_that_is_none_is_named(tool_model: Path, server: dict[str, Any], problem: str) -> None:
    more = {"allowed_targets": ["10.0.0.0/8"]} if "localhost" in server.get("url", "") else {}
    refused, _ = tools(tool_model, [], servers={"notes": server}, attempts=1, max_message_bytes=65_536, **more)
    assert isinstance(refused, TaskRefused)
    assert problem in str(refused), str(refused)


def test_a_server_at_a_url_is_called(tool_model: Path, http: ServedTools, tmp_path: Path) -> None:
    """With the seed and the token in its headers; two servers have names of their own for their tools."""
    (tmp_path / "token").write_text("secret\n")
    servers = {
        "web": {"url": http.url, "token_file": str(tmp_path / "token")},
        "new": {"url": http.url, "protocol": "auto"},
    }
    script = [
        call("web__header", name="authorization") + "\n" + call("web__header", name="penstock-seed"),
        call("new__add", a=1, b=2) + "\n" + call("new__header", name="authorization"),
        "3",
    ]
    wanted = ["web__header", "new__add", "new__header"]
    episode, engine = tools(tool_model, script, servers=servers, reward_tool="web__judge", tools=wanted)
    check_exact(episode, engine, tool_model, script)
    assert results(episode) == ["Bearer secret", str(episode.seed), "3", ""]
    assert episode.reward == 1.0
    assert "new__fail" not in engine.tokenizer.decode(engine.prompts[0])


def test_a_server_with_a_certificate_of_ones_own_authority_is_called(
    tool_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the machine's variable names it; without that its certificate is refused and the episode has failed."""
    certificates.write_certificates(tmp_path, services=("api",))
    running = ServedTools(ssl_certfile=str(tmp_path / "api.pem"), ssl_keyfile=str(tmp_path / "api.key"))
    try:
        servers, script = {"web": {"url": running.url}}, [call("add", a=1, b=2), "3"]
        refused, _ = tools(tool_model, [], servers=servers, reward_tool="judge", attempts=1)
        assert isinstance(refused, TaskRefused)
        assert "certificate" in str(refused)
        monkeypatch.setenv(tls.AUTHORITY, str(tmp_path / "ca.pem"))
        episode, engine = tools(tool_model, script, servers=servers, reward_tool="judge")
    finally:
        running.stop()
    check_exact(episode, engine, tool_model, script)
    assert results(episode) == ["3"]


def test_a_server_at_a_url_that_is_gone_has_failed(tool_model: Path) -> None:
    """In mid-episode: the policy's next call finds nothing."""
    running = ServedTools()

    async def stop() -> None:
        if len(engine.prompts) == 2:
            await asyncio.to_thread(running.stop)

    engine = engine_of(tool_model, [call("add", a=1, b=2)] * 2, before=stop)
    refused, _ = tools(tool_model, [], servers={"web": {"url": running.url}}, attempts=1, engine=engine)
    assert isinstance(refused, TaskRefused)
    assert "MCP server web does not answer a call of add" in str(refused)


class Answers(JsonServer):
    """Answers every request with bytes that are called JSON."""

    def __init__(self, content: bytes, encoding: str) -> None:
        self.content, self.headers = content, {"content-type": "application/json", "content-encoding": encoding}
        super().__init__()

    def answer(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
        return 200, self.content


LONG = b'{"x": "' + b"x" * 70_000 + b'"}'


@pytest.mark.parametrize(
    ("content", "encoding", "problem"),
    [
        (LONG, "identity", "answers with more than 65536 bytes (options.max_message_bytes)"),
        (gzip.compress(b"x" * 1000, mtime=0), "gzip", "compresses its answer, which was not requested"),
    ],
    ids=["long", "compressed"],  # not made of the bytes
)
def test_an_answer_that_is_too_much_is_not_read(tool_model: Path, content: bytes, encoding: str, problem: str) -> None:
    with Answers(content, encoding) as server:
        servers = {"web": {"url": f"{server.url}/mcp"}}
        refused, _ = tools(tool_model, [], servers=servers, attempts=1, max_message_bytes=65_536)
    assert problem in str(refused), str(refused)


_WORKER = """
import asyncio, os, pathlib, sys
from penstock.agents.environments.adapters import mcp_connection
shell = f"setsid sleep 600 & echo $! > {sys.argv[1]}/escaped; echo $$ > {sys.argv[1]}/direct; exec sleep 600"
async def main():
    known, variables = mcp_connection.ServerProcess(), {"PATH": os.environ["PATH"]}
    command = ["sh", "-c", shell]
    async with mcp_connection.over_process(command, pathlib.Path("."), variables, max_message_bytes=65536, known=known):
        await asyncio.sleep(600)
asyncio.run(main())
"""


def test_servers_of_a_killed_worker_are_ended(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(tmp_path)], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        direct, escaped = (read_pid(tmp_path / name) for name in ("direct", "escaped"))
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait(60.0)
    wait_until_ended(direct)
    killed, deleted = program_process.sweep(tmp_path)
    assert (killed >= 1, deleted) == (True, 1)
    wait_until_ended(escaped)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"servers": {}}, "at least 1 item"),
        ({"servers": {"a": {}}}, "write either command or url"),
        ({"servers": {"a": {"command": ["x"], "url": "http://a"}}}, "write either command or url"),
        ({"servers": {"a": {"url": "ftp://a"}}}, "only http:// and https://"),
        ({"servers": {"a": {"command": ["x"], "token_file": "y"}}}, "token_file is for a url"),
        ({"servers": {"a__b": {"command": ["x"]}}}, "single underscores"),
        (
            {"servers": {"a": {"command": ["x"]}}, "tools": ["add", "judge"], "reward_tool": "judge"},
            "reward_tool 'judge' is one of tools",
        ),
        (
            {"servers": {"a": {"command": ["x"]}}, "call_deadline_s": 55.0},
            "reply_deadline_s = 60: expected more than 65",
        ),
    ],
)
def test_options_are_checked(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_environments((), {"mine": EnvironmentDefinition.model_validate({"type": "mcp", "options": options})})
    assert problem in str(caught.value)


@pytest.mark.parametrize("token", ["", "two words", "é", None])
def test_a_token_that_is_none_is_refused_without_showing_it(
    tool_model: Path, tmp_path: Path, token: str | None
) -> None:
    if token is not None:
        (tmp_path / "token").write_text(token, encoding="utf-8")
    servers = {"web": {"url": "http://127.0.0.1:9", "token_file": str(tmp_path / "token")}}
    with pytest.raises(ConfigError, match=r"options.servers.web.token_file") as caught:
        tools(tool_model, [], servers=servers)
    assert "two words" not in str(caught.value)


def test_a_reward_that_nothing_gives_is_refused(tool_model: Path) -> None:
    """Zeros would train on nothing, without a word. Another reward sees the conversation."""
    refused, engine = tools(tool_model, [], reward_tool="")
    assert "an MCP server gives no reward" in str(refused)
    assert not engine.prompts


def test_a_tool_that_no_server_has_is_named(tool_model: Path, http: ServedTools) -> None:
    refused, _ = tools(tool_model, [], servers={"notes": {"url": http.url}}, tools=["substract"], attempts=1)
    assert "no MCP server has the tools ['substract']; they have add, " in str(refused)


def test_a_server_that_does_not_exit_is_killed(tmp_path: Path) -> None:
    noted = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    code = f"import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {noted}; time.sleep(600)"

    async def run() -> None:
        known = mcp_connection.ServerProcess()
        command = [sys.executable, "-S", "-c", code]
        async with mcp_connection.over_process(command, tmp_path, {}, max_message_bytes=65_536, known=known):
            await asyncio.to_thread(read_pid, tmp_path / "pid")

    asyncio.run(run())
    wait_until_ended(read_pid(tmp_path / "pid"))
