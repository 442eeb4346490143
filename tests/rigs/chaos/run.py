"""Kill every process at random moments during a run, and verify that nothing was lost or counted twice.

    make chaos                                          # every crash point in turn, then seeds 0, 1, 2 and the control
    python -m tests.rigs.chaos.run --seeds 0 --kills 30 --steps 60
    python -m tests.rigs.chaos.run --seeds 0 --victims trainer --kills 5 --points 0 --steps 330 --set trainer.checkpoint_every=24
    python -m tests.rigs.chaos.run --without-ids            # the control: the same audit must fail
    python -m tests.rigs.chaos.run --without-guards         # likewise, without any guard of the trainer

One run of the quickstart's services on its tiny model, with rewards from an HTTP endpoint in a separate process.
Trainer, both workers, reward service, endpoint, nats-server and S3 server are killed with SIGKILL at moments that the
seed determines (`kills.py`); in addition, the trainer kills itself at each of its crash points. The local run's
supervisor restarts them. At the end

1. the audit closes: every group issued was trained once, dropped once with a reason, or is in flight;
2. exactly ``steps x groups_per_step`` groups are trained, and each that is still in flight is in a queue: a killed
   trainer may have issued more than the run could use in the end;
3. a replay of the record without any fault, from the initial model, reproduces every version with the same hash;
4. the exported model has the weights that the record states for the last step.

The control takes the ids of trained groups out of the newest checkpoint before each start of the trainer. Then
redelivered groups are trained again, and the same audit must report it. The second control runs a trainer without ids and
without every later guard (`unguarded_trainer.py`). Exits with 1 if any check fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file
from tests.rigs.chaos import unguarded_trainer
from tests.rigs.chaos.kills import (
    POINTS,
    Kill,
    Observer,
    Outcome,
    PlannedKill,
    Seen,
    carry_out,
    late_ones,
    measure,
    notice_silence,
    plan_kills,
    plan_points,
    show,
)
from tests.small_run import audit_failures, replay_failures, report_of, write_small_run

from penstock.console.live.panel import LivePanel
from penstock.deploy.local_run import REWARD, TRAINER, LocalRun, endpoint_name, worker_name
from penstock.deploy.processes.child import Child, DeployError
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.deploy.processes.supervise import ProcessEvent, RestartRule
from penstock.forensics.audit.audit_checks import AuditResult, check_record
from penstock.forensics.audit.audit_inputs import gather
from penstock.protocol import logs
from penstock.protocol.record.checkpoint_state import STATE_FILE, committed
from penstock.protocol.record.lineage import LineageChapter, chapters
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.publishing.weight_buckets import ModelWeights, copy_to_buckets

REWARD_FILE = Path(__file__).with_name("chaos_reward.py")
VICTIMS = (
    TRAINER, worker_name(0), worker_name(1), REWARD, endpoint_name(REWARD_FILE), NatsServer.name, S3Server.name,
)  # fmt: skip
GROUPS_PER_STEP = 24
_EVAL_PROMPTS = 24
_LEAST_SHARE = 30 / 35  # of the planned kills: the last ones may come after a fast machine's last step
# The trainer is killed so often on purpose that the default rule would stop the restarts.
_RULE = RestartRule(max_crashes=20)


class UnguardedRun(LocalRun):
    """A run whose trainer has no guard against a group that comes twice."""

    def _trainer(self) -> Child:
        child = super()._trainer()
        at = child.command.index("penstock.trainer")
        if child.command[at + 1] != "train":
            raise DeployError(f"expected the command of a trainer of one rank, got {child.command}")
        # without -P: the benchmarks are imported from the working directory
        child.command = [sys.executable, "-m", unguarded_trainer.__name__, *child.command[at + 2 :]]
        return child


class ChaosRun:
    """One run with kills; the local run gets the overrides of each trainer start from it."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        steps: int,
        kills: Sequence[PlannedKill],
        points: int,
        without_ids: bool = False,
        without_guards: bool = False,
        overrides: Sequence[str] = (),
    ) -> None:
        self.overrides = list(overrides)
        self.folder, self.seed, self.steps, self.without_ids = folder, seed, steps, without_ids
        self.run_id = f"chaos-{seed}"
        self.planned = list(kills)
        self.is_control, self.without_guards = without_ids or without_guards, without_guards
        self.points = [(CrashPoint.COMMITTED, 1)] * points if self.is_control else plan_points(seed, points)
        self.kills: list[Kill] = []
        self.seen = Seen()
        self._armed: tuple[CrashPoint, int] | None = None
        self._killed = False  # whether this trainer process was killed by this benchmark
        self.run_file = write_small_run(
            folder,
            self.run_id,
            seed=seed,
            num_train=4 * steps * GROUPS_PER_STEP,
            num_eval=_EVAL_PROMPTS,
            reward={"name": REWARD_FILE.stem},
            eval={"every": max(1, steps // 3), "at_start": False},
            rollout={"groups_per_step": GROUPS_PER_STEP, "group_size": 8, "groups_per_message": 6, "max_staleness": 2},
            trainer={"steps": steps, "lr": 5e-4, "checkpoint_every": 2},
        )

    def go(self, deadline_s: float) -> Outcome:
        """Run to the end with kills and check the result."""
        outcome = Outcome(self.seed, self.steps)
        run = (UnguardedRun if self.without_guards else LocalRun)(
            [str(self.run_file), *self.overrides],
            reward_files=[REWARD_FILE],
            rule=_RULE,
            trainer_overrides=self._next_trainer_overrides,
        )
        with run:
            run.start_services()
            with Bus.connect(run.nats, name="chaos") as bus, Observer(self.run_id, bus) as observer:
                self.seen = observer.seen
                with LivePanel(self.run_id, bus, total_steps=self.steps, mode="quiet") as panel:
                    run.listen(self._on_event)
                    run.start_trainer()
                    carry_out(self.planned, run, self.seen, self._kill, deadline_s)
                blobs = Blobs(run.s3)
                proof = check_record(gather(self.run_id, bus, blobs, run.folder / "checkpoints", reads_packs=True))
                state = committed(run.folder / "checkpoints")[-1][1]
                lineage = list(chapters(state.record, blobs.get))
            events, incidents = run.events, panel.snapshot().incidents
        outcome.wall_s, outcome.cpu_s = run.usage.wall_s, run.usage.cpu_s
        outcome.kills = self.kills
        outcome.account = proof.to_document()
        outcome.issued_again = _num_issued_again(lineage)
        outcome.num_redelivered = self.seen.num_redelivered
        measure(self.kills, events, self.seen)
        notice_silence(self.kills, [(i.at, i.text) for i in incidents if i.kind == "lost"])
        outcome.late = late_ones(self.kills)
        if self.is_control:
            outcome.failures = _control_failures(proof)
        else:
            outcome.replay = report_of("replay", self.run_id, self.folder / "runs")
            outcome.failures = _failures(self, outcome, proof)
            made = ModelWeights(copy_to_buckets(load_file(run.folder / "model" / "model.safetensors"))).root()
            if made != state.weights_digest:
                outcome.failures.append(
                    f"the exported model has the hash {made[:16]}…, expected {state.weights_digest[:16]}… from the record"
                )
        return outcome

    def _kill(self, run: LocalRun, victim: str) -> None:
        if victim == TRAINER:
            self._killed = True
        self.kills.append(Kill(victim, "random", time.time(), self.seen.newest_step))
        run.kill(victim)

    def _on_event(self, event: ProcessEvent) -> None:
        """Record the trainer's exit at a crash point (on the supervisor's thread)."""
        if event.name == TRAINER and event.kind == "crashed":
            if not self._killed and self._armed is not None:
                self.kills.append(Kill(TRAINER, str(self._armed[0]), event.at, self.seen.newest_step))
                self.points.pop(0)
            self._killed = False

    def _next_trainer_overrides(self, session: int) -> Sequence[str]:
        """Return the override of the next crash point that has not killed yet; in the control, remove the ids first."""
        if session and self.without_ids:
            take_ids_out(self.folder / "runs" / self.run_id / "checkpoints")
        self._armed = self.points[0] if self.points else None
        return [f"trainer.kill_at={self._armed[0]}:{self._armed[1]}"] if self._armed else []


def take_ids_out(checkpoints: Path) -> None:
    """Remove the ledger from the newest checkpoint, so that its groups count as not trained."""
    found = committed(checkpoints)
    if not found:
        return
    path = found[-1][0] / STATE_FILE
    state = json.loads(path.read_text())
    newest = state["ledger"][-1:]
    ids = [group_id for _, row in newest for group_id in row]
    state["ledger"] = []
    state["dispatch"]["outstanding"] += ids
    state["account"]["in_flight"]["train"] += ids
    path.write_text(json.dumps(state))


def _num_issued_again(lineage: Sequence[LineageChapter]) -> int:
    ids = [group_id for chapter in lineage for group_id in chapter.issued.get("train", ())]
    return sum(not group_id.endswith(".a0") for group_id in ids)


def _failures(run: ChaosRun, outcome: Outcome, proof: AuditResult) -> list[str]:
    failures = audit_failures(proof, run.steps * GROUPS_PER_STEP)
    if run.points:
        failures.append(f"never killed at {', '.join(point for point, _ in run.points)}")
    made = sum(kill.cause == "random" for kill in outcome.kills)
    if made < _LEAST_SHARE * len(run.planned):
        failures.append(f"the run ended after {made} of {len(run.planned)} kills")
    return failures + replay_failures(outcome.replay)


def _control_failures(proof: AuditResult) -> list[str]:
    """Return no failure if the audit reports groups that were trained twice, as the control must."""
    kinds = Counter(breach.kind for breach in proof.breaches)
    return (
        [] if kinds["trained twice"] else [f"in a control the audit reports no group as trained twice: {dict(kinds)}"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=35, help="number of kills at random moments, over all victims")
    parser.add_argument(
        "--points", type=int, default=len(POINTS), help="number of additional crash points of the trainer"
    )
    parser.add_argument(
        "--victims", nargs="+", choices=VICTIMS, default=VICTIMS, help="what is killed at random moments"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("--without-ids", action="store_true", help="the control: the audit must fail")
    parser.add_argument(
        "--without-guards", action="store_true", help="the control without ids and later guards: the audit must fail"
    )
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="time limit for one run")
    parser.add_argument("--keep", type=Path, help="keep the runs' folders here")
    options = parser.parse_args()
    logs.configure("chaos", level="error")
    outcomes = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
            folder = (options.keep or Path(scratch)).absolute() / f"seed-{seed}"
            folder.mkdir(parents=True)
            kills = plan_kills(seed, options.victims, num_kills=options.kills, steps=options.steps)
            run = ChaosRun(
                folder, seed=seed, steps=options.steps, kills=kills, points=options.points,
                without_ids=options.without_ids, without_guards=options.without_guards, overrides=options.set,
            )  # fmt: skip
            outcome = run.go(options.deadline_s)
        print(show(outcome), flush=True)
        outcomes.append(outcome)
        if options.json:
            options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    return 1 if any(outcome.failures or outcome.late for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
