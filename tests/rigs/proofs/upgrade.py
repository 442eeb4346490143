"""Upgrade one service after the other while a run goes on, then back it up and go on elsewhere. `make proof NAME=upgrade REVISION=COMMIT`.

    python -m tests.rigs.proofs.upgrade REVISION [FOLDER] [--deadline-s SECONDS]

Every service begins with the code of REVISION of this repository, in an interpreter of its own. Reward service, workers and trainer are replaced
in turn by those of the working tree; for some steps old and new ones work together. Then the run is stopped, saved and
restored on a second pair of servers, where it is trained to its end, audited and replayed: every version must have the
weights that the record says, those that the old trainer made included. Prints a line for each step; exit code 1 when one does not hold.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.console.tools.removal import running_services
from penstock.deploy import quickstart_task
from penstock.deploy.processes.child import Child
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.transport.bus import Bus

_ROOT = Path(__file__).parents[3]
_STEPS = 1000  # never reached: the run is stopped when all services are replaced
_MORE = 8  # steps that services have to train together
_RUN_FILE = """
run = { id = "upgraded" }
model.path = "model"
data = { train = "data/train.jsonl", eval = "data/eval.jsonl" }
reward = { name = "exact_match" }
rollout = { groups_per_step = 8, group_size = 8, max_new_tokens = 10, max_staleness = 2 }
trainer = { steps = %d, lr = 1e-4, checkpoint_every = 5, keep_versions = 64, store_checkpoints = true }
eval.every = 10
"""


class Proof:
    """The services of one run, old and new, and what was found about them."""

    def __init__(self, base: Path, old: Path, deadline_s: float) -> None:
        self.base, self.deadline_s = base, deadline_s
        self.num_failed = 0
        self.pythons = {"old": old, "new": Path(sys.executable)}
        self.started: list[Child] = []
        self.environ: dict[str, str] = {}
        self.run_dir = base / "runs"

    def check(self, what: str, holds: bool) -> None:
        self.num_failed += not holds
        print(f"{'ok ' if holds else 'BAD'} {what}", flush=True)

    def use(self, nats: NatsServer, s3: S3Server) -> None:
        """Use these servers from now on."""
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTHON"))},
            "PENSTOCK_NATS__URL": nats.settings.url,
            "PENSTOCK_NATS__USER": nats.settings.user,
            "PENSTOCK_NATS__PASSWORD": nats.settings.secret(),
            "PENSTOCK_S3__ENDPOINT": s3.settings.endpoint,
            "PENSTOCK_S3__ACCESS_KEY": s3.settings.access_key,
            "PENSTOCK_S3__SECRET_KEY": s3.settings.secret(),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, age: str, name: str, *arguments: str) -> Child:
        """Start a verb of penstock with the old code or the new."""
        command = [str(self.pythons[age]), "-P", "-m", "penstock", *arguments, f"run.dir={self.run_dir}"]
        child = Child(name, command, log=self.base / f"{name}.log", environ=self.environ)
        child.start()
        self.started.append(child)
        return child

    def ask(self, age: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.pythons[age]), "-P", "-m", "penstock", *arguments],
            env=self.environ, cwd=self.base, capture_output=True, text=True, check=False, timeout=self.deadline_s,
        )  # fmt: skip

    def steps(self) -> list[int]:
        file = self.run_dir / "upgraded" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row["step"] for row in rows if row["kind"] == "step"]

    def services(self) -> set[str]:
        """Ids of the services that have a heartbeat."""
        settings = NatsSettings(
            url=self.environ["PENSTOCK_NATS__URL"],
            user=self.environ["PENSTOCK_NATS__USER"],
            password=self.environ["PENSTOCK_NATS__PASSWORD"],
        )
        with Bus.connect(settings, name="proof") as bus:
            return set(running_services("upgraded", bus))

    def join(self, name: str, *arguments: str) -> Child:
        """Start a new service and wait for its heartbeat."""
        before = self.services()
        child = self.start("new", name, *arguments)
        self.wait(f"{name} joins", lambda: bool(self.services() - before))
        return child

    def train(self, who: str) -> None:
        """Wait for further steps."""
        wanted = len(self.steps()) + _MORE
        self.wait(f"{_MORE} more steps, up to {wanted}, with {who}", lambda: len(self.steps()) >= wanted)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        since = time.monotonic()
        while not (holds := condition()) and time.monotonic() - since < self.deadline_s:
            time.sleep(0.1)
        self.check(f"{what} after {time.monotonic() - since:.0f} s", holds)

    def stop(self, child: Child) -> None:
        """Ask a service to stop, and wait until it has."""
        child.ask_to_stop()
        self.check(
            f"{child.name} stops with exit code {child.wait(self.deadline_s / 5)}",
            child.returncode in (0, 130, 143, -15),
        )


def main() -> int:
    """Return 1 when a step of the proof does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.rigs.proofs.upgrade", allow_abbrev=False)
    parser.add_argument("revision", help="commit whose code the run begins with")
    parser.add_argument("folder", nargs="?", type=Path, help="where the run's files are (default: a new folder)")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="of each step of the proof (default: 300)")
    options = parser.parse_args()
    base = (options.folder or Path(tempfile.mkdtemp(prefix="upgrade-"))).absolute()
    base.mkdir(parents=True, exist_ok=True)
    old = _old_interpreter(options.revision, base)
    quickstart_task.write_data(base / "data", seed=0, num_sft=1, num_train=2000, num_eval=32)
    quickstart_task.write_model(base / "model", seed=0)
    (base / "run.toml").write_text(_RUN_FILE % _STEPS)
    os.chdir(base)
    servers = [NatsServer(base / f"nats{i}", log=base / f"nats{i}.log") for i in (0, 1)]
    stores = [S3Server(base / f"s3-{i}", log=base / f"s3-{i}.log") for i in (0, 1)]
    proof = Proof(base, old, options.deadline_s)
    try:
        for server in (*servers, *stores):
            server.start()
        proof.use(servers[0], stores[0])
        _replace_in_turn(proof)
        _save(proof)
        proof.use(servers[1], stores[1])
        _go_on_elsewhere(proof)
    finally:
        for child in reversed(proof.started):
            child.stop()
        for server in (*servers, *stores):
            server.stop()
        subprocess.run(
            ["git", "worktree", "remove", "--force", str(base / "old")], cwd=_ROOT, check=False, capture_output=True
        )
    print(f"{proof.num_failed} steps of the proof do not hold; {base}")
    return int(proof.num_failed > 0)


def _old_interpreter(revision: str, base: Path) -> Path:
    """Return a Python that imports penstock from a checkout of the revision, all else from this one's packages or, where these lack it, installed."""
    subprocess.run(["git", "worktree", "add", "--detach", str(base / "old"), revision], cwd=_ROOT, check=True)
    venv.create(base / "python", symlinks=True)
    [packages] = (base / "python" / "lib").glob("python3*/site-packages")
    ours = [one for one in sys.path if one.endswith("site-packages")]
    (packages / "old.pth").write_text("".join(f"{one}\n" for one in (base / "old" / "src", *ours)))
    python = base / "python" / "bin" / "python"
    found = subprocess.run(
        [python, "-P", "-c", "import penstock; print(penstock.__file__)"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_relative_to(base / "old"):
        raise RuntimeError(f"{python} imports penstock from {found}, not from {base / 'old'}; unset PYTHONPATH")
    if missing := _missing(base / "old"):
        print(f"installing what the revision needs and this tree does not: {', '.join(missing)}", flush=True)
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "-c", base / "old" / "constraints.txt", *missing], check=True)
    return python


def _missing(tree: Path) -> list[str]:
    """Return the requirements of a tree, those of its services included, that are not installed here."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    extras = ("trainer", "rollout", "reward", "local")
    wanted = [
        *project["dependencies"],
        *(one for extra in extras for one in project["optional-dependencies"].get(extra, ())),
    ]
    installed = {canonicalize_name(one.name) for one in importlib.metadata.distributions()}
    names = (canonicalize_name(Requirement(one).name) for one in wanted)
    return sorted(set(names) - installed - {"penstock"})


def _replace_in_turn(proof: Proof) -> None:
    service = ("reward", "service", "run.toml", "reward_service.port=0")
    proof.check("old: streams and buckets are created", proof.ask("old", "bootstrap", "run.toml").returncode == 0)
    reward = proof.start("old", "old-reward", *service)
    workers = [proof.start("old", f"old-worker-{i}", "rollout", "run.toml", f"worker.id=old-{i}") for i in (0, 1)]
    trainer = proof.start("old", "old-trainer", "train", "run.toml")
    proof.train("old services")
    proof.check("new: streams and buckets are updated", proof.ask("new", "bootstrap", "run.toml").returncode == 0)
    proof.join("new-reward", *service)
    proof.train("an old and a new reward service")
    proof.stop(reward)
    proof.join("new-worker-0", "rollout", "run.toml", "worker.id=new-0")
    proof.stop(workers[0])
    proof.train("a new reward service, an old and a new worker, the old trainer")
    proof.stop(trainer)
    trainer = proof.start("new", "new-trainer", "train", "run.toml")
    proof.train("the new trainer, an old and a new worker")
    proof.join("new-worker-1", "rollout", "run.toml", "worker.id=new-1")
    workers[1].kill()
    proof.train("new services, after the SIGKILL of the last old one")
    proof.stop(trainer)
    for child in proof.started:
        child.stop()
    before = proof.steps()
    proof.check(f"steps 1 to {before[-1]}, each once", before == list(range(1, before[-1] + 1)))
    proof.check("the accounting balances", proof.ask("new", "audit", "upgraded").returncode == 0)


def _save(proof: Proof) -> None:
    time.sleep(12.0)  # heartbeats and leases end
    saved = proof.ask("new", "runs", "backup", "upgraded", "--to", "backup")
    proof.check(f"{saved.stdout.splitlines()[:1]} {saved.stderr[-300:]}", saved.returncode == 0)
    proof.check("the newest checkpoint is in it", "run folder only" not in saved.stdout)


def _go_on_elsewhere(proof: Proof) -> None:
    last = proof.steps()[-1] + 2 * _MORE
    proof.run_dir = proof.base / "elsewhere"  # without the trainer's run folder
    restored = proof.ask("new", "runs", "restore", "backup")
    proof.check(f"{restored.stdout.splitlines()[:1]} {restored.stderr[-300:]}", restored.returncode == 0)
    here = f"run.dir={proof.run_dir}"
    proof.check("the accounting balances there", proof.ask("new", "audit", "upgraded", here).returncode == 0)
    proof.start("new", "reward-elsewhere", "reward", "service", "run.toml", "reward_service.port=0")
    proof.start("new", "worker-elsewhere", "rollout", "run.toml", "worker.id=elsewhere")
    trainer = proof.start("new", "trainer-elsewhere", "train", "run.toml", f"trainer.steps={last}")
    proof.wait("the restored run ends", lambda: not trainer.alive)
    proof.check(f"with exit code {trainer.returncode}", trainer.returncode == 0)
    proof.check(f"steps 1 to {last}, each once", proof.steps() == list(range(1, last + 1)))
    audit = proof.ask("new", "audit", "upgraded", here)
    proof.check("the accounting balances at the end", audit.returncode == 0)
    print("\n".join(f"    {line}" for line in audit.stdout.splitlines() if line.strip()))
    replay = proof.ask("new", "replay", "upgraded", here)
    said = (replay.stdout + replay.stderr).strip().splitlines()[-1:]
    proof.check(f"replayed, the old trainer's steps too: {' '.join(said)}", replay.returncode == 0)


if __name__ == "__main__":
    sys.exit(main())
