"""Simulate which groups are dropped as stale under each rule: the trainer's own decisions, on a simulated clock.

    python -m benchmarks.admission

`Dispatch`, `DeliveryTracker` and `Batcher` are the real ones; steps, generations, publications and evaluations are durations drawn
from seeded distributions, so that all rules meet the same random durations, independent of the machine's load. The
quickstart's shape: 48 groups a step in packs of 12, two workers, a bound of two versions, an evaluation every 25 steps.
"""

from __future__ import annotations

import heapq
import itertools
import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.deploy.plan.simulated_groups import SimulatedIssuer
from penstock.deploy.quickstart_task import write_data, write_model
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.facts import BlobRef, GeneratedGroup, ScoredGroup
from penstock.protocol.versions import PolicyVersion, next_version
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.delivery_tracker import DeliveryTracker
from penstock.trainer.groups.dispatch import Dispatch
from penstock.trainer.groups.ledger import Ledger
from penstock.trainer.groups.overtake_backoff import OvertakeBackoff
from penstock.trainer.groups.task_packs import TaskPack
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.settings import DataSettings, RolloutSettings

NUM_STEPS = 150
NUM_WORKERS = 2
STEP_S = 0.17
PUBLISH_S = 0.03
SLOW_PUBLISH_S, SLOW_SHARE = 0.4, 0.05  # a busy disk, occasionally
SLOW_PACK_S = 0.4  # a worker without a processor for some time; the same share
SWAP_S = 0.03
SCORE_S = 0.02
EVAL_EVERY, EVAL_S = 25, 0.4
SPREAD = 0.25  # sigma of every duration's logarithm
ROLLOUT = RolloutSettings(group_size=1, groups_per_step=48, groups_per_message=12, max_staleness=2, max_attempts=100)
PACK = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)


@dataclass(frozen=True)
class Rule:
    name: str
    counts_lag: bool
    full_batch_wait: float  # in durations of the last step


RULES = (
    Rule("group count only", counts_lag=False, full_batch_wait=0.0),
    Rule("+ publication lag", counts_lag=True, full_batch_wait=0.0),
    *(Rule(f"+ wait of a full batch, at most {n} steps", counts_lag=True, full_batch_wait=n) for n in (0.5, 1.0, 2.0)),
)


@dataclass
class Outcome:
    wall_s: float = 0.0
    waited_s: float = 0.0
    generated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class SimulatedRun:
    """One run on a simulated clock."""

    def __init__(self, prompts: PromptSet, rule: Rule, *, load: float, seed: int) -> None:
        """``load`` is the share of the workers' time that generation takes when nothing is generated twice."""
        self._rule, self._random = rule, random.Random(seed)
        self._pack_s = load * STEP_S * NUM_WORKERS * ROLLOUT.groups_per_message / ROLLOUT.groups_per_step
        self.outcome = Outcome()
        self._dispatch = Dispatch(prompts, order=DataOrder(len(prompts), seed=0), rollout=ROLLOUT, stop_token_ids=(2,))
        batcher = Batcher(groups_per_step=ROLLOUT.groups_per_step, max_staleness=ROLLOUT.max_staleness, ledger=Ledger())
        self._tracker = DeliveryTracker(batcher, SimulatedIssuer(self._dispatch, self.outcome.dropped))
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._tasks: deque[tuple[TaskPack, PolicyVersion]] = deque()
        self._served = [PolicyVersion(0)] * NUM_WORKERS
        self._busy = [False] * NUM_WORKERS
        self._version = self._published = PolicyVersion(0)
        self._steps_done, self._step_s = 0, 0.0
        self._training = False
        self._idle_since = 0.0
        self._backoff = OvertakeBackoff()

    def run(self) -> Outcome:
        """Train all steps; return the result."""
        self._issue()
        while self._steps_done < NUM_STEPS:
            for worker in range(NUM_WORKERS):
                self._work(worker)
            if not self._training:
                self._train()
            self._now, _, act = heapq.heappop(self._events)
            act()
        self.outcome.wall_s = self._now
        return self.outcome

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._numbers), act))

    def _about(self, duration_s: float) -> float:
        return duration_s * self._random.lognormvariate(0.0, SPREAD)

    def _issue(self) -> None:
        """Issue as many groups as allowed, as the issuer does: when a version is announced and when a group was dropped."""
        wanted = (NUM_STEPS - self._steps_done) * ROLLOUT.groups_per_step
        trains_at = self._version if self._rule.counts_lag else None
        packs = self._dispatch.next_packs(self._published, wanted, trainer_version=trains_at)
        self._tasks.extend((pack, self._published) for pack in packs)

    def _work(self, worker: int) -> None:
        if self._busy[worker] or not self._tasks or self._tasks[0][1] > self._served[worker]:
            return
        pack, _ = self._tasks.popleft()
        version = self._served[worker]
        self.outcome.generated += len(pack.tasks)

        def sampled() -> None:
            self._after(self._about(SCORE_S), lambda: self._arrive(pack, version))

        slow_s = SLOW_PACK_S if self._random.random() < SLOW_SHARE else 0.0
        self._occupy(worker, self._about(self._pack_s) + slow_s, sampled)

    def _occupy(self, worker: int, duration_s: float, then: Callable[[], None] = lambda: None) -> None:
        self._busy[worker] = True

        def free() -> None:
            self._busy[worker] = False
            then()
            self._follow(worker)

        self._after(duration_s, free)

    def _follow(self, worker: int) -> None:
        """Swap to the published version once the worker is idle."""
        if self._busy[worker] or self._served[worker] == self._published:
            return
        version = self._published
        self._busy[worker] = True

        def swapped() -> None:
            self._busy[worker] = False
            self._served[worker] = version
            self._follow(worker)

        self._after(self._about(SWAP_S), swapped)

    def _arrive(self, pack: TaskPack, version: PolicyVersion) -> None:
        sequence = next(self._numbers)
        wanted = self._tracker.receive(sequence, [_scored(task.group_id, version) for task in pack.tasks])
        self._tracker.offer(ReadyGroup(one, PACK, None) for one in wanted)  # type: ignore[arg-type]

    def _train(self) -> None:
        full_batch_wait_s = self._rule.full_batch_wait * self._step_s
        overtakes = full_batch_wait_s > 0.0 and self._tracker.overtakes(self._version)
        rest_s = self._backoff.rest_s(full_batch_wait_s, overtakes=overtakes, now=self._now)
        if rest_s > 0.0:
            self._after(rest_s, lambda: None)  # check again then
            return
        dropped = self.outcome.dropped.total()
        batch = self._tracker.take(self._version)
        if self.outcome.dropped.total() > dropped:
            self._issue()
        if not batch:
            return
        self._backoff.record(overtook=overtakes)
        self.outcome.waited_s += self._now - self._idle_since
        self._training, self._step_s = True, self._about(STEP_S)

        def stepped() -> None:
            ids = [group.group_id for group in batch]
            self._dispatch.settle(ids)
            self._tracker.mark_trained(ids)
            self._version = next_version(self._version)
            self._steps_done += 1
            self._training, self._idle_since = False, self._now
            self._publish(self._version)

        self._after(self._step_s, stepped)

    def _publish(self, version: PolicyVersion) -> None:
        slow = self._random.random() < SLOW_SHARE

        def published() -> None:
            self._published = max(self._published, version)
            self._issue()
            for worker in range(NUM_WORKERS):
                if version % EVAL_EVERY == 0 and not self._busy[worker]:
                    self._occupy(worker, self._about(EVAL_S))
                self._follow(worker)

        self._after(self._about(SLOW_PUBLISH_S if slow else PUBLISH_S), published)


def _scored(group_id: str, version: PolicyVersion) -> ScoredGroup:
    generated = GeneratedGroup(
        group_id=group_id, row_group=0, split="train", attempt=0, reward_name="r", issued_version=version,
        oldest_version=version, newest_version=version, prompt_tokens=1, completion_tokens=(1,), finish_reasons=("stop",),
    )  # fmt: skip
    return ScoredGroup(generated=generated, rewards=(1.0,), scorer="simulated")


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    write_model(folder / "model", seed=0)
    write_data(folder, seed=0, num_sft=1, num_train=500, num_eval=1)
    prompts = PromptSet.open(
        [folder / "train.jsonl"],
        data=DataSettings(),
        reward=RewardSettings(name="exact_match"),
        tokenizer=ChatTokenizer.read(folder / "model"),
    )
    print("| workers' load | rule | dropped of 7,200 | by seed | wasted generations | wall s | trainer wait s |")
    print("|---|---|---|---|---|---|---|")
    for load in (0.5, 0.8):
        for rule in RULES:
            found = [SimulatedRun(prompts, rule, load=load, seed=seed).run() for seed in range(3)]
            dropped = [outcome.dropped.total() for outcome in found]
            wasted = (
                sum(outcome.generated for outcome in found) / (len(found) * NUM_STEPS * ROLLOUT.groups_per_step) - 1
            )
            wall, waited = (
                sum(times) / len(found) for times in zip(*((o.wall_s, o.waited_s) for o in found), strict=True)
            )
            print(
                f"| {load} | {rule.name} | {sum(dropped) / len(found):.0f} | {' '.join(map(str, dropped))} | {wasted:.1%} "
                f"| {wall:.1f} | {waited:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
