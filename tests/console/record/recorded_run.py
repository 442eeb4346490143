"""The messages of a whole run in order, for the views to fold; with invented values."""

from __future__ import annotations

import json
import math
import secrets
from pathlib import Path
from typing import Any

from penstock.console.live.run_snapshot import QueueDepths
from penstock.console.live.run_view import RunView
from penstock.protocol import streams, subjects
from penstock.protocol.facts import DeadLetter, Fact, Heartbeat, RunEvent, WeightsApplied, WeightsPublished, encode
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.bus import Bus

RUN = "sorting"
START = 1_790_000_000.0  # wall-clock seconds
STEPS = 60
TOKENS_A_STEP = 1000


def event(kind: str, at: float, source: str = "trainer", **data: Any) -> RunEvent:
    return RunEvent(run_id=RUN, source=source, kind=kind, at=at, data=data)


def step(number: int, at: float, **more: Any) -> RunEvent:
    fresh = 400 if number > 2 else TOKENS_A_STEP
    histogram = {"0": fresh, "1": TOKENS_A_STEP - fresh - 50, "2": 50} if number > 2 else {"0": fresh}
    groups = {"issued": 48 * (number + 2), "scored": 48 * number + 12, "trained": 48 * number, "dropped": {"stale": 3}}
    data: dict[str, Any] = {
        "step": number, "version": number - 1, "loss": 0.01, "reward_std": 0.2,
        "reward_mean": 0.4 + 0.5 * (1 - math.exp(-number / 15)) + 0.03 * math.sin(number),
        "staleness_mean": 0.65, "staleness_max": 2, "staleness_tokens": histogram, "tokens_trained": TOKENS_A_STEP,
        "groups": groups, "zero_signal_groups": 0.25, "clip_fraction": 0.012, "wait_s": 0.1, "step_s": 0.4,
        "mismatch": {"tokens": 400, "mean_abs": 2e-4, "max_abs": 0.004, "kl_k3": 3e-8}, "kl_behaviour": 0.0021,
        "ratio_percentiles": {"1": 0.91, "50": 1.0, "99": 1.12}, "ess_share": 0.98, "skipped": {"zero_advantage": 2},
        "rejected_fraction": 0.002, "rejected_by": {"veto": 0.002},
        "reward_parts": {"correct": 0.4 + number / 200, "correct.has_answer": 0.99, "form": 0.875},
    }  # fmt: skip
    return event("step", at, **{**data, **more})


def evaluation(number: int, accuracy: float, at: float, **more: Any) -> RunEvent:
    return event(
        "eval", at, step=number, version=number, accuracy=accuracy, reward_mean=accuracy, num_prompts=128, **more
    )


def beat(
    role: str, service_id: str, at: float, *, busy_s: float, idle_s: float, cpu_s: float, **figures: Any
) -> Heartbeat:
    return Heartbeat(
        role=role,  # type: ignore[arg-type]
        service_id=service_id, at=at, state=figures.pop("state", "working"), version=figures.pop("version", None),
        busy_s=busy_s, idle_s=idle_s, cpu_s=cpu_s, figures={name: float(value) for name, value in figures.items()},
    )  # fmt: skip


def fleet(second: int) -> list[Heartbeat]:
    """All services, ``second`` seconds into the run: workers 90 % busy, the trainer 80 %."""
    at, s = START + second, float(second)
    times = {"busy_s": 0.9 * s, "idle_s": 0.1 * s, "cpu_s": 0.5 + 0.8 * s}
    done = {
        "version": 2 * second,
        "tokens_generated": 1100 * s,
        "groups_generated": 50 * s,
        "weights_bytes_s3": 500.0 * s,
        "weights_misses_absent": 3,
    }
    workers = [beat("rollout", f"rollout-{n}", at, **times, **done) for n in (0, 1)]
    scorer = beat("reward", "reward", at, busy_s=0.05 * s, idle_s=0.95 * s, cpu_s=0.3 + 0.05 * s, groups_scored=100 * s)
    trainer = beat("trainer", "trainer", at, busy_s=0.8 * s, idle_s=0.2 * s, cpu_s=2 + 0.9 * s, version=2 * second)
    return [*workers, scorer, trainer]


def published(version: int) -> WeightsPublished:
    manifest = BlobRef(key="k", size_bytes=1, sha256="0" * 64)
    return WeightsPublished(run_id=RUN, version=version, step=version, manifest=manifest, num_bytes=500_000)


def applied(worker: str, version: int) -> WeightsApplied:
    previous = version - 1 if version else None
    return WeightsApplied(
        run_id=RUN, worker_id=worker, version=version, previous_version=previous, pause_s=0.02, fetch_s=0.03,
        num_bytes=500_000, checksum="c", layout="mirror",
    )  # fmt: skip


def dead_letter(*groups: str) -> DeadLetter:
    return DeadLetter(
        run_id=RUN, stage="generated", subject="s", reason="endpoint_failed", detail="500", group_ids=groups,
        num_delivered=5,
    )  # fmt: skip


def folded(*events: RunEvent, into: RunView | None = None) -> RunView:
    view = RunView(RUN) if into is None else into
    for one in events:
        view.fold_event(one)
    return view


def whole_run() -> RunView:
    """Sixty steps in thirty seconds; worker 1 is killed at second 15 and restarted five seconds later."""
    view = RunView(RUN)
    view.fold_event(event("state", START, text="evaluating version 0", total_steps=STEPS))
    view.fold_event(evaluation(0, 0.55, START + 1))
    view.fold_published(published(0))
    for second in range(1, STEPS // 2 + 1):
        beats = fleet(second)
        if 15 <= second < 20:
            beats[1] = fleet(14)[1]  # the key remains until its TTL expires
        elif second >= 20:
            reborn = fleet(second - 19)[1]
            beats[1] = reborn.model_copy(update={"at": START + second})
        view.fold_heartbeats(beats, START + second)
        for number in (2 * second - 1, 2 * second):
            view.fold_event(step(number, START + second + 0.5 * (number % 2 == 0)))
            view.fold_published(published(number))
            for worker in ("rollout-0", "rollout-1"):
                if worker == "rollout-0" or not 15 <= second < 20:
                    view.fold_applied(applied(worker, number))
        if second == 14:
            view.note(START + 14.5, "killed rollout-1 on purpose")
    view.fold_event(evaluation(STEPS, 0.95, START + 31))
    view.fold_queues(QueueDepths(waiting={"tasks": 3, "generated": 0, "scored": 1}, held={"tasks": 4, "scored": 6}))
    return view


class Services:
    """Says of a run what its services would say."""

    def __init__(self, bus: Bus, run_id: str) -> None:
        self._bus = bus
        self._run_id = run_id
        self._live = bus.key_value(streams.live_bucket(run_id).bucket).wait()

    def say(self, *facts: Fact) -> None:
        ours = [fact.model_copy(update={"run_id": self._run_id}) for fact in facts]
        sent = [self._bus.publish(self._subject(fact), fact, msg_id=secrets.token_hex(8)) for fact in ours]
        for pending in sent:
            pending.wait()

    def say_steps(self, *numbers: int) -> None:
        self.say(*(event("step", float(number), step=number) for number in numbers))

    def beat(self, *beats: Heartbeat) -> None:
        for one in beats:
            self._live.put(streams.heartbeat_key(one.role, one.service_id), encode(one)).wait()

    def _subject(self, fact: Fact) -> str:
        match fact:
            case RunEvent():
                return subjects.events(self._run_id, fact.kind)
            case WeightsPublished():
                return subjects.weights_published(self._run_id)
            case WeightsApplied():
                return subjects.weights_applied(self._run_id)
            case DeadLetter():
                return subjects.dead(self._run_id, "generated")
        return subjects.tasks(self._run_id, "train")


def write_metrics(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    events = [evaluation(0, 0.55, START + 1), *(step(n, START + n / 2) for n in range(1, STEPS + 1))]
    events += [evaluation(30, 0.81, START + 15), evaluation(STEPS, 0.95, START + 31)]
    lines = [json.dumps({"kind": e.kind, "at": e.at, **e.data}) for e in events]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
