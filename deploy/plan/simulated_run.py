"""One run on a virtual clock: the trainer's own decisions, around engines, steps and messages that only take time.

    issue ──▶ queue ──▶ worker ──▶ engine (slots) ──▶ score ──▶ collect ──▶ step ──▶ publish ──▶ issue, and swap on every worker

`Dispatch`, `DeliveryTracker`, `Batcher`, `Ledger` and `OvertakeBackoff` are those that a trainer runs. A worker takes packs
as `rollout_service.loop` does: one request at a time, up to its packs in flight. So what this module decides is only when
things happen: an engine's decode step takes longer the more sequences run (`EnginePace`), and lengths are those of a mix.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from penstock.deploy.plan.lengths import EnginePace, LengthMix
from penstock.protocol.facts import BlobRef, GeneratedGroup, RewardRequest, ScoredGroup
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.versions import PolicyVersion, next_version, staleness
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import Prompt
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.delivery_tracker import DeliveryTracker
from penstock.trainer.groups.dispatch import Dispatch, Prompts
from penstock.trainer.groups.drops import Drop
from penstock.trainer.groups.ledger import Ledger
from penstock.trainer.groups.overtake_backoff import OvertakeBackoff
from penstock.trainer.groups.task_packs import TaskPack
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.settings import RolloutSettings

_PACK = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of everything that is not generation."""

    token_s: float  # of training, for each sampled token
    step_s: float = 0.0  # of a step besides its tokens
    score_s: float = 0.0  # from the end of a pack's generation to its arrival at the trainer
    publish_s: float = 0.0  # from the end of a step to the moment that workers know its version
    load_s: float = 0.0  # to load a version into an engine
    deliver_s: float = 0.0  # from a worker's request to its pack, when there is one


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The workers, each with one engine."""

    num_workers: int
    pace: EnginePace
    packs_in_flight: int
    drains: bool  # whether a swap waits for running sequences, else they go on with the new weights


@dataclass(slots=True)
class Step:
    """One optimizer step."""

    started: float
    ended: float
    lengths: list[int]
    ages: Counter[int]  # versions, weighted by sampled tokens; of each group's oldest token
    groups: list[str]


@dataclass(slots=True)
class Outcome:
    """What happened."""

    steps: list[Step] = field(default_factory=list)
    sampled: dict[str, list[int]] = field(default_factory=dict)  # lengths by group, of everything generated
    dropped: Counter[str] = field(default_factory=Counter)  # groups by reason
    busy: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # after each step: time, engine seconds, tokens


class SimulatedPrompts:
    """Prompts without a text, as many as a run may need."""

    fingerprint = "simulated"

    def __init__(self, num: int) -> None:
        self._num = num
        self.num_tokens = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, (index,), "", RewardRequest(name="simulated"))


class SimulatedIssuer:
    """Takes the place of the issuer: the same dispatch, without threads, accounting and NATS."""

    def __init__(self, dispatch: Dispatch, dropped: Counter[str]) -> None:
        """Count drops in ``dropped``."""
        self._dispatch, self._dropped = dispatch, dropped

    def outstanding(self) -> Collection[str]:
        """Return the ids issued and neither trained nor dropped."""
        return [str(key) for key in self._dispatch.state.outstanding]

    def accept(self, group_id: str, holds: Callable[[str], bool]) -> bool:
        """Record that a group arrived."""
        return self._dispatch.accept(group_id, holds)

    def promise(self, group_id: str) -> TaskPromise:
        """Return what the task of a group asked for."""
        return self._dispatch.promise(group_id)

    def is_late(self, version: PolicyVersion, holds: Callable[[str], bool]) -> bool:
        """Return True if a group under way may be too old for every later step."""
        return self._dispatch.is_late(version, holds)

    def drop(self, drop: Drop) -> None:
        """Close a group and queue its prompt again."""
        self._dropped[str(drop.reason)] += 1
        self._dispatch.send_back([drop.group_id])

    def refuse(self, drop: Drop) -> None:
        """Never happens: nothing is delivered twice."""
        raise AssertionError(drop)

    def drop_dead(self, drops: Sequence[Drop], sequence: int) -> None:
        """Never happens: nothing is dead-lettered."""
        raise AssertionError(drops)

    def pause(self, is_paused: bool) -> None:
        """Never asked for: nothing is dead-lettered."""


@dataclass(slots=True)
class _Pack:
    """A pack that a worker holds."""

    worker: int
    groups: list[str]
    lengths: list[list[int]]
    left: int  # sequences that have not ended
    oldest: PolicyVersion | None = None  # of its first token; None: not started


class _Engine:
    """Slots in which sequences decode, all at the pace of how many there are."""

    __slots__ = (
        "_at",
        "_steps",
        "busy_s",
        "ends",
        "later",
        "loading",
        "num_tokens",
        "pace",
        "paused",
        "prompts_s",
        "stamp",
        "version",
        "waiting",
    )

    def __init__(self, pace: EnginePace) -> None:
        self.pace = pace
        self.waiting: deque[tuple[_Pack, int]] = deque()  # sequences without a slot, by their length
        self.later: deque[tuple[_Pack, int]] = deque()  # those that came after a swap was asked for
        self.ends: list[tuple[float, int, _Pack]] = []  # by the decode step at which each running sequence ends
        self.version = PolicyVersion(0)
        self.paused = False  # weights are being loaded
        self.loading = False  # new sequences wait for a swap
        self.busy_s = self.num_tokens = 0.0
        self.prompts_s = 0.0  # that prompts still take before decoding goes on
        self.stamp = 0  # changes whenever the next end does
        self._at = 0.0
        self._steps = 0.0  # decode steps so far

    def advance(self, now: float) -> None:
        """Decode until ``now``."""
        if self.ends and not self.paused:
            busy_s = now - self._at
            decoding_s = max(0.0, busy_s - self.prompts_s)
            self.prompts_s = max(0.0, self.prompts_s - busy_s)
            steps = decoding_s / self.pace.step_s(len(self.ends))
            self._steps += steps
            self.num_tokens += steps * len(self.ends)
            self.busy_s += busy_s
        self._at = now

    def start_waiting(self, numbers: Callable[[], int]) -> None:
        """Give free slots to waiting sequences; the prompts of a pack are computed when its first sequence starts."""
        while self.waiting and len(self.ends) < self.pace.slots:
            pack, length = self.waiting.popleft()
            if pack.oldest is None:
                pack.oldest = self.version
                self.prompts_s += self.pace.prompt_s * len(pack.groups)
            heapq.heappush(self.ends, (self._steps + length, numbers(), pack))

    def next_end_s(self) -> float | None:
        """Return the seconds until a sequence ends; None if none runs."""
        if not self.ends or self.paused:
            return None
        return self.prompts_s + max(0.0, self.ends[0][0] - self._steps) * self.pace.step_s(len(self.ends))

    def take_ended(self) -> list[_Pack]:
        """Return the pack of each sequence that has ended."""
        ended = []
        while self.ends and self.ends[0][0] <= self._steps + 1e-6:
            ended.append(heapq.heappop(self.ends)[2])
        return ended


class SimulatedRun:
    """A run of so many steps; `run` returns its outcome."""

    def __init__(
        self,
        rollout: RolloutSettings,
        fleet: Fleet,
        durations: Durations,
        mix: LengthMix,
        *,
        steps: int,
        seed: int = 0,
        oldest_patience: float = 3.0,
        prompts: Prompts | None = None,
    ) -> None:
        """``oldest_patience`` is `trainer.oldest_patience`; the lengths of ``prompts`` follow from their tokens (None: as many as needed)."""
        self._rollout, self._fleet, self._durations, self._mix = rollout, fleet, durations, mix
        self._num_steps, self._patience = steps, oldest_patience
        prompts = prompts or SimulatedPrompts(10 * (steps + rollout.max_staleness + 1) * rollout.groups_per_step)
        self.outcome = Outcome()
        self._dispatch = Dispatch(
            prompts, order=DataOrder(len(prompts), seed=seed), rollout=rollout, stop_token_ids=(0,)
        )
        batcher = Batcher(groups_per_step=rollout.groups_per_step, max_staleness=rollout.max_staleness, ledger=Ledger())
        self._tracker = DeliveryTracker(batcher, SimulatedIssuer(self._dispatch, self.outcome.dropped))
        self._backoff = OvertakeBackoff()
        self._now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tasks: deque[TaskPack] = deque()
        self._engines = [_Engine(fleet.pace) for _ in range(fleet.num_workers)]
        self._held = [0] * fleet.num_workers  # packs in flight
        self._requests = deque(range(fleet.num_workers))  # workers that ask for a pack, the longest waiting first
        self._version = self._published = PolicyVersion(0)
        self._training = False
        self._last_step_s = 0.0
        self._wakes_at = 0.0  # when `_collect` is called again, if that is later than now

    def run(self) -> Outcome:
        """Train all steps; return what happened."""
        self._issue()
        while len(self.outcome.steps) < self._num_steps:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return self.outcome

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._numbers), act))

    # ── trainer ───────────────────────────────────────────────────────────────────────────────

    def _issue(self) -> None:
        left = (self._num_steps - len(self.outcome.steps)) * self._rollout.groups_per_step
        self._tasks.extend(self._dispatch.next_packs(self._published, left, trainer_version=self._version))
        self._deliver()

    def _collect(self) -> None:
        if self._training:
            return
        wait_s = self._patience * self._last_step_s
        overtakes = wait_s > 0.0 and self._tracker.overtakes(self._version)
        rest_s = self._backoff.rest_s(wait_s, overtakes=overtakes, now=self._now)
        if rest_s > 0.0:
            self._wake(rest_s)
            return
        dropped = self.outcome.dropped.total()
        batch = self._tracker.take(self._version)
        if self.outcome.dropped.total() > dropped:
            self._issue()
        if not batch:
            return
        self._backoff.record(overtook=overtakes)
        self._train(batch)

    def _wake(self, delay_s: float) -> None:
        """Collect again after ``delay_s``, unless that is planned for then or earlier: every arrival asks for it."""
        at = self._now + delay_s
        if self._now < self._wakes_at <= at:
            return
        self._wakes_at = at
        self._after(delay_s, self._collect)

    def _train(self, batch: Sequence[ReadyGroup]) -> None:
        lengths = [count for one in batch for count in one.scored.generated.completion_tokens]
        ages: Counter[int] = Counter()
        for one in batch:
            age = staleness(self._version, PolicyVersion(one.scored.generated.oldest_version))
            ages[age] += sum(one.scored.generated.completion_tokens)
        self._last_step_s = self._durations.step_s + self._durations.token_s * sum(lengths)
        ids = [one.group_id for one in batch]
        step = Step(self._now, self._now + self._last_step_s, lengths, ages, ids)
        self._training = True
        self._after(self._last_step_s, lambda: self._stepped(step))

    def _stepped(self, step: Step) -> None:
        self._dispatch.settle(step.groups)
        self._tracker.mark_trained(step.groups)
        self._tracker.forget(self._tracker.settled())
        self._version = next_version(self._version)
        self.outcome.steps.append(step)
        for engine in self._engines:
            engine.advance(self._now)
        busy_s, tokens = (
            sum(values) for values in zip(*((e.busy_s, e.num_tokens) for e in self._engines), strict=True)
        )
        self.outcome.busy.append((self._now, busy_s, tokens))
        self._training = False
        version = self._version
        self._after(self._durations.publish_s, lambda: self._publish(version))
        self._collect()

    def _publish(self, version: PolicyVersion) -> None:
        self._published = version
        for worker in range(self._fleet.num_workers):
            self._swap(worker)
        self._issue()

    # ── workers ───────────────────────────────────────────────────────────────────────────────

    def _deliver(self) -> None:
        """Hand packs to the workers that ask for one; each asks again while it holds fewer than its limit."""
        while self._tasks and self._requests:
            worker, pack = self._requests.popleft(), self._tasks.popleft()
            self._held[worker] += 1
            if self._held[worker] < self._fleet.packs_in_flight:
                self._requests.append(worker)
            self._after(self._durations.deliver_s, lambda worker=worker, pack=pack: self._take(worker, pack))

    def _take(self, worker: int, pack: TaskPack) -> None:
        groups = [task.group_id for task in pack.tasks]
        lengths = [list(self._mix.group(repr(task.prompt_ids), self._rollout.group_size)) for task in pack.tasks]
        flat = [length for group in lengths for length in group]
        held = _Pack(worker, groups, lengths, left=len(flat))
        engine = self._engines[worker]
        queue = engine.later if engine.loading else engine.waiting
        queue.extend((held, length) for length in flat)
        self._turn(worker)

    def _turn(self, worker: int) -> None:
        """Bring an engine up to now: start what fits, end what has ended, and plan its next end."""
        engine = self._engines[worker]
        engine.advance(self._now)
        for pack in engine.take_ended():
            pack.left -= 1
            if not pack.left:
                self._end(pack, engine.version)
        if engine.loading and not engine.paused and not engine.ends and not engine.waiting:
            self._load(worker)  # drained
        if not engine.paused:
            engine.start_waiting(lambda: next(self._numbers))
        engine.stamp += 1
        if (delay_s := engine.next_end_s()) is not None:
            stamp = engine.stamp
            self._after(delay_s, lambda: self._turn(worker) if engine.stamp == stamp else None)

    def _end(self, pack: _Pack, newest: PolicyVersion) -> None:
        self._held[pack.worker] -= 1
        if self._held[pack.worker] == self._fleet.packs_in_flight - 1:
            self._requests.append(pack.worker)
        self.outcome.sampled |= dict(zip(pack.groups, pack.lengths, strict=True))
        self._after(self._durations.score_s, lambda: self._arrive(pack, newest))
        self._deliver()

    def _swap(self, worker: int) -> None:
        engine = self._engines[worker]
        if engine.loading or engine.version == self._published:
            return
        engine.advance(self._now)
        engine.loading = True
        if not self._fleet.drains or not (engine.ends or engine.waiting):
            self._load(worker)

    def _load(self, worker: int) -> None:
        engine, version = self._engines[worker], self._published
        engine.advance(self._now)
        engine.paused = True
        engine.stamp += 1

        def loaded() -> None:
            engine.advance(self._now)
            engine.paused = engine.loading = False
            engine.version = version
            engine.waiting.extend(engine.later)
            engine.later.clear()
            self._swap(worker)
            self._turn(worker)

        self._after(self._durations.load_s, loaded)

    def _arrive(self, pack: _Pack, newest: PolicyVersion) -> None:
        assert pack.oldest is not None
        scored = [_scored(g, tokens, pack.oldest, newest) for g, tokens in zip(pack.groups, pack.lengths, strict=True)]
        wanted = self._tracker.receive(next(self._numbers), scored)
        self._tracker.offer(ReadyGroup(one, _PACK, None) for one in wanted)  # pyright: ignore[reportArgumentType]  no tokens
        self._collect()


def _scored(group_id: str, lengths: Sequence[int], oldest: PolicyVersion, newest: PolicyVersion) -> ScoredGroup:
    generated = GeneratedGroup(
        group_id=group_id, row_group=0, split="train", attempt=0, reward_name="simulated", issued_version=oldest,
        oldest_version=oldest, newest_version=newest, prompt_tokens=1, completion_tokens=tuple(lengths),
        finish_reasons=("stop",) * len(lengths),
    )  # fmt: skip
    return ScoredGroup(generated=generated, rewards=(1.0,) * len(lengths), scorer="simulated")
