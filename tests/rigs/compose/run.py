"""Run what `docker compose --profile cpu --profile observability up --scale rollout-cpu=N` would start, as processes in namespaces of this machine.

    python -m tests.rigs.compose.run [--scale N] [--steps N] [--keep]        # make compose-test; needs root and iproute2

compose.yaml is read as it is: services, commands, variables, files, volumes, secrets, networks, health checks, order and
restarts. In place of images stand this repository's environment, nats-server, Debian's prometheus, and a program for MinIO
that has users and policies, and one for Grafana (`stand_ins.py`). In mid-run a worker, the reward service and the trainer are killed once
each. Prometheus must have read all of them over TLS. Then the run is audited with the viewer's credentials. Exit code 0 when everything that it prints holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.rigs.compose.interpret import Mount, Service, interpret
from tests.rigs.compose.stack import Stack

from penstock.deploy.make_secrets import make_secrets
from penstock.deploy.quickstart_task import write_data, write_model
from penstock.deploy.s3_policies import access_key

REPOSITORY = Path(__file__).parents[3]
RUN = "composed"
PROFILES = ("cpu", "observability")
_SCRAPED = {"penstock-trainer": 1, "penstock-reward": 1}  # and the workers: services that Prometheus must have read
_ASK = """
import json, ssl, sys, urllib.request as u
context = ssl.create_default_context(cafile="/etc/penstock/ca.pem")
print(json.dumps(json.load(u.urlopen("https://prometheus:9090/api/v1/" + sys.argv[1], timeout=5, context=context))["data"]))
"""
_RUN_FILE = """
data = {{ train = "/data/train.jsonl", eval = "/data/eval.jsonl" }}
rollout = {{ groups_per_step = 4, group_size = 4, max_new_tokens = 10 }}
reward = {{ name = "exact_match" }}
trainer = {{ steps = {steps}, lr = 1e-4, checkpoint_every = 3 }}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rigs.compose.run", allow_abbrev=False)
    parser.add_argument("--scale", type=int, default=2, help="workers (default: 2)")
    # Prometheus must read the trainer between its restart and its end
    parser.add_argument("--steps", type=int, default=200, help="steps of the trainer (default: 200)")
    parser.add_argument("--keep", action="store_true", help="keep the folder, with every container's log")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that containers and namespaces are removed
    folder = Path(tempfile.mkdtemp(prefix="penstock-compose-"))
    folder.chmod(0o755)  # containers reach their files under another user id
    try:
        return _run(folder, options.scale, options.steps)
    finally:
        if options.keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, scale: int, steps: int) -> int:
    files = folder / "deploy"
    files.mkdir()
    for name in ("compose.yaml", "nats.conf"):
        shutil.copy(REPOSITORY / "deploy" / name, files / name)
    shutil.copytree(REPOSITORY / "deploy" / "monitoring", files / "monitoring")
    make_secrets(files / "secrets")
    write_model(files / "model", seed=0)
    (files / "model" / "model.safetensors").chmod(0o644)  # as one that was downloaded: containers have another user
    write_data(files / "data", seed=0, num_sft=1, num_train=400, num_eval=8)
    (files / "run.toml").write_text(_RUN_FILE.format(steps=steps))
    services = interpret((files / "compose.yaml").read_text(), {"RUN_ID": RUN}, list(PROFILES), {"rollout-cpu": scale})
    subnet = f"10.213.{os.getpid() % 250}"
    started = time.monotonic()
    with Stack(services, files=files, repository=REPOSITORY, work=folder, subnet=subnet) as stack:
        (trainer,) = stack.of("trainer-cpu")
        metrics = folder / "volumes" / "runs" / RUN / "metrics.jsonl"

        def steps_done() -> int:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            return sum('"kind":"step"' in line.replace(" ", "") for line in lines)

        for at, container in ((2, stack.of("rollout-cpu")[0]), (4, stack.of("reward")[0]), (6, trainer)):
            stack.wait(lambda at=at: steps_done() >= at, f"step {at}", 900)
            restarts = container.restarts
            container.kill(signal.SIGKILL)
            stack.wait(lambda one=container, n=restarts: one.restarts > n and one.code is None, "restart", 60)
        stack.wait(lambda: trainer.code == 0, "end of the trainer", 900)
        wall_s = time.monotonic() - started
        done = steps_done()
        stack.wait(
            lambda: all(one.state == "healthy" for name, one in stack.health.items() if not name.startswith("trainer")),
            "health of all",
            120,
        )
        scraped, rules = _scraped(stack, {**_SCRAPED, "penstock-rollout": scale})
        healthy = sorted(name for name, one in stack.health.items() if one.state == "healthy")
        outcome = {
            name: _tool(stack, services["trainer-cpu"], number, words)
            for number, (name, words) in enumerate(_TOOLS.items(), 200)
        }
        refused = [line for line in stack.of("s3")[0].log.read_text().splitlines() if line.startswith("refused ")]
        restarts = {one.name: one.restarts for one in stack.containers if one.restarts}
        report = stack.report()
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    audit = json.loads(outcome["audit"][1]) if outcome["audit"][0] == 0 else {}
    result = {
        "containers": sum(service.replicas for service in services.values()), "healthy": healthy, "restarts": restarts,
        "steps": done, "audit": outcome["audit"][0], "breaches": audit.get("breaches"), "lineage": outcome["lineage"][0],
        "weights": outcome["weights"][0], "replay with signatures": outcome["replay"][0],
        "read by Prometheus": scraped, "alerts without an error": rules, "requests that a policy refused": refused, "wall_s": round(wall_s, 1), "cpu_s": round(cpu.ru_utime + cpu.ru_stime, 1),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    holds = (
        all(code == 0 for code, _ in outcome.values())
        and audit.get("breaches") == []
        and not refused
        and len(restarts) == 3
        and scraped == {**_SCRAPED, "penstock-rollout": scale}
        and rules > 10
        and done >= steps
    )
    if not holds:
        print(
            report,
            *(f"== {name}: {code}\n{text[-3000:]}" for name, (code, text) in outcome.items()),
            sep="\n",
            file=sys.stderr,
        )
    return 0 if holds else 1


def _scraped(stack: Stack, wanted: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return how many services of each job Prometheus has read, once they are all that are wanted or a minute later, and its healthy alerts."""
    (targets,) = stack.of("targets")

    def ask(path: str) -> Any:
        code, text = targets.run([sys.executable, "-c", _ASK, path], 20)
        return json.loads(text) if code == 0 else None

    def seen() -> dict[str, int]:
        answer = ask("query?query=count%20by%20(job)%20(max_over_time(up[30m])%20==%201)")
        return {one["metric"]["job"]: int(one["value"][1]) for one in answer["result"]} if answer else {}

    with contextlib.suppress(TimeoutError):
        stack.wait(lambda: seen() == wanted, "scrapes", 60)
    groups = (ask("rules") or {"groups": []})["groups"]
    return seen(), sum(rule["health"] == "ok" for group in groups for rule in group["rules"])


_TOOLS = {
    "audit": ("audit", RUN, "--json"),
    "lineage": ("lineage", RUN, "--json"),
    "weights": ("weights", "export", RUN, "--version", "LAST", "--to", "/tmp/exported"),
    "replay": ("replay", RUN, "--model", "/model", "--json", "--trusted-keys", "/etc/penstock/signing.pem"),
}  # fmt: skip


def _tool(stack: Stack, trainer: Service, number: int, words: Sequence[str]) -> tuple[int, str]:
    """Run a command about the run with the viewer's credentials, as `docker compose run` does; returns exit code and stdout."""
    secrets = ("nats_viewer", "s3_viewer")
    environment = {
        **{name: value for name, value in trainer.environment.items() if "SIGNING" not in name},
        "PENSTOCK_NATS__USER": "viewer",
        "PENSTOCK_NATS__PASSWORD_FILE": "/run/secrets/nats_viewer",
        "PENSTOCK_S3__ACCESS_KEY": access_key("viewer"),
        "PENSTOCK_S3__SECRET_KEY_FILE": "/run/secrets/s3_viewer",
        "PENSTOCK_WORKER__TRUSTED_KEYS_FILE": "/etc/penstock/signing.pem",
    }
    mounts = (
        *(mount for mount in trainer.mounts if not mount.target.startswith("/run/secrets/")),
        *(Mount(f"/run/secrets/{secret}", f"./secrets/{secret}", read_only=True) for secret in secrets),
        Mount("/etc/penstock/signing.pem", "./secrets/tls/signing.pem", read_only=True),
    )
    words = [_last_version(stack) if word == "LAST" else word for word in words]
    service = replace(
        trainer, name=f"tool-{words[0]}", command=("penstock", *words), environment=environment, mounts=mounts, check=None,
        restart="no", depends_on={},
    )  # fmt: skip
    container = stack.container(service, number)
    stack.start(container)
    stack.wait(lambda: container.code is not None, f"end of {words[0]}", 900)
    text = container.log.read_text()
    return container.code or 0, text.strip().rpartition("\n")[2] if "--json" in words else text


def _last_version(stack: Stack) -> str:
    """Return the newest version that workers were asked to load, from the trainer's log."""
    found = [
        json.loads(line) for line in stack.of("trainer-cpu")[0].log.read_text().splitlines() if line.startswith("{")
    ]
    versions = [one["version"] for one in found if isinstance(one.get("version"), int)]
    return str(max(versions, default=0))


if __name__ == "__main__":
    sys.exit(main())
