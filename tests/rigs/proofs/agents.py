"""Kill workers, an environment server and programs' proxies at random while agents are trained, and prove that nothing is lost.

    make proof NAME=agents
    python -m tests.rigs.proofs.agents --only http --steps 14 --kills 8 --seed 1

Two runs of the quickstart's services with a tiny random model. In ``http`` a server in a process of its own plays the episodes
(`penstock env serve`); in ``programs`` each episode is a program, in the sandbox where bubblewrap is installed, against the proxy in the
worker. A turn takes up to three seconds, and every ended episode is stored. Both workers, and with them their engines' clients, proxies and
programs, and the environment server are killed with SIGKILL at moments that the seed determines. At the end of each run

1. the audit closes: every group issued was trained once, dropped once with a reason, or is in flight; none is lost, none trained twice;
2. exactly ``steps x groups_per_step`` groups were trained;
3. a replay of the record without any fault reproduces every version with the same hash;
4. episodes that had ended were continued by another worker; objects of those whose worker was killed before it deleted them are counted;
5. no program and no folder of a killed worker is left.

Exits with 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.rigs.chaos.kills import Observer, plan_kills

from penstock.agents.environments import program_process
from penstock.deploy import quickstart_task
from penstock.deploy.local_run import TRAINER, LocalRun, worker_name
from penstock.deploy.processes.supervise import RestartRule
from penstock.forensics.audit.audit_checks import check_record
from penstock.forensics.audit.audit_inputs import gather
from penstock.protocol import blob_keys, logs
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

GROUPS_PER_STEP, GROUP_SIZE, TURNS = 4, 4, 3
SERVER = "environment"
_SWEPT_S = 3 * program_process.SWEEP_S
_RULE = RestartRule(max_crashes=40)

# Both play the same: three turns whatever the policy answers, each after a moment of up to three seconds.
_RULES = f"""
import hashlib, random

TURNS = {TURNS}

def moment():
    return 3 * random.random() ** 3

def number(seed, turn, below):
    return int.from_bytes(hashlib.sha256(f"{{seed}} {{turn}}".encode()).digest()[:4], "big") % below

def reward_of(answers):
    return sum(len(one) % 2 for one in answers) / len(answers)
"""
_ENVIRONMENT = (
    _RULES
    + """
import asyncio

from penstock import Play, Reply, TurnEnvironment, done, say


class AskPlay(Play):
    def __init__(self, seed, row):
        self.seed, self.row, self.answers = seed, row, []

    def start(self):
        return self.row.messages

    async def step(self, answer):
        self.answers.append(answer.content)
        await asyncio.sleep(moment())
        if len(self.answers) == TURNS:
            return done(reward_of(self.answers))
        return say(f"{number(self.seed, len(self.answers), 100):02d}")


class Ask(TurnEnvironment):
    name = "ask"
    version = "1"

    def play(self, seed, row, options):
        return AskPlay(seed, row)
"""
)
_PROGRAM = (
    _RULES
    + """
import json, os, time, urllib.request

task = json.load(open(os.environ["PENSTOCK_TASK"]))
messages, answers, seed = task["messages"], [], task["seed"]
for turn in range(TURNS):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    answers.append(answer["content"] or "")
    time.sleep(moment())
    messages = [*messages, answer, {"role": "user", "content": f"{number(seed, len(answers), 100):02d}"}]
json.dump({"reward": reward_of(answers)}, open(os.environ["PENSTOCK_RESULT"], "w"))
"""
)
_RUN_FILE = """\
run = {{ id = "{run_id}", dir = "{folder}/runs", seed = {seed} }}
model = {{ path = "{folder}/model" }}
reward = {{ name = "environment" }}

[data]
train = "{folder}/data/train.jsonl"
max_prompt_tokens = 32

[environment.define.ask]
{environment}
max_turns = {turns}
keep_after_s = 0
kept_staleness = 2

[rollout]
environment = "ask"
groups_per_step = {groups_per_step}
group_size = {group_size}
groups_per_message = 2
max_staleness = 2
max_new_tokens = {max_new_tokens}

[trainer]
steps = {steps}
lr = 5e-4
checkpoint_every = 2
"""


class EnvironmentServer:
    """`penstock env serve` at a fixed port; started again as soon as it was killed."""

    def __init__(self, file: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._command = [sys.executable, "-m", "penstock", "env", "serve", f"{file}:Ask", "--port", str(self.port)]
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = self._start()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def prove(kind: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Make one run with kills; return its figures, with what failed under ``failures``."""
    seed, steps = given.seed, given.steps
    quickstart_task.write_tools_data(
        folder / "data", seed=seed, num_sft=1, num_train=8 * steps * GROUPS_PER_STEP, num_eval=1
    )
    quickstart_task.write_model(folder / "model", seed=seed)
    agent = folder / "agent"
    agent.mkdir()
    server = None
    if kind == "http":
        (agent / "ask.py").write_text(_ENVIRONMENT)
        server = EnvironmentServer(agent / "ask.py")
        environment = f'type = "http"\noptions = {{ url = "http://127.0.0.1:{server.port}" }}'
    else:
        (agent / "ask.py").write_text(_PROGRAM)
        options = {"command": [sys.executable, "-I", "-S", str(agent / "ask.py")], "folder": str(agent)}
        sandbox = "true" if shutil.which("bwrap") else "false"
        values = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
        environment = f'type = "program"\noptions = {{ {values}, sandbox = {sandbox} }}'
    run_id = f"agents-{kind}-{seed}"
    (folder / "run.toml").write_text(
        _RUN_FILE.format(
            run_id=run_id, folder=folder, seed=seed, environment=environment, turns=TURNS, steps=steps,
            groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, max_new_tokens=quickstart_task.TOOLS_MAX_NEW_TOKENS,
        )
    )  # fmt: skip
    victims = (worker_name(0), worker_name(1), *([SERVER] if server else []))
    planned = plan_kills(seed, victims, num_kills=given.kills, steps=steps)
    kills: dict[str, int] = dict.fromkeys(victims, 0)
    began = time.monotonic()
    try:
        with LocalRun([str(folder / "run.toml")], rule=_RULE) as run:
            run.start_services()
            with Bus.connect(run.nats, name="proof") as bus, Observer(run_id, bus) as observer:
                run.start_trainer()
                give_up = time.monotonic() + given.deadline_s
                for kill in planned:
                    until(lambda kill=kill: observer.seen.newest_step >= kill.step, f"step {kill.step}", give_up, run)
                    time.sleep(kill.delay_s)
                    if kill.victim == SERVER and server is not None:
                        server.kill()
                    else:
                        alive = {view.name: view.alive for view in run.processes()}
                        until(
                            lambda kill=kill: {view.name: view.alive for view in run.processes()}[kill.victim],
                            f"{kill.victim} (alive: {alive})", give_up, run,
                        )  # fmt: skip
                        run.kill(kill.victim)
                    kills[kill.victim] += 1
                code = run.wait(max(1.0, give_up - time.monotonic()))
                if code != 0:
                    ended = f"ended with {code}" if code is not None else f"did not end within {given.deadline_s:g} s"
                    raise SystemExit(f"the trainer {ended}:\n{run.log_tail(TRAINER)}")
                blobs = Blobs(run.s3)
                proof = check_record(gather(run_id, bus, blobs, run.folder / "checkpoints", reads_packs=True))
                left = [stat.key for stat in blobs.list(blob_keys.all_finished_episodes_prefix(run_id))]
                num_redelivered = observer.seen.num_redelivered
            texts = [run.log(worker_name(number)).read_text(errors="replace") for number in (0, 1)]
    finally:
        if server is not None:
            server.stop()
    lines = [line for text in texts for line in text.splitlines() if "finished episodes continued" in line]
    continued = sum(int(found[1]) for line in lines if (found := re.search(r"num_episodes\W+(\d+)", line)))
    train, replay = proof.splits[0], replayed(run_id, folder)
    failures = [f"{breach.kind}: {breach.group_id} {breach.detail}" for breach in proof.breaches]
    failures += [] if proof.closes else ["the audit does not close"]
    if train.used != steps * GROUPS_PER_STEP:
        failures.append(f"{train.used} groups trained, expected {steps * GROUPS_PER_STEP}")
    if not replay["holds"]:
        failures.append(f"the replay differs: {replay['difference']}, {replay['findings']}")
    if not continued:
        failures.append("no ended episode was continued by another worker: the kills came at the wrong moments")
    deadline = time.monotonic() + _SWEPT_S
    while (orphans := left_behind()) and time.monotonic() < deadline:
        # The sweepers of the last kills ended with the run; what they left is swept here as the next worker would.
        time.sleep(0.5)
        program_process.sweep(Path(tempfile.gettempdir()))
    failures += [f"left behind: {orphan}" for orphan in orphans]
    return {
        "run": kind,
        "steps": steps,
        "kills": kills,
        "groups_issued": train.issued,
        "groups_trained": train.used,
        "groups_redelivered": num_redelivered,
        "episodes_continued": continued,
        "episode_objects_left": len(left),
        "versions_replayed": len(replay["same"]),
        "wall_s": round(time.monotonic() - began, 1),
        "failures": failures,
    }


def until(condition: Callable[[], object], what: str, give_up: float, run: LocalRun) -> None:
    while not condition():
        code = run.wait(0.05)
        if code is not None:
            raise SystemExit(f"the trainer ended with {code} before {what}:\n{run.log_tail(TRAINER)}")
        if time.monotonic() > give_up:
            raise SystemExit(f"waited in vain for {what}:\n{run.log_tail(TRAINER)}")


def replayed(run_id: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "replay", run_id, f"run.dir={folder / 'runs'}", "--json"],
        capture_output=True, text=True, timeout=1800, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if not done.stdout.strip():
        raise SystemExit(f"the replay ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def left_behind() -> list[str]:
    """Return processes and folders of workers that do not run any more."""
    found = [f"process {pid}" for pid in program_process.left_processes()]
    return found + [str(left_folder) for left_folder in program_process.left_folders(Path(tempfile.gettempdir()))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["http", "programs"], default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--deadline-s", type=float, default=1800.0, help="time limit for one run")
    given = parser.parse_args()
    logs.configure("proof", level="error")
    failed = False
    for kind in ("http", "programs"):
        if given.only in ("", kind):
            with tempfile.TemporaryDirectory(prefix="agents-") as scratch:
                figures = prove(kind, Path(scratch).absolute(), given)
            print(json.dumps(figures), flush=True)
            failed = failed or bool(figures["failures"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
