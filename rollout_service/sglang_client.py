"""SGLang's HTTP contract, spoken in this file and nowhere else; what it answers is read by `read_reply.py`.

Every reply is held against its request before anything is built from it. What the log-probabilities are:
``log softmax(logits / temperature)`` over the full vocabulary, of the token that was sampled, as long as
``top_p`` and ``top_k`` are off.

The embedded engine speaks the same contract, so nothing here knows which of the two it talks to.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from protocol.facts import Sampling
from protocol.versions import PolicyVersion
from rollout_service.check_task import ModelLimits, check_request
from rollout_service.embedded_engine.text import Text
from rollout_service.errors import (
    EngineDistrusted,
    EngineMisconfigured,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    ReplyRefused,
    WeightsNotApplied,
)
from rollout_service.read_reply import (
    Completion,
    EngineChecksum,
    read_checksum,
    read_completion,
    read_version,
    shorten,
)
from rollout_service.resumption import Resumption
from rollout_service.update_mode import UpdateMode

_CONNECT_S = 5.0
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
        self._num_doubts = 0
        self._doubt: str | None = None
        self._aborting = False  # a pause that ends what runs is under way
        self._num_aborts = 0  # counted when such a pause begins and when it ends
        self._cache_key: str | None = None  # keeps prefixes of different versions apart, where nothing flushes them
        self._folder: Path | None = None  # of the last weights, whose tokenizer decodes what was put together
        self._text: Text | None = None
        self.limits = ModelLimits(None, None)  # of the model that is served; requests beyond them are refused here
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # an engine on loopback is never behind a proxy
        )

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int) -> list[list[Completion]]:
        """Sample ``n`` completions of every prompt in one request.

        What an update of ours cuts short is asked for again from where it was, until it is whole. Returns one list
        of ``n`` for each prompt, in order. Raises EngineError of the kind that fits; a reply is used as a whole or
        not at all. Raises TaskRefused, and sends nothing, for what no engine could serve, or would die of.
        """
        for prompt in prompts:
            check_request(prompt, sampling, self.limits)
        num_doubts, deadline_s = self._num_doubts, self._request_deadline_s
        sequences = [Resumption(prompt, sampling.max_new_tokens) for prompt in prompts for _ in range(n)]
        try:
            async with asyncio.timeout(deadline_s):  # for all parts together
                await self._sample(sequences, sampling, n, num_doubts)
                while cut := [sequence for sequence in sequences if sequence.is_cut]:
                    await self._sample(cut, sampling, 1, num_doubts)
        except TimeoutError:
            raise EngineTimeout(f"{self.url}/generate gave no answer within {deadline_s:g} s") from None
        completions = [await self._whole(sequence) for sequence in sequences]
        return [completions[i : i + n] for i in range(0, len(completions), n)]

    async def _sample(self, sequences: Sequence[Resumption], sampling: Sampling, n: int, num_doubts: int) -> None:
        """Add one part to each sequence, in one request; ``n`` that follow one another share their prompt."""
        self._refuse_if_doubted(num_doubts)
        num_aborts = self._num_aborts
        prompts = [[*one.prompt, *one.sampled] for one in sequences[::n]]
        params = [_sampling_params(sampling, n, one.room) for one in sequences[::n]]
        body: dict[str, Any] = {
            "rid": [uuid.uuid4().hex for _ in prompts],  # aborts match by prefix, so all of one length
            "input_ids": prompts,
            "sampling_params": params[0] if all(one == params[0] for one in params) else params,
            "return_logprob": True,
        }
        if self._cache_key is not None:
            body["extra_key"] = self._cache_key
        rows = await self._call("POST", "/generate", body, self._request_deadline_s)
        self._refuse_if_doubted(num_doubts)
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
            await self._call("GET", "/health", None, _HEALTH_S, parse=False)

    async def server_info(self) -> dict[str, Any]:
        """Return how the engine was started, as it tells it; raises EngineError."""
        info = await self._call("GET", "/server_info", None, self._probe_s)
        return info if isinstance(info, dict) else {}

    async def metrics(self) -> str:
        """Return the engine's figures in Prometheus' text format; raises EngineError where it has none."""
        return await self._call("GET", "/metrics", None, self._probe_s, parse=False)

    async def load_weights(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None:
        """Swap the weights and read back that it happened; ``mode`` says what becomes of what runs.

        The engine drops its prefix cache, except ``in_place``: then later requests name the version, so that they
        meet no keys and values of another. Raises WeightsNotApplied when it says no or afterwards names another
        version: then nobody knows what it serves, it computes nothing if it was paused, and it must be loaded again
        or started anew.
        """
        async with self._weights_turn:
            self._folder = folder
            if mode == "drain":
                await self._continue()  # whoever was killed in the middle of an update may have left it paused
            else:
                await self._pause(mode)
            await self._update(folder, version, flush=mode != "in_place")
            self._cache_key = str(version) if mode == "in_place" else None
            if mode != "drain":
                await self._continue()

    async def _update(self, folder: Path, version: PolicyVersion, *, flush: bool) -> None:
        body = {
            "model_path": str(folder),
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        try:
            answer = await self._call("POST", "/update_weights_from_disk", body, _LOAD_S)
        except EngineRefused as err:
            raise WeightsNotApplied(f"version {version}: {err}") from None
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise WeightsNotApplied(f"{self.url} did not load version {version} from {folder}: {shorten(answer)}")
        served = await self._read_version()
        if served != version:
            raise WeightsNotApplied(f"{self.url} said it loaded version {version}, but its model_info names {served}")

    async def _pause(self, mode: UpdateMode) -> None:
        self._aborting = mode == "abort"
        self._num_aborts += self._aborting
        try:
            await self._call("POST", "/pause_generation", {"mode": mode}, _LOAD_S)
        finally:
            self._num_aborts += self._aborting
            self._aborting = False

    async def _continue(self) -> None:
        await self._call("POST", "/continue_generation", {}, _PAUSE_S)

    async def served_version(self) -> PolicyVersion | None:
        """Ask which version is served; None when the engine's label is not a version of ours."""
        async with self._weights_turn:
            return await self._read_version()

    async def weights_checksum(self) -> EngineChecksum | None:
        """Ask for the checksum of the served weights; None of an engine that cannot say it."""
        async with self._weights_turn:
            try:
                answer = await self._call("POST", "/weights_checker", {"action": "checksum"}, _LOAD_S)
            except (EngineRefused, ReplyRefused):
                return None
        return read_checksum(answer)

    async def _read_version(self) -> PolicyVersion | None:
        info = await self._call("GET", "/model_info", None, self._probe_s)
        return read_version(info.get("weight_version") if isinstance(info, dict) else None)

    async def _call(self, method: str, path: str, body: Any, deadline_s: float, *, parse: bool = True) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._http.request(method, path, json=body)
        except TimeoutError:
            raise EngineTimeout(f"{self.url}{path} gave no answer within {deadline_s:g} s") from None
        except (httpx.HTTPError, RuntimeError) as err:
            if isinstance(err, RuntimeError) and not self._http.is_closed:
                raise
            raise EngineUnreachable(f"{self.url}{path}: {type(err).__name__} {err}".rstrip()) from None
        if response.status_code != httpx.codes.OK:
            raise EngineRefused(f"{self.url}{path} answered {response.status_code}: {shorten(response.text)}")
        if not parse:
            return response.text
        try:
            return json.loads(response.content)
        except ValueError as err:
            raise ReplyRefused(
                f"{self.url}{path} answered what is not JSON ({err}): {shorten(response.text)}"
            ) from None


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
