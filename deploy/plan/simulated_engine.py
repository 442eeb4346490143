"""An engine on a virtual clock: slots in which sequences decode, and what a swap does to them."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.deploy.plan.lengths import EnginePace
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.embedded_engine.scheduler import are_admitted
from penstock.rollout_service.engines.redundancy import RedundantGroup


@dataclass(slots=True)
class Pack:
    worker: int
    groups: list[str]
    issued_for: PolicyVersion
    lengths: Sequence[Sequence[int]]  # of all that are started
    running: list[RedundantGroup]  # of each group
    kept: dict[int, list[int]] = field(default_factory=dict)  # lengths of what closed groups keep, by place
    oldest: PolicyVersion | None = None  # of its first token; None: not started
    started: set[int] = field(default_factory=set)  # groups whose prompt was computed, by place


class SimulatedSequence(NamedTuple):
    pack: Pack
    place: int  # of its group in the pack
    number: int  # in its group

    @property
    def length(self) -> int:
        return self.pack.lengths[self.place][self.number]

    @property
    def is_abandoned(self) -> bool:
        return self.place in self.pack.kept


class SimulatedEngine:
    __slots__ = (
        "_at",
        "_steps",
        "busy_s",
        "early",
        "ends",
        "later",
        "loading",
        "num_tokens",
        "pace",
        "pause_s",
        "paused",
        "prompts_s",
        "stamp",
        "swapping_since",
        "target",
        "version",
        "waiting",
    )

    def __init__(self, pace: EnginePace) -> None:
        self.pace = pace
        self.waiting: deque[SimulatedSequence] = deque()  # without a slot
        self.later: deque[SimulatedSequence] = deque()  # those that came after the engine began to drain
        self.early: list[Pack] = []  # packs that wait for the version they were issued for
        self.ends: list[tuple[float, int, SimulatedSequence]] = []  # of what runs, by the decode step of its end
        self.version = PolicyVersion(0)
        self.target: PolicyVersion | None = None  # of the swap under way
        self.swapping_since = 0.0
        self.pause_s = math.inf  # of the last swap, as the worker measures it
        self.paused = False  # weights are being loaded
        self.loading = False  # new sequences wait for the end of a drain
        self.busy_s = self.num_tokens = 0.0
        self.prompts_s = 0.0  # that prompts still take before decoding goes on
        self.stamp = 0  # changes whenever the next end does
        self._at = 0.0
        self._steps = 0.0  # decode steps so far

    def advance(self, now: float) -> None:
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
        """Give free slots to waiting sequences, by the embedded engine's rule.

        A pass computes the new prompts of what starts together, each once, and samples the first tokens; nothing decodes
        meanwhile.
        """
        free = self.pace.slots - len(self.ends)
        if not are_admitted(free, len(self.waiting), len(self.ends), self.pace.slots):
            return
        num_new = 0
        for _ in range(min(free, len(self.waiting))):
            sequence = self.waiting.popleft()
            pack = sequence.pack
            if pack.oldest is None:
                pack.oldest = self.version
            num_new += sequence.place not in pack.started
            pack.started.add(sequence.place)
            heapq.heappush(self.ends, (self._steps + sequence.length - 1, numbers(), sequence))
            self.num_tokens += 1
        self.prompts_s += self.pace.prompt_s * num_new

    def next_end_s(self) -> float | None:
        if not self.ends or self.paused:
            return None
        return self.prompts_s + max(0.0, self.ends[0][0] - self._steps) * self.pace.step_s(len(self.ends))

    def abort(self) -> tuple[int, float]:
        """Remove the sequences of closed groups; return their number, and the tokens that were sampled for them."""
        gone = [(at, one) for at, _, one in self.ends if one.is_abandoned]
        self.ends = [entry for entry in self.ends if not entry[2].is_abandoned]
        heapq.heapify(self.ends)
        count = len(gone)
        for queue in (self.waiting, self.later):
            left = [one for one in queue if not one.is_abandoned]
            count += len(queue) - len(left)
            queue.clear()
            queue.extend(left)
        return count, sum(one.length - (at - self._steps) for at, one in gone)

    def take_ended(self) -> list[SimulatedSequence]:
        ended = []
        while self.ends and self.ends[0][0] <= self._steps + 1e-6:
            ended.append(heapq.heappop(self.ends)[2])
        return ended
