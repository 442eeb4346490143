"""`harbor`: task folders of Harbor (Terminal-Bench 2 and others), each episode in a box of its own.

A box is a root file system under an overlay, confined with bubblewrap (`harbor_box.py`): the agent runs in it, then the task's verifier, in
what the agent left. Format: schema 1.4 of Harbor 0.26. A row whose task asks for what a box cannot do is refused with the key's name.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import shutil
import string
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from penstock.agents.environments import process_reaper, program_process
from penstock.agents.environments.adapters import harbor_box
from penstock.agents.environments.episode_environment import Attempt, Begun, RowUnfit, Site
from penstock.agents.environments.program import Program, ProgramOptions, write_task
from penstock.agents.environments.program_process import Ended
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.files import read_regular
from penstock.rollout_service.environments.environment import Sampler

_MOST_BYTES = 2**20  # of task.toml and Dockerfile
_LEFT_S = 60.0  # of an episode, for what is neither set-up, agent nor verifier
_GIVEN = "/run/penstock"  # inside
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OF_THE_WORKER = ("PATH", "HOME", "USER", "TMPDIR", "PENSTOCK_RESULT", program_process.MARK)
_SOLVE = f"cp -R {_GIVEN}/solution /solution && chmod +x /solution/solve.sh && exec /solution/solve.sh"
_TIMEOUTS = {part: f"{key}timeout_sec" for part, key in (("setup_s", "environment.build_"), ("agent_s", "agent."), ("verifier_s", "verifier."))}  # fmt: skip
_CANARY = re.compile(
    rb"(?i)\A(?:[^\S\n]*(?:<!--.*canary.*-->|#.*canary.*)[^\S\n]*(?:\n|\Z))*(?:[^\S\n]*\n)*"
)  # Harbor shows it to no agent
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_IGNORED = r"(version|schema_version|source|artifacts|environment\.(cpus|memory|memory_mb|storage|storage_mb|gpu_types)|(task|metadata)\..*)"
_READ = r"(environment\.(build_timeout_sec|docker_image|workdir|allow_internet|network_mode)|(agent|verifier)\.(timeout_sec|network_mode))"
_ENV = r"(environment|verifier|solution)\.env\..*"
_ONLY = {
    "environment.os": "linux", "environment.gpus": 0, "agent.user": "root", "verifier.user": "root", "verifier.environment_mode": "shared",
}  # fmt: skip
_FILES = (
    "environment/docker-compose.yaml", "environment/.dockerignore", "tests/.harborignore", "solution/.harborignore", "trajectory.json",
)  # fmt: skip


@dataclass(slots=True)
class HarborTask:
    folder: Path
    keys: dict[str, Any]  # of task.toml: "agent.timeout_sec"
    image: str = ""  # a folder with a root file system, or "/"
    setup: list[str] = field(default_factory=list)  # commands of the box's shell
    workdir: str = "/"
    variables: dict[str, str] = field(default_factory=dict)

    def seconds(self, key: str) -> float:
        seconds = self.keys.get(key, 600.0)
        if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise RowUnfit(f"task {self.folder.name}: {key} is {seconds!r}, expected a number of seconds")
        return float(seconds)

    def env(self, section: str) -> dict[str, str]:
        prefix = f"{section}.env."
        return {key.removeprefix(prefix): str(value) for key, value in self.keys.items() if key.startswith(prefix)}

    @property
    def episode_s(self) -> float:
        return _LEFT_S + sum(map(self.seconds, _TIMEOUTS.values()))


class HarborOptions(ProgramOptions):
    """Where the tasks are, what plays them, and in which root file systems."""

    tasks: str = Field(description="A folder of task folders; extra_info.task of a row names one of them.")
    images: dict[str, str] = Field(
        description="Root file systems by the name of an image (what a Dockerfile begins FROM, or docker_image) or of a task (its "
        'Dockerfile, built): absolute paths of folders; "/" is the system\'s own programs.'
    )
    offline: bool = Field(False, description="Play tasks that may use the internet without it; else they are refused.")
    storage_mb: int = Field(1024, ge=1, description="MiB that a box may write; they are in memory.")
    checks_solution: bool = Field(True, description="Refuse tasks whose own solution gets no reward: tried once.")
    sandbox: Literal[True] = Field(True, description="A box always is one.")  # pyright: ignore[reportIncompatibleVariableOverride]


def read_task(folder: Path, images: Mapping[str, str], *, offline: bool) -> HarborTask:
    """Read a task folder, which may be a stranger's; raises RowUnfit, which names what a box cannot do."""
    try:
        return _read_task(folder, images, offline=offline)
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as err:
        raise RowUnfit(f"task {folder.name}: {type(err).__name__}: {err}") from None


def _read_task(folder: Path, images: Mapping[str, str], *, offline: bool) -> HarborTask:
    task = HarborTask(folder, dict(_flat(tomllib.loads(_text(folder / "task.toml")))))
    dockerfile = folder / "environment" / "Dockerfile"
    text = _text(dockerfile) if os.path.lexists(dockerfile) else ""
    _ = [read_regular(folder / needed, 1) for needed in ("instruction.md", "tests/test.sh")]
    keys, read = task.keys, f"{_IGNORED}|{_READ}|{_ENV}"
    refused = [key for key, value in keys.items() if not re.fullmatch(read, key) and _ONLY.get(key, []) != value]
    refused += [f"{key} (a variable of here)" for key, value in keys.items() if ".env." in key and "${" in str(value)]
    refused += [name for name in _FILES if (folder / name).exists()]
    network, *others = (keys.get(f"{part}.network_mode") for part in ("environment", "agent", "verifier"))
    is_closed = network == "no-network" or (network is None and keys.get("environment.allow_internet") is False)
    if not offline and not (is_closed and {*others} <= {None, "no-network"}):
        refused.append("the internet (options.offline = true plays it without)")
    if refused:
        raise RowUnfit(f"task {folder.name} needs what a box does not have: {', '.join(refused)}")
    _put_on_image(task, text, images)
    return task


def _text(path: Path) -> str:
    if len(data := read_regular(path, _MOST_BYTES + 1)) > _MOST_BYTES:
        raise ValueError(f"{path.name} is longer than {_MOST_BYTES} bytes")
    return data.decode()


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _put_on_image(task: HarborTask, text: str, images: Mapping[str, str]) -> None:
    """Choose the root file system, and note those instructions of the Dockerfile that need no build."""
    name = task.folder.name
    text = re.sub(r"""(?ms)<<-?["']?(\w+)["']?[^\n]*\n.*?^\t*\1$""", "", text)
    text = re.sub(r"\\[ \t]*\n", " ", re.sub(r"(?m)^\s*(#.*)?\n", "", text))
    lines = [(word.upper(), rest) for word, rest, *_ in ((*line.split(None, 1), "") for line in text.splitlines())]
    prebuilt = name if name in images else task.keys.get("environment.docker_image")
    image = prebuilt or (lines[0][1] if lines else "")
    if image not in images:
        raise RowUnfit(f"task {name}: options.images has no root file system for {image!r}; it has {', '.join(images)}")
    task.image = images[image]
    for number, (word, rest) in enumerate(lines):
        if word in ("ENV", "WORKDIR"):
            rest = _expanded(rest, task.variables)
        is_plain = not re.search(r"""[$<>*?\[\]"'\\]|--|\.\.""", rest)
        if word == "FROM" and prebuilt and not re.search(rf"(?im)^FROM .* AS {re.escape(rest.split()[0])}$", text):
            task.workdir, task.variables, task.setup = "/", {}, []
        elif word == "WORKDIR" and is_plain:
            task.workdir = str(Path(task.workdir) / rest)
            task.setup.append(f"mkdir -p {shlex.quote(task.workdir)}")
        elif word == "ENV" and "$" not in rest:
            pairs = shlex.split(rest) if "=" in rest.split()[0] else ["=".join(rest.split(None, 1))]
            task.variables |= dict(pair.split("=", 1) for pair in pairs)
        elif word == "COPY" and is_plain and not prebuilt:
            *sources, target = rest.split()
            inside = Path(task.workdir) / target
            into = f"{inside}/" if target.endswith(("/", ".")) else str(inside)
            task.setup.append(shlex.join(["copy", into, *(f"{_GIVEN}/context/{one.lstrip('/')}" for one in sources)]))
        elif word in ("ENV", "WORKDIR") or not (prebuilt or word in ("LABEL", "CMD") or (word, number) == ("FROM", 0)):
            raise RowUnfit(
                f"task {name}: its Dockerfile's {f'{word} {rest}'[:200]!r} needs a build: build it (docker build, create, export) and name "
                f"the folder with its root file system as options.images.{name}"
            )
    task.workdir = str(task.keys.get("environment.workdir") or task.workdir)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return an instruction with the values of variables; as it is where one is not known."""
    try:
        return string.Template(text).substitute({"PATH": _PATH, **variables})
    except (KeyError, ValueError):
        return text


def reward_of(account: Mapping[str, Any]) -> bytes | str:
    """Return a program's result that has the verifier's rewards, or why there are none."""
    if account["problem"]:
        return account["problem"]
    text, plain = (account["rewards"][name] for name in ("reward.json", "reward.txt"))
    try:
        rewards = {"reward": float(plain or "none")} if text is None else json.loads(text)
        finite = (item for item in rewards.items() if type(item[1]) in (int, float) and math.isfinite(item[1]))
        numbers = {name: float(one) for name, one in finite}
        if len(numbers) == len(rewards):
            return json.dumps({"reward": numbers.pop("reward"), "parts": numbers}).encode()
    except (ValueError, AttributeError, KeyError, OverflowError, RecursionError):
        pass
    found = "neither exists" if text is plain else f"found {(plain if text is None else text)[:200]!r}"
    wanted = "a number in /logs/verifier/reward.txt, or in reward.json an object of numbers with 'reward'"
    return f"its verifier left no reward: expected {wanted}; {found}; the end of its output:\n{account['said']}"


class Harbor(Program):
    name = "harbor"
    options = HarborOptions

    def __init__(self) -> None:
        super().__init__()
        self._checks: dict[Path, asyncio.Future[str]] = {}

    def defined(self, name: str, definition: EnvironmentDefinition) -> Self:
        other = super().defined(name, definition)
        other._checks = {}
        return other

    async def attempt(self, site: Site, begun: Begun, sampler: Sampler) -> Attempt:
        if self.chosen is None:
            raise RowUnfit(self.needs_definition("options.tasks"))
        task = self._task_of(begun)
        if self.chosen.checks_solution:
            check = self._checks.get(task.folder) or asyncio.ensure_future(self._check(begun, task))
            self._checks[task.folder] = check
            if problem := await asyncio.shield(check):
                self._checks.pop(task.folder, None)
                raise RowUnfit(f"task {task.folder.name}: its own solution is not rewarded: {problem}")
        return await super().attempt(site, begun, sampler)

    def _task_of(self, begun: Begun) -> HarborTask:
        name, most_s = json.loads(begun.task.reward.extra_info).get("task"), self.settings.episode_deadline_s
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RowUnfit(f"extra_info.task is {name!r}, expected the name of a task folder in {self.chosen.tasks}")
        task = read_task(Path(self.chosen.tasks, name).absolute(), self.chosen.images, offline=self.chosen.offline)
        if "agent.timeout_sec" not in task.keys:  # then it has what is left
            task.keys["agent.timeout_sec"] = max(1.0, most_s + 600.0 - task.episode_s)
        if task.episode_s > most_s:
            raise RowUnfit(f"task {name} may take {task.episode_s:g} s, and episode_deadline_s is {most_s:g}: raise it")
        return task

    async def _check(self, begun: Begun, task: HarborTask) -> str:
        """Return why a task's solution gets no reward from its verifier; empty: it gets one."""
        folder = await asyncio.to_thread(write_task, begun)
        await self._served_url()
        try:
            given = {"solution": str(task.folder / "solution")}
            ended, result, _ = await self._in_box(
                task, folder, ["/bin/sh", "-c", _SOLVE], task.env("solution"), given, verified=True
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(result, bytes) and json.loads(result)["reward"] > 0:
            return ""
        return f"{result}; it ended with {ended.status} and said:\n{ended.output}"

    async def _run(
        self, begun: Begun, folder: Path, variables: Mapping[str, str]
    ) -> tuple[Ended, bytes | str | None, float]:
        own = {
            name: value for name, value in variables.items() if name not in {*_OF_THE_WORKER} - {*self.chosen.variables}
        }
        own["PENSTOCK_TASK"], given = f"{_GIVEN}/task.json", {"task.json": str(folder / "task.json")}
        verified = begun.task.reward.name == "environment"
        return await self._in_box(self._task_of(begun), folder, self.chosen.command, own, given, verified=verified)

    async def _in_box(
        self, task: HarborTask, folder: Path, agent: list[str], variables: Mapping[str, str], given: Mapping[str, str], *,
        verified: bool,
    ) -> tuple[Ended, bytes | str | None, float]:  # fmt: skip
        """Return how an agent ended in a box, the verifier's result (a text: why there is none), and the agent's seconds."""
        assert self._served is not None
        chosen, source, instruction = self.chosen, task.folder, folder / "instruction.md"
        instruction.write_bytes(_CANARY.sub(b"", (source / instruction.name).read_bytes()))
        box = {
            "modules": str(Path(process_reaper.__file__).parent), "bubblewrap": program_process.bubblewrap(), "image": task.image,
            "system": program_process.SYSTEM, "storage_mb": chosen.storage_mb, "agent": agent, "setup": " && ".join([":", *task.setup]),
            "workdir": shlex.quote(task.workdir), "tests": str(source / "tests") if verified else "", "verifier_env": task.env("verifier"),
            "given": {"instruction.md": str(instruction), "context": str(source / "environment"), **given},
            "readable": [str(Path.cwd() / chosen.folder), *chosen.readable], "socket": str(self._served.socket),
            "port": program_process.PROXY_PORT, **{name: task.seconds(key) for name, key in _TIMEOUTS.items()},
            "variables": {"PATH": _PATH, "HOME": "/root", **task.variables, **task.env("environment"), **variables},
        }  # fmt: skip
        (folder / "box.json").write_text(json.dumps(box))
        command = [sys.executable, "-I", "-S", harbor_box.__file__, str(folder)]
        mark = {program_process.MARK: program_process.episode_mark()}
        ended = await program_process.run(command, folder, mark, task.episode_s)
        try:
            account = json.loads((folder / "account.json").read_bytes())
        except OSError:
            return ended, f"its box ended without an account:\n{ended.output}", task.episode_s
        result = reward_of(account) if verified or account["problem"] else None
        return replace(ended, status=None) if account["over_time"] else ended, result, account["agent_s"]


HARBOR = Harbor()
