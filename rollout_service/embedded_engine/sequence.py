"""Sequences and jobs: a sequence is one prompt and its growing completion; a job is one HTTP request.

waiting ──admitted──► running ──stop | length | abort──► finished
▲                     │
└─────retracted───────┘   (tokens and logprobs kept, keys and values dropped)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # what schedules sequences needs no torch
    import numpy as np

    from penstock.protocol.groups import RowImages
    from penstock.rollout_service.embedded_engine.model.low_rank import Adapter

NO_ADAPTER = 0  # number of sequences and rows without an adapter

# (key, adapter number) and tokens; a token of an image is the negative number of that image
Prefix: TypeAlias = tuple[tuple[str | None, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sampling:
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    seed: int = 0  # unsigned 64 bit
    stop_token_ids: tuple[int, ...] = ()  # with the model's end tokens; empty when those are ignored
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    number: int  # 1 or more; two images have one number only if they are equal
    pixel_values: np.ndarray  # [patches, values of a patch] float32
    grid: tuple[int, int, int]  # patches in time, height and width


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a prompt: where their tokens are, and what they are, in the same order."""

    places: RowImages
    shown: tuple[Image, ...]

    def marked(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return a prompt's tokens with the negative numbers of its images in the places of theirs."""
        tokens = list(prompt)
        for ref, image in zip(self.places.refs, self.shown, strict=True):
            tokens[ref.position : ref.end] = [-image.number] * ref.num_tokens
        return tuple(tokens)


@dataclass(frozen=True, slots=True)
class FinishReason:
    type: str  # "stop" | "length" | "abort"
    matched: int | str | None = None
    message: str = ""
    status_code: int | None = None  # set when the engine failed: the whole reply becomes an HTTP error

    def to_json(self, num_tokens: int) -> dict[str, object]:
        """Return SGLang's ``finish_reason`` object."""
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.type == "length":
            return {"type": "length", "length": num_tokens}
        return {"type": "abort", "message": self.message, "status_code": self.status_code, "err_type": None}


@dataclass(frozen=True, slots=True)
class VersionSpan:
    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its completion; owned by the engine thread from submission until its job is done."""

    rid: str
    prompt: tuple[int, ...]
    sampling: Sampling
    extra_key: str | None = None  # shares a computed prompt only with sequences of the same key
    adapter: Adapter | None = None  # None: the model alone
    images: Images | None = None  # of the prompt
    marked: tuple[int, ...] = field(init=False)  # the prompt as `Prefix` has it
    input_logprobs_from: int | None = None  # report prompt logprobs from this position on; None: none
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float] | None = None  # of tokens input_logprobs_from + 1 .. len(prompt) - 1
    num_top_logprobs: int = 0  # likeliest tokens to report in the place of each of these
    input_top_logprobs: list[list[tuple[float, int]]] | None = None  # (logprob, token) of each place, likeliest first
    wants_experts: bool = False
    experts: np.ndarray | None = None  # [tokens - 1, layers with experts, k] int16, set when it leaves the cache
    spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0  # of the prompt, that another sequence had computed
    computed_with: int = 0  # which set of weights computed its first keys and values; the runner counts them
    num_retractions: int = 0
    finish: FinishReason | None = None
    final_version: str = ""  # the weights that served it last
    job: Job | None = None

    def __post_init__(self) -> None:
        self.marked = self.prompt if self.images is None else self.images.marked(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output_ids)

    @property
    def num_reusable(self) -> int:
        """How many first tokens need not be computed where their keys and values are known.

        The last one must be, and those of the prompt from where its log-probabilities are wanted.
        """
        reported = self.input_logprobs_from if self.input_logprobs is None else None
        return self.num_tokens - 1 if reported is None else min(reported, self.num_tokens - 1)

    @property
    def max_tokens(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens

    @property
    def adapter_number(self) -> int:
        return NO_ADAPTER if self.adapter is None else self.adapter.number

    def prefix(self) -> Prefix:
        """Return key, adapter and tokens so far; sequences with equal prefixes share one prompt computation."""
        tokens = (*self.marked, *self.output_ids) if self.output_ids else self.marked
        return (self.extra_key, self.adapter_number), tokens

    def close_span(self, version: str) -> None:
        start = self.spans[-1].end if self.spans else 0
        end = len(self.output_ids)
        if end == start and (self.spans or self.finish is None):
            return  # a sequence that ends without a token still names its version, as SGLang does
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, end))


@dataclass(slots=True, eq=False)
class Job:
    """The sequences of one HTTP request, answered together.

    ``on_done`` and ``on_step`` are called in the engine thread and must only pass on to another thread.
    """

    sequences: list[Sequence]
    on_done: Callable[[Exception | None], None]
    on_step: Callable[[list[int]], None] | None = None  # streaming: output tokens of each sequence so far
    num_unfinished: int = 0

    def __post_init__(self) -> None:
        self.num_unfinished = len(self.sequences)
        for sequence in self.sequences:
            sequence.job = self
