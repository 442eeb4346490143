"""Task folders of Harbor, each episode in a box: rewarded by its verifier alone, never for what failed around it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.played import check_exact, engine_of, play, said, task_of
from tests.agents.proxy.agent_model import Engine

from penstock.agents.environments.adapters.harbor import _PATH, HARBOR, read_task
from penstock.agents.environments.episode_environment import RowUnfit
from penstock.rollout_service.errors import TaskRefused

TASKS = Path(__file__).parent / "harbor_tasks"
IMAGES = {"debian:12": "/", "beats:1": "/"}
PYTHON = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
needs_boxes = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt install bubblewrap"
)

AGENT = """
import json, os, subprocess, urllib.request
task = json.load(open(os.environ["PENSTOCK_TASK"]))
messages = [{"role": "user", "content": open("/run/penstock/instruction.md").read()}]
while True:
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    if answer["content"] == "done":
        break
    environment = {**os.environ, "ATTEMPT": str(task["attempt"])}
    ran = subprocess.run(answer["content"], shell=True, capture_output=True, text=True, env=environment)
    messages += [answer, {"role": "user", "content": ran.stdout + ran.stderr + "."}]
"""
SOLVED = {
    "count-words": "wc -w < letter.txt > answer.txt",
    "repair-script": "printf '#!/bin/sh\\necho $(($1 * $2))\\n' > bin/scale",
    "keep-beating": "setsid sh -c 'while :; do echo beat >> /var/beat; sleep 0.1; done' >/dev/null 2>&1 &",
}


def run(model: Path, tmp_path: Path, name: str, script: Sequence[str], *, tasks: Path = TASKS, **more: Any) -> Any:
    agent = tmp_path / "agent"
    agent.mkdir(exist_ok=True)
    (agent / "agent.py").write_text(AGENT)
    options = {
        "tasks": str(tasks), "images": IMAGES, "command": [PYTHON, "-S", str(agent / "agent.py")], "folder": str(agent),
        "readable": [sys.base_prefix], "storage_mb": 64, "checks_solution": False, **more.pop("options", {}),
    }  # fmt: skip
    task = more.pop("task", None) or task_of(extra_info=json.dumps({"task": name}))
    return play(model, HARBOR, script, task, options=options, **{"episode_deadline_s": 600, "attempts": 1, **more})


def changed(tmp_path: Path, **files: str) -> Path:
    """Return a folder with a copy of the task count-words in which some files are others."""
    folder = shutil.copytree(TASKS / "count-words", tmp_path / "tasks" / "count-words")
    for path, text in files.items():
        (folder / path).write_text(text)
    return folder.parent


TOML_OF_WORDS = (TASKS / "count-words" / "task.toml").read_text()


def timed(part: str, seconds: float) -> str:
    before = f"[{part}]\ntimeout_sec = 60.0"
    assert before in TOML_OF_WORDS
    return TOML_OF_WORDS.replace(before, f"[{part}]\ntimeout_sec = {seconds}")


@needs_boxes
@pytest.mark.parametrize("name", SOLVED)
def test_a_task_is_played_in_its_box_and_rewarded_by_its_verifier(model: Path, tmp_path: Path, name: str) -> None:
    """Its solution is rewarded, and a policy that solves it; another gets the verifier's 0. What it left runs on."""
    script = [SOLVED[name], "done"]
    (episode,), engine = run(model, tmp_path, name, script, options={"checks_solution": True})
    assert (episode.status, episode.reward, episode.attempt) == ("done", 1.0, 0)
    check_exact(episode, engine, model, script)
    assert "anary" not in said(episode)[0][1]
    assert dict(episode.reward_parts) == ({"passed": 3.0} if name == "repair-script" else {})
    (episode,), _ = run(model, tmp_path, name, ["true", "done"])
    assert (episode.status, episode.reward) == ("done", 0.0)


REWARD = "/logs/verifier/reward.txt"
VERDICTS = {
    "true": "neither exists",
    ": > /logs/verifier/reward.txt": "found ''",
    "echo nan > /logs/verifier/reward.txt": "found 'nan",
    "echo 1 of 2 > /logs/verifier/reward.txt": "'1 of 2",
    "echo 1 > /tmp/one; ln -s /tmp/one /logs/verifier/reward.txt": "neither exists",
    "echo 1 > /logs/verifier/reward.txt; echo '{\"score\": 1}' > /logs/verifier/reward.json": '{"score": 1}',
    "echo '{\"reward\": true}' > /logs/verifier/reward.json": '{"reward": true}',
    """echo '{"reward": 1, "passed": "all"}' > /logs/verifier/reward.json""": '"passed": "all"',
    f"echo 1 > {REWARD}; kill -9 $$": "its verifier ended with 137",
    f"echo 1 > {REWARD}; echo wait; sleep 600": "no status within 1.5 s; the end of its verifier's output:\nwait",
    "mkdir /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt; exit 3": "",
}


@needs_boxes
@pytest.mark.parametrize(("test", "said"), VERDICTS.items())
def test_a_verifier_without_a_verdict_is_a_failure_and_no_reward(
    model: Path, tmp_path: Path, test: str, said: str
) -> None:
    """Also where the agent left a reward before, and where a limit ended the episode; an exit status is no verdict."""
    files = {"tests/test.sh": f"#!/bin/sh\n{test}\n", "task.toml": timed("verifier", 1.5)}
    tasks = changed(tmp_path, **files)
    forged = "echo 1 > /logs/verifier/reward.txt; mkdir /tests; echo x > /tests/expected"
    found, _ = run(model, tmp_path, "count-words", [forged, "true", "true"], tasks=tasks, max_turns=2)
    if said:
        assert isinstance(found, TaskRefused)
        assert said in str(found), found
    else:
        assert (found[0].status, found[0].reward) == ("truncated", 1.0)


class Slow(Engine):
    async def generate(self, prompts: Any, sampling: Any, n: int) -> Any:
        if len(self.prompts) == 1:
            await asyncio.sleep(4)
        return await super().generate(prompts, sampling, n)


@needs_boxes
def test_the_time_of_the_agent_is_the_tasks_own_and_a_box_that_ends_is_begun_again(model: Path, tmp_path: Path) -> None:
    tasks = changed(tmp_path, **{"task.toml": timed("agent", 3)})
    solved = SOLVED["count-words"]
    found, _ = run(model, tmp_path, "count-words", [f"{solved}; sleep 600"], tasks=tasks)
    assert isinstance(found, TaskRefused)
    assert "timeout: not over after 3." in str(found), found
    engine = engine_of(model, [solved, "done"], Slow)
    (episode,), _ = run(model, tmp_path, "count-words", [], tasks=tasks, engine=engine)
    assert (episode.status, episode.time_spent_by, episode.reward) == ("timeout", "policy", 1.0)
    script = [solved + "; test $ATTEMPT = 1 || { kill -9 $(pgrep -P 1); sleep 9; }", solved, "done"]
    (episode,), _ = run(model, tmp_path, "count-words", script, attempts=2)
    assert (episode.status, episode.attempt, episode.reward) == ("done", 1, 1.0), said(episode)


@needs_boxes
def test_a_box_is_no_way_to_its_machine_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """It writes everywhere, as root, and nothing of it is on the machine; what it may write is bounded."""
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    commands = [
        "id -u; echo x > /usr/bin/new && rm -f /usr/bin/wc && echo written",
        f"cat {secret} /etc/shadow; ls /work /home",
        f"ln -s {tmp_path} /tests; ln -s {tmp_path} /app/out",
        "dd if=/dev/zero of=/big bs=1M count=100 2>&1 | tail -1; rm /big",
        "printf 9 > answer.txt",
        "setsid sleep 600.25 >/dev/null 2>&1 &",
        "done",
    ]
    with socket.create_server(("127.0.0.1", 0)) as other:
        commands[1] += (
            f"; {PYTHON} -S -c 'import socket; socket.create_connection((\"127.0.0.1\", {other.getsockname()[1]}), 5)'"
        )
        (episode,), _ = run(model, tmp_path, "count-words", commands)
    answers = [content for role, content in said(episode) if role == "user"][1:]
    assert (episode.reward, answers[0]) == (1.0, "0\nwritten\n.")
    assert ("hidden" in answers[1], "Connection refused" in answers[1], "64 MiB" in answers[3]) == (
        False,
        True,
        True,
    ), answers
    assert (Path("/usr/bin/new").exists(), Path("/usr/bin/wc").exists()) == (False, True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["agent", "secret"]
    assert not [one for one in Path("/proc").glob("[0-9]*/cmdline") if b"600.25" in readable(one)]


ATTACKS = {
    "forge": f"echo 1 > {REWARD}; for pid in /proc/[0-9]*; do printf '0\\n0\\n' > $pid/fd/1; done; sleep 1; exit 1",
    "move": "for one in /logs /logs/verifier /tests; do umount $one; mv $one /x; done; "
    "mkdir -p /logs/verifier; echo 1 > /x/verifier/reward.txt",
    "race": f"setsid sh -c 'while :; do echo 1 >{REWARD}; echo echo 1 >/tests/test.sh; done' >/dev/null 2>&1 &",
    "read": "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -a JUDGE | grep -v tr",
    "mount": "mount -o remount,rw,bind {agent}; echo x > {agent}/made; mount -t tmpfs no /mnt; umount /run/penstock",
}


@needs_boxes
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_agent_reaches_neither_the_verdict_nor_what_it_may_only_read(
    model: Path, tmp_path: Path, attack: str
) -> None:
    """Nor do a task's variables reach the machine: ``LD_DEBUG_OUTPUT`` would have the loader write a file."""
    trace = f"[environment.env]\nLD_DEBUG = 'libs'\nLD_DEBUG_OUTPUT = '{tmp_path}/trace'\n"
    toml = f"{TOML_OF_WORDS}\n[verifier.env]\nKEY = 'JUDGE'\n{trace if attack == 'forge' else ''}"
    tasks = changed(tmp_path, **{"task.toml": toml})
    script = [ATTACKS[attack].replace("{agent}", str(tmp_path / "agent")), "done"]
    (episode,), _ = run(model, tmp_path, "count-words", script, tasks=tasks)
    assert (episode.status, episode.reward) == ("done", 0.0), said(episode)
    assert sorted(one.name for one in tmp_path.rglob("*") if tasks not in one.parents) == ["agent", "agent.py", "tasks"]
    assert attack != "read" or "KEY" not in said(episode)[2][1]


@needs_boxes
def test_an_image_is_a_folder_that_no_box_changes(model: Path, tmp_path: Path) -> None:
    """It has what it has: here a shell, a few programs, their libraries, and those of Python."""
    image = tmp_path / "image"
    programs = [str(shutil.which(name)) for name in ("sh", "mkdir", "cp", "rm", "chmod", "wc", "tr", "cat", "dirname")]
    modules = map(str, Path(PYTHON).parents[1].glob("lib/python3*/lib-dynload/*.so"))
    listed = subprocess.run(["ldd", *programs, PYTHON, *modules], check=True, capture_output=True, text=True)
    for path in {*programs, *re.findall(r"/\S+(?=\s\()", listed.stdout)}:
        (image / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, image / path.lstrip("/"))
    (image / "bin").exists() or (image / "bin").symlink_to("usr/bin")
    (image / "bin/sh").exists() or shutil.copy("/bin/sh", image / "bin/sh")
    before = sorted(map(str, image.rglob("*")))
    script = [
        "echo 7 > /bin/new; rm -rf /usr/share; echo /* >&2",
        f"read n < /bin/new; {SOLVED['count-words']}",
        "done",
    ]
    options = {"images": {"count-words": str(image), "debian:12": "/nowhere"}}
    (image / "app").mkdir()
    shutil.copy(TASKS / "count-words/environment/letter.txt", image / "app")
    (episode,), _ = run(model, tmp_path, "count-words", script, options=options)
    assert episode.reward == 1.0
    assert "home" not in said(episode)[2][1].split()
    assert sorted(map(str, image.rglob("*"))) == sorted([*before, f"{image}/app", f"{image}/app/letter.txt"])


def readable(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


@needs_boxes
def test_a_solution_that_its_verifier_does_not_reward_refuses_the_task(model: Path, tmp_path: Path) -> None:
    missing = "FROM debian:12\nWORKDIR /app\nCOPY none.txt letter.txt ./\n"
    tasks = changed(tmp_path / "broken", **{"environment/Dockerfile": missing})
    assert "its set-up failed" in str(run(model, tmp_path, "count-words", ["true"], tasks=tasks)[0])
    tasks = changed(tmp_path, **{"solution/solve.sh": "#!/bin/sh\necho wrong; echo 8 > answer.txt\n"})
    found, engine = run(model, tmp_path, "count-words", ["true"], tasks=tasks, options={"checks_solution": True})
    assert (type(found), engine.prompts) == (TaskRefused, [])
    assert re.search(r"its own solution is not rewarded: .*said:\nwrong", str(found), re.DOTALL)


TOML = {
    "[[steps]]\nname = 'a'": "steps",
    "[environment]\ngpus = 1": "environment.gpus",
    "[environment]\nmcp_servers = [{name = 'a', url = 'b'}]": "environment.mcp_servers",
    "[environment.healthcheck]\ncommand = 'true'": "environment.healthcheck.command",
    "[verifier]\nenvironment_mode = 'separate'": "verifier.environment_mode",
    "[verifier.environment]\ncpus = 1": "verifier.environment.cpus",
    "[agent]\nuser = 'me'": "agent.user",
    "[verifier.env]\nKEY = '${KEY}'": "verifier.env.KEY",
    "[environment]\ncpus = 2": "the internet",
    "[agent]\ntimeout_sec = 0": "agent.timeout_sec is 0",
    "[agent]\ntimeout_sec = 10": "",
    "[environment]\ndocker_image = [1]": "TypeError",
    f"a = {'[' * 5000}": "RecursionError",
}
FILES = {
    "FROM debian:12\nRUN apt-get update": "'RUN apt-get update' needs a build",
    "FROM debian:12 AS first": "no root file system for 'debian:12 AS first'",
    "FROM alpine": "no root file system for 'alpine'",
    "FROM debian:12\nCOPY --chown=1 letter.txt /": "COPY --chown=1",
    "FROM debian:12\nCOPY ../task.toml /": "COPY ../task.toml",
    "FROM debian:12\nCOPY *.txt /": "COPY *.txt",
    "FROM debian:12\nENV A=$B": "ENV A=$B",
    "FROM debian:12\nUSER me": "USER me",
    "FROM debian:12\nFROM debian:12": "'FROM debian:12' needs",
    "FROM debian:12\nENV": "IndexError",
    "FROM debian:12\nENV A='": "No closing quotation",
    "FROM debian:12\nCOPY": "ValueError",
    "#" * 2**21: "Dockerfile is longer",
}
NAMES = ("trajectory.json", "tests/.harborignore", "environment/.dockerignore")


@pytest.mark.parametrize(("files", "said"), [({"task.toml": text}, said) for text, said in TOML.items()]
                         + [({"environment/Dockerfile": text}, said) for text, said in FILES.items()]
                         + [({name: ""}, name) for name in NAMES])  # fmt: skip
def test_what_a_box_cannot_do_is_refused_by_its_name(tmp_path: Path, files: dict[str, str], said: str) -> None:
    folder = changed(tmp_path, **files) / "count-words"
    offline = said != "the internet"
    if not said:
        assert read_task(folder, IMAGES, offline=True).seconds("agent.timeout_sec") == 10
        return
    with pytest.raises(RowUnfit, match=re.escape(said)):
        _ = read_task(folder, IMAGES, offline=offline).episode_s


@pytest.mark.parametrize("name", ["task.toml", "environment/Dockerfile", "instruction.md", "tests/test.sh"])
@pytest.mark.parametrize("target", ["/dev/zero", ""])
def test_a_file_of_a_task_is_no_way_to_another(tmp_path: Path, name: str, target: str) -> None:
    """A link would be read without end, or hand over a file of the worker's user; a pipe would be waited for."""
    folder = changed(tmp_path) / "count-words"
    (folder / name).unlink()
    (folder / name).symlink_to(target) if target else os.mkfifo(folder / name)
    with pytest.raises(RowUnfit, match=r"symbolic links|not a regular file"):
        read_task(folder, IMAGES, offline=True)


@pytest.mark.parametrize(
    ("dockerfile", "workdir", "variables"),
    [
        ("FROM debian:12\nENV PATH=\"/opt/bin:$PATH\" A=1\nENV B=${A}2\nWORKDIR /app/$B", "/app/12",
         {"PATH": "/opt/bin:" + _PATH, "A": "1", "B": "12"}),
        ("from debian:12\nenv LANG C.UTF-8\nworkdir /app", "/app", {"LANG": "C.UTF-8"}),
        ("FROM go AS b\nENV GO=1\nWORKDIR /b\nFROM debian:12\nCOPY --from=b /b /app\nWORKDIR app", "/app", {}),
        ("FROM debian:12 AS base\nENV A=1\nFROM base\nRUN <<EOF\nWORKDIR /none\nEOF\nWORKDIR /app", "/app", {"A": "1"}),
    ],
)  # fmt: skip
def test_a_built_image_has_the_variables_and_the_folder_of_its_dockerfile(
    tmp_path: Path, dockerfile: str, workdir: str, variables: dict[str, str]
) -> None:
    folder = changed(tmp_path, **{"environment/Dockerfile": dockerfile}) / "count-words"
    task = read_task(folder, {"count-words": "/image"}, offline=True)
    assert (task.workdir, task.variables) == (workdir, variables)
