"""A real run under a real Prometheus: every query answers, no alert fires; then faults, and their alerts do. `make proof NAME=observe`.

    python -m tests.rigs.proofs.observe [FOLDER]        # as root: the run is in a file system of its own, which is filled

Seven faults, one after the other: a worker, the reward service and an endpoint that hang, an endpoint whose answers cannot be
scored, a version that an engine does not take, a disk that fills, and, in a run of its own that waits for every version, log-probabilities that are not the trainer's. The alerts
are those of `rules.yml` with a fifth of their times; that their whole times hold is what promtool tests
(`tests/deploy/monitoring/test_alerts.py`). Prints a line for each step of the proof with its figures; exit code 1 when one does
not hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from tests.alert_rules import rules
from tests.rigs.proofs.proof import Proof, folder_of
from tests.small_run import write_small_run

from penstock.deploy.local_run import LocalRun
from penstock.deploy.monitoring.alerts import ALERTS
from penstock.deploy.monitoring.dashboards import read_boards
from penstock.deploy.monitoring.observe import METRICS_ON, Prometheus, target_writer
from penstock.protocol import logs

_REWARD = """
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if Path(FOLDER, "endpoint-fails").exists():
        raise RuntimeError("no score, for the proof")
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / 8
"""
# The embedded engine, whose client spoils what it was told to by files.
_ENGINE = """
import asyncio
from dataclasses import replace
from pathlib import Path

from penstock.rollout_service.engines.embedded import EMBEDDED
from penstock.rollout_service.engines.sglang.client import SglangClient


class Flawed(SglangClient):
    async def generate(self, *given, **named):
        found = await super().generate(*given, **named)
        if not Path(FOLDER, "log-probabilities-differ").exists():
            return found
        return [[replace(one, logprobs=[value - 0.07 for value in one.logprobs]) for one in group] for group in found]

    async def load_weights(self, folder, *given, **named):
        while Path(FOLDER, "version-not-taken").exists() and "worker-1" in str(folder):
            await asyncio.sleep(0.2)
        await super().load_weights(folder, *given, **named)


kind = replace(EMBEDDED, name="flawed", connect=Flawed)
"""
_DISK_MB = 3000
_FASTER = 5  # times as fast as rules.yml
_WARM_S, _FAULT_S = 240.0, 420.0
_STEPS = 25
_RATE = "30s"  # for $__rate_interval: scrapes are two seconds apart


class Observed(Proof):
    def __init__(self, base: Path, url: str) -> None:
        super().__init__(base)
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30).json()
        assert answer["status"] == "success", (expression, answer)
        return answer["data"]["result"]

    def alerts(self) -> set[str]:
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}


def main() -> int:
    """Return 1 when a step of the proof does not hold."""
    base = folder_of("observe")
    os.chdir(base)
    if not (base / "run.toml").exists():
        write_small_run(
            base,
            "observed",
            num_train=4000,
            reward={"name": "strict"},
            trainer={"steps": 100_000, "checkpoint_every_s": 20},
            eval={"every": 20},
            worker={"engine": "flawed.py:kind"},
        )
        (base / "strict.py").write_text(_REWARD.replace("FOLDER", repr(str(base))))
        (base / "flawed.py").write_text(_ENGINE.replace("FOLDER", repr(str(base))))
    logs.configure("proof", level="warning")
    (base / "rules.yml").write_text(
        rules(tuple(replace(one, expr=faster(one.expr), wait=faster(one.wait)) for one in ALERTS))
    )
    with _disk(base / "runs"):
        failed = _observe(base, "observed", [], _prove)
        failed += _observe(base, "compared", ["rollout.max_staleness=0"], _prove_mismatch)
    print(f"{failed} steps of the proof do not hold; {base}")
    return int(failed > 0)


def faster(text: str) -> str:
    """Return an expression, or a wait, with every range and time in minutes at a fraction of it; never below ten seconds."""
    return re.sub(r"\b(\d+)m\b", lambda match: f"{max(10, int(match[1]) * 60 // _FASTER)}s", text)


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """A file system of its own for the run, in memory, so that it can be filled."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _observe(base: Path, run_id: str, settings: list[str], prove: Callable[[Observed, LocalRun], None]) -> int:
    """Start a run and a Prometheus that reads it; return how many steps of its proof do not hold."""
    settings = ["run.toml", *METRICS_ON, f"run.id={run_id}", *settings]
    prometheus = Prometheus(base / f"prometheus-{run_id}", rules=base / "rules.yml")
    prometheus.start()
    proof = Observed(base, prometheus.url)
    writer = None
    try:
        with LocalRun(settings, num_workers=2, reward_files=[base / "strict.py"]) as run:
            run.start_services()
            writer = target_writer(settings, run.folder, prometheus.targets)
            assert writer is not None
            writer.start()
            run.start_trainer()
            prove(proof, run)
    finally:
        if writer is not None:
            writer.stop()
        prometheus.stop()
    return proof.num_failed


def _warm_up(proof: Observed) -> None:
    def done() -> bool:
        steps = proof.query("penstock_trainer_steps_total")
        evaluated = proof.query("penstock_eval_version")
        saved = proof.query("penstock_trainer_last_checkpoint_timestamp_seconds")
        return bool(steps and evaluated and saved) and float(steps[0]["value"][1]) >= _STEPS

    proof.wait(f"{_STEPS} steps, an evaluation and a checkpoint", done, _WARM_S)
    proof.wait("Prometheus reads four services", lambda: len(proof.query("up == 1")) == 4, 30)


def _prove_mismatch(proof: Observed, _: LocalRun) -> None:
    """In a run that waits for every version: all its tokens can be compared."""
    _warm_up(proof)
    flag = Path.cwd() / "log-probabilities-differ"
    proof.check("no difference before", not proof.query("penstock_trainer_engine_mismatch_nats > 0.001"))
    _until_it_fires(proof, flag.name, {"PenstockEngineMismatch"}, flag.touch, flag.unlink)


def _prove(proof: Observed, run: LocalRun) -> None:
    _warm_up(proof)
    num_queries, num_series, empty, idle = 0, 0, [], []
    dashboards = read_boards()
    for board in dashboards:
        for panel in board.panels():
            for query in panel.queries:
                text = query.of_run().replace("$run", ".*").replace("$__rate_interval", _RATE)
                found = len(proof.query(text))
                num_queries += 1
                num_series += found
                if not found:
                    (idle if panel.needs else empty).append(f"{board.title}, {panel.title}: {text}")
    proof.check(f"{num_queries} queries of {len(dashboards)} dashboards answer with {num_series} series", not empty)
    print("\n".join(f"    empty: {one}" for one in empty))
    print("\n".join(f"    empty, as it should be without its cause: {one}" for one in idle))
    found = httpx.get(f"{proof.url}/api/v1/rules", timeout=30).json()["data"]["groups"][0]["rules"]
    proof.check(f"{len(found)} alerts evaluated, none with an error", all(rule["health"] == "ok" for rule in found))
    proof.check(f"alerts that fire in a healthy run: {sorted(proof.alerts())}", not proof.alerts())
    _fault(proof, run, "worker-1", {"PenstockFewerWorkers"})
    _fault(proof, run, "reward", {"PenstockNoRewardService"})
    _fault(proof, run, "endpoint-strict", {"PenstockRewardsWait"})
    base = Path.cwd()
    for flag, expected in (
        ("endpoint-fails", {"PenstockEndpointErrors"}),
        ("version-not-taken", {"PenstockWorkerOnOldWeights"}),
    ):
        _until_it_fires(proof, flag, expected, (base / flag).touch, (base / flag).unlink)
    fill = base / "runs" / "fill"
    _until_it_fires(proof, "disk fills", {"PenstockDiskFills"}, lambda: _fill(fill), fill.unlink)


def _fill(file: Path) -> None:
    free = shutil.disk_usage(file.parent).free
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, free - _DISK_MB * 1_000_000 // 20)


def _until_it_fires(
    proof: Observed, what: str, expected: set[str], begin: Callable[[], object], end: Callable[[], object]
) -> None:
    begin()
    try:
        proof.wait(f"{what}: {sorted(expected)} fire", lambda: expected <= proof.alerts(), _FAULT_S)
        print(f"    firing: {json.dumps(sorted(proof.alerts()))}")
    finally:
        end()
    proof.wait(f"{what} no more: no alert fires", lambda: not proof.alerts(), _FAULT_S)


def _fault(proof: Observed, run: LocalRun, name: str, expected: set[str]) -> None:
    """Stop a process as a machine that hangs would, until its alerts fire; then let it go on, and they end."""
    pid = next(view.pid for view in run.processes() if view.name == name)
    _until_it_fires(
        proof,
        f"{name} stopped",
        expected,
        lambda: os.killpg(pid, signal.SIGSTOP),
        lambda: os.killpg(pid, signal.SIGCONT),
    )


if __name__ == "__main__":
    sys.exit(main())
