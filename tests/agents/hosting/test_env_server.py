"""`penstock env`: answers to calls out of order, too many or forged; trials of environments; the example in Node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.agents.environments.played import Script, task_of
from tests.agents.environments.test_over_http import SECRET, served

from penstock.agents.environments.games.calculator import CALCULATOR
from penstock.agents.environments.play import Reply, Row, done, say
from penstock.agents.hosting import commands, serve
from penstock.agents.hosting.trial import RandomPolicy, ScriptedPolicy, play_trial
from penstock.agents.proxy.messages import Message
from penstock.protocol.command_line import run
from penstock.protocol.config.environment_settings import EpisodeSettings
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.environments.environment import ENVIRONMENTS
from penstock.serving import signature

ROOT = Path(__file__).parents[3]
ID = "0123456789abcdef" * 2
ROW = {"messages": [{"role": "user", "content": "go"}]}
START = {"id": ID, "seed": "7", "deadline_s": 60, "row": ROW}


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60.0)


def step(number: int, text: str = "x") -> dict[str, Any]:
    return {"step": number, "message": {"role": "assistant", "content": text}}


async def test_a_step_is_taken_once_and_in_order() -> None:
    """Sent again it gets the same reply; out of order, with another answer, or after the end it is refused."""
    script = Script(lambda: say("on", 0.5), lambda: done(1.0))
    async with served(script) as (url, episodes), client_of(url) as http:
        first = await http.post("/episodes", json=START)
        assert first.json()["messages"] == [{"role": "user", "content": "go"}]
        assert (await http.post("/episodes", json=START)).json() == first.json()
        other = await http.post("/episodes", json={**START, "seed": "8"})
        assert (other.status_code, other.json()["code"]) == (409, "step_refused")
        replies = [await http.post(f"/episodes/{ID}/step", json=step(1)) for _ in range(2)]
        assert [reply.json()["reward"] for reply in replies] == [0.5, 0.5]
        for body, said in ((step(1, "y"), "was another answer"), (step(3), "expected step 2")):
            refused = await http.post(f"/episodes/{ID}/step", json=body)
            assert (refused.status_code, refused.json()["code"]) == (409, "step_refused")
            assert said in refused.json()["message"]
        last = await asyncio.gather(*(http.post(f"/episodes/{ID}/step", json=step(2)) for _ in range(3)))
        assert [one.json()["done"] for one in last] == [True] * 3
        over = await http.post(f"/episodes/{ID}/step", json=step(3))
        assert "the episode is over" in over.json()["message"]
        assert [(await http.delete(f"/episodes/{ID}")).status_code for _ in range(2)] == [204, 204]
        gone = await http.post(f"/episodes/{ID}/step", json=step(2))
        assert (gone.status_code, gone.json()["code"], episodes.running) == (404, "unknown_episode", 0)
    assert script.closed == [2]


async def test_a_score_is_made_once_and_ends_the_steps() -> None:
    """After the last step that was answered; asked again it is the same, and a start says whether there is one."""
    script = Script(lambda: say("on"), lambda: done(1.0), score=lambda: 0.5)
    async with served(script) as (url, _), client_of(url) as http:

        async def asked(after: int) -> tuple[int, Any]:
            answer = await http.post(f"/episodes/{ID}/score", json={"step": after})
            return answer.status_code, answer.json().get("message", answer.json())

        assert (await asked(1))[0] == 404
        assert (await http.post("/episodes", json=START)).json()["scores"] is True
        assert await asked(1) == (409, "the score after step 1 is out of order: the last step is 0")
        assert (await asked(0))[0] == 400
        first = (await http.post(f"/episodes/{ID}/step", json=step(1))).json()
        assert await asked(2) == (409, "the score after step 2 is out of order: the last step is 1")
        assert await asyncio.gather(asked(1), asked(1), asked(1)) == [(200, {"reward": 0.5})] * 3
        assert await asked(2) == (409, "the score was asked after step 1, not 2")
        assert (await http.post(f"/episodes/{ID}/step", json=step(1))).json() == first
        refused = await http.post(f"/episodes/{ID}/step", json=step(2))
        assert (refused.status_code, "the episode is over" in refused.json()["message"]) == (409, True)
        assert script.asked == 1
        await http.delete(f"/episodes/{ID}")
        await http.post("/episodes", json=START)
        for number in (1, 2):
            await http.post(f"/episodes/{ID}/step", json=step(number))
        assert await asked(2) == (409, "the score after step 2 is out of order: the episode is over")
    async with served(Script(lambda: done(1.0))) as (url, _), client_of(url) as http:
        assert set((await http.post("/episodes", json=START)).json()) == {"messages", "tools", "version"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b'{"id": 1, "id": 2}', "the key 'id' twice"),
        (b'{"seed": NaN}', "NaN is not a JSON number"),
        (b"[" * 70 + b"]" * 70, "nested"),
        (json.dumps({**START, "id": "../x"}).encode(), "id: String should match pattern"),
        (json.dumps({**START, "seed": "-1"}).encode(), "seed: String should match pattern"),
        (json.dumps({**START, "extra": 1}).encode(), "extra: Extra inputs"),
        (json.dumps({**START, "protocol": 2}).encode(), "protocol: Input should be 1"),
        (b" " * (16 * 1024 * 1024 + 1), "the body is longer than 16777216 bytes"),
    ],
)
async def test_a_body_that_is_none_is_refused(body: bytes, said: str) -> None:
    """With the field at fault; nothing is started."""
    async with served(Script(lambda: done(1.0))) as (url, episodes), client_of(url) as http:
        refused = await http.post("/episodes", content=body, headers={"content-type": "application/json"})
        assert (refused.status_code, refused.json()["code"], episodes.running) == (400, "bad_request", 0)
        assert said in refused.json()["message"]


async def test_a_server_that_is_full_or_drains_says_when_to_come_again() -> None:
    """503 with Retry-After; a held episode goes on, and the drain ends with it."""
    script = Script(lambda: done(1.0))
    async with served(script, capacity=1) as (url, episodes), client_of(url) as http:
        await http.post("/episodes", json=START)
        other = {**START, "id": "f" * 32}
        full = await http.post("/episodes", json=other)
        draining = asyncio.create_task(episodes.drain(60.0))
        await asyncio.sleep(0)
        drains = await http.post("/episodes", json=other)
        found = [(one.status_code, one.json()["code"], one.headers["retry-after"]) for one in (full, drains)]
        assert found == [(503, "full", "1"), (503, "draining", "1")]
        about = (await http.get("/environment")).json()
        assert (about["capacity"], about["running"], about["draining"]) == (1, 1, True)
        assert (await http.post(f"/episodes/{ID}/step", json=step(1))).json()["done"]
        assert not draining.done()
        await http.delete(f"/episodes/{ID}")
        await draining


async def test_a_step_of_an_episode_that_is_ended_meanwhile_is_answered() -> None:
    """The worker gave up waiting; what still runs is not waited for."""
    stepping, released = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang() -> Reply:
        loop.call_soon_threadsafe(stepping.set)
        released.wait(60)
        return done(1.0)

    async with served(Script(hang)) as (url, episodes), client_of(url) as http:
        await http.post("/episodes", json=START)
        moving = asyncio.create_task(http.post(f"/episodes/{ID}/step", json=step(1)))
        await stepping.wait()
        assert (await http.delete(f"/episodes/{ID}")).status_code == 204
        answer = await moving
        released.set()
        assert (answer.status_code, answer.json()["code"], episodes.running) == (404, "unknown_episode", 0)


async def test_an_episode_that_nobody_plays_is_closed() -> None:
    """Its worker was killed: no call for a while, or its time is over."""
    script = Script(lambda: done(1.0))
    async with served(script, idle_s=0.05) as (url, episodes), client_of(url) as http:
        sweeping = asyncio.create_task(episodes.sweep())
        await http.post("/episodes", json=START)
        await episodes.drain(60.0)
        sweeping.cancel()
        assert (episodes.running, script.closed) == (0, [0])


async def test_what_an_environment_raises_or_returns_is_a_problem() -> None:
    """500 with the reason; the episode takes no further step, and a start that failed holds no place."""

    def broken() -> Reply:
        raise KeyError("board")

    for script, said in (
        (Script(broken), "KeyError: 'board'"),
        (Script(lambda: done(1e300)), "reward"),
        (Script(lambda: None), "step() must return a Reply, got NoneType"),
    ):
        async with served(script) as (url, episodes), client_of(url) as http:
            await http.post("/episodes", json=START)
            failed = await http.post(f"/episodes/{ID}/step", json=step(1))
            assert (failed.status_code, failed.json()["code"]) == (500, "environment_failed")
            assert said in failed.json()["message"]
            assert (await http.post(f"/episodes/{ID}/step", json=step(2))).status_code == 409
    async with served(Script(start=list)) as (url, episodes), client_of(url) as http:
        failed = await http.post("/episodes", json=START)
        assert (failed.status_code, episodes.running) == (500, 0)
    for score, said in (
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: 1e300, "score(): "),
        (lambda: float("nan"), "a finite number"),
    ):
        script = Script(lambda: say("on"), score=score)
        async with served(script) as (url, _), client_of(url) as http:
            await http.post("/episodes", json=START)
            await http.post(f"/episodes/{ID}/step", json=step(1))
            failed = await http.post(f"/episodes/{ID}/score", json={"step": 1})
            assert (failed.status_code, said in failed.json()["message"]) == (500, True)


async def test_a_signature_opens_its_own_call_only() -> None:
    """A signature that was overheard repeats its call, and is good for no other one."""

    def signed(call_id: str, body: bytes = b"", ago_s: int = 0) -> dict[str, str]:
        made = signature.headers([SECRET], message_id=call_id, timestamp=int(time.time()) - ago_s, body=body)
        return {"content-type": "application/json", **made}

    served_here = served(Script(lambda: done(1.0)), secrets=(SECRET,))
    async with served_here as (url, episodes), client_of(url) as http:
        data = json.dumps(START).encode()
        for headers in ({}, signed(f"{ID}.start", data, 400), signed(f"{ID}.end", data), signed(f"{ID}.start")):
            assert (await http.post("/episodes", content=data, headers=headers)).status_code == 401
        assert (await http.post("/episodes", content=data, headers=signed(f"{ID}.start", data))).status_code == 200
        moved = json.dumps(step(1)).encode()
        url_of = f"/episodes/{ID}/step"
        assert (await http.post(url_of, content=moved, headers=signed(f"{ID}.2", moved))).status_code == 401
        assert (await http.delete(f"/episodes/{ID}", headers=signed("environment"))).status_code == 401
        assert (await http.get("/environment", headers=signed(f"{ID}.end"))).status_code == 401
        assert episodes.running == 1
        assert (await http.post(url_of, content=moved, headers=signed(f"{ID}.1", moved))).status_code == 200
        ended, url_of = b'{"step": 1}', f"/episodes/{ID}/score"
        for call_id in (f"{ID}.1", f"{ID}.end", f"{ID[::-1]}.score"):
            refused = await http.post(url_of, content=ended, headers=signed(call_id, ended))
            assert refused.status_code == 401
        assert (await http.post(url_of, content=ended, headers=signed(f"{ID}.score", ended))).status_code == 409
        assert (await http.delete(f"/episodes/{ID}", headers=signed(f"{ID}.end"))).status_code == 204


async def test_the_api_is_described() -> None:
    """For servers in other languages: the bodies of both directions, and the problems."""
    async with served(CALCULATOR) as (url, _), client_of(url) as http:
        document = (await http.get("/openapi.json")).json()
    of_one = {f"/episodes/{{id}}{action}" for action in ("", "/step", "/score")}
    assert set(document["paths"]) == {"/environment", "/episodes", *of_one}
    assert {"About", "Start", "Started", "Step", "Stepped", "Score", "Scored", "Problem"} <= set(
        document["components"]["schemas"]
    )
    assert "503" in document["paths"]["/episodes"]["post"]["responses"]


@pytest.fixture
def guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of docs/environments.md, in the working directory."""
    page = (ROOT / "docs" / "environments.md").read_text()
    (tmp_path / "guess.py").write_text(page.split("```python\n")[1].split("```")[0])
    (tmp_path / "run.toml").write_text(page.split("and the run file:\n\n```toml\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_environment_is_tried_without_a_model(guess: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At random and by a script; by class, by name, and as a run file defines it."""
    (guess / "script").write_text("50\n\n1\n2\n3\n")
    for name in ("guess.py:Guess", "guess.py:GUESS"):
        code = run(
            commands.app,
            ["test", name, "--options", '{"highest": 3}', "--episodes", "4", "--script", "script", "--json"],
        )
        found = json.loads(capsys.readouterr().out)
        assert (code, found["repeatable"]) == (0, True)
        drawn, scripted = found["policies"]
        assert (drawn["policy"], drawn["episodes"], drawn["ends"]["failed"]) == ("random", 4, 0)
        assert scripted["ends"] == {"done": 4, "truncated": 0, "no answer left": 0, "failed": 0}
        assert (scripted["reward"]["mean"], 2 <= scripted["turns"]["mean"] <= 4) == (1.0, True)
        assert scripted["ms"]["step"]["most"] >= scripted["ms"]["step"]["least"] > 0
    assert run(commands.app, ["test", "guess-small", "--run-file", "run.toml", "--episodes", "2"]) == 0
    assert "same seed, same answers: the same episode" in capsys.readouterr().out
    assert run(commands.app, ["test", "calculator", "--episodes", "5"]) == 0
    assert "malformed" in capsys.readouterr().out


UNSEEDED = """
import random

from penstock import Message, Play, TurnEnvironment, done


class Dice(Play):
    def start(self):
        return [Message("user", f"{random.random()}")]

    def step(self, answer):
        if random.random() < 0.5:
            raise OSError("fell off the table")
        return done(1.0)


class Unseeded(TurnEnvironment):
    name = "unseeded"

    def play(self, seed, row, options):
        return Dice()
"""


def test_a_trial_finds_failures_and_worlds_that_do_not_follow_from_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dice.py").write_text(UNSEEDED)
    monkeypatch.chdir(tmp_path)
    assert run(commands.app, ["test", "dice.py:Unseeded", "--episodes", "30"]) == 1
    said = capsys.readouterr().out
    assert "problem: OSError: fell off the table" in said
    assert "ANOTHER EPISODE: everything random must follow from the seed" in said


async def test_a_trial_that_runs_out_of_turns_has_its_score() -> None:
    environment = Script(lambda: say("on", 0.25), score=lambda: 0.5)
    environment.settings = EpisodeSettings(max_turns=2)
    trial = await play_trial(environment, RandomPolicy(0), 0, Row.of(task_of()))
    assert (trial.end, trial.reward) == ("truncated", 1.0)


def test_environments_are_listed_with_their_options(guess: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The built-in ones, and those of a run file."""
    assert run(commands.app, ["list"]) == 0
    said = capsys.readouterr().out
    assert "frozen_lake: walk from the upper left corner" in said
    assert "    url = []: URL of its server" in said
    assert run(commands.app, ["list", "run.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["guess-small"]["options"]["highest"]["default"] == "100"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("test lokup", "did you mean 'lookup'"),
        ("test single_turn", "it is not one of several turns"),
        ('test program --options {"command":["x"]}', "cannot be tried without a model"),
        ("test lookup --options []", "--options must be a JSON object"),
        ("test lookup --episodes 0", "must be at least 1"),
        ("test lookup --script nowhere", "--script nowhere: not readable"),
        ("serve lookup --host 0.0.0.0 --port -1", "give --secret-file, or listen on 127.0.0.1"),
        ("serve lookup --capacity 0", "--capacity must be at least 1"),
        ("serve single_turn", "which makes no plays"),
        ("serve guess.py:GuessPlay", "expected an instance of"),
        ("serve lookup nats.url=nats://x", "with --register NAME only"),
        ("register http://127.0.0.1:9 --name a.b", "expected 1 to 64 letters"),
        ("register ftp://127.0.0.1:9", "only http:// and https://"),
        ("register http://127.0.0.1:9 --allowed-target 10.0.0.0/99", "neither a network"),
        ("register http://127.0.0.1:9 nats.urls=x", "nats.urls"),
        ("list nats.url=nats://127.0.0.1:1", "is needed with --registered only"),
        ("list nats.url=nats://x run.toml", "nats.url=nats://x is needed with"),
    ],
)
def test_arguments_that_cannot_be_are_refused(guess: Path, arguments: str, said: str) -> None:
    """Before anything is played or listened for, with what to write instead."""
    with pytest.raises(ConfigError) as caught:
        run(commands.app, arguments.split())
    assert said in str(caught.value)


def test_a_version_is_known_without_being_written(guess: Path) -> None:
    (guess / "plain.py").write_text((guess / "guess.py").read_text().replace('version = "1"', ""))
    assert serve.version_of(serve.served_environment("guess.py:Guess")) == "1"
    assert re.fullmatch(r"[0-9a-f]{8}", serve.version_of(serve.served_environment("plain.py:Guess")))
    assert ENVIRONMENTS.find("guess.py:Guess").value.name == "guess"


def test_policies_answer_what_they_are_asked() -> None:
    """A random one calls tools with arguments of their schema; a scripted one writes calls as the format says."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 3, "maximum": 4}, "b": {"enum": ["x"]}, "c": {"type": "boolean"},
            "d": {"type": "array", "items": {"type": "number"}}, "e": {"type": ["null"]}, "f": {"type": "string"},
        },
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    policy = RandomPolicy(1)
    answers = [policy.answer([Message("user", "left right")], tools) for _ in range(40)]
    calls = [json.loads(answer.tool_calls[0].arguments) for answer in answers if answer.tool_calls]
    assert 20 < len(calls) < 40
    for one in calls:
        assert (one["a"] in (3, 4), one["b"], one["c"] in (True, False), one["e"]) == (True, "x", True, None)
        assert all(isinstance(value, float) for value in one["d"])
        assert isinstance(one["f"], str)
    assert {"left", "right"} < {answer.content for answer in answers if not answer.tool_calls} | {"left", "right", "0"}
    scripted = ScriptedPolicy(['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "5"], "hermes")
    first, second, third = (scripted.answer([Message("user", "x")], tools) for _ in range(3))
    assert first is not None
    assert second is not None
    assert [(call.name, json.loads(call.arguments)) for call in first.tool_calls] == [("add", {"a": 1})]
    assert (second.content, third) == ("5", None)


@contextlib.contextmanager
def node(**variables: str) -> Iterator[str]:
    """Run the example; yields its URL."""
    command = ["node", str(ROOT / "examples/environment_node/server.mjs"), "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={"PATH": "/usr/bin:/bin", **variables}
    ) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().rpartition(" at ")[2].strip()
        finally:
            server.terminate()
            assert server.wait(60) == 0


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node: apt-get install nodejs")
def test_the_example_in_node_is_played_and_drains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `penstock env test` plays it, signed; without a signature it refuses."""
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "script").write_text("x\n1\n2\n3\n")
    with node(ENVIRONMENT_SECRET=SECRET) as url:
        common = [url, "--options", '{"highest": 3}', "--episodes", "3", "--script", str(tmp_path / "script"), "--json"]
        assert run(commands.app, ["test", *common, "--secret-file", str(tmp_path / "key")]) == 0
        drawn, scripted = json.loads(capsys.readouterr().out)["policies"]
        assert (drawn["ends"]["failed"], scripted["ends"]["done"], scripted["parts"]) == (0, 3, {"success": 1.0})
        (tmp_path / "script").write_text("2\n")
        near = ["--max-turns", "1", "--secret-file", str(tmp_path / "key")]
        assert run(commands.app, ["test", *common, *near]) == 0
        scripted = json.loads(capsys.readouterr().out)["policies"][1]
        assert (scripted["ends"]["truncated"], scripted["reward"]["mean"]) == (3, 0.25)
        assert run(commands.app, ["test", *common]) == 1
        assert "401: unauthorized" in capsys.readouterr().out
        with httpx.Client(base_url=url) as http:
            assert http.get("/environment").status_code == 401


def test_the_documented_definition_is_one(tmp_path: Path) -> None:
    """The run file of docs/environments_over_http.md."""
    from penstock.rollout_service.settings import RolloutSettings

    page = (ROOT / "docs" / "environments_over_http.md").read_text()
    (tmp_path / "run.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    settings = load(RolloutSettings, files=[tmp_path / "run.toml"]).settings
    assert settings.environment.define["guess"].type == "http"
