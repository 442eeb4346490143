"""The parts of a simulated run: lengths of completions, durations, workers, groups, an engine on a virtual clock, and the outcome.

Response lengths of reasoning models are close to log-normal with a long tail: the longest exceed the median more than
20 times (ROLL Flash, arXiv:2510.11345). Here they are log-normal, cut at the longest completion.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist, fmean
from typing import NamedTuple

from penstock.protocol.groups import GeneratedGroup, RewardRequest, ScoredGroup
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.embedded_engine.scheduler import are_admitted
from penstock.rollout_service.engines.redundancy import RedundantGroup
from penstock.trainer.data.dataset import Prompt

_INITIAL = PolicyVersion(0)
_random = random.Random()  # noqa: S311  a simulation


@dataclass(frozen=True)
class LengthMix:
    """Tokens of completions. The logarithm is normal, with one part of its variance between prompts and one within a group."""

    median_tokens: float
    longest_tokens: int
    spread_of_prompts: float = 0.8  # standard deviation of the logarithm between prompts
    spread_of_samples: float = 0.6  # and between the completions of one prompt

    def __post_init__(self) -> None:
        if not 1 <= self.median_tokens <= self.longest_tokens:
            raise ValueError(
                f"median_tokens = {self.median_tokens} must be at least 1 and at most longest_tokens = {self.longest_tokens}"
            )
        if min(self.spread_of_prompts, self.spread_of_samples) < 0.0:
            raise ValueError("spreads of a length mix must be 0 or more")

    @property
    def spread(self) -> float:
        return math.hypot(self.spread_of_prompts, self.spread_of_samples)

    @cached_property
    def mean_tokens(self) -> float:
        quantiles = NormalDist(sigma=self.spread or 1e-9)
        return fmean(self._tokens(quantiles.inv_cdf((i + 0.5) / 1000)) for i in range(1000))

    def length(self, prompt: str, sample: int) -> int:
        """Return the length of a prompt's completion, which follows from prompt and number alone: every schedule meets the same."""
        return self._length(_normal(f"prompt {prompt}"), prompt, sample)

    def group(self, prompt: str, size: int) -> Sequence[int]:
        of_prompt = _normal(f"prompt {prompt}")
        return [self._length(of_prompt, prompt, sample) for sample in range(size)]

    def _length(self, of_prompt: float, prompt: str, sample: int) -> int:
        of_sample = _normal(f"sample {sample} of {prompt}")
        return round(self._tokens(self.spread_of_prompts * of_prompt + self.spread_of_samples * of_sample))

    def _tokens(self, logarithm: float) -> float:
        return min(float(self.longest_tokens), max(1.0, self.median_tokens * math.exp(logarithm)))


def _normal(name: str) -> float:
    """Return a number of the standard normal distribution that follows from ``name`` alone."""
    _random.seed(name)  # one object for all of them: making another takes as long as the number
    return _random.gauss()


@dataclass(frozen=True, slots=True)
class EnginePace:
    """Seconds of an engine's work. A decode step reads all weights for however few sequences, and takes longer for more."""

    slots: int  # sequences that decode together at most
    step_s_alone: float  # of one token, for a single sequence
    step_s_full: float  # of one token for each of ``slots`` sequences
    prompt_s: float = 0.0  # to compute a prompt and sample the first token; nothing decodes meanwhile

    def __post_init__(self) -> None:
        if self.slots < 1 or not 0.0 < self.step_s_alone <= self.step_s_full:
            raise ValueError(f"needs slots >= 1 and 0 < step_s_alone <= step_s_full, got {self}")

    def step_s(self, running: int) -> float:
        share = (min(running, self.slots) - 1) / max(1, self.slots - 1)
        return self.step_s_alone + (self.step_s_full - self.step_s_alone) * max(0.0, share)

    @property
    def tokens_per_s(self) -> float:
        return self.slots / self.step_s_full


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of everything that is not generation."""

    token_s: float  # of training, for each sampled token
    step_s: float = 0.0  # of a step besides its tokens
    between_s: float = 0.0  # from the end of a step until the next may begin: it is recorded, its weights are copied
    score_s: float = 0.0  # from the end of a pack's generation to its arrival at the trainer
    publish_s: float = 0.0  # from then to the moment that workers know the step's version
    load_s: float = 0.0  # to load a version into an engine
    deliver_s: float = 0.0  # from a worker's request to its pack, when there is one


@dataclass(frozen=True, kw_only=True)
class Fleet:
    num_workers: int
    pace: EnginePace  # of all servers of a worker together
    packs_in_flight: int  # 0: as many as an engine makes use of, as `worker.packs_in_flight`
    drains: bool  # whether a swap waits for running sequences, else they go on with the new weights
    max_paused_share: float = 0.5  # `worker.max_paused_share`
    num_servers: int = 1  # of a worker


@dataclass(slots=True)
class Step:
    started: float
    ended: float
    lengths: list[int]
    ages: Counter[int]  # versions, weighted by sampled tokens; of each group's oldest token
    groups: list[str]


@dataclass(slots=True)
class Outcome:
    steps: list[Step] = field(default_factory=list)
    sampled: dict[str, Sequence[int]] = field(default_factory=dict)  # lengths by group, of all started, to their ends
    abandoned: Counter[str] = field(default_factory=Counter)  # completions that were started and not kept, by reason
    abandoned_tokens: float = 0.0  # sampled for them
    dropped: Counter[str] = field(default_factory=Counter)  # groups by reason
    busy: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # after each step: time, engine seconds, tokens


class SimulatedPrompts:
    fingerprint = "simulated"

    def __init__(self, num: int) -> None:
        self._num = num
        self.num_tokens = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, (index,), "", RewardRequest(name="simulated"))


def scored_group(group_id: str, lengths: Sequence[int], oldest: PolicyVersion, newest: PolicyVersion) -> ScoredGroup:
    """Return the fact of a group; its values are right by construction, and checking them takes a tenth of a run."""
    generated = GeneratedGroup.model_construct(
        group_id=group_id, row_group=0, split="train", attempt=0, reward_name="simulated", issued_version=oldest,
        oldest_version=oldest, newest_version=newest, prompt_tokens=1, completion_tokens=tuple(lengths),
        finish_reasons=("stop",) * len(lengths),
    )  # fmt: skip
    return ScoredGroup.model_construct(generated=generated, rewards=(1.0,) * len(lengths), scorer="simulated")


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


@dataclass(slots=True)
class SimulatedEngine:
    pace: EnginePace
    waiting: deque[SimulatedSequence] = field(default_factory=deque)  # without a slot
    later: deque[SimulatedSequence] = field(default_factory=deque)  # those that came after the engine began to drain
    early: list[Pack] = field(default_factory=list)  # packs that wait for the version they were issued for
    ends: list[tuple[float, int, SimulatedSequence]] = field(
        default_factory=list
    )  # of what runs, by the decode step of its end
    version: PolicyVersion = _INITIAL
    target: PolicyVersion | None = None  # of the swap under way
    swapping_since: float = 0.0
    pause_s: float = math.inf  # of the last swap, as the worker measures it
    paused: bool = False  # weights are being loaded
    loading: bool = False  # new sequences wait for the end of a drain
    busy_s: float = 0.0
    num_tokens: float = 0.0
    prompts_s: float = 0.0  # that prompts still take before decoding goes on
    stamp: int = 0  # changes whenever the next end does
    _at: float = 0.0
    _steps: float = 0.0  # decode steps so far

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
        gone = [(at, seq) for at, _, seq in self.ends if seq.is_abandoned]
        self.ends = [entry for entry in self.ends if not entry[2].is_abandoned]
        heapq.heapify(self.ends)
        count = len(gone)
        for queue in (self.waiting, self.later):
            left = [sequence for sequence in queue if not sequence.is_abandoned]
            count += len(queue) - len(left)
            queue.clear()
            queue.extend(left)
        return count, sum(seq.length - (at - self._steps) for at, seq in gone)

    def take_ended(self) -> list[SimulatedSequence]:
        ended = []
        while self.ends and self.ends[0][0] <= self._steps + 1e-6:
            ended.append(heapq.heappop(self.ends)[2])
        return ended
