"""One run on a virtual clock: the trainer's decisions, around engines, steps and messages that only take time.

    issue ──▶ queue ──▶ worker ──▶ engine (slots) ──▶ score ──▶ collect ──▶ step ──▶ publish ──▶ issue, and swap on every worker

`Dispatch`, `Batcher`, `GroupStates` and `OvertakeBackoff` are those that a trainer runs, `RedundantGroup` and `PackLimit`
those of a worker. A worker takes packs as `rollout_service.loop` does: one request at a time, up to its packs
in flight; it keeps a pack until its engine serves the version that the pack was issued for. The version of a swap is chosen when
the swap begins, and one that takes long needs a permit (`SwapSemaphore`). So what this module decides is only when things
happen: an engine's decode step takes longer the more sequences run (`EnginePace`), and lengths are those of a mix.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence

from penstock.deploy.plan.simulation import (
    Durations,
    Fleet,
    LengthMix,
    Outcome,
    Pack,
    SimulatedEngine,
    SimulatedPrompts,
    SimulatedSequence,
    Step,
    scored_group,
)
from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion, is_newer, next_version, staleness
from penstock.rollout_service.engines.redundancy import Redundancy, RedundantGroup
from penstock.rollout_service.packs.pack_loops import SAMPLE_S, EngineLoad, PackLimit
from penstock.rollout_service.weights.weight_follower import ISSUED_VERSION_DEADLINE_S
from penstock.rollout_service.weights.weight_swap import NEEDS_PERMIT_S, num_permits
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.collect import OvertakeBackoff
from penstock.trainer.groups.dispatch import Dispatch
from penstock.trainer.groups.task_packs import TaskPack
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.settings import RolloutSettings

_PACK = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)


class SimulatedRun:
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
    ) -> None:
        """``oldest_patience`` is `trainer.oldest_patience`."""
        self._rollout, self._fleet, self._durations, self._mix = rollout, fleet, durations, mix
        self._redundancy = Redundancy(rollout.group_size, rollout.redundant_completions, rollout.redundant_wait)
        self._num_steps, self._patience = steps, oldest_patience
        prompts = SimulatedPrompts(10 * (steps + rollout.max_staleness + 1) * rollout.groups_per_step)
        self.outcome = Outcome()
        self._dispatch = Dispatch(
            prompts, order=DataOrder(len(prompts), seed=seed), rollout=rollout, stop_token_ids=(0,)
        )
        self._batcher = Batcher(self._dispatch.groups, self._dispatch, rollout, AlgorithmSettings())
        self.outcome.dropped = self._batcher.dropped
        self._backoff = OvertakeBackoff()
        self._now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tasks: deque[TaskPack] = deque()
        self._engines = [SimulatedEngine(fleet.pace) for _ in range(fleet.num_workers)]
        self._held = [0] * fleet.num_workers  # packs in flight
        self._requests = deque(range(fleet.num_workers))  # workers that ask for a pack, the longest waiting first
        self._asking = set(self._requests)
        self._limits = [fleet.packs_in_flight or PackLimit(fleet.num_servers) for _ in range(fleet.num_workers)]
        self._num_permits = num_permits(fleet.num_workers, fleet.max_paused_share)
        self._permits: set[int] = set()  # workers that hold one
        self._waiting_for_permit: deque[int] = deque()
        self._version = self._published = PolicyVersion(0)
        self._training = False
        self._last_step_s = 0.0
        self._wakes_at = 0.0  # when `_collect` is called again, if that is later than now

    def run(self) -> Outcome:
        self._issue()
        if not self._fleet.packs_in_flight:
            self._after(SAMPLE_S, self._sample)
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
        overtakes = wait_s > 0.0 and self._batcher.overtakes(self._version)
        rest_s = self._backoff.rest_s(wait_s, overtakes=overtakes, now=self._now)
        if rest_s > 0.0:
            self._wake(rest_s)
            return
        dropped = self.outcome.dropped.total()
        batch = self._batcher.take(self._version)
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
        lengths = [count for group in batch for count in group.scored.generated.completion_tokens]
        ages: Counter[int] = Counter()
        for group in batch:
            age = staleness(self._version, PolicyVersion(group.scored.generated.oldest_version))
            ages[age] += sum(group.scored.generated.completion_tokens)
        self._last_step_s = self._durations.step_s + self._durations.token_s * sum(lengths)
        ids = [group.group_id for group in batch]
        step = Step(self._now, self._now + self._last_step_s, lengths, ages, ids)
        self._training = True
        self._after(self._last_step_s, lambda: self._stepped(step, batch))

    def _stepped(self, step: Step, batch: Sequence[ReadyGroup]) -> None:
        self._dispatch.train(self._version, batch, {})
        self._dispatch.groups.forget_messages(self._dispatch.groups.settled())
        self._version = next_version(self._version)
        self.outcome.steps.append(step)
        for engine in self._engines:
            engine.advance(self._now)
        busy_s, tokens = (
            sum(values) for values in zip(*((e.busy_s, e.num_tokens) for e in self._engines), strict=True)
        )
        self.outcome.busy.append((self._now, busy_s, tokens))
        self._after(self._durations.between_s, self._recorded)

    def _recorded(self) -> None:
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
            self._asking.discard(worker)
            self._held[worker] += 1
            self._ask(worker)
            self._after(self._durations.deliver_s, lambda worker=worker, pack=pack: self._take(worker, pack))

    def _ask(self, worker: int) -> None:
        limit = self._limits[worker]
        if worker not in self._asking and self._held[worker] < (limit if isinstance(limit, int) else limit.value):
            self._asking.add(worker)
            self._requests.append(worker)

    def _sample(self) -> None:
        sequences = self._rollout.started_completions * max(1, self._rollout.groups_per_message)
        for worker, (engine, limit) in enumerate(zip(self._engines, self._limits, strict=True)):
            assert isinstance(limit, PackLimit)
            engine.advance(self._now)
            queued = len(engine.waiting) + len(engine.later)
            limit.observe(
                EngineLoad(self._now, engine.num_tokens, len(engine.ends), queued, self._held[worker]), sequences
            )
            self._ask(worker)
        self._deliver()
        self._after(SAMPLE_S, self._sample)

    def _take(self, worker: int, pack: TaskPack) -> None:
        groups = [task.group_id for task in pack.tasks]
        lengths = [self._mix.group(repr(task.prompt_ids), self._rollout.started_completions) for task in pack.tasks]
        issued_for = PolicyVersion(max(task.issued_version for task in pack.tasks))
        held = Pack(worker, groups, issued_for, lengths, [])
        engine = self._engines[worker]
        if not is_newer(issued_for, engine.version):
            self._submit(held)
            return
        engine.early.append(held)
        self._after(ISSUED_VERSION_DEADLINE_S, lambda: self._submit_early([held]))

    def _submit_early(self, packs: Sequence[Pack]) -> None:
        for pack in packs:
            early = self._engines[pack.worker].early
            if pack in early:
                early.remove(pack)
                self._submit(pack)

    def _submit(self, pack: Pack) -> None:
        engine = self._engines[pack.worker]
        queue = engine.later if engine.loading else engine.waiting
        pack.running = [RedundantGroup(self._redundancy, self._now) for _ in pack.groups]
        for place, lengths in enumerate(pack.lengths):
            queue.extend(SimulatedSequence(pack, place, number) for number in range(len(lengths)))
        self._turn(pack.worker)

    def _turn(self, worker: int) -> None:
        engine = self._engines[worker]
        engine.advance(self._now)
        for sequence in engine.take_ended():
            self._end(sequence, engine)
        if engine.loading and not engine.ends and not engine.waiting:
            self._swapped(worker)  # drained
        if not engine.paused:
            engine.start_waiting(lambda: next(self._numbers))
        engine.stamp += 1
        if (delay_s := engine.next_end_s()) is not None:
            stamp = engine.stamp
            self._after(delay_s, lambda: self._turn(worker) if engine.stamp == stamp else None)

    def _end(self, sequence: SimulatedSequence, engine: SimulatedEngine) -> None:
        pack, place, number = sequence
        if sequence.is_abandoned:  # it ended together with the last one that was needed
            self._abandon("surplus", 1, sequence.length)
            return
        group = pack.running[place]
        group.end(number, self._now)
        if group.is_closed(self._now):
            self._close(pack, place, engine)
        elif group.enough_at == self._now and (closes_at := group.closes_at) is not None:
            self._after(closes_at - self._now, lambda: self._close_late(pack, place, engine))

    def _close_late(self, pack: Pack, place: int, engine: SimulatedEngine) -> None:
        if place not in pack.kept:
            engine.advance(self._now)
            self._close(pack, place, engine)
            self._turn(pack.worker)

    def _close(self, pack: Pack, place: int, engine: SimulatedEngine) -> None:
        group, lengths = pack.running[place], pack.lengths[place]
        pack.kept[place] = [lengths[number] for number in group.kept]
        if len(group.ended) < len(lengths):
            self._abandon("aborted", *engine.abort())
        if len(pack.kept) == len(pack.groups):
            self._generated(pack, engine.version)

    def _abandon(self, reason: str, num: int, tokens: float) -> None:
        self.outcome.abandoned[reason] += num
        self.outcome.abandoned_tokens += tokens

    def _generated(self, pack: Pack, newest: PolicyVersion) -> None:
        self._held[pack.worker] -= 1
        self._ask(pack.worker)
        self.outcome.sampled |= dict(zip(pack.groups, pack.lengths, strict=True))
        self._after(self._durations.score_s, lambda: self._arrive(pack, newest))
        self._deliver()

    def _swap(self, worker: int) -> None:
        """Begin to load the newest version, unless a swap is under way: the version of a swap is chosen when it begins."""
        engine = self._engines[worker]
        if engine.target is not None or engine.version == self._published:
            return
        engine.target = self._published
        if engine.pause_s > NEEDS_PERMIT_S and self._num_permits:
            self._waiting_for_permit.append(worker)
            self._give_permits()
        else:
            self._load(worker)

    def _give_permits(self) -> None:
        while self._waiting_for_permit and len(self._permits) < self._num_permits:
            worker = self._waiting_for_permit.popleft()
            self._permits.add(worker)
            self._load(worker)

    def _load(self, worker: int) -> None:
        """Read the files: a draining engine decodes meanwhile, and drains afterwards; any other is paused."""
        engine = self._engines[worker]
        engine.swapping_since = self._now
        if not self._fleet.drains:
            engine.advance(self._now)
            engine.paused = True
            engine.stamp += 1

        def read() -> None:
            engine.advance(self._now)
            engine.paused = False
            if self._fleet.drains:
                engine.loading = True
                self._turn(worker)
            else:
                self._swapped(worker)
                self._turn(worker)

        self._after(self._durations.load_s, read)

    def _swapped(self, worker: int) -> None:
        engine = self._engines[worker]
        assert engine.target is not None
        engine.version, engine.target, engine.loading = engine.target, None, False
        engine.pause_s = self._now - engine.swapping_since
        engine.waiting.extend(engine.later)
        engine.later.clear()
        self._permits.discard(worker)
        self._give_permits()
        self._after(
            0.0, lambda: self._submit_early([p for p in engine.early if not is_newer(p.issued_for, engine.version)])
        )
        self._swap(worker)

    def _arrive(self, pack: Pack, newest: PolicyVersion) -> None:
        assert pack.oldest is not None
        scored = [scored_group(g, pack.kept[place], pack.oldest, newest) for place, g in enumerate(pack.groups)]
        wanted = self._batcher.receive(next(self._numbers), scored)
        self._batcher.offer(ReadyGroup(group, _PACK, None) for group in wanted)  # pyright: ignore[reportArgumentType]  no tokens
        self._collect()
