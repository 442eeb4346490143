"""Requests → whole completions, for the client of any engine.

Continues what an update interrupts, refuses unverified weights, applies stop strings. `AdapterTable` holds the LoRA
adapters of one server: which it confirmed, and which requests use them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.checks.check_task import ModelLimits, check_request
from penstock.rollout_service.engines.completion import Completion, Resumption, sampled_by_adapter
from penstock.rollout_service.engines.stop_strings import Detokenizer, ended_at, first_end
from penstock.rollout_service.errors import EngineMisconfigured, EngineRefused, EngineTimeout, WeightsUnverified

_TIMES_THE_MEAN = 4.0  # a request may take so many times the mean time of its tokens
_FEWEST_MEASURED = 16  # tokens of a completion whose time counts: in a shorter one the prompt's time is most of it
_WEIGHT = 0.2  # of a new measurement in the mean


@dataclass(slots=True)
class RequestDeadline:
    """How long a request may take: ``least_s``, or more where its longest completion needs it at the measured speed."""

    least_s: float
    s_per_token: float = 0.05  # of one sequence, its waits included; an assumption until one was measured
    decoding_s: float = 0.0  # the longest that a completion was given so far

    def seconds(self, max_new_tokens: int) -> float:
        decoding_s = _TIMES_THE_MEAN * max_new_tokens * self.s_per_token
        self.decoding_s = max(self.decoding_s, decoding_s)
        return max(self.least_s, decoding_s)

    def measure(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= _FEWEST_MEASURED:
            self.s_per_token += _WEIGHT * (seconds / num_tokens - self.s_per_token)


@dataclass(slots=True)
class _Entry:
    base: PolicyVersion  # the weights on which it was loaded
    num_requests: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while no request names it
    is_leaving: bool = False


class AdapterTable:
    def __init__(self) -> None:
        self._entries: dict[PolicyVersion, _Entry] = {}

    def __contains__(self, version: object) -> bool:
        """Return True if the server confirmed a version and has not unloaded it since."""
        return version in self._entries

    @property
    def versions(self) -> list[PolicyVersion]:
        """The loaded versions, those that are being unloaded included."""
        return list(self._entries)

    @property
    def bases(self) -> set[PolicyVersion]:
        """The weights on which those were loaded."""
        return {entry.base for entry in self._entries.values()}

    def confirm(self, version: PolicyVersion, base: PolicyVersion) -> None:
        entry = self._entries[version] = _Entry(base)
        entry.idle.set()

    def forget(self, version: PolicyVersion) -> None:
        self._entries.pop(version, None)

    @contextlib.contextmanager
    def using(self, version: PolicyVersion) -> Iterator[PolicyVersion]:
        """Count a request with a version; yields the base weights that it is computed with.

        Raises EngineRefused, before anything is sent, for a version that is not loaded: SGLang reloads an unloaded
        adapter from its last folder when a request names it.
        """
        entry = self._entries.get(version)
        if entry is None or entry.is_leaving:
            have = ", ".join(map(str, self._entries)) or "none"
            raise EngineRefused(f"the adapter of version {version} is not loaded; loaded are: {have}")
        entry.num_requests += 1
        entry.idle.clear()
        try:
            yield entry.base
        finally:
            entry.num_requests -= 1
            if not entry.num_requests:
                entry.idle.set()

    async def leave(self, version: PolicyVersion, deadline_s: float) -> None:
        """Refuse a version to new requests and wait for those under way; raises EngineTimeout if they take too long."""
        entry = self._entries[version]
        entry.is_leaving = True
        try:
            async with asyncio.timeout(deadline_s):
                await entry.idle.wait()
        except TimeoutError:
            raise EngineTimeout(
                f"{entry.num_requests} requests still use the adapter of version {version} after {deadline_s:g} s"
            ) from None


@dataclass(slots=True)
class SingleRequest:
    name: str
    is_abandoned: bool = False  # its reply may end anywhere, and nothing more is asked for


@dataclass(frozen=True, slots=True)
class SampleRequest:
    sampling: Sampling
    n: int  # so many sequences in a row share their prompt
    adapter: PolicyVersion | None
    deadline_s: float
    single: SingleRequest | None = None  # of one sequence, with a separate name


class SampleParts(Protocol):
    async def __call__(self, sequences: Sequence[Resumption], request: SampleRequest) -> list[Completion]:
        """Sample the next part of each sequence; a part that an update of this worker cut ends with ``"abort"``."""
        ...


@dataclass(eq=False)
class CompletionSampler:
    url: str
    sample: SampleParts
    adapters: AdapterTable
    deadline: RequestDeadline
    _: KW_ONLY
    returns_text: bool = True  # False: the engine returns token ids only, which are decoded here

    def __post_init__(self) -> None:
        self.folder: Path | None = None  # of the last weights, whose tokenizer decodes
        self.may_send = asyncio.Event()  # cleared while the engine's memory is released
        self.may_send.set()
        self._num_sent = 0  # requests that the engine computes
        self._all_answered = asyncio.Event()
        self._num_unverified = 0
        self._unverified_reason: str | None = None
        self._detokenizer: Detokenizer | None = None

    def mark_unverified(self, reason: str) -> None:
        self._num_unverified += 1
        self._unverified_reason = reason
        self.may_send.set()  # what waits is refused at once

    def mark_verified(self) -> None:
        self._unverified_reason = None

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        adapter: PolicyVersion | None,
        limits: ModelLimits,
        seeds: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """Return ``n`` whole completions of every prompt; see `Generates.generate`. One deadline covers all parts."""
        for prompt in prompts:
            check_request(prompt, sampling, limits)
        sequences = [
            Resumption(prompt, sampling.max_new_tokens, None if seeds is None else seeds[at], number)
            for at, prompt in enumerate(prompts)
            for number in range(n)
        ]
        deadline_s = self.deadline.seconds(sampling.max_new_tokens)
        await self._complete(sequences, SampleRequest(sampling, n, adapter, deadline_s))
        completions = [await self.whole(sequence, sampling.stop) for sequence in sequences]
        return [completions[i : i + n] for i in range(0, len(completions), n)]

    async def generate_single(
        self, prompt: Sequence[int], sampling: Sampling, adapter: PolicyVersion | None, request: SingleRequest
    ) -> Resumption:
        """Return one sequence as soon as it is whole, or abandoned; `whole` makes a completion of it."""
        sequence = Resumption(prompt, sampling.max_new_tokens)
        deadline_s = self.deadline.seconds(sampling.max_new_tokens)
        await self._complete([sequence], SampleRequest(sampling, 1, adapter, deadline_s, request))
        return sequence

    async def _complete(self, sequences: Sequence[Resumption], request: SampleRequest) -> None:
        num_unverified, adapter, started = self._num_unverified, request.adapter, time.monotonic()
        try:
            with self.adapters.using(adapter) if adapter is not None else contextlib.nullcontext() as base:
                async with asyncio.timeout(request.deadline_s) as limit:
                    unfinished = sequences
                    while unfinished:
                        started += await self._wait_until_sendable(limit)
                        await self._add_parts(unfinished, request, base, num_unverified)
                        request = replace(request, n=1)
                        is_over = request.single is not None and request.single.is_abandoned
                        unfinished = [] if is_over else [sequence for sequence in unfinished if sequence.is_cut]
        except TimeoutError:
            raise EngineTimeout(f"{self.url} gave no answer within {request.deadline_s:g} s") from None
        self.deadline.measure(max(len(sequence.sampled) for sequence in sequences), time.monotonic() - started)

    async def wait_until_answered(self, deadline_s: float) -> None:
        """Return once no request is at the engine; raises EngineTimeout."""
        try:
            async with asyncio.timeout(deadline_s):
                while self._num_sent:
                    self._all_answered.clear()
                    await self._all_answered.wait()
        except TimeoutError:
            raise EngineTimeout(f"{self._num_sent} requests to {self.url} still run after {deadline_s:g} s") from None

    async def _wait_until_sendable(self, limit: asyncio.Timeout) -> float:
        """Wait while the engine's memory is released, which no deadline counts; return the seconds."""
        if self.may_send.is_set():
            return 0.0
        now, deadline = asyncio.get_running_loop().time, limit.when()
        started = now()
        limit.reschedule(None)
        await self.may_send.wait()
        waited_s = now() - started
        limit.reschedule(None if deadline is None else deadline + waited_s)
        return waited_s

    async def _add_parts(
        self, sequences: Sequence[Resumption], request: SampleRequest, base: PolicyVersion | None, num_unverified: int
    ) -> None:
        self._refuse_if_unverified(num_unverified)
        self._num_sent += 1
        try:
            parts = await self.sample(sequences, request)
        finally:
            self._num_sent -= 1
            self._all_answered.set()
        self._refuse_if_unverified(num_unverified)
        for sequence, part in zip(sequences, parts, strict=True):
            if request.adapter is not None:
                part = sampled_by_adapter(part, request.adapter, base)
            sequence.parts.append(part)

    def _refuse_if_unverified(self, num_unverified: int) -> None:
        if self._unverified_reason is not None or num_unverified != self._num_unverified:
            raise WeightsUnverified(
                f"{self.url}: {self._unverified_reason or 'an update of its weights failed during the request'}"
            )

    async def whole(self, sequence: Resumption, stop: Sequence[str]) -> Completion:
        """Return a sequence's completion.

        The text of several parts is decoded from all of its tokens: a character may be split between two parts.
        """
        if stop:
            return await asyncio.to_thread(self._stopped, sequence, stop)
        if self.returns_text and len(sequence.parts) == 1 and sequence.parts[0].finish_reason != "abort":
            return sequence.parts[0]
        return sequence.joined(await asyncio.to_thread(self._decode, sequence))

    def _stopped(self, sequence: Resumption, stop: Sequence[str]) -> Completion:
        tokenizer = self._tokenizer()
        if not tokenizer.has_tokenizer:
            raise EngineMisconfigured(
                f"no tokenizer.json among the published weights ({self.folder}): rollout.stop needs one to find the "
                "strings in the sampled tokens; publish it with the weights, or set rollout.stop = []"
            )
        whole = sequence.joined("")
        count = first_end(whole.token_ids, stop, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        if count is None:
            return replace(whole, text=tokenizer.decode(sequence.visible))
        ended = ended_at(whole, count)
        return replace(ended, text=tokenizer.decode(ended.token_ids))

    def _decode(self, sequence: Resumption) -> str:
        tokenizer = self._tokenizer()
        if not tokenizer.has_tokenizer and (not self.returns_text or any(p.text for p in sequence.parts)):
            reason = (
                "worker.update_mode = 'abort' needs a tokenizer to decode interrupted completions; "
                "use 'retract', or publish it"
                if self.returns_text
                else "this engine returns token ids only; publish it with the weights"
            )
            raise EngineMisconfigured(f"no tokenizer.json among the published weights ({self.folder}): {reason}")
        return tokenizer.decode(sequence.visible)

    def _tokenizer(self) -> Detokenizer:
        if self._detokenizer is None:
            assert self.folder is not None  # weights were loaded before anything was sampled
            self._detokenizer = Detokenizer(self.folder)
        return self._detokenizer
