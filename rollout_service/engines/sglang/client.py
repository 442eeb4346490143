"""SGLang's HTTP contract, spoken in this file and nowhere else; what it answers is read by `read_reply.py`.

Every reply is held against its request before anything is built from it. What the log-probabilities are:
``log softmax(logits / temperature)`` over the full vocabulary, of the token that was sampled, as long as
``top_p`` and ``top_k`` are off.

The embedded engine speaks the same contract, so nothing here knows which of the two it talks to.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.protocol.facts import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import adapter_name, version_of
from penstock.rollout_service.checks.check_task import ModelLimits, check_request
from penstock.rollout_service.embedded_engine.http.text import Text
from penstock.rollout_service.engines.adapter_table import AdapterTable
from penstock.rollout_service.engines.engine_http import EngineHttp
from penstock.rollout_service.engines.read_reply import (
    Completion,
    EngineChecksum,
    read_checksum,
    read_completion,
    read_version,
    sampled_by_adapter,
    shorten,
)
from penstock.rollout_service.engines.resumption import Resumption
from penstock.rollout_service.engines.update_mode import UpdateMode
from penstock.rollout_service.errors import (
    EngineDistrusted,
    EngineMisconfigured,
    EngineRefused,
    EngineTimeout,
    ReplyRefused,
    WeightsNotApplied,
)

_PROBE_S = 10.0  # a question that costs the engine nothing: model_info
_HEALTH_S = 30.0  # a token of its own at most; SGLang itself gives up after 20 s
_PAUSE_S = 60.0  # at most a step that is under way
_LOAD_S = 600.0  # draining what runs, then reading the weights


_NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


class SglangClient:
    """One engine. Requests may run side by side; weight operations go one at a time."""

    def __init__(self, url: str, *, api_key: str = "", request_deadline_s: float = 600.0) -> None:
        """Prepare a client; nothing is sent before the first call."""
        self.url = url
        self._request_deadline_s = request_deadline_s
        self._probe_s = _PROBE_S
        self._weights_turn = asyncio.Lock()
        self._adapters_turn = asyncio.Lock()  # of their own: nothing stands still for an adapter
        self._adapters = AdapterTable()
        self._num_doubts = 0
        self._doubt: str | None = None
        self._aborting = False  # a pause that ends what runs is under way
        self._may_be_paused = True  # by whoever was killed in the middle of an update, before us
        self._said: EngineChecksum | None = None  # of the weights it serves, where the answer to their update held it
        self._num_aborts = 0  # counted when such a pause begins and when it ends
        self._cache_key: str | None = None  # keeps prefixes of different versions apart, where nothing flushes them
        self._folder: Path | None = None  # of the last weights, whose tokenizer decodes what was put together
        self._text: Text | None = None
        self.limits = ModelLimits(None, None)  # of the model that is served; requests beyond them are refused here
        self._http = EngineHttp(url, api_key=api_key)

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.close()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        adapter: PolicyVersion | None = None,
    ) -> list[list[Completion]]:
        """Sample ``n`` completions of every prompt in one request, by the adapter of a version where one is named.

        What an update of ours cuts short is asked for again from where it was, until it is whole. Returns one list
        of ``n`` for each prompt, in order. Raises EngineError of the kind that fits; a reply is used as a whole or
        not at all. Raises TaskRefused, and sends nothing, for what no engine could serve, or would die of.
        """
        for prompt in prompts:
            check_request(prompt, sampling, self.limits)
        num_doubts, deadline_s = self._num_doubts, self._request_deadline_s
        sequences = [Resumption(prompt, sampling.max_new_tokens) for prompt in prompts for _ in range(n)]
        ask = _Ask(sampling, num_doubts, adapter)
        try:
            with self._adapters.using(adapter) if adapter is not None else contextlib.nullcontext() as base:
                ask.base = base
                async with asyncio.timeout(deadline_s):  # for all parts together
                    await self._sample(sequences, ask, n)
                    while cut := [sequence for sequence in sequences if sequence.is_cut]:
                        await self._sample(cut, ask, 1)
        except TimeoutError:
            raise EngineTimeout(f"{self.url}/generate gave no answer within {deadline_s:g} s") from None
        completions = [await self._whole(sequence) for sequence in sequences]
        return [completions[i : i + n] for i in range(0, len(completions), n)]

    async def _sample(self, sequences: Sequence[Resumption], ask: _Ask, n: int) -> None:
        """Add one part to each sequence, in one request; ``n`` that follow one another share their prompt."""
        self._refuse_if_doubted(ask.num_doubts)
        num_aborts = self._num_aborts
        prompts = [[*one.prompt, *one.sampled] for one in sequences[::n]]
        params = [_sampling_params(ask.sampling, n, one.room) for one in sequences[::n]]
        body: dict[str, Any] = {
            "rid": [uuid.uuid4().hex for _ in prompts],  # aborts match by prefix, so all of one length
            "input_ids": prompts,
            "sampling_params": params[0] if all(one == params[0] for one in params) else params,
            "return_logprob": True,
        }
        if self._cache_key is not None:
            body["extra_key"] = self._cache_key
        if ask.adapter is not None:
            body["lora_path"] = adapter_name(ask.adapter)
        rows = await self._http.call("POST", "/generate", body, self._request_deadline_s)
        self._refuse_if_doubted(ask.num_doubts)
        if isinstance(rows, dict):
            rows = [rows]
        if not isinstance(rows, list) or len(rows) != len(sequences):
            got = f"{len(rows)} rows" if isinstance(rows, list) else type(rows).__name__
            raise ReplyRefused(f"{self.url}: expected {len(sequences)} completions, got {got}")
        interrupted = self._aborting or num_aborts != self._num_aborts
        for index, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
            part = read_completion(
                row,
                num_prompt_tokens=len(prompts[index // n]),
                max_new_tokens=sequence.room,
                interrupted=interrupted,
            )
            if ask.adapter is not None:
                part = sampled_by_adapter(part, ask.adapter, ask.base)
            sequence.parts.append(part)

    async def _whole(self, sequence: Resumption) -> Completion:
        """Return a sequence's completion; the text of several parts is decoded anew, from all of its tokens.

        A character may lie across the cut, so texts of parts cannot be strung together.
        """
        if len(sequence.parts) == 1 and sequence.parts[0].finish_reason != "abort":
            return sequence.parts[0]
        return sequence.joined(await asyncio.to_thread(self._decode, sequence))

    def _decode(self, sequence: Resumption) -> str:
        if self._text is None:
            assert self._folder is not None  # nothing is cut but by an update
            self._text = Text(self._folder)
        if not self._text.has_tokenizer and any(part.text for part in sequence.parts):
            raise EngineMisconfigured(
                f"worker.update_mode = 'abort' needs a tokenizer.json among the published weights ({self._folder}): "
                "the text of a completion that was cut must be decoded as a whole; use 'retract' without one"
            )
        return self._text.decode([sequence.visible], skip_special_tokens=True)[0]

    def distrust(self, why: str) -> None:
        """Refuse what is under way, and whatever is asked until `trust`: nobody knows which weights sample it."""
        self._num_doubts += 1
        self._doubt = why

    def trust(self) -> None:
        """Let requests through again: the engine has confirmed what it serves."""
        self._doubt = None

    def _refuse_if_doubted(self, num_doubts: int) -> None:
        if self._doubt is not None or num_doubts != self._num_doubts:
            raise EngineDistrusted(f"{self.url}: {self._doubt or 'an update of its weights failed meanwhile'}")

    async def health(self) -> None:
        """Return when the engine generates, or could; raises EngineError when it does not."""
        async with self._weights_turn:  # while it drains for an update it answers nobody
            await self._http.call("GET", "/health", None, _HEALTH_S, parse=False)

    async def server_info(self) -> dict[str, Any]:
        """Return how the engine was started, as it tells it; raises EngineError."""
        info = await self._http.call("GET", "/server_info", None, self._probe_s)
        return info if isinstance(info, dict) else {}

    async def metrics(self) -> str:
        """Return the engine's figures in Prometheus' text format; raises EngineError where it has none."""
        return await self._http.call("GET", "/metrics", None, self._probe_s, parse=False)

    async def load_weights(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None:
        """Swap the weights and read back that it happened; ``mode`` says what becomes of what runs.

        The engine drops its prefix cache, except ``in_place``: then later requests name the version, so that they
        meet no keys and values of another. Raises WeightsNotApplied when it says no or afterwards names another
        version: then nobody knows what it serves, it computes nothing if it was paused, and it must be loaded again
        or started anew.
        """
        if self._adapters.versions:  # they change the weights they were loaded upon, and no others
            await self.drop_adapters()
        async with self._adapters_turn, self._weights_turn:
            self._folder = folder
            if mode != "drain":
                await self._pause(mode)
            elif self._may_be_paused:
                await self._continue()
            await self._update(folder, version, flush=mode != "in_place")
            self._cache_key = str(version) if mode == "in_place" else None
            if mode != "drain":
                await self._continue()

    async def load_adapter(self, folder: Path, version: PolicyVersion) -> None:
        """Have the engine serve a version's adapter beside everything it serves; nothing pauses.

        Requests name it from then on, until it is unloaded or the weights below change; one that it has already stays as
        it is. Raises WeightsNotApplied when the engine says no, or does not list it afterwards, or serves weights that are
        no version of ours.
        """
        async with self._adapters_turn:
            if version in self._adapters:
                return
            base = await self.served_version()
            if base is None:
                raise WeightsNotApplied(
                    f"{self.url} serves weights that are no version of ours; nothing can be upon them"
                )
            name = adapter_name(version)
            body = {"lora_name": name, "lora_path": str(folder)}
            try:
                answer = await self._http.call("POST", "/load_lora_adapter", body, _LOAD_S)
            except EngineRefused as err:
                raise WeightsNotApplied(f"adapter of version {version}: {err}{_remedy(str(err))}") from None
            listed = (
                answer.get("loaded_adapters") if isinstance(answer, dict) and answer.get("success") is True else None
            )
            if not isinstance(listed, dict) or listed.get(name) != str(folder):
                raise WeightsNotApplied(f"{self.url} did not load {name} from {folder}: {shorten(answer)}")
            self._adapters.confirm(version, base)

    async def unload_adapter(self, version: PolicyVersion) -> None:
        """Let a version's adapter go, once no request of ours uses it; one that is not loaded is fine.

        Raises EngineTimeout when requests use it for longer than they may take, EngineRefused when the engine says no.
        """
        if version not in self._adapters:
            return
        await self._adapters.leave(version, self._request_deadline_s)
        async with self._adapters_turn:
            if version in self._adapters:
                await self._unload(version)
                self._adapters.forget(version)

    async def drop_adapters(self) -> None:
        """Unload every adapter of ours that the engine has, once unused; another life of this worker may have left it."""
        for version in self._adapters.versions:
            await self._adapters.leave(version, self._request_deadline_s)
        async with self._adapters_turn:
            for version in await self.listed_adapters():
                await self._unload(version)
            for version in self._adapters.versions:
                self._adapters.forget(version)

    async def forget_lost_adapters(self) -> None:
        """Forget what the engine does not have any more, so that nobody asks for it and it can be loaded again."""
        async with self._adapters_turn:
            have = await self.listed_adapters()
            for version in self._adapters.versions:
                if version not in have:
                    self._adapters.forget(version)

    async def listed_adapters(self) -> set[PolicyVersion]:
        """Ask which versions' adapters the engine has."""
        answer = await self._http.call("GET", "/v1/models", None, self._probe_s)
        cards = answer.get("data") if isinstance(answer, dict) else None
        names = [card.get("id") for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        return {version for name in names if (version := version_of(name)) is not None}

    async def _unload(self, version: PolicyVersion) -> None:
        answer = await self._http.call("POST", "/unload_lora_adapter", {"lora_name": adapter_name(version)}, _LOAD_S)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineRefused(f"{self.url} did not unload the adapter of version {version}: {shorten(answer)}")

    async def _update(self, folder: Path, version: PolicyVersion, *, flush: bool) -> None:
        body = {
            "model_path": str(folder),
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        self._said = None
        try:
            answer = await self._http.call("POST", "/update_weights_from_disk", body, _LOAD_S)
        except EngineRefused as err:
            raise WeightsNotApplied(f"version {version}: {err}") from None
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise WeightsNotApplied(f"{self.url} did not load version {version} from {folder}: {shorten(answer)}")
        says_itself = "weight_version" in answer  # SGLang does not
        served = read_version(answer["weight_version"]) if says_itself else await self._read_version()
        if served != version:
            where = "answer" if says_itself else "model_info"
            raise WeightsNotApplied(f"{self.url} said it loaded version {version}, but its {where} names {served}")
        self._said = read_checksum(answer)

    async def _pause(self, mode: UpdateMode) -> None:
        self._may_be_paused = True
        self._aborting = mode == "abort"
        self._num_aborts += self._aborting
        try:
            await self._http.call("POST", "/pause_generation", {"mode": mode}, _LOAD_S)
        finally:
            self._num_aborts += self._aborting
            self._aborting = False

    async def _continue(self) -> None:
        await self._http.call("POST", "/continue_generation", {}, _PAUSE_S)
        self._may_be_paused = False

    async def served_version(self) -> PolicyVersion | None:
        """Ask which version is served; None when the engine's label is not a version of ours."""
        async with self._weights_turn:
            return await self._read_version()

    async def weights_checksum(self) -> EngineChecksum | None:
        """Return the checksum of the served weights as the engine says it; None of one that cannot.

        An engine that said it when it took the weights is not asked again.
        """
        async with self._weights_turn:
            if self._said is not None:
                return self._said
            try:
                answer = await self._http.call("POST", "/weights_checker", {"action": "checksum"}, _LOAD_S)
            except (EngineRefused, ReplyRefused):
                return None
        return read_checksum(answer)

    async def _read_version(self) -> PolicyVersion | None:
        info = await self._http.call("GET", "/model_info", None, self._probe_s)
        return read_version(info.get("weight_version") if isinstance(info, dict) else None)


@dataclass(slots=True)
class _Ask:
    """What all parts of one request have alike."""

    sampling: Sampling
    num_doubts: int
    adapter: PolicyVersion | None
    base: PolicyVersion | None = None  # the weights that the adapter changes


def _remedy(refusal: str) -> str:
    if "LoRA is not enabled" not in refusal:
        return ""
    return (
        "; set sglang.max_lora_rank for a server of the worker's own, or start yours with --enable-lora --max-lora-rank"
    )


def _sampling_params(sampling: Sampling, n: int, max_new_tokens: int) -> dict[str, Any]:
    return {
        "n": n,
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        # said although they are off: a server may have been started with other preferences
        **_NEUTRAL,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
