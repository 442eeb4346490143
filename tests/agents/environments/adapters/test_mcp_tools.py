"""Tools of real MCP servers in the environment `tools`: one toolbox for the policy, sessions of each episode."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.adapters.served_tools import ServedTools
from tests.agents.environments.played import call, check_exact, play, results, task_of
from tests.servers import needs

from penstock.agents.environments.tools.tools_environment import TOOLS_ENVIRONMENT
from penstock.agents.hosting import commands
from penstock.protocol.command_line import run
from penstock.rollout_service.errors import TaskRefused

pytestmark = needs("mcp", extra="dev")

COMMAND = [sys.executable, str(Path(__file__).parent / "tool_server.py")]
TAKEN = """
from penstock import Tool, ToolArguments


class Taken(Tool):
    name = "web__add"
    description = "Add."
    arguments = ToolArguments

    def call(self, arguments, episode):
        return "0"


TAKEN = Taken()
"""


def tools(model: Path, script: Sequence[str], servers: dict[str, Any], **options: Any) -> Any:
    """Play one episode with the calculator and servers; return it, or why there is none, and the engine."""
    settings = {"reply_deadline_s": 200.0, **{name: options.pop(name) for name in ("attempts",) if name in options}}
    given = {"tools": {"calculator": {}}, "servers": servers, "answer": "number", **options}
    task = task_of(ground_truth='"3"')
    found, engine = play(model, TOOLS_ENVIRONMENT, script, task, options=given, **settings)
    return found if isinstance(found, TaskRefused) else found[0], engine


@pytest.fixture(scope="module")
def web() -> Iterator[ServedTools]:
    running = ServedTools()
    yield running
    running.stop()


def test_tools_of_servers_are_among_the_others(tool_model: Path, web: ServedTools, tmp_path: Path) -> None:
    """One answer calls the calculator, a process with state for the episode, and a URL that gets token and seed."""
    (tmp_path / "token").write_text("secret\n")
    servers = {
        "notes": {"command": COMMAND, "tools": ["note"]},
        "web": {"url": web.url, "token_file": str(tmp_path / "token"), "tools": ["header", "add"]},
    }
    header = "web__header"
    script = [
        call("calculator", expression="1+2") + call("notes__note", text="one") + call(header, name="authorization"),
        call("notes__note", text="two") + call(header, name="penstock-seed") + call("notes__add", a=1, b=2),
        "3",
    ]
    episode, engine = tools(tool_model, script, servers, format_penalty=-0.25, call_reward=-0.01)
    check_exact(episode, engine, tool_model, script)
    seed = str(episode.seed)
    unknown = "error: there is no tool 'notes__add'; tools: calculator, notes__note, web__header, web__add"
    assert results(episode) == ["3", f"['one'] {seed}", "Bearer secret", f"['one', 'two'] {seed}", seed, unknown]
    assert (episode.status, round(episode.reward, 9)) == ("done", 0.69)
    assert dict(episode.reward_parts) == {"calls": 6.0, "unknown_tools": 1.0, "success": 1.0}
    prompt = engine.tokenizer.decode(engine.prompts[0])
    assert '"name": "notes__note", "description": "Keep a note; return all of them and the seed."' in prompt
    assert "judge" not in prompt


def test_what_a_server_refuses_is_text_for_the_policy(tool_model: Path, web: ServedTools) -> None:
    """A failing tool, wrong arguments, no answer in time, a long result: the words and counts of other tools."""
    script = [
        call("web__fail") + "\n" + call("web__add", a="one", b=2) + "\n" + call("web__wait", seconds=600),
        call("web__long", count=1000),
        "4",
    ]
    given = {"call_deadline_s": 8.0, "max_output_chars": 500}
    episode, _ = tools(tool_model, script, {"web": {"url": web.url}}, **given)
    failed, wrong, late, long = results(episode)
    assert failed.lower().startswith("error")
    assert "there is no such page" in failed
    assert wrong.lower().startswith("error")
    assert late == "error: web__wait gave no answer within 8 s"
    assert long == "x" * 500 + "\n[503 characters left out]"
    counts = {"calls": 4.0, "tool_errors": 2.0, "timed_out_calls": 1.0, "shortened_outputs": 1.0}
    assert (episode.attempt, dict(episode.reward_parts)) == (0, {**counts, "success": 0.0})


def test_a_server_that_crashes_begins_the_episode_again(tool_model: Path, tmp_path: Path) -> None:
    crash = call("notes__crash_once", marker=str(tmp_path / "marker"))
    episode, _ = tools(tool_model, [crash, crash, "3"], {"notes": {"command": COMMAND}})
    assert (episode.attempt, results(episode), episode.reward) == (1, ["alive"], 1.0)


def test_servers_without_the_tools_that_are_wanted_are_named(
    tool_model: Path, web: ServedTools, tmp_path: Path
) -> None:
    (tmp_path / "taken.py").write_text(TAKEN)
    missing, _ = tools(tool_model, [], {"web": {"url": web.url, "tools": ["search"]}}, attempts=1)
    assert "MCP server web does not have the tools ['search'] of options.servers.web.tools; it has add, " in str(
        missing
    )
    taken = {f"{tmp_path}/taken.py:TAKEN": {}}
    twice, _ = tools(tool_model, [], {"web": {"url": web.url}}, tools=taken, attempts=1)
    assert "two tools are named 'web__add'; rename the MCP server in options.servers" in str(twice)
    own, _ = tools(
        tool_model, [], {"web": {"url": "http://169.254.169.254/mcp"}}, tools={}, attempts=1, allowed_targets=["::/0"]
    )
    assert "metadata and multicast addresses are never called" in str(own)


def test_servers_are_tried_without_a_model(
    web: ServedTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.txt").write_text(
        '<tool_call>{"name": "web__add", "arguments": {"a": 1, "b": 2}}</tool_call>\n3\n'
    )
    (tmp_path / "run.toml").write_text(
        'run.id = "r"\n'
        '[environment.define.mixed]\ntype = "tools"\n'
        f'options = {{ answer = "number", servers.web = {{ url = "{web.url}", tools = ["add"] }} }}\n'
        '[environment.define.alone]\ntype = "mcp"\n'
        f'options = {{ servers.web = {{ url = "{web.url}" }}, tools = ["add"], reward_tool = "judge" }}\n'
    )
    for name, reward in (("mixed", 1.0), ("alone", 1.0)):
        words = f"test {name} --run-file run.toml --episodes 1 --script answers.txt --json --ground-truth"
        assert run(commands.app, [*words.split(), '"3"']) == 0
        scripted = json.loads(capsys.readouterr().out)["policies"][1]
        assert (scripted["ends"]["done"], scripted["reward"]["mean"]) == (1, reward)
