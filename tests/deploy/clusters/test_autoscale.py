"""The autoscaler of the workers: what it reads there is, and it does not fight with the trainer's admission."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.servers import require_package

from penstock.deploy.make_secrets import make_secrets
from penstock.protocol import streams
from penstock.protocol.config.run_file import load
from penstock.protocol.metrics.table import METRICS
from penstock.rollout_service.settings import RolloutSettings

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'penstock[dev]'")

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
COMPONENT = FOLDER / "components" / "autoscale"
SCALER: dict[str, Any] = yaml.safe_load((COMPONENT / "scaledobject.yaml").read_text())["spec"]
RELEASE = "1.37"
_TOLERANCE = 0.1  # of a HorizontalPodAutoscaler: smaller differences change nothing
_LOADING_S = 120  # of a new worker, before it takes a pack


def test_an_overlay_with_the_component_leaves_the_number_to_the_autoscaler(tmp_path: Path) -> None:
    """Kustomize renders it; the Deployment has no number any more, and the behaviour is one that Kubernetes takes."""
    require_package("kubectl", "kubernetes-client")
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("secrets"))
    make_secrets(folder / "base" / "secrets", ["nats-0.nats", "nats-1.nats", "nats-2.nats"])
    overlay = folder / "overlays" / "gpu" / "kustomization.yaml"
    overlay.write_text(overlay.read_text() + "components: [../../components/autoscale]\n")
    made = subprocess.run(["kubectl", "kustomize", str(overlay.parent)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    objects = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(made.stdout)}
    target = SCALER["scaleTargetRef"]
    workers = objects[target["kind"], target["name"]]["spec"]
    assert "replicas" not in workers
    environment = workers["template"]["spec"]["containers"][0]["env"]
    most = next(one["value"] for one in environment if one["name"] == "PENSTOCK_WORKER__PACKS_IN_FLIGHT")
    assert most == SCALER["triggers"][0]["metadata"]["threshold"], "a worker takes as many packs as it is counted for"
    assert objects["ScaledObject", "rollout"]["metadata"]["namespace"] == "penstock"
    spec = {
        "scaleTargetRef": target, "minReplicas": SCALER["minReplicaCount"], "maxReplicas": SCALER["maxReplicaCount"],
        "behavior": SCALER["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
    }  # fmt: skip
    scaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "x"},
        "spec": spec,
    }
    kubernetes_validate.validate(scaler, RELEASE, strict=True)


def test_it_reads_what_the_trainer_shows() -> None:
    """The metrics are in the table, their labels are the run's stream of tasks, and the threshold is a worker's own number.

    The label `run` is not theirs: a Prometheus that finds the pods by itself does not write it.
    """
    (trigger,) = SCALER["triggers"]
    given = trigger["metadata"]
    run = load(RolloutSettings, files=[FOLDER / "base" / "run.toml"], environ={}).settings.run.id
    found = re.findall(r'(penstock_\w+)\{(\w+)="([^"]+)"\}', given["query"])
    stream = streams.tasks_consumer(run, "train").stream
    assert found == [(name, "stream", stream) for name in ("penstock_queue_pending", "penstock_queue_ack_pending")]
    assert all(label in METRICS[name].labels for name, label, _ in found)
    assert all(isinstance(value, str) for value in given.values()), "KEDA takes texts only"


class Fleet:
    """Workers under the autoscaler's rules and a trainer that admits a bounded number of packs; in steps of one second."""

    def __init__(self, *, admitted: int, generate_s: float, packs_of_step: int, step_s: float) -> None:
        self.admitted, self.generate_s, self.packs_of_step, self.step_s = admitted, generate_s, packs_of_step, step_s
        self.ready_at = [0.0]  # of each worker
        self.scored, self.trained, self.training = 0, 0, 0.0
        self.remaining: list[float] = []  # seconds of each pack that is being generated
        self.counts: list[tuple[float, int]] = []
        self.wanted: list[tuple[float, int]] = []
        self.waiting = admitted
        self.now = 0.0

    def second(self) -> None:
        """Generate, train, admit; then ask the autoscaler every so often."""
        self.now += 1.0
        slots = 2 * sum(ready <= self.now for ready in self.ready_at)
        starts = max(0, min(self.waiting, slots - len(self.remaining)))
        self.waiting -= starts
        self.remaining += [self.generate_s] * starts
        self.remaining = [left - 1.0 for left in self.remaining]
        self.scored += sum(left <= 0 for left in self.remaining)
        self.remaining = [left for left in self.remaining if left > 0]
        if self.training > 0:
            self.training -= 1.0
        elif self.scored >= self.packs_of_step:
            self.scored -= self.packs_of_step
            self.trained += self.packs_of_step
            self.training = self.step_s
        self.waiting = self.admitted - len(self.remaining) - self.scored
        self.counts.append((self.now, len(self.ready_at)))
        if self.now % SCALER["pollingInterval"] == 0:
            self._scale()

    def _scale(self) -> None:
        """As a HorizontalPodAutoscaler: the target value, then stabilisation, then the policy that allows most."""
        now, (trigger,) = len(self.ready_at), SCALER["triggers"]
        ratio = (self.waiting + len(self.remaining)) / (now * int(trigger["metadata"]["threshold"]))
        wanted = now if abs(ratio - 1) <= _TOLERANCE else math.ceil(ratio * now)
        self.wanted.append((self.now, max(SCALER["minReplicaCount"], min(SCALER["maxReplicaCount"], wanted))))
        behavior = SCALER["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        up, down = behavior["scaleUp"], behavior["scaleDown"]
        least = min(n for at, n in self.wanted if at > self.now - up["stabilizationWindowSeconds"])
        most = max(n for at, n in self.wanted if at > self.now - down["stabilizationWindowSeconds"])
        if least > now:
            wanted = min(least, self._allowed(up["policies"], 1))
        elif most < now:
            wanted = max(most, self._allowed(down["policies"], -1))
        else:
            return
        self.ready_at = sorted(self.ready_at)[:wanted]
        self.ready_at += [self.now + _LOADING_S] * (wanted - len(self.ready_at))

    def _allowed(self, policies: list[dict[str, Any]], sign: int) -> int:
        limits = []
        for policy in policies:
            before = next(n for at, n in self.counts if at > self.now - policy["periodSeconds"])
            step = policy["value"] if policy["type"] == "Pods" else math.ceil(before * policy["value"] / 100)
            limits.append(before + sign * step)
        return max(limits) if sign > 0 else min(limits)


@pytest.mark.parametrize(
    ("generate_s", "step_s", "expected"),
    [
        (30.0, 10.0, range(11, 15)),  # 8 packs in 10 s, each 30 s: 24 at a time
        (30.0, 60.0, range(2, 5)),  # a slow trainer: 4 at a time
        (200.0, 10.0, range(16, 17)),  # more than there may be
    ],
)
def test_scaling_and_admission_come_to_rest(generate_s: float, step_s: float, expected: range) -> None:
    """From one worker on, the number goes to what the trainer consumes, and then stays for hours."""
    fleet = Fleet(admitted=64, generate_s=generate_s, packs_of_step=8, step_s=step_s)
    for _ in range(2 * 3600):
        fleet.second()
    trained = fleet.trained
    for _ in range(2 * 3600):
        fleet.second()
    found = {count for _, count in fleet.counts[2 * 3600 :]}
    assert found <= set(expected), found
    assert max(found) - min(found) <= 1, "it does not swing"
    slots_of_most = 2 * SCALER["maxReplicaCount"] / generate_s
    possible = min(8 / (step_s + 1), slots_of_most) * 2 * 3600
    assert fleet.trained - trained > 0.93 * possible, "and the trainer does not wait for workers that it could have"
