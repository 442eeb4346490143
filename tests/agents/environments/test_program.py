"""Programs as environments: recorded token for token, ended whole, restarted where they fail, never rewarded for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.played import call, check_exact, engine_of, play, said, task_of
from tests.agents.proxy.agent_model import Engine
from tests.servers import needs, wait_for

from penstock.agents.environments import process_reaper, program_process
from penstock.agents.environments.episode_environment import group_seed
from penstock.agents.environments.program import PROGRAM
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import Task
from penstock.rollout_service.errors import EngineError, TaskRefused

ROOT = Path(__file__).parents[3]

AGENT = """
import json, os, subprocess, sys, time, urllib.error, urllib.request
task = json.load(open(os.environ["PENSTOCK_TASK"]))
def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
def result(text):
    open(os.environ["PENSTOCK_RESULT"], "w").write(text)
"""


def asked(reward: str = "environment") -> Task:
    return task_of("what is sun", reward=reward, ground_truth='"star"')


class Failing(Engine):
    async def generate(self, prompts: Any, sampling: Any, n: int) -> Any:
        raise EngineError("the engine is gone")


def run(
    model: Path, command: Sequence[str], script: Sequence[str] = ("a", "b", "c"), task: Task | None = None, **more: Any
) -> Any:
    """Run one episode of a command; return what became of its group, and the engine."""
    options = {"command": list(command), "version": "7", **more.pop("options", {})}
    return play(model, PROGRAM, script, task or asked(), options=options, **more)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", AGENT + code]


def test_a_program_with_the_openai_package_is_recorded_as_it_was_sampled(model: Path) -> None:
    """The example, unchanged: two turns in one row, each under the tokens that the engine was given."""
    (episode,), engine = run(model, [sys.executable, str(ROOT / "examples" / "lookup_agent.py")], ["?sun", "star"])
    assert (episode.status, episode.reward) == ("done", 1.0)
    assert (episode.environment, episode.environment_version) == ("mine", "7")
    check_exact(episode, engine, model, ["?sun", "star"])
    assert [turn.reward for turn in episode.rows[0].turns] == [0.0, 1.0]
    assert [content for _, content in said(episode)] == ["what is sun", "?sun", "star", "star"]


def run_framework(model: Path, script: list[str]) -> Any:
    options = {"variables": {"OPENAI_AGENTS_DISABLE_TRACING": "1"}}
    return run(model, [sys.executable, str(ROOT / "examples" / "dictionary_agent.py")], script, options=options)


@needs("agents", extra="dev")
def test_an_agent_of_a_framework_is_recorded_as_it_was_sampled(tool_model: Path) -> None:
    """The example of openai-agents, unchanged: its call of a tool and its answer are two turns of one row."""
    script = [call("look_up", word="sun"), "star"]
    (episode,), engine = run_framework(tool_model, script)
    check_exact(episode, engine, tool_model, script)
    assert said(episode)[-2:] == [("tool", "star"), ("assistant", "star")]
    assert ("system", "Look the word up, then say what it is.") in said(episode)
    assert (episode.status, [turn.reward for turn in episode.rows[0].turns]) == ("done", [0.0, 1.0])
    assert "Look a word up in the dictionary." in engine.tokenizer.decode(engine.prompts[0])


@needs("agents", extra="dev")
@pytest.mark.skipif("PENSTOCK_TEST_ENVIRONMENTS" not in os.environ, reason="make test-more NAME=environments: slow")
def test_what_the_framework_refuses_is_the_policys_reward(tool_model: Path) -> None:
    """A tool that there is not: the program ends with a result, and no attempt is repeated."""
    (episode,), _ = run_framework(tool_model, [call("look_down")])
    assert (episode.status, episode.reward, episode.attempt, len(episode.turns)) == ("done", 0.0, 0, 1)


def test_a_program_gets_its_task_and_none_of_the_workers_logins(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row, the seed and the deadline; variables only by name; its result's parts; its folder is deleted."""
    monkeypatch.setenv("PENSTOCK_S3_SECRET_KEY", "secret")
    monkeypatch.setenv("PASSED", "1")
    code = """
ask(task["messages"])
assert task["ground_truth"] == "star" and task["attempt"] == 0 and str(task["seed"]) == os.environ["PENSTOCK_SEED"]
assert "PENSTOCK_S3_SECRET_KEY" not in os.environ and os.environ["PASSED"] + os.environ["OWN"] == "12"
assert 50 < float(os.environ["PENSTOCK_DEADLINE"]) - time.time() <= 60
result(json.dumps({"reward": 0.5, "parts": {"seed": task["seed"] % 1000, "kept": len(os.environ["TMPDIR"])}}))
"""
    options = {"variables": {"OWN": "2"}, "pass_variables": ["PASSED"]}
    (episode,), _ = run(model, python(code), options=options, episode_deadline_s=60)
    assert (episode.reward, episode.seed) == (0.5, group_seed(asked()))
    assert dict(episode.reward_parts)["seed"] == episode.seed % 1000


def test_another_reward_needs_no_result(model: Path) -> None:
    (episode,), _ = run(model, python('ask(task["messages"])'), task=asked("exact_match"))
    assert (episode.status, len(episode.turns)) == ("done", 1)


def test_a_program_that_fails_once_is_begun_again_with_its_seed(model: Path) -> None:
    code = 'ask(task["messages"])\nif not task["attempt"]: sys.exit(3)\nresult(json.dumps({"reward": 1}))'
    (episode,), _ = run(model, python(code))
    assert (episode.attempt, episode.reward, episode.seed) == (1, 1.0, group_seed(asked()))


_ASKED = 'ask(task["messages"]); '


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (_ASKED + 'print("x" * 9000, "the end"); sys.exit(3)', "exit status 3; the end of its output:\nx"),
        (_ASKED + "os.kill(os.getpid(), 9)", "its program ended with signal 9; it printed nothing"),
        ("result('{\"reward\": 1}')", "ended without an answer of the policy"),
        (_ASKED, "wrote no result to PENSTOCK_RESULT"),
        (_ASKED + "result('{\"reward\": NaN}')", "NaN is not a JSON number"),
        (_ASKED + 'result(\'{"reward": "1"}\')', "reward: Input should be a valid number"),
        (_ASKED + 'result(\'{"reward": 1, "rewards": 2}\')', "rewards: "),
        (_ASKED + 'result(\'{"reward": 1, "reward": 0}\')', "the key 'reward' twice"),
        (_ASKED + "result(' ' * 70000)", "more than 65536 bytes"),
        (_ASKED + 'os.mkfifo(os.environ["PENSTOCK_RESULT"])', "wrote no result to PENSTOCK_RESULT"),
    ],
)
def test_a_failure_is_an_error_and_no_reward(model: Path, code: str, said: str) -> None:
    """The group is refused with the program's words, of bounded length."""
    found, _ = run(model, python(code), attempts=1)
    assert isinstance(found, TaskRefused)
    assert (found.reason, said in str(found), len(str(found)) < 6000) == ("environment_failed", True, True), str(found)


def test_a_program_that_cannot_be_started_is_named(model: Path) -> None:
    assert "cannot start /no/program" in str(run(model, ["/no/program"], attempts=1)[0])
    assert "cannot start it in /no/folder" in str(run(model, ["true"], attempts=1, options={"folder": "/no/folder"})[0])


def test_the_end_of_the_turns_truncates(model: Path) -> None:
    """The refused request may end the program with an error; what was sampled is trained."""
    (episode,), _ = run(model, python(_ASKED + _ASKED), max_turns=1)
    assert (episode.status, len(episode.turns), episode.reward) == ("truncated", 1, 0.0)


def test_a_slow_program_is_no_slow_policy_and_all_of_its_processes_are_killed(model: Path, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    code = f"{_ASKED}other = subprocess.Popen(['sleep', '600']); open({str(noted)!r}, 'w').write(str(other.pid))"
    found, _ = run(model, python(f"{code}; time.sleep(600)"), attempts=1, episode_deadline_s=3)
    assert "timeout: not over after" in str(found)
    wait_until_ended(int(noted.read_text()))


def test_a_failure_of_the_engine_requeues_the_pack(model: Path) -> None:
    with pytest.raises(EngineError, match="the engine failed in episode"):
        run(model, python(_ASKED), engine=engine_of(model, kind=Failing))


async def test_what_writes_on_after_the_program_is_not_read_for_ever() -> None:
    """Processes that left the group keep the pipe full; the worker goes on with the end of what was printed."""
    output = program_process.Output()
    writers = [await asyncio.create_subprocess_exec("yes", stdout=output.write_end) for _ in range(3)]
    try:
        await asyncio.to_thread(wait_for, output.text, "the output of a writer")
        output.close()
    finally:
        for writer in writers:
            with contextlib.suppress(ProcessLookupError):  # the closed pipe has ended it
                writer.kill()
            await writer.wait()
    assert output.text().endswith("y")


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="comand: Extra inputs"):
        PROGRAM.defined("a", EnvironmentDefinition(type="program", options={"comand": ["x"]}))


_WORKER = """
import asyncio, os, pathlib, sys, tempfile
from penstock.agents.environments import program_process as p
folder = tempfile.mkdtemp(prefix=f"{p.PREFIX}{p.mark()}-", dir=sys.argv[1])
variables = {"PATH": os.environ["PATH"], p.MARK: p.mark()}
shell = f"setsid sleep 600 & echo $! > {sys.argv[1]}/escaped; echo $$ > {sys.argv[1]}/direct; exec sleep 600"
asyncio.run(p.run(["sh", "-c", shell], pathlib.Path(folder), variables, 600))
"""


def test_programs_of_a_killed_worker_are_ended(tmp_path: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", _WORKER, str(tmp_path)])
    try:
        direct, escaped = (read_pid(tmp_path / name) for name in ("direct", "escaped"))
        program_process.sweep(tmp_path)
        assert list(tmp_path.glob(f"{program_process.PREFIX}*"))  # its worker runs: nothing of it is touched
        os.kill(escaped, 0)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait(60.0)
    wait_until_ended(direct)
    sweeper = program_process.Sweeper(tmp_path, period_s=600)  # another worker on the machine
    wait_until_ended(escaped)
    wait_for(lambda: not list(tmp_path.glob(f"{program_process.PREFIX}*")), "the folder's deletion")
    sweeper.close()


_LEAVES = {  # how a program leaves a process; PENSTOCK_LEFT is its name
    "new session": "setsid sleep $NAME &",
    "nohup": "nohup sleep $NAME >/dev/null 2>&1 &",
    "double fork": "(setsid sh -c '(sleep '$NAME') & (sleep '$NAME') &' &)",
    "without its mark": "env -i setsid sleep $NAME </dev/null >/dev/null 2>&1 &",
    "daemon that starts others": "setsid sh -c 'while :; do env -i sleep '$NAME' & sleep 0.02; done' >/dev/null 2>&1 &",
    "kills its parent": "env -u X setsid sleep $NAME & kill -9 $PPID",
    "stops": "setsid sh -c 'kill -STOP $$; sleep 1' $NAME & sh -c 'kill -STOP $$' & setsid sleep $NAME & kill -STOP $!",
}
_RUNS_SHELL = """
import asyncio, os, pathlib, sys
from penstock.agents.environments import program_process as p
variables = {"PATH": os.environ["PATH"], p.MARK: p.episode_mark()}
print(asyncio.run(p.run(["sh", "-c", sys.argv[1]], pathlib.Path("/"), variables, float(sys.argv[2]))), flush=True)
"""


@pytest.mark.parametrize("leaves", _LEAVES.values(), ids=_LEAVES)
async def test_nothing_outlives_its_episode(leaves: str) -> None:
    for status, end, deadline_s in ((3, "sleep 0.1; exit 3", 60.0), (None, "sleep 700", 1.0)):
        name = f"700.{os.getpid()}"
        variables = {"PATH": os.environ["PATH"], program_process.MARK: program_process.episode_mark()}
        shell = f"{leaves.replace('$NAME', name)}\n{end}"
        ended = await program_process.run(["sh", "-c", shell], Path("/"), variables, deadline_s)
        assert sleeping(name) == []
        assert ended.status == (-9 if "kill -9" in leaves else status)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_nothing_outlives_the_program_of_a_worker_that_was_killed_or_stopped(number: int) -> None:
    """A worker that is stopped ends nothing: the program's end does, or its deadline."""
    name = f"720.{os.getpid()}"
    shell = f"{_LEAVES['without its mark'].replace('$NAME', name)} sleep {name}"
    worker = subprocess.Popen([sys.executable, "-c", _RUNS_SHELL, shell, "1"], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(sleeping(name)) == 2, "both processes")
        worker.send_signal(number)
        wait_for(lambda: not sleeping(name), "the end of the processes")
    finally:
        worker.kill()
        worker.wait(60.0)


@pytest.mark.parametrize("numbers", [(one,) for one in process_reaper._STOPS] + [(signal.SIGINT,) * 3])
def test_a_signal_ends_the_reaper_and_all_that_it_runs(numbers: tuple[int, ...]) -> None:
    name = f"730.{os.getpid()}"
    command = ["sh", "-c", f"{_LEAVES['without its mark'].replace('$NAME', name)} sleep {name}"]
    arguments = [process_reaper.__file__, str(ROOT / "protocol"), str(os.getpid()), "600", *command]
    reaper = subprocess.Popen([sys.executable, "-I", "-S", *arguments])
    try:
        wait_for(lambda: len(sleeping(name)) == 2, "both processes")
        for number in numbers:
            reaper.send_signal(number)
        assert (reaper.wait(60.0), sleeping(name)) == (-signal.SIGTERM, [])
    finally:
        reaper.kill()


needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt install bubblewrap"
)


@needs_bubblewrap
def test_a_program_in_the_sandbox_reaches_the_proxy_and_nothing_else(model: Path, tmp_path: Path) -> None:
    """It asks, writes its result, and reads what it is given; no other address, file, process or variable."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "given").write_text("here")
    (tmp_path / "hidden").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "given").write_text("behind a link")
    (tmp_path / "link").symlink_to("elsewhere")
    with socket.create_server(("127.0.0.1", 0)) as other:
        code = f"""
import socket
ask(task["messages"])
def fails(function, *arguments):
    try:
        function(*arguments)
    except OSError as err:
        return err
    raise AssertionError((function, arguments))
for address in (("127.0.0.1", {other.getsockname()[1]}), ("127.0.0.1", 4222), ("192.0.2.1", 80)):
    fails(socket.create_connection, address, 5)
assert open({str(tmp_path / "data" / "given")!r}).read() == "here"
assert open({str(tmp_path / "link" / "given")!r}).read() == "behind a link"
for path in ({str(tmp_path / "hidden")!r}, "/etc/passwd", {str(ROOT / "pyproject.toml")!r}):
    fails(open, path)
for path in ({str(tmp_path / "data" / "new")!r}, "/usr/new", "/new"):
    fails(open, path, "w")
assert os.getuid() != 0 and all(int(one) < 20 for one in os.listdir("/proc") if one.isdecimal())
assert "OWN" in os.environ and "PENSTOCK_S3_SECRET_KEY" not in os.environ
assert os.environ["OPENAI_BASE_URL"] not in open("/proc/1/cmdline").read()  # of bubblewrap, which all users can read
result(json.dumps({{"reward": 0.25}}))
"""
        options = {
            "sandbox": True,
            "readable": [str(tmp_path / "data"), str(tmp_path / "link")],
            "variables": {"OWN": "2"},
            "folder": "/usr",
        }
        (episode,), engine = run(model, python(code), options=options)
    assert (episode.status, episode.reward, len(engine.prompts)) == ("done", 0.25, 1)


@needs_bubblewrap
def test_nothing_outlives_a_sandbox(model: Path) -> None:
    """Its exit status is known, a signal as a shell says it, and a process that left the group is gone with it."""
    name = f"600.{os.getpid()}"
    code = f"{_ASKED}subprocess.Popen(['setsid', 'sleep', '{name}']); time.sleep(0.2); "
    for end, expected in (("sys.exit(3)", "exit status 3"), ("os.kill(os.getpid(), 9)", "exit status 137")):
        found, _ = run(model, python(code + end), attempts=1, options={"sandbox": True, "folder": "/usr"})
        assert expected in str(found)
        wait_for(lambda: not sleeping(name), "the end of the process")


def sleeping(name: str) -> list[str]:
    wanted = f"sleep\0{name}\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [process.name] if (process / "cmdline").read_bytes() == wanted else []
    return found


def test_a_sandbox_is_refused_before_the_first_episode(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the run file where it says something impossible; by a worker without bubblewrap before its first task."""

    def define(**options: Any) -> Any:
        return PROGRAM.defined("a", EnvironmentDefinition(type="program", options={"command": ["true"], **options}))

    with pytest.raises(ConfigError, match="readable is read in the sandbox alone"):
        define(readable=["/data"])
    with pytest.raises(ConfigError, match="'data' is not an absolute path"):
        define(sandbox=True, folder="/usr", readable=["data"])
    for folder in (".", "./", str(Path.cwd()), "..", "/"):
        with pytest.raises(ConfigError, match="needs a folder"):
            define(sandbox=True, folder=folder)
    own = define(sandbox=True, folder="/usr")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="apt install bubblewrap"):
        own.use_model(model, 8192)


def read_pid(file: Path) -> int:
    wait_for(lambda: file.exists() and file.read_text().strip(), f"{file.name}")
    return int(file.read_text())


def wait_until_ended(pid: int) -> None:
    def has_ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    wait_for(has_ended, f"the end of process {pid}")
