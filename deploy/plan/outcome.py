"""What a simulated run is given, and what it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.deploy.plan.lengths import EnginePace


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
    """The workers, each with one engine."""

    num_workers: int
    pace: EnginePace
    packs_in_flight: int  # 0: as many as an engine makes use of, as `worker.packs_in_flight`
    drains: bool  # whether a swap waits for running sequences, else they go on with the new weights
    max_paused_share: float = 0.5  # `worker.max_paused_share`


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
    sampled: dict[str, Sequence[int]] = field(default_factory=dict)  # lengths by group, of all started, to their ends
    abandoned: Counter[str] = field(default_factory=Counter)  # completions that were started and not kept, by reason
    abandoned_tokens: float = 0.0  # sampled for them
    dropped: Counter[str] = field(default_factory=Counter)  # groups by reason
    busy: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # after each step: time, engine seconds, tokens
