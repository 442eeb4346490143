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
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.rigs.chaos.kills import Observer, carry_out, plan_kills
from tests.small_run import audit_failures, replay_failures, report_of, write_small_run

from penstock.agents.environments import program_process
from penstock.deploy import quickstart_task
from penstock.deploy.local_run import LocalRun, worker_name
from penstock.deploy.processes.servers import free_port
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


class EnvironmentServer:
    """`penstock env serve` at a fixed port; started again as soon as it was killed."""

    def __init__(self, file: Path) -> None:
        self.port = free_port()
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
    agent = folder / "agent"
    agent.mkdir()
    server = None
    if kind == "http":
        (agent / "ask.py").write_text(_ENVIRONMENT)
        server = EnvironmentServer(agent / "ask.py")
        environment = {"type": "http", "options": {"url": f"http://127.0.0.1:{server.port}"}}
    else:
        (agent / "ask.py").write_text(_PROGRAM)
        command = [sys.executable, "-I", "-S", str(agent / "ask.py")]
        options = {"command": command, "folder": str(agent), "sandbox": shutil.which("bwrap") is not None}
        environment = {"type": "program", "options": options}
    run_id = f"agents-{kind}-{seed}"
    ask = {**environment, "max_turns": TURNS, "keep_after_s": 0, "kept_staleness": 2}
    run_file = write_small_run(
        folder,
        run_id,
        seed=seed,
        num_train=8 * steps * GROUPS_PER_STEP,
        write_data=quickstart_task.write_tools_data,
        reward={"name": "environment"},
        environment={"define": {"ask": ask}},
        rollout={
            "environment": "ask", "groups_per_step": GROUPS_PER_STEP, "group_size": GROUP_SIZE, "groups_per_message": 2,
            "max_staleness": 2, "max_new_tokens": quickstart_task.TOOLS_MAX_NEW_TOKENS,
        },
        trainer={"steps": steps, "lr": 5e-4, "checkpoint_every": 2},
    )  # fmt: skip
    victims = (worker_name(0), worker_name(1), *([SERVER] if server else []))
    planned = plan_kills(seed, victims, num_kills=given.kills, steps=steps)
    kills: dict[str, int] = dict.fromkeys(victims, 0)
    began = time.monotonic()

    def kill(run: LocalRun, victim: str) -> None:
        kills[victim] += 1
        if victim == SERVER and server is not None:
            server.kill()
        else:
            run.kill(victim)

    try:
        with LocalRun([str(run_file)], rule=_RULE) as run:
            run.start_services()
            with Bus.connect(run.nats, name="proof") as bus, Observer(run_id, bus) as observer:
                run.start_trainer()
                num_made = carry_out(planned, run, observer.seen, kill, given.deadline_s)
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
    train, replay = proof.splits[0], report_of("replay", run_id, folder / "runs")
    failures = audit_failures(proof, steps * GROUPS_PER_STEP) + replay_failures(replay)
    if num_made < len(planned):
        failures.append(f"the run ended after {num_made} of {len(planned)} kills")
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
