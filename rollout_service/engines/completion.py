"""Completions as every engine returns them, the checks of replies, and sequences that a weight update interrupts; pure.

The same worker requests the rest of an interrupted sequence: the prefix has to be recomputed under the new weights on any engine, and an
engine that has just loaded them is idle. When the worker is killed, the whole pack is redelivered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.protocol.groups import FinishReason, derived_seed
from penstock.protocol.token_annotations import ExpertChoices
from penstock.protocol.trajectory import LOWEST_SAMPLED_LOGPROB
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.errors import ReplyRefused

_LOGPROB_SLACK = 1e-3  # a probability of 1 may round to a log-probability just above 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation; positions of ``version_runs`` count from its first token."""

    token_ids: list[int]  # [C] as sampled, the matched stop token, or those of the stop string, included
    logprobs: list[float]  # [C] of the sampled tokens under the policy that sampled them
    version_runs: tuple[VersionRun, ...]  # cover [0, C) without gap or overlap
    finish_reason: FinishReason
    text: str
    # Of all tokens of prompt and completion but the last, where they were asked for.
    experts: ExpertChoices | None = None


@dataclass(frozen=True, slots=True)
class EngineChecksum:
    """An engine's checksum of the weights it serves; comparable among engines of one ``layout``."""

    value: str
    layout: str  # how many ranks hold the weights, and how they are sharded
    is_of_files: bool = False  # of the tensors in the model folder, as the version's root is


def read_version(label: object) -> PolicyVersion | None:
    if isinstance(label, str) and label.isascii() and label.isdecimal():
        return PolicyVersion(int(label))
    return None


def check_tokens(
    token_ids: Sequence[Any], logprob_ids: Sequence[Any], logprobs: Sequence[Any], *, at_least: int, at_most: int
) -> None:
    """Raise ReplyRefused unless every sampled token has one valid log-probability and their number was asked for."""
    if not at_least <= len(token_ids) <= at_most:
        raise ReplyRefused(f"{len(token_ids)} completion tokens, expected 1 to {at_most}")
    if list(logprob_ids) != list(token_ids):
        raise ReplyRefused(
            f"log-probabilities are of other tokens than the sampled ones: {len(logprobs)} for {len(token_ids)} tokens"
        )
    if not all(type(value) is int and value >= 0 for value in token_ids):
        raise ReplyRefused(f"output_ids are not token ids: {shorten(token_ids)}")
    if not all(type(value) in (float, int) and math.isfinite(value) and value <= _LOGPROB_SLACK for value in logprobs):
        raise ReplyRefused(f"log-probabilities are missing, not finite or above 0: {shorten(logprobs)}")
    if logprobs and min(logprobs) < LOWEST_SAMPLED_LOGPROB:
        raise ReplyRefused(
            f"a sampled token has log-probability {min(logprobs)}, expected {LOWEST_SAMPLED_LOGPROB} or more: a less probable one "
            "is never drawn, so these are not of the distribution that was sampled; check the engine's log-probability mode"
        )


def read_version_runs(spans: Any, num_tokens: int, *, engine: str) -> tuple[VersionRun, ...]:
    runs: list[VersionRun] = []
    position = 0
    for span in spans if isinstance(spans, list) else ():
        try:
            version, start, end = read_version(span["version"]), span["start"], span["end"]
        except (KeyError, TypeError) as err:
            raise ReplyRefused(f"weight_versions do not have {engine}'s form ({err!r}): {shorten(spans)}") from None
        if start == end:  # an update before the first token leaves an empty span
            continue
        if version is None:
            raise ReplyRefused(f"tokens of unknown version {shorten(span['version'])} are never trained on")
        if start != position or not isinstance(end, int) or end < start:
            raise ReplyRefused(f"weight_versions have a gap or overlap at token {position}: {shorten(spans)}")
        runs.append(VersionRun(version, start, end))
        position = end
    if position != num_tokens:
        raise ReplyRefused(f"weight_versions cover {position} of {num_tokens} tokens: {shorten(spans)}")
    return tuple(runs)


def sampled_by_adapter(completion: Completion, adapter: PolicyVersion, base: PolicyVersion | None) -> Completion:
    """Return a completion whose tokens are all of the adapter's version.

    A server names the version of the base weights, not the adapter. It refuses a request for an adapter that it does
    not have, so a reply was computed with the adapter that the request named. Raises ReplyRefused when a token was
    computed with other base weights than those the adapter was loaded on.
    """
    for run in completion.version_runs:
        if run.version != base:
            raise ReplyRefused(
                f"tokens {run.start} to {run.end} of adapter {adapter} were computed with base weights of version "
                f"{run.version}, expected version {base}, on which the adapter was loaded"
            )
    num_tokens = len(completion.token_ids)
    runs = (VersionRun(adapter, 0, num_tokens),) if num_tokens else ()
    return replace(completion, version_runs=runs)


def shorten(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"


@dataclass(slots=True)
class Resumption:
    prompt: Sequence[int]
    max_new_tokens: int
    seed: int | None = None  # of all samples of its prompt; None: random
    number: int = 0  # among these
    parts: list[Completion] = field(default_factory=list)

    @property
    def sampled(self) -> list[int]:
        return [token for part in self.parts for token in part.token_ids]

    @property
    def num_left(self) -> int:
        return self.max_new_tokens - sum(len(part.token_ids) for part in self.parts)

    @property
    def next_seed(self) -> int | None:
        """The seed of its next part: the first part's is that of the prompt, from which an engine derives those of n samples."""
        if self.seed is None or not self.parts:
            return self.seed
        return derived_seed(self.seed, self.number, self.max_new_tokens - self.num_left)

    @property
    def is_cut(self) -> bool:
        """Whether an update interrupted it, and nothing else ended it."""
        return self.parts[-1].finish_reason == "abort" and self.num_left > 0

    @property
    def visible(self) -> list[int]:
        """The tokens that its text is decoded from: without the stop token, as engines do."""
        return self.sampled[:-1] if self.parts[-1].finish_reason == "stop" else self.sampled

    def joined(self, text: str) -> Completion:
        """Return the parts as one completion of this text.

        Versions and log-probabilities are those that each token was sampled with. A sequence that was interrupted at its
        last allowed token ended by length.
        """
        finish = self.parts[-1].finish_reason
        return Completion(
            token_ids=self.sampled,
            logprobs=[logprob for part in self.parts for logprob in part.logprobs],
            version_runs=_joined_runs(self.parts),
            finish_reason="length" if finish == "abort" else finish,
            text=text,
            experts=self.parts[-1].experts,  # which computed all tokens before it again
        )


def _joined_runs(parts: Sequence[Completion]) -> tuple[VersionRun, ...]:
    runs: list[VersionRun] = []
    start = 0
    for part in parts:
        for run in part.version_runs:
            moved = VersionRun(run.version, run.start + start, run.end + start)
            if runs and runs[-1].version == moved.version:
                runs[-1] = runs[-1]._replace(end=moved.end)
            else:
                runs.append(moved)
        start += len(part.token_ids)
    return tuple(runs)
