"""A real run under a real Prometheus: every query answers, no alert fires; then faults, and their alerts do. `make proof-observe`.

    python -m benchmarks.proofs.observe [FOLDER]

Prints a line for each step of the proof with its figures; exit code 1 when one does not hold.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from penstock.deploy import quickstart_task
from penstock.deploy.local_run import LocalRun
from penstock.deploy.monitoring.boards import DASHBOARDS
from penstock.deploy.monitoring.observe import METRICS_ON, Prometheus, target_writer
from penstock.protocol import logs

_RUN_FILE = """
run = { id = "observed" }
model.path = "model"
data = { train = "data/train.jsonl", eval = "data/eval.jsonl" }
reward = { name = "strict" }
rollout = { groups_per_step = 4, group_size = 4, max_new_tokens = 10 }
trainer = { steps = 100000, lr = 1e-4, checkpoint_every_s = 20 }
eval.every = 20
"""
_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / 8
"""
_WARM_S, _FAULT_S = 240.0, 420.0
_STEPS = 25
_RATE = "30s"  # for $__rate_interval: scrapes are two seconds apart


class Proof:
    """The steps of the proof, and Prometheus' answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_failed = 0

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30).json()
        assert answer["status"] == "success", (expression, answer)
        return answer["data"]["result"]

    def alerts(self) -> set[str]:
        """Names of the alerts that fire."""
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}

    def check(self, what: str, holds: bool) -> None:
        self.num_failed += not holds
        print(f"{'ok ' if holds else 'BAD'} {what}", flush=True)

    def wait(self, what: str, condition: Callable[[], bool], deadline_s: float) -> None:
        started = time.monotonic()
        while not (holds := condition()) and time.monotonic() - started < deadline_s:
            time.sleep(1.0)
        self.check(f"{what} after {time.monotonic() - started:.0f} s", holds)


def main() -> int:
    """Return 1 when a step of the proof does not hold."""
    base = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="observe-")).absolute()
    base.mkdir(parents=True, exist_ok=True)
    os.chdir(base)
    if not (base / "run.toml").exists():
        quickstart_task.write_data(base / "data", seed=0, num_sft=1, num_train=4000, num_eval=8)
        quickstart_task.write_model(base / "model", seed=0)
        (base / "run.toml").write_text(_RUN_FILE)
        (base / "strict.py").write_text(_REWARD)
    logs.configure("proof", level="warning")
    prometheus = Prometheus(base / "prometheus")
    prometheus.start()
    proof = Proof(prometheus.url)
    writer = None
    try:
        with LocalRun(["run.toml", *METRICS_ON], num_workers=2, reward_files=[base / "strict.py"]) as run:
            run.start_services()
            writer = target_writer(["run.toml"], run.folder, prometheus.targets)
            assert writer is not None
            writer.start()
            run.start_trainer()
            _prove(proof, run)
    finally:
        if writer is not None:
            writer.stop()
        prometheus.stop()
    print(f"{proof.num_failed} steps of the proof do not hold; {base}")
    return int(proof.num_failed > 0)


def _prove(proof: Proof, run: LocalRun) -> None:
    def done() -> bool:
        steps = proof.query("penstock_trainer_steps_total")
        evaluated = proof.query("penstock_eval_version")
        saved = proof.query("penstock_trainer_last_checkpoint_timestamp_seconds")
        return bool(steps and evaluated and saved) and float(steps[0]["value"][1]) >= _STEPS

    proof.wait(f"{_STEPS} steps, an evaluation and a checkpoint", done, _WARM_S)
    proof.wait("Prometheus reads four services", lambda: len(proof.query("up == 1")) == 4, 30)
    num_queries, num_series, empty, idle = 0, 0, [], []
    for board in DASHBOARDS:
        for panel in board.panels():
            for query in panel.queries:
                text = query.of_run().replace("$run", ".*").replace("$__rate_interval", _RATE)
                found = len(proof.query(text))
                num_queries += 1
                num_series += found
                if not found:
                    (idle if panel.needs else empty).append(f"{board.title}, {panel.title}: {text}")
    proof.check(f"{num_queries} queries of {len(DASHBOARDS)} dashboards answer with {num_series} series", not empty)
    print("\n".join(f"    empty: {one}" for one in empty))
    print("\n".join(f"    empty, as it should be without its cause: {one}" for one in idle))
    rules = httpx.get(f"{proof.url}/api/v1/rules", timeout=30).json()["data"]["groups"][0]["rules"]
    proof.check(f"{len(rules)} alerts evaluated, none with an error", all(rule["health"] == "ok" for rule in rules))
    proof.check(f"alerts that fire in a healthy run: {sorted(proof.alerts())}", not proof.alerts())
    _fault(proof, run, "worker-1", {"PenstockFewerWorkers"})
    _fault(proof, run, "reward", {"PenstockNoRewardService"})
    _fault(proof, run, "endpoint-strict", {"PenstockRewardsWait"})


def _fault(proof: Proof, run: LocalRun, name: str, expected: set[str]) -> None:
    """Stop a process as a machine that hangs would, until its alerts fire; then let it go on, and they end."""
    pid = next(view.pid for view in run.processes() if view.name == name)
    os.killpg(pid, signal.SIGSTOP)
    try:
        proof.wait(f"{name} stopped (SIGSTOP): {sorted(expected)} fire", lambda: expected <= proof.alerts(), _FAULT_S)
        print(f"    firing: {json.dumps(sorted(proof.alerts()))}")
    finally:
        os.killpg(pid, signal.SIGCONT)
    proof.wait(f"{name} goes on: no alert fires", lambda: not proof.alerts(), _FAULT_S)


if __name__ == "__main__":
    sys.exit(main())
