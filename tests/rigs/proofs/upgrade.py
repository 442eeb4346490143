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
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.rigs.proofs.proof import Proof, plain_environ
from tests.small_run import write_small_run

from penstock.console.tools.removal import running_services
from penstock.deploy.processes.child import Child
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.protocol.transport.bus import Bus

_ROOT = Path(__file__).parents[3]
_STEPS = 1000  # never reached: the run is stopped when all services are replaced
_MORE = 8  # steps that services have to train together


class Upgrade(Proof):
    """The services of one run, old and new, and what was found about them."""

    def __init__(self, base: Path, old: Path, deadline_s: float) -> None:
        super().__init__(base, deadline_s=deadline_s)
        self.pythons = {"old": old, "new": Path(sys.executable)}

    def use(self, nats: NatsServer, s3: S3Server) -> None:
        kept = {name: value for name, value in plain_environ().items() if not name.startswith("PYTHON")}
        self.nats = nats.settings
        self.environ = {  # by hand: the old code may not know every setting that has a name now
            **kept,
            "PENSTOCK_NATS__URL": nats.settings.url,
            "PENSTOCK_NATS__USER": nats.settings.user,
            "PENSTOCK_NATS__PASSWORD": nats.settings.secret(),
            "PENSTOCK_S3__ENDPOINT": s3.settings.endpoint,
            "PENSTOCK_S3__ACCESS_KEY": s3.settings.access_key,
            "PENSTOCK_S3__SECRET_KEY": s3.settings.secret(),
            "OMP_NUM_THREADS": "1",
        }

    def begin(self, age: str, name: str, *arguments: str) -> Child:
        """Start a verb of penstock with the old code or the new."""
        return self.start(name, *arguments, f"run.dir={self.runs}", python=self.pythons[age])

    def services(self) -> set[str]:
        with Bus.connect(self.nats, name="proof") as bus:
            return set(running_services("upgraded", bus))

    def join(self, name: str, *arguments: str) -> Child:
        """Start a new service and wait for its heartbeat."""
        before = self.services()
        child = self.begin("new", name, *arguments)
        self.wait(f"{name} joins", lambda: bool(self.services() - before))
        return child

    def train(self, who: str) -> None:
        wanted = len(self.steps("upgraded")) + _MORE
        self.wait(f"{_MORE} more steps, up to {wanted}, with {who}", lambda: len(self.steps("upgraded")) >= wanted)

    def stop(self, child: Child) -> None:
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
    write_small_run(
        base,
        "upgraded",
        num_train=2000,
        rollout={"groups_per_step": 8, "group_size": 8, "max_staleness": 2},
        trainer={"steps": _STEPS, "checkpoint_every": 5, "keep_versions": 64, "store_checkpoints": True},
        eval={"every": 10},
    )
    os.chdir(base)
    servers = [NatsServer(base / f"nats{i}", log=base / f"nats{i}.log") for i in (0, 1)]
    stores = [S3Server(base / f"s3-{i}", log=base / f"s3-{i}.log") for i in (0, 1)]
    proof = Upgrade(base, old, options.deadline_s)
    try:
        for server in (*servers, *stores):
            server.start()
        proof.use(servers[0], stores[0])
        _replace_in_turn(proof)
        _save(proof)
        proof.use(servers[1], stores[1])
        _go_on_elsewhere(proof)
    finally:
        proof.stop_all()
        for server in (*servers, *stores):
            server.stop()
        subprocess.run(
            ["git", "worktree", "remove", "--force", str(base / "old")], cwd=_ROOT, check=False, capture_output=True
        )
    return proof.end()


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
    installed = {canonicalize_name(distribution.name) for distribution in importlib.metadata.distributions()}
    names = (canonicalize_name(Requirement(one).name) for one in wanted)
    return sorted(set(names) - installed - {"penstock"})


def _replace_in_turn(proof: Upgrade) -> None:
    old = proof.pythons["old"]
    service = ("reward", "service", "run.toml", "reward_service.port=0")
    proof.check("old: streams and buckets are created", proof.ask("bootstrap", "run.toml", python=old).returncode == 0)
    reward = proof.begin("old", "old-reward", *service)
    workers = [proof.begin("old", f"old-worker-{i}", "rollout", "run.toml", f"worker.id=old-{i}") for i in (0, 1)]
    trainer = proof.begin("old", "old-trainer", "train", "run.toml")
    proof.train("old services")
    proof.check("new: streams and buckets are updated", proof.ask("bootstrap", "run.toml").returncode == 0)
    proof.join("new-reward", *service)
    proof.train("an old and a new reward service")
    proof.stop(reward)
    proof.join("new-worker-0", "rollout", "run.toml", "worker.id=new-0")
    proof.stop(workers[0])
    proof.train("a new reward service, an old and a new worker, the old trainer")
    proof.stop(trainer)
    trainer = proof.begin("new", "new-trainer", "train", "run.toml")
    proof.train("the new trainer, an old and a new worker")
    proof.join("new-worker-1", "rollout", "run.toml", "worker.id=new-1")
    workers[1].kill()
    proof.train("new services, after the SIGKILL of the last old one")
    proof.stop(trainer)
    for child in proof.started:
        child.stop()
    before = proof.steps("upgraded")
    proof.check(f"steps 1 to {before[-1]}, each once", before == list(range(1, before[-1] + 1)))
    proof.check("the accounting balances", proof.ask("audit", "upgraded").returncode == 0)


def _save(proof: Upgrade) -> None:
    time.sleep(12.0)  # heartbeats and leases end
    saved = proof.ask("runs", "backup", "upgraded", "--to", "backup")
    proof.check(f"{saved.stdout.splitlines()[:1]} {saved.stderr[-300:]}", saved.returncode == 0)
    proof.check("the newest checkpoint is in it", "run folder only" not in saved.stdout)


def _go_on_elsewhere(proof: Upgrade) -> None:
    last = proof.steps("upgraded")[-1] + 2 * _MORE
    proof.runs = proof.base / "elsewhere"  # without the trainer's run folder
    restored = proof.ask("runs", "restore", "backup")
    proof.check(f"{restored.stdout.splitlines()[:1]} {restored.stderr[-300:]}", restored.returncode == 0)
    here = f"run.dir={proof.runs}"
    proof.check("the accounting balances there", proof.ask("audit", "upgraded", here).returncode == 0)
    proof.begin("new", "reward-elsewhere", "reward", "service", "run.toml", "reward_service.port=0")
    proof.begin("new", "worker-elsewhere", "rollout", "run.toml", "worker.id=elsewhere")
    trainer = proof.begin("new", "trainer-elsewhere", "train", "run.toml", f"trainer.steps={last}")
    proof.wait("the restored run ends", lambda: not trainer.alive)
    proof.check(f"with exit code {trainer.returncode}", trainer.returncode == 0)
    proof.check(f"steps 1 to {last}, each once", proof.steps("upgraded") == list(range(1, last + 1)))
    audit = proof.ask("audit", "upgraded", here)
    proof.check("the accounting balances at the end", audit.returncode == 0)
    print("\n".join(f"    {line}" for line in audit.stdout.splitlines() if line.strip()))
    replay = proof.ask("replay", "upgraded", here)
    said = (replay.stdout + replay.stderr).strip().splitlines()[-1:]
    proof.check(f"replayed, the old trainer's steps too: {' '.join(said)}", replay.returncode == 0)


if __name__ == "__main__":
    sys.exit(main())
