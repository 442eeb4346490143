"""A run of 1,024 episodes in a mixture of registered environments, of whose servers one is killed and all are replaced.

    python -m tests.rigs.proofs.registered_environments [FOLDER]

`penstock train --local` starts NATS, S3 and two workers; two servers of ``asked`` and one of ``guessed`` register at its NATS.
After a quarter of the steps one of ``asked`` gets SIGKILL and another one starts; after half of them a new version of ``asked``
replaces both. Then the run is audited and replayed. Exit code 1 if a group was lost or trained twice, if an episode got another
seed than its group, if the proportions are not exact, or if a version of the weights is replayed otherwise.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.rigs.proofs.proof import folder_of, plain_environ

from penstock.console.connections import store_environment
from penstock.deploy import quickstart_task, quickstart_tasks
from penstock.rollout_service.engines.engine_process import process_cpu_seconds

_STEPS, _GROUPS, _SIZE = 16, 8, 8
_DEADLINE_S = 420.0
_LEASE_S = "3"
_RUN_FILE = f"""
run.id = "registered"
model.path = "model"
data = {{ train = "data/train.jsonl" }}
reward = {{ name = "environment" }}
rollout = {{ environment = "mixture", groups_per_step = {_GROUPS}, group_size = {_SIZE}, max_new_tokens = 5 }}
trainer = {{ steps = {_STEPS}, lr = 1e-4 }}

[environment.define.asked]
type = "http"
options = {{ registered = "asked" }}
weight = 3

[environment.define.guessed]
type = "http"
options = {{ registered = "guessed", options = {{ highest = 20 }} }}
weight = 1
max_turns = 3
"""
_SERVED = """
import random
import time

from penstock import Message, Play, TurnEnvironment, done, say


class AskedPlay(Play):
    def __init__(self, seed):
        self.value, self.turns = str(random.Random(seed).randrange(10)), 0

    def start(self):
        return [Message("user", "get 37")]

    def step(self, answer):
        time.sleep(0.05)  # so that a kill meets episodes
        self.turns += 1
        return say(self.value) if self.turns < 3 else done(float(self.value in answer.content))


class Asked(TurnEnvironment):
    name = "asked"
    version = "VERSION"

    def play(self, seed, row, options):
        return AskedPlay(seed)
"""


class Servers:
    """The servers of environments, each a process."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        """``environ`` says where NATS is."""
        self._folder, self._environ = folder, environ
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._idle_s: dict[str, float] = {}
        self.cpu_s = 0.0  # of those that have ended, without their start

    def start(self, label: str, environment: str, name: str, *more: str) -> None:
        """Start a server and wait until it is registered."""
        words = [sys.executable, "-P", "-m", "penstock.agents.hosting", "serve", environment]
        words += ["--register", name, "--lease-s", _LEASE_S, "--idle-s", "60", *more]
        process = subprocess.Popen(
            words, cwd=self._folder, env=self._environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._running[label] = process
        assert process.stdout is not None
        for line in process.stdout:
            if " is registered at " in line:
                break
        else:
            raise SystemExit(f"server {label} ended with {process.wait()} before it was registered")
        self._idle_s[label] = process_cpu_seconds(process.pid)
        print(f"{_clock()} {label} is registered", flush=True)

    def stop(self, label: str, number: signal.Signals) -> int:
        """Send a signal and wait for the end; return the exit status."""
        process = self._running.pop(label)
        self.cpu_s += process_cpu_seconds(process.pid) - self._idle_s[label]
        process.send_signal(number)
        code = process.wait(120.0)
        assert process.stdout is not None
        process.stdout.close()
        print(f"{_clock()} {label} got {number.name}: exit status {code}", flush=True)
        return code

    def stop_all(self) -> None:
        """Ask all to stop."""
        for label in list(self._running):
            self.stop(label, signal.SIGTERM)


def main() -> int:
    """Return 1 when something was lost."""
    folder = folder_of("registered")
    quickstart_tasks.write_tool_data(folder / "data", seed=0, num_sft=1, num_train=_STEPS * _GROUPS, num_eval=1)
    quickstart_task.write_model(folder / "model", seed=0)
    (folder / "run.toml").write_text(_RUN_FILE)
    for version in ("1", "2"):
        (folder / f"asked{version}.py").write_text(_SERVED.replace("VERSION", version))
    environ = plain_environ()
    run = folder / "runs" / "registered"
    with _running(folder, environ) as training:
        _wait((run / "store" / "environment").is_file, training, "the run's NATS")
        servers = Servers(folder, {**environ, **store_environment(run / "store")})
        try:
            _play(servers, training, run)
        finally:
            servers.stop_all()
    return _report(folder, environ, run, servers.cpu_s)


def _play(servers: Servers, training: subprocess.Popen[bytes], run: Path) -> None:
    """Serve the environments until the run has ended, with a kill and a replacement."""
    for label in ("first", "second"):
        servers.start(label, "asked1.py:Asked", "asked")
    servers.start("guessing", "guess_number", "guessed")
    _wait(lambda: _steps(run) >= _STEPS // 4, training, f"step {_STEPS // 4}")
    servers.stop("first", signal.SIGKILL)
    servers.start("third", "asked1.py:Asked", "asked")
    _wait(lambda: _steps(run) >= _STEPS // 2, training, f"step {_STEPS // 2}")
    servers.start("new version", "asked2.py:Asked", "asked", "--replace")
    for label in ("second", "third"):
        servers.stop(label, signal.SIGTERM)
    code = training.wait(_DEADLINE_S)
    print(f"{_clock()} the run ended with {code}", flush=True)


def _report(folder: Path, environ: Mapping[str, str], run: Path, cpu_s: float) -> int:
    steps = [event for line in (run / "metrics.jsonl").open() if (event := json.loads(line)).get("kind") == "step"]
    figures = [event["environments"] for event in steps]
    totals = {name: Counter[str]() for name in ("asked", "guessed")}
    versions: Counter[str] = Counter()
    turns = 0.0
    for of_step in figures:
        for name, one in of_step.items():
            totals[name].update({"episodes": one["episodes"], "failures": one["failures"]})
            turns += one["turns_mean"] * one["episodes"]
            versions.update({f"{name} {version}": count for version, count in one.get("versions", {}).items()})
    episodes = sum(one["episodes"] for one in totals.values())
    failures = sum(one["failures"] for one in totals.values())
    groups = steps[-1]["groups"]
    audited = _command(folder, environ, "audit", "registered")
    replayed = _command(folder, environ, "replay", "registered")
    calls = turns + 2 * episodes
    print(f"steps {len(steps)}, groups {groups}")
    print(f"episodes {episodes}: {dict(totals)}; by version {dict(versions)}; failed attempts, begun again: {failures}")
    print(
        f"CPU of the servers {cpu_s:.1f} s, {1000 * cpu_s / calls:.2f} ms for each of {calls:.0f} calls of trained episodes"
    )
    wanted = {"asked": 3 * episodes // 4, "guessed": episodes // 4}
    problems = {
        "episodes": episodes != _STEPS * _GROUPS * _SIZE,
        "proportions": {name: one["episodes"] for name, one in totals.items()} != wanted,
        "nobody was hit by the kill": failures == 0,
        "one version only": not {"asked 1", "asked 2"} <= set(versions),
        "groups dropped": sum(groups["dropped"].values()) > 0,
        "audit": audited != 0,
        "replay": replayed != 0,
    }
    found = [name for name, is_wrong in problems.items() if is_wrong]
    print(f"lost, doubled or otherwise wrong: {', '.join(found) or 'nothing'}")
    return int(bool(found))


def _command(folder: Path, environ: Mapping[str, str], *words: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "penstock", *words],
        cwd=folder, env=dict(environ), capture_output=True, text=True, timeout=_DEADLINE_S, check=False,
    )  # fmt: skip
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    print(f"penstock {' '.join(words)}: exit status {ended.returncode}\n    " + "\n    ".join(lines[-12:]), flush=True)
    return ended.returncode


@contextlib.contextmanager
def _running(folder: Path, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-P", "-m", "penstock", "train", "run.toml", "--local"]
    with (folder / "train.log").open("wb") as log:
        training = subprocess.Popen(words, cwd=folder, env=dict(environ), stdout=log, stderr=log)
        try:
            yield training
        finally:
            if training.poll() is None:
                training.send_signal(signal.SIGINT)
                training.wait(60.0)


def _steps(run: Path) -> int:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    return sum('"kind":"step"' in line.replace(" ", "") for line in lines)


def _wait(condition: Callable[[], Any], training: subprocess.Popen[bytes], what: str) -> None:
    ends = time.monotonic() + _DEADLINE_S
    while not condition():
        if training.poll() is not None or time.monotonic() > ends:
            raise SystemExit(f"waited in vain for {what}; the run's exit status is {training.poll()}")
        time.sleep(0.05)


def _clock() -> str:
    return time.strftime("%H:%M:%S")


if __name__ == "__main__":
    sys.exit(main())
