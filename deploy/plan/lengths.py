"""Define what a simulated run takes and returns: lengths of completions, durations, workers, and its outcome; pure.

Response lengths of reasoning models are close to log-normal with a long tail: the longest exceed the median more than
20 times (ROLL Flash, arXiv:2510.11345). Here they are log-normal, cut at the longest completion.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist, fmean

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
    pace: EnginePace
    packs_in_flight: int  # 0: as many as an engine makes use of, as `worker.packs_in_flight`
    drains: bool  # whether a swap waits for running sequences, else they go on with the new weights
    max_paused_share: float = 0.5  # `worker.max_paused_share`


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
